"""A slow NumPy model, docs/model.md read once more: the second opinion of the tests.

    config, weights = read_folder(folder)
    oracle = Oracle(config, weights, token_map, quantize_kv=True)
    state = oracle.new_state()
    records = oracle.prefill(state, tokens)       # one Record per row: logits and every choice
    draft = oracle.draft(state, anchor)           # greedy DSpark block

It imports nothing of the package. Rows run one at a time over unbounded lists in float64, so there
are no rings, chunks, pads or kernels to get wrong, and no bf16 rounding: compare with the float32
modes, and expect a quantizer or a near tie to fall on the other side now and then (the `*_gap`
fields of a record tell how near).
"""

from .model import Oracle
from .state import Draft, Record, State
from .weights import dequantize, read_folder

__all__ = ["Draft", "Oracle", "Record", "State", "dequantize", "read_folder"]
