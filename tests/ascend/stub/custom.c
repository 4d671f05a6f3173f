/* Stands for a package of custom operations. Prototypes are written from the operations' headers
 * and definitions, not from the table, so that an argument in the wrong place shows. */
#include "base.h"

PHASES(aclnnKvQuantSparseAttnSharedkv, const aclTensor *q, const aclTensor *ori_kv,
       const aclTensor *cmp_kv, const aclTensor *ori_sparse_indices,
       const aclTensor *cmp_sparse_indices, const aclTensor *ori_block_table,
       const aclTensor *cmp_block_table, const aclTensor *cu_seqlens_q,
       const aclTensor *cu_seqlens_ori_kv, const aclTensor *cu_seqlens_cmp_kv,
       const aclTensor *seqused_q, const aclTensor *seqused_kv, const aclTensor *sinks,
       const aclTensor *metadata, int64_t kv_quant_mode, int64_t tile_size, int64_t rope_head_dim,
       double softmax_scale, int64_t cmp_ratio, int64_t ori_mask_mode, int64_t cmp_mask_mode,
       int64_t ori_win_left, int64_t ori_win_right, char *layout_q, char *layout_kv,
       int64_t ori_kv_stride0, int64_t cmp_kv_stride0, bool return_softmax_lse,
       const aclTensor *attn_out, const aclTensor *softmax_lse) {
  stub_say("aclnnKvQuantSparseAttnSharedkv\n");
  OPERAND(q) OPERAND(ori_kv) OPERAND(cmp_kv) OPERAND(ori_sparse_indices)
  OPERAND(cmp_sparse_indices) OPERAND(ori_block_table) OPERAND(cmp_block_table)
  OPERAND(cu_seqlens_q) OPERAND(cu_seqlens_ori_kv) OPERAND(cu_seqlens_cmp_kv)
  OPERAND(seqused_q) OPERAND(seqused_kv) OPERAND(sinks) OPERAND(metadata)
  NUMBER(kv_quant_mode) NUMBER(tile_size) NUMBER(rope_head_dim) REAL(softmax_scale)
  NUMBER(cmp_ratio) NUMBER(ori_mask_mode) NUMBER(cmp_mask_mode) NUMBER(ori_win_left)
  NUMBER(ori_win_right) TEXT(layout_q) TEXT(layout_kv) NUMBER(ori_kv_stride0)
  NUMBER(cmp_kv_stride0) NUMBER(return_softmax_lse) OPERAND(attn_out) OPERAND(softmax_lse)
  FIRST(aclnnKvQuantSparseAttnSharedkv, 4096)
}

PHASES(aclnnVllmQuantLightningIndexerMetadata, const aclTensor *actual_seq_lengths_query,
       const aclTensor *actual_seq_lengths_key, int64_t num_heads_q, int64_t num_heads_k,
       int64_t head_dim, int64_t query_quant_mode, int64_t key_quant_mode, int64_t batch_size,
       int64_t max_seqlen_q, int64_t max_seqlen_k, char *layout_query, char *layout_key,
       int64_t sparse_count, int64_t sparse_mode, int64_t pre_tokens, int64_t next_tokens,
       int64_t cmp_ratio, const aclTensor *metadata) {
  stub_say("aclnnVllmQuantLightningIndexerMetadata\n");
  OPERAND(actual_seq_lengths_query) OPERAND(actual_seq_lengths_key) NUMBER(num_heads_q)
  NUMBER(num_heads_k) NUMBER(head_dim) NUMBER(query_quant_mode) NUMBER(key_quant_mode)
  NUMBER(batch_size) NUMBER(max_seqlen_q) NUMBER(max_seqlen_k) TEXT(layout_query)
  TEXT(layout_key) NUMBER(sparse_count) NUMBER(sparse_mode) NUMBER(pre_tokens)
  NUMBER(next_tokens) NUMBER(cmp_ratio) OPERAND(metadata)
  FIRST(aclnnVllmQuantLightningIndexerMetadata, 0)
}

PHASES(aclnnInplacePartialRotaryMul, aclTensor *x, const aclTensor *cos, const aclTensor *sin,
       int64_t mode, const aclIntArray *partial_slice) {
  stub_say("aclnnInplacePartialRotaryMul\n");
  OPERAND(x) OPERAND(cos) OPERAND(sin) NUMBER(mode) OPERAND(partial_slice)
  FIRST(aclnnInplacePartialRotaryMul, 64)
}

PHASES(aclnnHcPre, const aclTensor *x, const aclTensor *hc_fn, const aclTensor *hc_scale,
       const aclTensor *hc_base, int64_t hc_mult, int64_t hc_sinkhorn_iters, double hc_eps,
       double norm_eps, const aclTensor *y, const aclTensor *post, const aclTensor *comb) {
  stub_say("aclnnHcPre\n");
  OPERAND(x) OPERAND(hc_fn) OPERAND(hc_scale) OPERAND(hc_base) NUMBER(hc_mult)
  NUMBER(hc_sinkhorn_iters) REAL(hc_eps) REAL(norm_eps) OPERAND(y) OPERAND(post) OPERAND(comb)
  FIRST(aclnnHcPre, 0)
}

PHASES(aclnnDispatchFFNCombine, const aclTensor *x, const aclTensorList *weight1,
       const aclTensorList *weight2, const aclTensor *expert_idx, const aclTensorList *scale1,
       const aclTensorList *scale2, const aclTensor *probs, const aclTensor *x_active_mask,
       const char *group, int64_t max_output_size, double swiglu_limit, const aclTensor *out,
       const aclTensor *expert_token_nums) {
  stub_say("aclnnDispatchFFNCombine\n");
  OPERAND(x) OPERAND(weight1) OPERAND(weight2) OPERAND(expert_idx) OPERAND(scale1)
  OPERAND(scale2) OPERAND(probs) OPERAND(x_active_mask) TEXT(group) NUMBER(max_output_size)
  REAL(swiglu_limit) OPERAND(out) OPERAND(expert_token_nums)
  FIRST(aclnnDispatchFFNCombine, 128)
}
