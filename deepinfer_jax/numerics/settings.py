"""The settings that fix the bits of a result."""

from __future__ import annotations

import dataclasses
import hashlib
from typing import Literal, get_args

HEIGHTS = (8, 16, 32, 64, 128, 256)  # of tiles whose products are known to agree
Form = Literal["tiled", "ffi", "pallas", "cuda", "batched", "dense"]

# Part of every fingerprint. Raise it when a constant in code that fixes bits changes: the lanes of
# `sums.row_sum`, the limbs of `sums.unit_sum`, the parts of K of `pallas.schedule` and of `cuda`,
# the blocks of keys of `full` and `pallas.full`, tiles of `pallas.attending` and `pallas.scores`,
# the order of sums in `kernels_bridge/csrc`, where roundings and pins stand, quotients and
# exponentials of `pallas.mixing`. What a user may choose is a field of `Numerics` instead.
FORM = 3


@dataclasses.dataclass(frozen=True, slots=True)
class Numerics:
    """What fixes the bits of a result, apart from model, weights and chip.

    dtype                 activations between modules: "bfloat16" or "float32"
    quantize_activations  FP8 by 32 before every linear that the release stores in FP8 or FP4
    quantize_kv           quantized window KV, compressed KV, index keys and queries
    index_rounding        "once": index scores accumulate in float32 and round to bfloat16 once;
                          "reference": the published reference's three roundings
    rows                  "tiled": the invariant forms of a CPU; "ffi": the same promise with C++
                          kernels, which a compiler on the machine builds; "pallas": the invariant
                          forms of an NVIDIA GPU; "cuda": the same, but for products with weights
                          in FP4 and FP8, which are CUDA kernels that a compiler on the machine
                          builds; "batched": plain XLA, no promise; "dense": the same, for calls
                          without a cache whose rows are sequences of equal length
    row_tile              rows per dot below `long_rows` rows, and `long_row_tile` from there on
    tall_tiles            heights to choose from (`tiles.of_product`) for weights of `tall_from`
                          elements and more with sums of `long_sum` terms and more, in whole
                          blocks of `sum_block`
    index_block           index keys scored at once (on a GPU at least: `scores.index_width`)
    interpret             run "pallas" in an interpreter: slow, for tests without a GPU
    """

    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    quantize_activations: bool = True
    quantize_kv: bool = True
    index_rounding: Literal["once", "reference"] = "once"
    rows: Form = "tiled"
    row_tile: int = 8
    long_row_tile: int = 32
    long_rows: int = 128
    tall_tiles: tuple[int, ...] = HEIGHTS
    tall_from: int = 1 << 18
    long_sum: int = 64
    sum_block: int = 8
    index_block: int = 512
    interpret: bool = False

    def __post_init__(self) -> None:
        allowed = {
            "dtype": ("bfloat16", "float32"),
            "index_rounding": ("once", "reference"),
            "rows": get_args(Form),
        }
        for name, values in allowed.items():
            if getattr(self, name) not in values:
                raise ValueError(
                    f"{name} must be one of {', '.join(values)}, got {getattr(self, name)!r}"
                )
        # A tile of one row would take another path through the compiler than two.
        least = {
            "row_tile": 2, "long_row_tile": 2, "long_rows": 1, "index_block": 1, "tall_from": 1,
            "long_sum": 1, "sum_block": 1,
        }  # fmt: skip
        for name, low in least.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < low:
                raise ValueError(f"{name} must be an integer of at least {low}, got {value!r}")
        heights = self.tall_tiles
        if not isinstance(heights, tuple) or not heights or not set(heights) <= set(HEIGHTS):
            raise ValueError(f"tall_tiles must be a tuple of some of {HEIGHTS}, got {heights!r}")
        if self.rows == "dense" and self.index_rounding == "reference":
            raise ValueError('index_rounding="reference" is not made for rows="dense"')

    @property
    def uses_pallas(self) -> bool:
        """Whether the kernels of a GPU run: those of `numerics.pallas`, all of them or most."""
        return self.rows in ("pallas", "cuda")

    @classmethod
    def native(cls, quantized: bool = True, rows: Form = "tiled") -> Numerics:
        """What the model was trained with; `quantized` is `ModelConfig.quantized`.

        `rows` is `rows_for` of the back end that will run it.
        """
        return cls(quantize_activations=quantized, rows=rows)

    @classmethod
    def fp32(cls, rows: Form = "tiled") -> Numerics:
        """Float32 throughout, no quantization points: for parity with other implementations."""
        return cls(dtype="float32", quantize_activations=False, quantize_kv=False, rows=rows)

    @classmethod
    def fp32_kvq(cls, rows: Form = "tiled") -> Numerics:
        """`fp32` with the KV and index quantizers kept."""
        return cls(dtype="float32", quantize_activations=False, quantize_kv=True, rows=rows)

    def fingerprint(self) -> str:
        """Twelve hex digits naming these settings and `FORM`, the constants in code.

        Equal ones on one chip, with one build of jaxlib, give equal bits.
        """
        named = (FORM, *dataclasses.astuple(self))
        return hashlib.sha256(repr(named).encode()).hexdigest()[:12]
