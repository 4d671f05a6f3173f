"""The engine in narrow places: replies are those of a request alone, whatever happens to it."""

from __future__ import annotations

import dataclasses
import functools

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import deepinfer_jax as di
from deepinfer_jax import engine, planning
from deepinfer_jax.engine import Engine, Sizes, StepRecord, memory, programs, watch
from deepinfer_jax.engine.device import Device
from deepinfer_jax.engine.seats import sampling_of
from deepinfer_jax.prompts import make_requests
from deepinfer_jax.requests import Options
from deepinfer_jax.scheduling import FirstCome, Priority, ShortestFirst
from tests import tiny_model

# Room for one long request, or two or three short ones; programs that tests/engine share.
SIZES = Sizes(
    slots=3, capacity=96, pages=6, page_tokens=16, snapshots=2, edits=True, forced=4, prefill=(32,)
)  # fmt: skip
COUNT = 11
HEAD = np.random.default_rng(3).integers(3, 2048, 37).tolist()  # what some prompts begin with


@functools.cache
def prompts() -> list[dict]:
    """Prompts of 3 to 61 tokens, half of them beginning alike; replies of 1 to 31 tokens, every
    third of logits that depend on those before.
    """
    rng = np.random.default_rng(9)
    kinds = [{}, {"temperature": 0}, {"top_p": 0.8}, {"temperature": 20.0}]
    edits = {"repetition_penalty": 1.5, "frequency_penalty": 0.7, "logit_bias": {"40": 4.0}}
    return [
        {
            "tokens": (HEAD if n % 2 else []) + rng.integers(3, 2048, 3 + 2 * n).tolist(),
            "id": str(n),
            "max_tokens": 1 + 7 * n % 32,
            **kinds[n % 4],
            **(edits if n % 3 == 1 else {}),
        }
        for n in range(COUNT)
    ]


@functools.cache
def requests():
    model = tiny_model.model()
    return make_requests(prompts(), Options(seed=5), model.tokenizer, model.cfg, model.max_length)


@functools.cache
def alone() -> list[di.Result]:
    """Every request by itself in an engine of the same programs."""
    return [answered([n])[n] for n in range(COUNT)]


def answered(asked, **more) -> dict[int, di.Result]:
    """Results by the request's number, all submitted at first in the order of `asked`."""
    running = Engine(tiny_model.model(), SIZES, **more)
    numbers = {running.submit(requests()[n], priority=n % 4): n for n in asked}
    found = {}
    for update in running.updates():
        if update.result:
            found[numbers[update.index]] = update.result
    used = running.usage()
    assert (used.waiting, used.running) == (0, 0)
    assert found.keys() == set(asked)
    return found


def watched(monkeypatch) -> list:
    """The steps that an engine was told to take."""
    steps, step = [], engine.engine.Scheduler.step

    def record(self, *args):
        steps.append(step(self, *args))
        return steps[-1]

    monkeypatch.setattr(engine.engine.Scheduler, "step", record)
    return steps


@pytest.mark.slow
def test_shared_beginnings_and_preemption_change_no_bit(monkeypatch):
    want = alone()
    steps = watched(monkeypatch)
    found = answered(range(COUNT))
    assert [found[n] for n in range(COUNT)] == want
    assert any(step.preempted for step in steps)
    assert any(seated.snapshot is not None for step in steps for seated in step.seated)
    assert any(step.chunks and step.decode for step in steps)


@pytest.mark.slow
@given(
    asked=st.permutations(range(COUNT)),
    rule=st.sampled_from([FirstCome(), ShortestFirst(8), Priority(2)]),
    eager=st.booleans(),
)
@settings(max_examples=6)
def test_no_order_changes_a_bit(asked, rule, eager):
    found = answered(asked, order=rule, eager=eager)
    assert [found[n] for n in range(COUNT)] == alone()


@pytest.mark.exhaustive  # the default run drafts in tests/test_rounds.py and test_structured.py
def test_drafts_in_narrow_places_change_no_bit():
    found = answered(range(COUNT), policy=planning.Fixed(2))
    assert [found[n] for n in range(COUNT)] == alone()
    assert sum(result.timing.accepted for result in found.values()) > 3


@pytest.mark.exhaustive  # on a GPU the engine runs so wherever it can
def test_programs_that_never_truncate_change_no_bit():
    """Until somebody asks for it, in the middle of a run."""
    running, found = Engine(tiny_model.model(), dataclasses.replace(SIZES, truncates=False)), {}
    late = [n for n in range(COUNT) if requests()[n].options.truncates]
    numbers = {running.submit(requests()[n]): n for n in range(COUNT) if n not in late}
    assert late
    assert running._device.state().sampling.top_p is None
    for update in running.updates():
        if update.result:
            found[numbers[update.index]] = update.result
        if late and len(found) > 2:
            numbers |= {running.submit(requests()[n]): n for n in late}
            late = []
    assert running._device.state().sampling.top_p is not None
    assert [found[n] for n in range(COUNT)] == alone()


