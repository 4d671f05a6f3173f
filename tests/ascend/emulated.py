"""Operands and programs of the small kernels, for the tests of the emulator."""

from __future__ import annotations

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from ascend import emulator, kernels
from ascend.emulator import Control, Source
from kernels_bridge.ops import attention, norms, selection, streams

BF16 = ml_dtypes.bfloat16
FORMS = {form.kernel.name: form for form in kernels.SMALL}
ROWS = 13


def planted(name: str, called: str, pattern: str, replacement: str) -> Source:
    """The small kernel `name` with one place of its source changed, under another name."""
    source = emulator.committed(FORMS[name])
    text, count = re.subn(pattern, replacement, source.text, count=1, flags=re.S)
    assert count == 1
    return Source(dataclasses.replace(source.form, name=f"{name}-{called}"), text)


SOURCES = {name: emulator.committed(form) for name, form in FORMS.items()}
# What tilelang 0.1.15 makes where a loop of another length in every lane reads a shared number.
PARTED = planted("select_best", "parted", r"(uint32_t low = [^\n]*\n)", r"\1asc_syncthreads();\n")
OUTSIDE = planted("norm_rope", "outside", r"(asc_copy_ub2gm_align.*?), 1, 192,", r"\1, 1, 224,")
MISPLACED = planted("norm_rope", "misplaced", r"(asc_copy_gm2ub_align.*?\[)0\]", r"\g<1>1]")
EVERY = (*SOURCES.values(), PARTED, OUTSIDE, MISPLACED)


@functools.cache
def program(source: Source):
    """(control operand, *operands) -> tuple of results, compiled once."""

    def run(control, *operands):
        made = emulator.call(source, *operands, beside=EVERY, control=control)
        return made if isinstance(made, tuple) else (made,)

    return jax.jit(run)


class LaunchError(Exception):
    """A fault that the emulator found."""


def launch(source: Source, operands, control: Control = emulator.PROGRAM_ORDER):
    """Results as NumPy arrays. Raises LaunchError for a fault."""
    run = program(source)
    try:
        made = jax.block_until_ready(run(control.operand(), *operands))
    except (
        jax.errors.JaxRuntimeError,
        ValueError,
    ) as error:  # JAX raises either
        if "INTERNAL" not in str(error):
            raise
        raise LaunchError(str(error)) from error
    return tuple(np.asarray(each) for each in made)


def bits(results) -> list[bytes]:
    """All bits of some arrays."""
    return [np.ascontiguousarray(each).tobytes() for each in results]


def normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.normal(size=shape).astype(np.float32)


def norm_rope_operands(rng):
    angle = normal(rng, ROWS, 10)
    x = (normal(rng, ROWS, 96) * 3).astype(BF16)
    return x, normal(rng, 96) + 1, np.cos(angle), np.sin(angle)


def attend_rows_operands(rng):
    ids = rng.integers(-3, 44, (ROWS, 21)).astype(np.int32)
    ids[2] = -1
    q, rows = normal(rng, ROWS, 6, 32), normal(rng, 40, 32)
    return q.astype(BF16), rows.astype(BF16), ids, normal(rng, 6)


def stream_mixes_operands(rng):
    return normal(rng, ROWS, 15) * 4, normal(rng, 3), normal(rng, 15)


def select_best_operands(rng):
    values = np.array([-np.inf, -1.5, -0.0, 0.0, 0.25, 3.0, np.nan, -np.nan], np.float32)
    x = values[rng.integers(0, 8, (ROWS, 33))]
    x[::2] = normal(rng, *x[::2].shape)
    return x.view(np.uint32), rng.integers(-1, 36, ROWS).astype(np.int32)


OPERANDS = {
    "norm_rope": norm_rope_operands(np.random.default_rng(1)),
    "attend_rows": attend_rows_operands(np.random.default_rng(2)),
    "stream_mixes": stream_mixes_operands(np.random.default_rng(3)),
    "select_best": select_best_operands(np.random.default_rng(4)),
}
# Which operands have a row for every row of the result.
BY_ROW = {
    "norm_rope": (0, 2, 3), "attend_rows": (0, 2), "stream_mixes": (0,), "select_best": (0, 1),
}  # fmt: skip


@jax.jit
def _norm_rope(*operands):
    return (norms.norm_rope_twin(*operands, eps=1e-6),)


@jax.jit
def _attend_rows(q, rows, ids, sink):
    return attention.attend_rows_twin(q, rows, ids[:, :9], ids[:, 9:], sink, scale=0.25)


@jax.jit
def _stream_mixes(*operands):
    pre, post, comb = streams.stream_mixes_twin(*operands, streams=3, iterations=4, eps=1e-6)
    return pre, post, comb.reshape(-1, 9)


@jax.jit
def _select_best(x, end):
    x = jax.lax.bitcast_convert_type(x, jnp.float32)
    return (selection.select_best_twin(x, end, k=5),)


TWINS = {
    "norm_rope": _norm_rope, "attend_rows": _attend_rows, "stream_mixes": _stream_mixes,
    "select_best": _select_best,
}  # fmt: skip
