"""Plans against recorded ones, against brute force, and what must not change them."""

import dataclasses

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_jax import planning

plan = jax.jit(planning.plan)
plan_greedy = jax.jit(planning.plan_greedy)
distribute = jax.jit(planning.distribute)
step_ms = jax.jit(planning.step_ms)
survival_of = jax.jit(planning.survival)

REQUESTS, DRAFTS, SIZES = 5, 3, 4


def with_idle(requests, *survivals):
    """Idle requests behind those of `survivals`, up to `requests`; then which ones are active.

    Compiling is what these tests spend their time on, and idle requests must not matter.
    """
    count = len(survivals[0])
    wide = [np.pad(s, ((0, requests - count), (0, 0)), constant_values=0.77) for s in survivals]
    return *wide, np.arange(requests) < count


def lengthened(cost):
    """The same cost with 160 sizes, for the same reason."""
    fill = (0, 160 - len(cost.sizes))
    sizes, ms = (np.pad(a, fill, "edge") for a in (cost.sizes, cost.ms))
    return dataclasses.replace(cost, sizes=sizes, ms=ms)


# -- recorded vectors -----------------------------------------------------------------------------


def rates(case):
    """(newest, sizing) survivals of a recorded case; what is missing counts 1 if drafts exist."""
    newest, sizing = [], []
    for seq in case["seqs"]:
        paired = seq["schedule_cnt"] == seq["process_cnt"]
        missing = float(seq["has_draft_info"] or not paired)
        drafts = seq["num_drafts"]
        newest.append(seq["accept_rates"] or [missing] * drafts)
        older = seq["prev_accept_rates"] or [missing] * drafts
        sizing.append(older if paired else newest[-1])
    return np.array(newest, np.float32), np.array(sizing, np.float32)


def recorded_cost(case, dtype):
    """The curve and what the recorded run-time samples made of it, through our estimators."""
    sizes, ms = zip(*case["curve"], strict=True)
    updates = case["runtime_updates"]
    bare = planning.make_cost(sizes, ms, dtype=np.float64)
    residuals = [planning.residual(bare, u["graph_size"], u["forward_ms"]) for u in updates]
    samples = [(u["num_seqs"], u["sampler_ms"]) for u in updates]
    slope = planning.slope(residuals)
    constant = planning.sampler_ms(samples, len(case["seqs"]))
    assert slope == pytest.approx(case["slope_ms_per_token"], abs=1e-15)
    assert constant == case["sampler_ms"]
    return planning.make_cost(sizes, ms, slope=slope, constant=constant, dtype=dtype)


def replay(case, dtype):
    newest, sizing = rates(case)
    cost = lengthened(recorded_cost(case, dtype))
    with jax.enable_x64(dtype is np.float64):
        got = plan(*with_idle(24, newest, sizing), cost)
        return jax.tree.map(np.asarray, got)


@pytest.fixture
def cases(recorded):
    """The recorded cases with a curve. Without one every draft is verified: no plan is made."""
    every = recorded("dspark_planner/plan_cost_curve.json")["cases"]
    for case in every:
        if not case["curve"]:
            full = [1 + seq["num_drafts"] for seq in case["seqs"]]
            assert case["expected_seqlens_q"] == full
    return [case for case in every if case["curve"]]


def agrees(case, got):
    count = len(case["seqs"])
    rows, expected = int(got.rows), case["expected_seqlens_q"]
    return (1 + got.lengths[:count]).tolist() == expected and rows == case["expected_total_q"]


def test_recorded_plans_in_float64(cases):
    for case in cases:
        got = replay(case, np.float64)
        assert agrees(case, got), case["name"]
        assert not got.lengths[len(case["seqs"]) :].any()
        with jax.enable_x64(True):
            times = np.asarray(step_ms(lengthened(recorded_cost(case, np.float64)), np.arange(160)))
        for step in case.get("trace", ()):
            assert times[step["total_q"]] == step["time_ms"], case["name"]
            if step["total_q"] == case["expected_total_q"]:
                assert got.objective == step["tokens_per_ms"], case["name"]


def test_recorded_plans_in_float32(cases):
    """All 39 of them: no recorded plan hangs on the last bits of a time."""
    differing = [case["name"] for case in cases if not agrees(case, replay(case, np.float32))]
    assert differing == []


def test_recorded_distributions(recorded):
    for case in recorded("dspark_planner/distribute_budget.json")["cases"]:
        remap = np.array(case["remap"])
        confidence, _ = with_idle(40, np.float32(case["prev_confidence"]))
        known = np.asarray(survival_of(confidence))
        survival = np.where(remap[:, None] >= 0, known[remap], np.float32(0))
        survival, active = with_idle(40, survival)
        got = np.asarray(distribute(survival, case["total_q"] - len(remap), active))
        assert (1 + got[: len(remap)]).tolist() == case["expected_seqlens_q"], case["name"]


