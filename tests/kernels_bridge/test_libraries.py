"""Libraries as they are installed, called from inside compiled programs: values, and bits of rows.

Each is skipped with the reason where its library is not here. What an implementation claims
(`batch_invariant`) is what is asked of it: a row has the same bits alone, among others, in another
place and beside rows of padding. The same checks run on the engine's programs with FlashMLA in the
place of their own attention.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from deepinfer_jax import determinism, params, resources, tables
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.determinism import reference
from deepinfer_jax.determinism.equality import bits
from deepinfer_jax.loading import Model
from deepinfer_jax.model import attention as engine_attention
from deepinfer_jax.numerics import Form, Numerics
from deepinfer_jax.text import load_tokenizer
from kernels_bridge.calling import call
from kernels_bridge.machine import probe
from kernels_bridge.ops import attention, gemm, logits, pages, selection
from kernels_bridge.registry import Policy, refusals
from tests import every_role

pytestmark = pytest.mark.gpu
BF16, FP8 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn
ROWS = 37


@dataclasses.dataclass(frozen=True)
class Case:
    """An implementation and operands for it: `rows` of them are by row, the others shared."""

    op: Any
    name: str
    make: Callable[[], tuple[Any, ...]]
    rows: tuple[int, ...]
    tolerance: float
    static: Any = ()

    def __str__(self) -> str:
        return f"{self.op.name}-{self.name}"


def normal(seed: int, *shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32).astype(dtype)


def lists(seed: int, *shape: int, rows: int) -> np.ndarray:
    """Ids with strangers among them; the last row sees nobody."""
    ids = np.random.default_rng(seed).integers(-3, rows + 3, shape).astype(np.int32)
    ids[-1] = -1
    return ids


def attended_rows() -> tuple[Any, ...]:
    return (
        normal(1, ROWS, 64, 512, dtype=BF16), normal(2, 5000, 512, dtype=BF16),
        lists(3, ROWS, 128, rows=5000), lists(4, ROWS, 512, rows=5000), normal(5, 64),
    )  # fmt: skip


def attended_pages() -> tuple[Any, ...]:
    pack = jax.jit(pages.pack_pages, static_argnums=(1, 2))
    table, further = (pack(normal(seed, 2560, 512), 64, 584) for seed in (6, 7))
    return (
        normal(8, ROWS, 2, 64, 512, dtype=BF16), table, lists(9, ROWS, 2, 128, rows=2560),
        further, lists(10, ROWS, 2, 512, rows=2560), normal(11, 64),
    )  # fmt: skip


def quantized(seed: int, *shape: int, block: int) -> tuple[np.ndarray, np.ndarray]:
    codes = normal(seed, *shape, dtype=FP8)
    *lead, n, k = shape
    scale = np.random.default_rng(seed).integers(-6, 0, (*lead, -(-n // block), -(-k // 128)))
    return codes, np.exp2(scale).astype(np.float32)


def contiguous() -> tuple[Any, ...]:
    expert = np.repeat(np.array([2, 0, 0, 1], np.int32), 128)
    expert[100:128] = expert[370:384] = -1
    return *quantized(1, 512, 512, block=1), *quantized(2, 3, 384, 512, block=128), expert


def masked() -> tuple[Any, ...]:
    count = np.array([ROWS, 0, 5], np.int32)
    return *quantized(3, 3, 64, 512, block=1), *quantized(4, 3, 384, 512, block=128), count


def scored() -> tuple[Any, ...]:
    first = np.random.default_rng(5).integers(0, 900, ROWS).astype(np.int32)
    last = first + np.random.default_rng(6).integers(1, 2000, ROWS).astype(np.int32)
    return (
        normal(1, ROWS, 32, 128, dtype=FP8), normal(2, 3000, 128, dtype=FP8),
        np.abs(normal(3, 3000)), normal(4, ROWS, 32), first, last,
    )  # fmt: skip


def ordered() -> tuple[Any, ...]:
    end = np.random.default_rng(7).integers(1, 5000, ROWS).astype(np.int32)
    return normal(8, ROWS, 5000), end


ROUNDED = 1 / 128  # of a bfloat16 result of size 1 and below
FEW_BITS = 1 / 2048  # tensor cores of Hopper add FP8 products with some 14 bits
PRODUCT = (("group", 128), ("block", 128))
CASES = (
    Case(attention.attend_rows, "flash_mla", attended_rows, (0, 2, 3), ROUNDED, (("scale", 0.05),)),
    Case(
        attention.attend_pages, "flash_mla_sm90", attended_pages, (0, 2, 4), ROUNDED,
        (("scale", 0.05),),
    ),
    Case(
        gemm.fp8_gemm, "deep_gemm_sm90",
        lambda: (*quantized(1, ROWS, 5120, block=1), *quantized(2, 1280, 5120, block=128)),
        (0, 1), ROUNDED, PRODUCT,
    ),
    Case(gemm.grouped_contiguous, "deep_gemm_sm90", contiguous, (), ROUNDED, PRODUCT),
    Case(gemm.grouped_masked, "deep_gemm_sm90", masked, (), ROUNDED, (*PRODUCT, ("expected", 8))),
    Case(logits.index_logits, "deep_gemm_sm90", scored, (0, 3, 4, 5), FEW_BITS),
    Case(selection.select_best, "deep_select", ordered, (0, 1), 0, (("k", 512),)),
)  # fmt: skip


@pytest.fixture(params=CASES, ids=str)
def case(request) -> Case:
    chosen = request.param
    said = refusals(chosen.op.impl(chosen.name), probe(), Policy(False), asked=True)
    if said:
        pytest.skip("; ".join(said))
    return chosen


@functools.cache
def operands(case: Case) -> tuple[Any, ...]:
    return tuple(map(jnp.asarray, case.make()))


@functools.partial(jax.jit, static_argnames="case")
def by_library(case: Case, *given: Any) -> Any:
    policy = Policy(case.op.impl(case.name).capability.batch_invariant)
    return call(case.op, *given, asked=case.name, policy=policy, **dict(case.static))


def picked(case: Case, given: tuple[Any, ...], order: Any) -> tuple[Any, ...]:
    return tuple(x[order] if i in case.rows else x for i, x in enumerate(given))


def raw(tree: Any) -> list[np.ndarray]:
    return [bits(np.asarray(x)) for x in jax.tree.leaves(tree)]


def test_a_library_computes_what_the_twin_says(case):
    given = operands(case)
    got = by_library(case, *given)
    want = jax.jit(functools.partial(case.op.twin, **dict(case.static)))(*given)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        x, y = np.asarray(x, np.float32), np.asarray(y, np.float32)
        np.testing.assert_array_equal(np.isfinite(x), np.isfinite(y))
        size = np.abs(y[np.isfinite(y)]).max()
        np.testing.assert_allclose(x, y, rtol=case.tolerance, atol=case.tolerance * size)


def test_a_library_gives_the_same_bits_twice(case):
    given = operands(case)
    first = raw(by_library(case, *given))
    for _ in range(5):
        for x, y in zip(raw(by_library(case, *given)), first, strict=True):
            np.testing.assert_array_equal(x, y)


def test_a_row_has_its_bits_in_any_company(case):
    """What `batch_invariant` claims; one that does not claim it is not asked."""
    if not (case.rows and case.op.impl(case.name).capability.batch_invariant):
        pytest.skip(f"{case.name} does not claim that the bits of a row are its own")
    given = operands(case)
    want = raw(by_library(case, *given))
    rng = np.random.default_rng(1)
    orders = [np.array([i]) for i in (0, 7, ROWS - 1)]
    orders += [np.arange(5), rng.permutation(ROWS), rng.permutation(ROWS)[:16]]
    orders += [np.concatenate([rng.permutation(ROWS), np.full(27, ROWS - 1)])]  # nobody's rows
    for order in orders:
        for x, y in zip(raw(by_library(case, *picked(case, given, order))), want, strict=True):
            np.testing.assert_array_equal(x, y[order], err_msg=str(order))


def test_a_library_inside_a_loop_of_xla(case):
    """Four calls in a scan, with XLA's work before and after each, are four calls."""
    given = operands(case)
    by_row = case.rows[0] if case.rows else 0

    def moved(i: Any) -> tuple[Any, ...]:
        x = given[by_row]
        turned = jnp.roll(x.astype(jnp.float32), i, axis=0).astype(x.dtype)
        return tuple(turned if j == by_row else each for j, each in enumerate(given))

    @jax.jit
    def looped() -> Any:
        def body(carry: Any, i: Any) -> Any:
            return carry, by_library(case, *moved(i))

        return jax.lax.scan(body, 0, jnp.arange(4))[1]

    together = raw(looped())
    for i in range(4):
        for x, y in zip(together, raw(by_library(case, *moved(i))), strict=True):
            np.testing.assert_array_equal(x[i], y)


