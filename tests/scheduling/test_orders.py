"""Orders: who goes first, and how long anybody can be passed by."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer_jax.scheduling import FirstCome, Job, Priority, ShortestFirst

JOBS = st.builds(
    lambda prompt, reply, priority: Job("", (1,) * prompt, reply, priority),
    st.integers(1, 40),
    st.integers(1, 40),
    st.integers(0, 9),
)
ORDERS = [FirstCome(), ShortestFirst(1), ShortestFirst(7), Priority(1), Priority(5)]
TINY = Job("", (1,), 1, priority=9)  # the smallest and the most urgent


@pytest.mark.parametrize("order", ORDERS, ids=repr)
@given(job=JOBS, others=st.lists(JOBS, max_size=80), arrival=st.integers(0, 50))
def test_nobody_is_overtaken_more_often_than_said(order, job, others, arrival):
    rank = (order.rank(job, arrival), arrival)
    before = sum(
        (order.rank(other, later), later) < rank
        for later, other in enumerate(others, start=arrival + 1)
    )
    assert before <= order.overtaken(job)


@pytest.mark.parametrize("order", ORDERS, ids=repr)
@given(job=JOBS)
def test_the_bound_is_reached_by_the_luckiest_followers(order, job):
    most = order.overtaken(job)
    before = sum(order.rank(TINY, later) < order.rank(job, 0) for later in range(1, most + 3))
    assert before == most


def test_first_come_looks_at_nothing_else():
    assert FirstCome().rank(Job("", (1,) * 50, 50), 3) < FirstCome().rank(TINY, 4)


def test_shortest_first():
    order = ShortestFirst(ageing=10)
    short, long = Job("", (1,) * 3, 4), Job("", (1,) * 20, 17)
    assert order.rank(short, 2) < order.rank(long, 0)
    assert order.rank(short, 4) > order.rank(long, 0)
    assert order.overtaken(long) == 3


def test_priority():
    order = Priority(ageing=4)
    calm, urgent = Job("", (1,), 1, 2), Job("", (1,), 1, 3)
    assert order.rank(urgent, 3) < order.rank(calm, 0)
    assert order.rank(urgent, 5) > order.rank(calm, 0)
    assert order.overtaken(Job("", (1,), 1, 9)) == 0


@pytest.mark.parametrize("order", [ShortestFirst, Priority])
def test_ageing_is_what_prevents_starvation(order):
    with pytest.raises(ValueError, match="ageing must be at least 1, got 0"):
        order(0)