def test_recorded_greedy_plans(recorded):
    """Steps per second of every row count are a curve; stop early or search all of it."""
    for case in recorded("dspark_planner/plan_greedy.json")["cases"]:
        survival = np.cumprod(np.array(case["confidence"], np.float64), axis=1)
        rows, sps = zip(*case["sps"], strict=True)
        cost = planning.make_cost(rows, 1 / np.array(sps), dtype=np.float64)
        survival, active = with_idle(6, survival)
        cost = lengthened(cost)
        with jax.enable_x64(True):
            stopped = plan_greedy(survival, active, cost)
            best = plan(survival, survival, active, cost)
        count = len(case["confidence"])
        assert np.asarray(stopped.lengths)[:count].tolist() == case["early_stop_lengths"]
        assert np.asarray(best.lengths)[:count].tolist() == case["global_lengths"]
        # 1 / (1 / x) is not always x
        assert float(stopped.objective) == pytest.approx(case["early_stop_objective"], rel=1e-12)
        assert float(best.objective) == pytest.approx(case["global_objective"], rel=1e-12)


def table_cost(case):
    """A table of steps per second (floor) or a sum of two ramps, as a time for every row count."""
    requests, drafts = np.shape(case["confidence"])
    rows = np.arange(requests, requests * (1 + drafts) + 1)
    if case["additive_table"] is None:
        probes, sps = np.transpose(case["steps_per_second_table"])
        at = np.maximum(np.searchsorted(probes, rows, side="right") - 1, 0)
        return planning.make_cost(rows, 1 / sps[at], dtype=np.float64)
    table = case["additive_table"]
    constant = table["bias"] + np.interp(requests, table["bs"], table["alpha"])
    ms = np.interp(rows, table["m"], table["theta"])
    return planning.make_cost(rows, ms, constant=constant, dtype=np.float64)


def test_recorded_plans_from_tables_of_steps_per_second(recorded):
    """Another system's rule is this one with another curve, survivals below 1e-6 counted as 0."""
    for case in recorded("dspark_planner/plan_sps_table.json")["cases"]:
        count = len(case["confidence"])
        confidence, active = with_idle(20, np.float32(case["confidence"]))
        survival = np.asarray(survival_of(confidence), np.float64)
        survival = np.where(survival < 1e-6, 0, survival)
        cost = lengthened(table_cost(case))
        with jax.enable_x64(True):
            got = plan(survival, survival, active, cost)
        assert (1 + np.asarray(got.lengths)[:count]).tolist() == case["expected_verify_lens"]
        assert int(got.rows) == count + case["expected_budget"]
        # 1 / (1 / x) is not always x
        assert float(got.objective) == pytest.approx(case["expected_objective"], rel=1e-12)


# -- properties -----------------------------------------------------------------------------------


@st.composite
def survivals(draw, levels=6):
    """Few levels, so that ties are frequent."""
    p = draw(st.lists(st.integers(0, levels), min_size=15, max_size=15))
    p = np.float32(p).reshape(REQUESTS, DRAFTS) / np.float32(levels)
    return np.asarray(np.cumprod(p, axis=1, dtype=np.float32))


@st.composite
def costs(draw):
    sizes = draw(st.lists(st.integers(6, 20), min_size=3, max_size=3, unique=True))
    ms = draw(st.lists(st.integers(1, 9), min_size=SIZES, max_size=SIZES))
    slope = draw(st.sampled_from([0.0, 0.125]))
    return planning.make_cost([5, *sorted(sizes)], np.float64(ms), slope=slope, constant=0.5)


actives = st.lists(st.booleans(), min_size=REQUESTS, max_size=REQUESTS).map(np.array)


def brute_distribute(survival, budget, active):
    entries = [(-survival[r, i], r, i) for r in range(REQUESTS) for i in range(DRAFTS) if active[r]]
    lengths = np.zeros(REQUESTS, int)
    for _, request, _ in sorted(entries)[: max(budget, 0)]:
        lengths[request] += 1
    return lengths


def brute_objectives(survival, active, cost):
    """E / time for 0, 1, ... drafts, in float32 like the plan; a size that is missing counts 0."""
    queue = sorted(-survival[active].ravel())
    total, found = np.float32(active.sum()), []
    for extra in range(len(queue) + 1):
        rows = active.sum() + extra
        holding = [i for i, size in enumerate(cost.sizes) if size >= rows]
        if holding:
            at = holding[0]
            time = cost.ms[at] + cost.slope * np.float32(cost.sizes[at]) + cost.constant
            found.append(total / time)
        else:
            found.append(np.float32(0))
        if extra < len(queue):
            total = total - queue[extra]
    return np.array(found)


@given(survivals(), st.integers(-2, 18), actives)
def test_a_budget_goes_to_the_best_drafts_and_is_never_exceeded(survival, budget, active):
    got = np.asarray(distribute(survival, budget, active))
    np.testing.assert_array_equal(got, brute_distribute(survival, budget, active))
    assert got.sum() == min(max(budget, 0), DRAFTS * active.sum())
    assert got.max() <= DRAFTS
    assert not got[~active].any()


