"""Several schedulers seen as one: every job on one device, numbers of slots without gaps."""

from __future__ import annotations

import numpy as np
import pytest

from deepinfer_jax.scheduling import Fleet, Job, Limits, Scheduler

PARTS = 3
LIMITS = Limits(slots=2, pages=9, page_tokens=4, rows=8, longest=24, snapshots=1, keep="shared")


def jobs(count: int, seed: int = 0) -> list[Job]:
    rng = np.random.default_rng(seed)
    return [
        Job(n, tuple(rng.integers(0, 9, rng.integers(1, 15)).tolist()), int(rng.integers(1, 9)))
        for n in range(count)
    ]


def run(scheduler, steps: int = 400) -> tuple[dict[int, set[int]], list]:
    """(Slots that each job had, steps) until nothing is left; a slot emits a token a step."""
    had: dict[int, set[int]] = {}
    sits, emitted, made = {}, dict.fromkeys(by_id, 0), []
    for _ in range(steps):
        step = scheduler.step()
        made.append(step)
        if step.idle:
            return had, made
        for seated in step.seated:
            had.setdefault(seated.job, set()).add(seated.slot)
            sits[seated.slot] = seated.job
        ready = [*step.decode, *(chunk.slot for chunk in step.chunks if chunk.last)]
        for slot in ready:
            scheduler.advance(slot, 1)
            emitted[sits[slot]] += 1
            if emitted[sits[slot]] == by_id[sits[slot]].max_tokens:
                scheduler.finish(slot)
    raise AssertionError("it does not end")


by_id = {job.id: job for job in jobs(20)}


def test_jobs_stay_on_one_device_and_all_end():
    fleet = Fleet(LIMITS, PARTS)
    for job in by_id.values():
        fleet.submit(job)
    waiting = fleet.usage()
    assert (waiting.waiting, waiting.running, waiting.pages) == (20, 0, PARTS * LIMITS.pages)
    had, steps = run(fleet)
    assert had.keys() == by_id.keys()
    homes = {job: {slot // LIMITS.slots for slot in slots} for job, slots in had.items()}
    assert all(len(parts) == 1 for parts in homes.values())
    assert {part for parts in homes.values() for part in parts} == set(range(PARTS))
    used = {slot for step in steps for slot in step.decode}
    assert used == set(range(PARTS * LIMITS.slots))
    assert all(page < LIMITS.pages for s in steps for grant in s.grants for page in grant.pages)
    assert any(len({chunk.slot // LIMITS.slots for chunk in s.chunks}) == PARTS for s in steps)
    assert fleet.usage().running == 0


def test_one_device_is_a_scheduler():
    one, fleet = Scheduler(LIMITS), Fleet(LIMITS, 1)
    for job in by_id.values():
        one.submit(job)
        fleet.submit(job)
    assert run(one)[1] == run(fleet)[1]


def test_the_device_with_the_fewest_tokens_to_come_is_next():
    fleet = Fleet(LIMITS, 2)
    for n, tokens in enumerate((12, 3, 3)):
        fleet.submit(Job(n, (1,) * tokens, 1))
    step = fleet.step()
    assert {seated.job: seated.slot for seated in step.seated} == {0: 0, 1: 2, 2: 3}
    assert fleet.cancel(1) == 2
    fleet.submit(Job(3, (1,), 1))
    assert [(s.job, s.slot) for s in fleet.step().seated] == [(3, 2)]
    with pytest.raises(ValueError, match="there is no unfinished job 1"):
        fleet.cancel(1)
    with pytest.raises(ValueError, match="is taken by an unfinished job"):
        fleet.submit(Job(3, (1,), 1))
