"""What a program does with memory, with weights and with the host."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

torch = pytest.importorskip("torch", reason="the executor runs on torch")

from ascend.executor import Executed, fetch, place  # noqa: E402


def test_a_donated_cache_is_updated_where_it_lies():
    """Through a loop, too; what was not donated keeps its values."""

    def step(cache, rows, n):
        def body(carry):
            turn, cache = carry
            return turn + 1, cache.at[turn].set(rows[turn])

        return lax.while_loop(lambda c: c[0] < n, body, (jnp.int32(0), cache))[1]

    rows = np.arange(12, dtype=np.float32).reshape(4, 3)
    given = place((np.zeros((4, 3), np.float32), rows, np.int32(3)), "cpu")
    kept = Executed(jax.jit(step), device="cpu")(*given)
    assert kept.data_ptr() != given[0].data_ptr()
    assert not given[0].any()
    made = Executed(jax.jit(step), device="cpu", donated=("cache",))(*given)
    assert made.data_ptr() == given[0].data_ptr()
    np.testing.assert_array_equal(made, kept)
    np.testing.assert_array_equal(kept[:3], rows[:3])


def test_what_is_still_read_is_not_overwritten():
    """The old value is used after the update, or swaps its place with the new one."""

    def step(cache, n):
        def body(carry):
            turn, new, old = carry
            return turn + 1, old.at[0].add(1.0), new

        swapped = lax.while_loop(lambda c: c[0] < n, body, (jnp.int32(0), cache, cache))
        return cache.at[1].set(5.0) + cache, swapped[1], swapped[2]

    x = np.arange(6, dtype=np.float32).reshape(3, 2)
    wanted = jax.jit(step)(x, np.int32(3))
    run = Executed(jax.jit(step), device="cpu", donated=("cache",))
    for want, got in zip(wanted, run(*place((x, np.int32(3)), "cpu")), strict=True):
        np.testing.assert_array_equal(got, want)


def test_outputs_share_no_memory():
    """A constant, a weight, one array twice: whoever donates one of them harms no other."""

    def step(weight, x):
        y = x + 1
        return y, y, weight, jnp.zeros(3), x

    run = Executed(jax.jit(step), device="cpu", levels=(("weight",),))
    given = place((np.ones(3, np.float32), np.ones(3, np.float32)), "cpu")
    made = run(*given)
    places = {t.data_ptr() for t in (*made, *given)}
    assert len(places) == len(made) + len(given)


@pytest.mark.parametrize("branches", ["read", "select"])
def test_what_passes_through_blocks_is_not_overwritten(branches):
    """A branch that changes nothing and a loop without turns hand on their operand itself."""

    def step(x, y, n):
        own = x * 3
        passed = lax.cond(n > 2, lambda z: z, lambda z: z + 1, x)
        row = lax.cond(n > 2, lambda z: z[0], lambda z: z[1] + 1, y)
        made = lax.cond(n > 2, lambda z: (z, z), lambda z: (z + 1, z), own)
        looped = lax.while_loop(lambda c: c[0] > n, lambda c: (c[0] - 1, c[1] + 1), (n, x))[1]
        return (
            passed, looped, *made, passed.at[0].set(9.0), row.at[0].set(9.0),
            made[0].at[0].set(9.0), looped.at[0].set(9.0), own, x * 2, y * 2,
        )  # fmt: skip

    given = np.arange(6, dtype=np.float32), np.ones((2, 3), np.float32), np.int32(3)
    run = Executed(jax.jit(step), device="cpu", branches=branches)
    tensors = place(given, "cpu")
    made = run(*tensors)
    for want, got in zip(jax.jit(step)(*given), made, strict=True):
        np.testing.assert_array_equal(got, want)
    for before, after in zip(given, tensors, strict=True):
        np.testing.assert_array_equal(after, before)
    assert len({t.data_ptr() for t in (*made, *tensors)}) == len(made) + len(tensors)


def test_a_donated_cache_that_a_branch_hands_on_is_still_read():
    def step(cache, n):
        kept = lax.cond(n > 2, lambda z: z, lambda z: z.at[1].set(3.0), cache)
        return kept.at[0].set(9.0), cache * 2

    x = np.arange(6, dtype=np.float32)
    run = Executed(jax.jit(step), device="cpu", donated=("cache",))
    for want, got in zip(jax.jit(step)(x, 3), run(*place((x, np.int32(3)), "cpu")), strict=True):
        np.testing.assert_array_equal(got, want)


def test_weights_of_unsigned_bits_are_prepared_once():
    """They are viewed as signed ones at every call, and stay the same weights; after a failure they
    are prepared again.
    """
    seen, failing = [], []

    @jax.jit
    def prepare(w):
        return w.astype(jnp.float32)

    def counted(w):
        if failing:
            raise MemoryError
        seen.append(1)
        return w.float()

    run = Executed(
        jax.jit(lambda weight, x: x * prepare(weight)), device="cpu", levels=(("weight",),),
        ops={"prepare": counted},
    )  # fmt: skip
    one, two, x = place(
        (np.full(3, 2, np.uint16), np.full(3, 5, np.uint16), np.ones(3, "f")), "cpu"
    )
    for _ in range(3):
        np.testing.assert_array_equal(run(one, x), np.full(3, 2.0))
    assert len(seen) == 1
    failing.append(1)
    with pytest.raises(MemoryError):
        run(two, x)
    failing.clear()
    np.testing.assert_array_equal(run(one, x), np.full(3, 2.0))
    np.testing.assert_array_equal(run(two, x), np.full(3, 5.0))
    assert len(seen) == 3


def test_what_follows_from_weights_is_computed_once():
    seen = []

    @jax.jit
    def prepare(w):
        return w.T * 2

    def counted(w):
        seen.append(1)
        return w.T * 2

    def step(weight, x):
        return x @ prepare(weight)

    run = Executed(jax.jit(step), device="cpu", levels=(("weight",),), ops={"prepare": counted})
    weight, x = place((np.ones((3, 3), np.float32), np.ones((2, 3), np.float32)), "cpu")
    for _ in range(3):
        run(weight, x)
    assert len(seen) == 1
    np.testing.assert_array_equal(run(weight * 2, x), np.full((2, 3), 12.0))
    assert len(seen) == 2


def test_predicates_are_read_where_they_are_made(monkeypatch):
    """One that follows from settings: when these change; of a loop: once a turn; else selected."""
    reads = []
    item = torch.Tensor.item
    monkeypatch.setattr(torch.Tensor, "item", lambda self: reads.append(1) or item(self))

    def step(settings, x, n):
        def body(carry):
            turn, x = carry
            x = lax.cond(settings > 0, jnp.sin, jnp.cos, x)
            return turn + 1, lax.cond(jnp.any(x > 0.5), lambda z: z / 2, lambda z: z, x)

        return lax.while_loop(lambda c: c[0] < n, body, (jnp.int32(0), x))[1]

    run = Executed(jax.jit(step), device="cpu", levels=(("settings",),), branches="select")
    x = np.linspace(0, 1, 5, dtype=np.float32)
    given = place((np.float32(1), x, np.int32(4)), "cpu")
    made = run(*given)
    first = len(reads)
    np.testing.assert_allclose(made, jax.jit(step)(np.float32(1), x, 4), rtol=1e-6)
    run(*given)
    assert (first, len(reads) - first) == (1 + 5, 5)  # a loop of four turns asks five times


@jax.jit
def double(x):
    return x * 2


@pytest.mark.parametrize("wrong", [lambda x: x[:2], lambda x: x.double(), lambda x: (x, x)])
def test_what_a_replacing_function_returns_is_checked(wrong):
    x = np.ones((3, 5), np.float32)
    run = Executed(jax.jit(lambda x: double(x) + 1), device="cpu", ops={"double": wrong})
    with pytest.raises(ValueError, match=r"ops\['double'\] must return tensors of .*3, 5.*got"):
        run(*place((x,), "cpu"))


def test_a_program_runs_with_its_threads_and_leaves_those_of_others():
    """After an error, too."""
    before, seen = torch.get_num_threads(), []

    def counted(x):
        seen.append(torch.get_num_threads())
        return x * 2 if len(seen) < 2 else None

    run = Executed(jax.jit(lambda x: double(x) + 1), device="cpu", threads=before + 1,
                   ops={"double": counted})  # fmt: skip
    (x,) = place((np.ones((3, 5), np.float32),), "cpu")
    run(x)
    assert torch.get_num_threads() == before
    with pytest.raises(AttributeError):
        run(x)
    assert (torch.get_num_threads(), seen) == (before, [before + 1] * 2)


def test_results_and_arguments_with_gaps_are_made_whole():
    x = np.arange(15, dtype=np.float32).reshape(3, 5)
    ops = {"double": lambda x: torch.stack([x, x], -1).sum(-1).t().contiguous().t()}
    run = Executed(jax.jit(lambda x: double(x).reshape(-1)), device="cpu", ops=ops)
    np.testing.assert_array_equal(run(torch.tensor(x.T.copy()).t()), 2 * x.reshape(-1))


def test_donating_no_argument_is_refused():
    with pytest.raises(ValueError, match=r"has no arguments \['nobody'\]"):
        Executed(jax.jit(lambda x: x), device="cpu", donated=("x", "nobody"))


def test_no_work_is_done_twice_or_in_vain():
    def step(x, y):
        unused = jnp.exp(y)
        del unused
        return jnp.sin(x) * 2 + jnp.sin(x) * 2 + (jnp.arange(3.0) * 4)[0]

    program = Executed(jax.jit(step), device="cpu").program(np.ones(3, np.float32), np.ones(3))
    assert program.steps == 4  # sin, times, plus, plus


def test_many_tensors_reach_the_host_as_one():
    from ascend.executor import calling

    tree = {"a": np.arange(6, dtype=np.int32).reshape(2, 3), "b": np.array([True, False]),
            "c": np.float32(1.5), "d": np.zeros((0, 2), np.float32)}  # fmt: skip
    leaves = jax.tree.leaves(place(tree, "cpu"))
    for one, back in zip(leaves, calling._together(leaves), strict=True):
        assert one.dtype == back.dtype
        assert torch.equal(one, back)
    assert all(jax.tree.leaves(jax.tree.map(np.array_equal, fetch(place(tree, "cpu")), tree)))
