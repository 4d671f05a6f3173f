"""One example for each thing that the scheduler does."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable

import pytest

from deepinfer_jax.scheduling import (
    Chunk,
    FirstCome,
    Grant,
    Job,
    Limits,
    Preempted,
    Priority,
    Saved,
    Scheduler,
    Seated,
    ShortestFirst,
    Span,
    Step,
)
from tests.scheduling.device import Device, drain

LIMITS = Limits(slots=2, pages=9, page_tokens=4, rows=7, longest=30)
SHARING = dataclasses.replace(LIMITS, slots=3, pages=20, rows=30, snapshots=2, keep="shared")
TEXT = tuple(range(100, 130))


def job(name: Hashable, prompt: int, reply: int = 3, first: int = 0, **fields) -> Job:
    """A job whose prompt begins like TEXT, from place `first` on."""
    return Job(name, TEXT[first : first + prompt], reply, **fields)


def start(limits: Limits, *jobs: Job, order=None) -> tuple[Scheduler, Device]:
    scheduler = Scheduler(limits, order)
    device = Device(scheduler, stopping=False)
    for each in jobs:
        scheduler.submit(each)
        device.expect(each)
    return scheduler, device


def run(device: Device, lookahead: int = 1) -> Step:
    step = device.scheduler.step(lookahead)
    device.run(step)
    return step


def seated(step: Step) -> list[object]:
    return [each.job for each in step.seated]


# -- prompts ---------------------------------------------------------------------------------------


def test_nothing_to_do():
    assert Scheduler(LIMITS).step() == Step()
    assert Step().idle


def test_a_prompt_runs_in_chunks_within_the_rows():
    _, device = start(LIMITS, job("a", 10, 9), job("b", 6, 9, first=1))
    assert run(device) == Step(
        seated=(Seated(0, "a", 0, None, 10), Seated(1, "b", 0, None, 6)),
        grants=(Grant(0, 0, (0, 1, 2)), Grant(1, 0, (3, 4))),
        chunks=(Chunk(0, "a", 0, 7, False),),
    )
    assert run(device).chunks == (Chunk(0, "a", 7, 3, True), Chunk(1, "b", 0, 4, False))
    step = run(device, lookahead=6)
    assert (step.chunks, step.decode, step.ahead) == ((Chunk(1, "b", 4, 2, True),), (0,), 1)
    step = run(device, lookahead=6)
    assert (step.chunks, step.decode, step.ahead) == ((), (0, 1), 6)


def test_without_mixed_steps_decoding_waits_for_prompts():
    limits = dataclasses.replace(LIMITS, rows=2, mixed=False)
    scheduler, device = start(limits, job("a", 2))
    run(device)
    scheduler.submit(late := job("b", 3, first=1))
    device.expect(late)
    steps = [run(device, 3) for _ in range(3)]
    assert [(step.chunks, step.decode) for step in steps] == [
        ((Chunk(1, "b", 0, 2, False),), ()),
        ((Chunk(1, "b", 2, 1, True),), ()),
        ((), (0, 1)),
    ]


@pytest.mark.parametrize(("mixed", "granted"), [(True, (Grant(0, 1, (4,)),)), (False, ())])
def test_pages_for_no_more_than_the_step_can_use(mixed, granted):
    limits = dataclasses.replace(LIMITS, mixed=mixed)
    _, device = start(limits, job("a", 4, 20), job("b", 12, first=1))
    run(device)
    step = run(device, lookahead=16)  # b is at its prompt still
    assert (step.grants, step.ahead) == (granted, 1)


def test_the_next_step_need_not_wait_for_the_tokens_of_the_last():
    scheduler = Scheduler(LIMITS)
    device = Device(scheduler, stopping=False, overlapped=True)
    for each in (job("a", 4, 9), job("b", 6, 9, first=1)):
        scheduler.submit(each)
        device.expect(each)
    steps = drain(device, lookahead=4)
    assert [(len(step.chunks), step.decode) for step in steps] == [
        (2, ()), (1, (0,)), (0, (0, 1)), (0, (0, 1)), (0, (0, 1)),
    ], "and the last one in vain"  # fmt: skip


# -- room ------------------------------------------------------------------------------------------


def test_a_job_waits_for_pages_and_nobody_slips_past():
    limits = dataclasses.replace(LIMITS, slots=3, pages=6)
    _, device = start(limits, job("a", 12), job("b", 10, first=1), job("c", 1, first=2))
    assert seated(run(device)) == ["a"]  # b needs three pages, and one must remain for a
    assert seated(run(device)) == []
    order = [name for step in drain(device) for name in seated(step)]
    assert order == ["b", "c"]


def test_the_last_one_is_preempted_and_computes_its_reply_again():
    limits = dataclasses.replace(LIMITS, pages=6)
    _, device = start(limits, job("a", 4, 16), job("b", 5, 15, first=1))
    steps = drain(device, lookahead=4)
    gone = [step for step in steps if step.preempted]
    assert [step.preempted for step in gone] == [(Preempted(1, "b"),)]
    assert gone[0].decode == (0,)
    back = next(seat for step in steps[1:] for seat in step.seated)
    assert back.job == "b"
    assert back.reused == 0
    assert back.prompt > 5, "what it had emitted is part of what it computes"


def test_a_job_sits_out_where_those_before_it_have_the_pages():
    limits = dataclasses.replace(LIMITS, pages=5)
    _, device = start(limits, job("a", 8, 12), job("b", 4, 4, first=1))
    run(device)
    run(device)
    step = run(device, lookahead=8)  # two pages for a, and two are free
    assert (step.decode, step.preempted) == ((0,), ())
    assert run(device).decode == (0,)
    drain(device)


def test_the_first_is_never_preempted():
    limits = dataclasses.replace(LIMITS, slots=4, pages=8)
    jobs = [job(name, 6, 20, first=place) for place, name in enumerate("abcd")]
    _, device = start(limits, *jobs)
    steps = drain(device, lookahead=5)
    gone = [each.job for step in steps for each in step.preempted]
    assert gone
    assert "a" not in gone


def test_idle_prefixes_go_before_anybody_is_preempted():
    limits = dataclasses.replace(LIMITS, pages=6, snapshots=2)
    scheduler, device = start(limits, job("a", 9, 3))
    drain(device)
    assert scheduler.usage().prefixes == 1
    scheduler.submit(big := job("b", 12, 12, first=1))
    device.expect(big)
    steps = drain(device)
    assert not any(step.preempted for step in steps)
    assert scheduler.usage().prefixes == 1, "of b, for which that of a had to go"


# -- beginnings ------------------------------------------------------------------------------------


def test_a_prompt_known_up_to_a_boundary():
    limits = dataclasses.replace(SHARING, keep="ends")
    scheduler, device = start(limits, job("a", 11))
    step = run(device)
    assert step.chunks == (Chunk(0, "a", 0, 8, False),)
    assert step.saved == (Saved(0, 0, 8),)
    drain(device)
    scheduler.submit(again := job("b", 10))
    device.expect(again)
    step = run(device)
    assert step.seated == (Seated(0, "b", 8, 0, 10),)
    assert step.grants[0].pages[:2] == (0, 1)
    assert step.chunks == (Chunk(0, "b", 8, 2, True),)


def test_nothing_is_kept_for_nobody():
    _, device = start(SHARING, job("a", 11), job("b", 11, first=1))
    assert not any(step.saved for step in drain(device))


def test_samples_of_a_prompt_compute_it_once():
    scheduler, device = start(SHARING)
    for copy in scheduler.fork(job("a", 11), 4):
        device.expect(copy)
    step = run(device)
    assert seated(step) == [("a", 0)]
    assert step.saved == (Saved(0, 0, 8),)
    step = run(device)
    assert seated(step) == [("a", 1), ("a", 2)]
    assert {grant.pages[:2] for grant in step.grants} == {(0, 1)}
    drain(device)
    assert device.reused == 3 * 8
    assert len(device.finished) == 4


def test_questions_after_the_same_examples_compute_those_once():
    prompts = [(*TEXT[:13], 1, 2, 3, 4, end) for end in (5, 6, 7)]
    prompts += [(*TEXT[:13], 9, 9, 9, 9, 9)] * 2  # a pair that has more in common
    jobs = [Job(place, tokens, 2) for place, tokens in enumerate(prompts)]
    _, device = start(dataclasses.replace(SHARING, snapshots=3), *jobs)
    drain(device)
    # 0 computes 16 for 1 and 2; 12 are what it shares with 3, which computes 16 for 4.
    assert device.reused == 16 + 16 + 12 + 16


def test_a_job_does_not_wait_for_one_behind_it():
    limits = dataclasses.replace(SHARING, rows=5, keep="ends")
    for priority, who in ((0, []), (1, ["late"])):
        scheduler, device = start(limits, job("early", 11), order=Priority(5))
        run(device)  # a part of what it will keep
        scheduler.submit(late := job("late", 11, priority=priority))
        device.expect(late)
        assert seated(run(device)) == who


def race() -> tuple[Scheduler, Device]:
    """Two jobs at one prompt: "late" stands before "early", which began before it came."""
    limits = dataclasses.replace(SHARING, rows=5, keep="ends")
    scheduler, device = start(limits, job("early", 11), order=Priority(5))
    run(device)
    scheduler.submit(late := job("late", 11, priority=1))
    device.expect(late)
    run(device)
    return scheduler, device


def test_a_boundary_that_somebody_else_kept_cuts_no_chunk():
    _, device = race()
    step = run(device)
    assert step.chunks == (Chunk(1, "late", 5, 3, False), Chunk(0, "early", 5, 2, False))
    assert step.saved == (Saved(1, 0, 8),)
    assert run(device).chunks == (Chunk(1, "late", 8, 3, True), Chunk(0, "early", 7, 2, False))


def test_of_two_jobs_with_the_same_beginning_the_first_is_waited_for():
    scheduler, device = race()
    scheduler.submit(third := job("third", 11, priority=1))
    device.expect(third)
    assert seated(run(device)) == []
    assert run(device).seated == (Seated(2, "third", 8, 0, 11),)


def test_a_beginning_that_is_known_is_not_waited_for():
    scheduler, device = race()
    run(device)  # "late" keeps what "early" is still going to compute
    scheduler.submit(third := job("third", 11))
    device.expect(third)
    assert run(device).seated == (Seated(2, "third", 8, 0, 11),)


def test_the_prefix_cache_is_off_without_snapshots_and_for_jobs_that_say_so():
    off = dataclasses.replace(SHARING, snapshots=0)
    for limits, reuse in ((off, True), (SHARING, False)):
        jobs = (job("a", 11, reuse=reuse), job("b", 11, reuse=reuse))
        _, device = start(limits, *jobs)
        assert seated(run(device)) == ["a", "b"]
        drain(device)
        assert device.reused == 0


def test_new_weights_forget_every_beginning():
    scheduler, device = start(SHARING, job("a", 22))
    for each in (job("b", 22), job("c", 22)):
        scheduler.submit(each)
        device.expect(each)
    run(device)
    assert scheduler.usage().prefixes == 1
    scheduler.renew("new")
    assert scheduler.usage().prefixes == 0
    assert [seat.reused for seat in run(device).seated] == [0]  # b; c waits for it
    assert [seat.reused for seat in run(device).seated] == [20]


def test_new_weights_hold_for_jobs_that_wait():
    scheduler, device = start(SHARING, job("a", 11))
    scheduler.renew("new")
    scheduler.submit(job("b", 11))
    assert seated(run(device)) == ["a"]  # b waits for what it has in common with a


def test_a_promise_of_old_weights_is_not_kept():
    limits = dataclasses.replace(SHARING, rows=5)
    scheduler, device = start(limits, job("a", 11), job("b", 11))
    run(device)
    scheduler.renew("new")
    steps = drain(device)
    assert device.reused == 0
    assert not any(step.saved for step in steps)


# -- spans -----------------------------------------------------------------------------------------


def test_a_chunk_ends_before_a_span_that_it_has_no_room_for():
    limits = dataclasses.replace(LIMITS, rows=8)
    spans = (Span(3, 6, b"sun"), Span(9, 3, b"moon"))
    _, device = start(limits, job("a", 13, spans=spans), job("b", 9, first=1))
    assert run(device).chunks == (Chunk(0, "a", 0, 3, False), Chunk(1, "b", 0, 5, False))
    assert run(device).chunks == (Chunk(0, "a", 3, 6, False), Chunk(1, "b", 5, 2, False))


def test_a_span_waits_for_rows_while_others_get_on():
    limits = dataclasses.replace(LIMITS, rows=8)
    late = job("b", 9, first=1, spans=(Span(2, 6, b"sun"),))
    _, device = start(limits, job("a", 12), late)
    assert run(device).chunks == (Chunk(0, "a", 0, 8, False),)
    assert run(device).chunks == (Chunk(0, "a", 8, 4, True), Chunk(1, "b", 0, 2, False))
    step = run(device)
    assert (step.decode, step.chunks) == ((0,), (Chunk(1, "b", 2, 7, True),))


def shown(*keys: bytes) -> list[Job]:
    """Prompts of equal token ids, with a span of 5 at 6, which covers the boundary at 8."""
    return [job(place, 15, spans=(Span(6, 5, key),)) for place, key in enumerate(keys)]


def test_a_span_is_shared_by_those_who_show_the_same():
    _, device = start(SHARING, *shown(b"sun", b"sun", b"sun"))
    steps = drain(device)
    assert device.reused == 2 * 12
    assert [saved.tokens for step in steps for saved in step.saved] == [12]


def test_spans_that_show_other_things_share_what_stands_before_them():
    _, device = start(SHARING, *shown(b"sun", b"moon"))
    steps = drain(device)
    assert device.reused == 4  # not 8: that boundary lies inside the span
    assert [saved.tokens for step in steps for saved in step.saved] == [4]


# -- orders, ends and errors -----------------------------------------------------------------------


def test_the_order_decides_who_is_seated():
    jobs = (job("a", 9), job("b", 7, first=1), job("c", 2, first=2))
    limits = dataclasses.replace(LIMITS, slots=1)
    _, device = start(limits, *jobs, order=ShortestFirst(1))
    assert [name for step in drain(device) for name in seated(step)] == ["c", "b", "a"]


@pytest.mark.parametrize("order", [FirstCome(), ShortestFirst(4), Priority(2)], ids=repr)
def test_however_many_come_later_a_job_gets_its_turn(order):
    long = job("long", 20, 9)
    scheduler, device = start(LIMITS, long, order=order)
    before: list[object] = []
    for number in range(60):
        for name in ((number, 0), (number, 1)):
            scheduler.submit(tiny := job(name, 1, 2, first=number % 9, priority=9))
            device.expect(tiny)
        before += seated(run(device))
        if "long" in before:
            break
    # Those that are seated at the same time are no loss: there were slots for all.
    assert 0 <= before.index("long") <= order.overtaken(long)


def test_cancelled_jobs_leave_nothing():
    scheduler, device = start(LIMITS, job("a", 9), job("b", 7, first=1), job("c", 2, first=2))
    run(device)
    assert scheduler.cancel("c") is None
    assert scheduler.cancel("b") == 1
    assert scheduler.cancel("a") == 0
    usage = scheduler.usage()
    assert (usage.waiting, usage.running, usage.free_pages) == (0, 0, 9)
    assert scheduler.step().idle
    scheduler.submit(job("a", 1))  # the name is free again


def test_what_never_fits_is_refused_and_leaves_no_trace():
    scheduler = Scheduler(LIMITS)
    with pytest.raises(ValueError, match="= 31 tokens, the longest sequence is 30"):
        scheduler.submit(job("a", 20, 11))
    with pytest.raises(ValueError, match="= 31 tokens"):
        scheduler.fork(job("a", 20, 11), 2)
    assert scheduler.step().idle


def test_names_of_unfinished_jobs_are_taken():
    scheduler = Scheduler(LIMITS)
    scheduler.submit(dataclasses.replace(job("a", 3), id=("a", 1)))
    with pytest.raises(ValueError, match=r"job id \('a', 1\) is taken"):
        scheduler.fork(job("a", 3), 2)
    assert scheduler.usage().waiting == 1
    with pytest.raises(ValueError, match="count must be at least 1"):
        scheduler.fork(job("a", 3), 0)


def test_reports_that_cannot_be():
    scheduler = Scheduler(LIMITS)
    scheduler.submit(job("a", 9, 2))
    scheduler.step()
    with pytest.raises(ValueError, match="slot 0 has computed 7 of 9 prompt tokens"):
        scheduler.advance(0, 1)
    scheduler.step()
    with pytest.raises(ValueError, match=r"tokens must lie in 0\.\.2 for job 'a'.* got 3"):
        scheduler.advance(0, 3)
    scheduler.advance(0, 2)
    with pytest.raises(ValueError, match="slot 0 has all its tokens: finish it first"):
        scheduler.step()
    scheduler.finish(0)
    for slot in (0, 5, -1):
        with pytest.raises(ValueError, match=f"slot {slot} has no job"):
            scheduler.finish(slot)
    with pytest.raises(ValueError, match="no unfinished job 'a'"):
        scheduler.cancel("a")
    with pytest.raises(ValueError, match="lookahead must be at least 1"):
        scheduler.step(0)
