"""All operations that kernels of other libraries can run, in the order of the model."""

from kernels_bridge.ops import attention, experts, gemm, logits, norms, selection, streams, tokens
from kernels_bridge.registry import Op

OPS: tuple[Op, ...] = (
    *streams.OPS,
    *norms.OPS,
    *logits.OPS,
    *selection.OPS,
    *attention.OPS,
    *gemm.OPS,
    *experts.OPS,
    *tokens.OPS,
)