@pytest.mark.parametrize(("leave", "rounds"), [(0, 7), (1, 1), (2, 4), (3, 7)])
def test_a_look_ends_when_so_many_slots_have_stopped(leave, rounds):
    model = tiny_model.model()
    device = Device(model, SIZES, sampling_of([None] * 3, SIZES.truncates), watch.Watch())
    device.widen(SIZES)
    device.hand_out(np.arange(6, dtype=np.int32).reshape(3, 2).repeat(3, axis=1))
    everyone = np.ones(3, bool)
    ends = np.full((3, SIZES.stop_ids), -1, np.int32)
    left = np.array([2, 5, 8], np.int32)  # one is said after the prompt
    device.seat(everyone, left, ends, {}, np.zeros(3, bool))
    rows = programs.make_rows([(7, slot, 0) for slot in range(3)], 32)
    device.fill(rows, everyone, ~everyone, None)
    move = planning.OFF.move(planning.OFF.start(3, 0), 3)
    made, _ = device.look(None, move, 16, leave).result()
    assert np.asarray(made.emitted).any(axis=(1, 2)).sum() == rounds
    device.close()


def test_cancelled_requests_are_not_heard_of_again():
    running = Engine(tiny_model.model(), SIZES)
    numbers = [running.submit(requests()[n]) for n in range(6)]
    running.cancel(numbers[4])  # waits
    found, gone = {}, False
    for update in running.updates():
        if not gone:
            running.cancel(numbers[3 if update.index != numbers[3] else 2])
            gone, last = True, 3 if update.index != numbers[3] else 2
        assert update.index not in (numbers[4], numbers[last]) or not gone
        if update.result:
            found[update.index] = update.result
    assert found.keys() == set(numbers) - {numbers[4], numbers[last]}
    for number, result in found.items():
        assert result == alone()[number]
    with pytest.raises(ValueError, match="no unfinished job"):
        running.cancel(numbers[0])


def test_requests_may_come_while_others_run():
    running, found = Engine(tiny_model.model(), SIZES), {}
    running.submit(requests()[0])
    for update in running.updates():
        if (count := running.statistics().requests) < 4:
            running.submit(requests()[count])
        if update.result:
            found[update.index] = update.result
    assert [found[n] for n in range(4)] == alone()[:4]


def test_a_failing_prompt_fails_alone(monkeypatch):
    """The device gives up at the prompt of request 3; all others have their bits."""
    fill, others = programs.fill_program, [requests()[n].tokens for n in range(6) if n != 3]
    own = set(requests()[3].tokens).difference(*others)

    def failing(params, tables, rows, *args, **more):
        if own & set(np.asarray(rows.tokens).tolist()):
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: planted")
        return fill(params, tables, rows, *args, **more)

    monkeypatch.setattr(programs, "fill_program", failing)
    running = Engine(tiny_model.model(), SIZES, order=FirstCome())
    for request in requests()[:6]:
        running.submit(request)
    found, errors = heard(running)
    assert 3 in errors
    assert "request '3'" in str(errors[3])
    assert found.keys() | errors.keys() == set(range(6))
    for number, result in found.items():
        assert result == alone()[number]


def test_a_failure_that_is_seen_late_is_that_of_the_prompt(monkeypatch):
    """The device says only when results are read that the call of a prompt went wrong."""
    running = Engine(tiny_model.model(), SIZES)
    for request in requests()[:6]:
        running.submit(request)
    read = running._watch.read

    def failing(values):
        made, _ = values
        if any(made is each.result()[0] for each in doomed):
            raise jax.errors.JaxRuntimeError("INTERNAL: planted")
        return read(values)

    doomed, fly = [], running._fly

    def flying(made, *args):
        fly(made, *args)
        if 3 in running._flights[-1].prompts:
            doomed.append(made)

    monkeypatch.setattr(running._watch, "read", failing)
    monkeypatch.setattr(running, "_fly", flying)
    found, errors = heard(running)
    assert 3 in errors
    assert found.keys() | errors.keys() == set(range(6))
    assert not found.keys() & errors.keys()
    assert all(result == alone()[number] for number, result in found.items())


def test_a_poisoned_prompt_fails_alone():
    """A damaged row of the embedding, of a token in one prompt: nobody else reads it, and who comes
    into its slot and its pages has the bits of a sound model.
    """
    model, place = tiny_model.model(), 4
    others = {
        token
        for n in range(COUNT)
        for token in (*requests()[n].tokens, *alone()[n].tokens)
        if n != place
    }
    token = next(token for token in requests()[place].tokens if token not in others)
    embed = np.asarray(model.params["embed"]).copy()
    embed[token] = np.nan
    broken = dataclasses.replace(model, params={**model.params, "embed": jax.numpy.asarray(embed)})
    running = Engine(broken, SIZES)
    for request in requests():
        running.submit(request)
    found, errors = heard(running)
    assert errors.keys() == {place}
    assert "request '4': the log-probability of token 0 is not finite" in str(errors[place])
    assert all(result == alone()[number] for number, result in found.items())
    assert running.statistics().failed == 1


