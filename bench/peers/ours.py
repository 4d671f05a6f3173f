"""Ours as a peer: the program that `gpu_decode.py` times, with our kernels or plain XLA's."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import gpu_decode
import jax
import released

from deepinfer_jax.numerics import Form, rows_for

STORED = {
    "weights": "FP8 and FP4 as released, decoded inside every product",
    "cache": "FP8 windows, FP4 entries and index keys, packed",
    "activations": "bfloat16, FP8 before every quantized product",
}
FORMS: dict[str, Form] = {
    "ours-cuda": "cuda",
    "xla": "batched",
}  # "ours" is the form that the machine is given


def measured(
    name: str, cells: list[tuple[int, int]], steps: int, repeats: int, small: bool
) -> Iterator[dict[str, Any]]:
    """Of each cell (batch, tokens held) the `samples_ms` of a step."""
    cfg, form = released.slice_config(small), FORMS.get(name, rows_for(jax.default_backend()))
    numerics = gpu_decode.numerics_of(form, small)
    spare = steps * (repeats + 2) + 2
    made = jax.block_until_ready(released.make(cfg, max(c for _, c in cells) + spare))

    def build(cell: tuple[int, int]) -> Any:
        batch, context = cell
        return gpu_decode.compiled(made, cfg, numerics, batch, context + spare, steps, False)

    with ThreadPoolExecutor(len(cells)) as pool:
        programs = list(pool.map(build, cells))
    for (batch, context), program in zip(cells, programs, strict=True):
        row = gpu_decode.cell(
            program, made, cfg, numerics, batch, context, context + spare, steps, repeats, 0
        )
        peak = (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
        yield {
            "samples_ms": row["samples_ms"], "form": form, "experts_touched": row["touched"],
            "peak_bytes": peak,
        }  # fmt: skip