@given(survivals(), survivals(), actives, costs())
def test_a_plan_is_the_best_of_all_totals(survival, older, active, cost):
    got = plan(survival, older, active, cost)
    objectives = brute_objectives(older, active, cost)
    best = int(np.argmax(objectives))  # the first, so the smallest total
    assert float(got.objective) == objectives[best]
    assert int(got.rows) == active.sum() + best
    expected = brute_distribute(survival, best, active)
    np.testing.assert_array_equal(got.lengths, expected)


@given(survivals(), actives, costs())
def test_a_greedy_plan_stops_where_the_next_draft_does_not_improve(survival, active, cost):
    objectives = brute_objectives(survival, active, cost)
    stop = 0
    while stop + 1 < len(objectives) and objectives[stop + 1] > objectives[stop]:
        stop += 1
    got = plan_greedy(survival, active, cost)
    assert float(got.objective) == objectives[stop]
    np.testing.assert_array_equal(got.lengths, brute_distribute(survival, stop, active))


@given(survivals(), st.integers(0, 15), st.integers(0, 4), st.integers(0, 2), survivals())
def test_later_confidence_never_decides_about_an_earlier_draft(survival, budget, r, i, other):
    """With a fixed total; a draft that is verified stays so whatever the ones after it say."""
    active = np.ones(REQUESTS, bool)
    changed = survival.copy()
    changed[r, i + 1 :] = np.minimum(other[r, i + 1 :], survival[r, i])
    before = np.asarray(distribute(survival, budget, active))
    after = np.asarray(distribute(changed, budget, active))
    assert (before[r] > i) == (after[r] > i)


@given(st.permutations(range(15)), st.permutations(range(REQUESTS)), costs())
def test_without_ties_the_order_of_requests_does_not_matter(values, order, cost):
    survival = -np.sort(-np.float32(values).reshape(REQUESTS, DRAFTS), axis=1) / np.float32(16)
    active = np.arange(REQUESTS) != 2
    order = np.array(order)
    got = plan(survival, survival, active, cost)
    turned = plan(survival[order], survival[order], active[order], cost)
    np.testing.assert_array_equal(turned.lengths, np.asarray(got.lengths)[order])
    assert turned.rows == got.rows
    assert turned.objective == got.objective


@given(survivals(), actives, costs())
def test_worthless_drafts_are_left_out_under_a_monotone_curve(survival, active, cost):
    got = plan(survival, survival, active, planning.monotone(cost))
    kept = np.arange(DRAFTS) < np.asarray(got.lengths)[:, None]
    assert (survival[kept] > 0).all()


@settings(max_examples=15)
@given(survivals(), survivals(), actives, costs())
def test_jit_and_eager_agree_in_every_bit(survival, older, active, cost):
    got, eager = plan(survival, older, active, cost), planning.plan(survival, older, active, cost)
    for field in dataclasses.fields(planning.Plan):
        a, b = getattr(got, field.name), getattr(eager, field.name)
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


# -- corners --------------------------------------------------------------------------------------


def test_equal_survivals_go_to_the_lower_request_and_minus_zero_is_zero():
    survival = np.full((REQUESTS, DRAFTS), 0.5, np.float32)
    active = np.ones(REQUESTS, bool)
    assert np.asarray(distribute(survival, 4, active)).tolist() == [3, 1, 0, 0, 0]
    survival[:] = 0.0
    survival[::2] = -0.0
    assert np.asarray(distribute(survival, 4, active)).tolist() == [3, 1, 0, 0, 0]


def test_nothing_running_is_nothing_to_verify():
    survival, idle = np.ones((REQUESTS, DRAFTS), np.float32), np.zeros(REQUESTS, bool)
    got = plan(survival, survival, idle, planning.make_cost([5, 6, 7, 8], [1.0, 1.0, 1.0, 1.0]))
    assert (int(got.rows), float(got.objective)) == (0, 0.0)
    assert not np.asarray(got.lengths).any()


def test_a_curve_that_is_too_short_verifies_nothing():
    survival, active = np.ones((REQUESTS, DRAFTS), np.float32), np.ones(REQUESTS, bool)
    got = plan(survival, survival, active, planning.make_cost([1, 2, 3, 4], [1.0, 1.0, 1.0, 1.0]))
    assert (int(got.rows), float(got.objective)) == (REQUESTS, 0.0)
    assert not np.asarray(got.lengths).any()


def test_shapes_that_do_not_fit_are_refused():
    survival, active = np.ones((5, 3), np.float32), np.ones(5, bool)
    cost = planning.make_cost([5], [1.0])
    with pytest.raises(ValueError, match=r"survival must have shape \[R, D\] and active \[R\]"):
        planning.distribute(survival, 3, active[:4])
    with pytest.raises(ValueError, match=r"must have one shape, got \[\(5, 2\), \(5, 3\)\]"):
        planning.plan(survival, survival[:, :2], active, cost)
    with pytest.raises(ValueError, match=r"got \(15,\) and \(5,\)"):
        planning.plan_greedy(survival.ravel(), active, cost)
