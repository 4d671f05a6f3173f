"""DeepEP: why its dispatch and combine cannot stand in a program of JAX, as data.

What a dispatch leaves for its combine is an object of Python full of tensors whose shapes the
library alone knows, and its buffers lie in memory that XLA does not allocate. So the operations run
on collectives of JAX, and asking for this library is refused with that reason.
"""

from __future__ import annotations

from kernels_bridge.registry import Capability, Impl, Need
from kernels_bridge.signatures import Signature, signature

LIBRARY = Need(
    "deep_ep", at_least="2.5", mend="install deepinfer-ep 2.5 (CUDA 13.1, NCCL 2.32.3 or later)"
)
DISPATCH = signature(
    LIBRARY, "EPBuffer.dispatch",
    "self x topk_idx topk_weights cumulative_local_expert_recv_stats num_experts "
    "num_max_tokens_per_rank expert_alignment num_sms num_qps previous_event "
    "async_with_compute_stream allocate_on_comm_stream handle do_handle_copy do_cpu_sync do_expand "
    "do_zero_padding use_tma_aligned_col_major_sf defer_epilogue",
    "x topk_idx topk_weights num_experts do_cpu_sync",
)  # fmt: skip
COMBINE = signature(
    LIBRARY, "EPBuffer.combine",
    "self x handle topk_weights bias num_sms num_qps previous_event async_with_compute_stream "
    "allocate_on_comm_stream defer_epilogue",
    "x handle topk_weights",
)  # fmt: skip
_NEVER = (
    "deep_ep drives one GPU from each process, through a group of torch.distributed, and hands the "
    "tensors of a dispatch to its combine inside an object that no compiled program can hold: use "
    "all_to_all"
)


def implementation(published: Signature) -> Impl:
    """The entry that says so."""
    can = Capability(("cuda",), (9, 10), ("bfloat16",), (Need("torch", at_least="2.10"), LIBRARY))
    return Impl("deep_ep", "dlpack", can, published.path, never=_NEVER)