# -- the engine's programs with a library's attention ----------------------------------------------


def wide_model(rows: Form) -> Model:
    """Every kind of layer, with heads as FlashMLA takes them: 64 of 512."""
    config = json.loads(every_role.CONFIG_FILE.read_text("utf-8"))
    config["text_config"] |= {"num_attention_heads": 64, "head_dim": 512, "o_groups": 2}
    cfg = ModelConfig.from_dict(config)
    # Numerics that no other test has, so that nothing compiled here serves another.
    numerics = dataclasses.replace(Numerics.native(rows=rows), index_block=499)
    token_map = np.arange(cfg.vocab_size, dtype=np.int32) % cfg.engram_compressed_vocab_size
    made = tables.make_tables(cfg, token_map, every_role.POSITIONS)
    tokenizer = load_tokenizer(resources.model_folder("spark-tiny"))
    return Model("wide", cfg, numerics, params.init(jax.random.key(5), cfg), made, tokenizer)


def attended(
    q: Any, new: Any, ring: Any, entries: Any, selected: Any, floor: Any, sink: Any, rows: Any,
    spans: Any, reach: Any, numerics: Any, fetched: Any = None,
) -> Any:  # fmt: skip
    """`model.attention.attend` by FlashMLA: each row's keys as a table of its own."""
    each = (q, jnp.maximum(rows.slots, 0), rows.positions, floor, selected, fetched)
    slots = functools.partial(engine_attention._keys_of_row, reach=reach)
    keys, mask = jax.vmap(slots, (0, None))(each, (new, ring, entries, spans, sink))
    count, width, size = keys.shape
    ids = jnp.arange(count * width, dtype=jnp.int32).reshape(count, width)
    out, _ = call(
        attention.attend_rows, q, keys.reshape(-1, size), jnp.where(mask, ids, -1),
        jnp.zeros((count, 0), jnp.int32), sink, asked="flash_mla", scale=reach.scale,
    )  # fmt: skip
    return out.astype(jnp.float32)


@pytest.fixture(scope="module")
def bridged():
    """References made with the library in the place of the engine's attention, as all that is
    compiled while this lasts.
    """
    said = refusals(attention.attend_rows.impl("flash_mla"), probe(), Policy(), asked=True)
    if said:
        pytest.skip("; ".join(said))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_attention, "attend", attended)
        yield reference.make_setup(wide_model("pallas"), tokens=22, seed=1, count=4)


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
@pytest.mark.parametrize("check", determinism.CHECKS, ids=lambda check: check.name)
def test_nothing_changes_a_bit_with_a_librarys_attention(check, bridged):
    finding = determinism.run_check(check, bridged)
    assert finding.first is None
    assert finding.differing == 0