def heard(running) -> tuple[dict[int, di.Result], dict[int, Exception]]:
    """Results and errors of all requests, by number."""
    found, errors = {}, {}
    for update in running.updates():
        if update.result:
            found[update.index] = update.result
        if update.error:
            errors[update.index] = update.error
    return found, errors


def test_drained_requests_are_those_that_have_begun():
    """The others are forgotten; what was preempted comes back and ends."""
    running = Engine(tiny_model.model(), SIZES)
    for request in requests():
        running.submit(request)
    found = {}
    for update in running.updates():
        running.drain()
        if update.result:
            found[update.index] = update.result
    after = running.statistics()
    assert 0 < len(found) < COUNT
    assert all(result == alone()[number] for number, result in found.items())
    assert (after.done, after.waiting, after.running) == (len(found), 0, 0)


def foreseen(monkeypatch, running) -> set[str]:
    """The names of the programs that are called; a call that was not compiled ahead is an error."""
    ask, called = running._watch.ask, set()

    def asking(program, *args, **more):
        name = watch.name_of(program)
        assert watch.signature(program, args, more) in running._watch._known[name]
        called.add(name)
        return ask(program, *args, **more)

    monkeypatch.setattr(running._watch, "ask", asking)
    return called


@pytest.mark.slow
def test_after_warming_up_a_run_calls_what_was_foreseen(monkeypatch):
    """Preemption, beginnings in common and mixed steps: every call is one of those compiled ahead.
    And every number that is told of the run is that of its results.
    """
    records: list[StepRecord] = []
    running, told = Engine(tiny_model.model(), SIZES, observer=records.append), []
    for request in requests():
        running.submit(request)
    running.warm_up(told.append)
    before = running.statistics()
    assert (before.tokens, before.seconds, before.waiting) == (0, 0, COUNT)
    called = foreseen(monkeypatch, running)
    found, errors = heard(running)
    assert not errors
    assert [found[n] for n in range(COUNT)] == alone()
    assert called == running._watch._known.keys()
    assert {each.total for each in told} <= {len(called)}
    check_numbers(running.statistics(), before, found, records)


def check_numbers(after, before, found, records):
    """Of a run of all requests."""
    assert (after.compiled, after.recompiled) == (before.compiled, 0)
    assert (after.done, after.failed, after.running) == (COUNT, 0, 0)
    assert after.tokens == sum(len(result.tokens) for result in found.values())
    assert after.preempted > 0
    assert after.shared_tokens > 0
    prompts = sum(result.prompt_tokens for result in found.values())
    assert after.prompt_tokens + after.shared_tokens >= prompts
    assert 0 <= after.idle_s <= after.seconds
    assert after.peak_pages == SIZES.pages
    for name in ("tokens", "verified", "accepted", "prompt_tokens"):
        assert sum(getattr(record, name) for record in records) == getattr(after, name)
    assert sum(record.idle_s for record in records) <= after.idle_s + 1e-9
    assert sum(record.compile_s for record in records) == pytest.approx(after.compile_s)
    assert {record.kind for record in records} == {"prompts", "decode"}
    assert max(record.pages for record in records) <= SIZES.pages
    assert all(record.rounds <= 1 for record in records if record.kind == "prompts")
    assert all(record.rounds == 0 for record in records if record.latency_s is None)


def test_what_can_never_fit_is_refused_with_the_arithmetic():
    running = Engine(tiny_model.model(), dataclasses.replace(SIZES, pages=4))
    long = dataclasses.replace(requests()[9], options=Options(max_tokens=40))
    with pytest.raises(ValueError, match=r"98 tokens.*longest sequence is 96"):
        running.submit(long)
    long = dataclasses.replace(requests()[9], options=Options(max_tokens=31))
    with pytest.raises(ValueError, match=r"= 6 pages of 16, there are 4"):
        running.submit(long)


def test_pages_are_those_that_fit_the_memory():
    model, wide = tiny_model.model(), dataclasses.replace(SIZES, pages=8)
    each = memory.need(model.cfg, model.numerics, wide)
    state = 5 * each.slot + 3 * each.edits
    for pages in (6, 7):
        free = int((state + pages * each.page) / memory.SHARE) + 1
        found = memory.fitted(wide, model.cfg, model.numerics, free)
        assert found == dataclasses.replace(wide, pages=pages)
    assert memory.fitted(wide, model.cfg, model.numerics, None) == wide
    assert memory.fitted(wide, model.cfg, model.numerics, 1 << 40) == wide
    with pytest.raises(ValueError, match=r"96 tokens needs 6 pages .* lower batch_size"):
        memory.fitted(wide, model.cfg, model.numerics, int(state + 5 * each.page))
    assert memory.free_bytes() > 1 << 20
