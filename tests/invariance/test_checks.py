"""Every check of `check-determinism` on the model with every role, in both numerics."""

from __future__ import annotations

import pytest

from deepinfer_jax import determinism
from tests.invariance import setups

# The default run is in bfloat16 and leaves these out: they share no program with another test, vary
# what test_schedules draws at random (neighbours, too), or ask what the tests of rl and LLM ask
# (scores). The exhaustive run has them and everything in float32.
ALONE = {
    "batch",
    "chunks",
    "devices",
    "donation",
    "drafts",
    "engine",
    "gradient",
    "mesh",
    "neighbours",
    "padding",
    "preemption",
    "remat",
    "repetition",
    "scan",
    "score",
    "speculation",
}


def case(check, dtype):
    more = dtype == "float32" or check.name in ALONE
    marks = [pytest.mark.slow, *([pytest.mark.exhaustive] if more else [])]
    return pytest.param(check, dtype, id=f"{check.name}-{dtype}", marks=marks)


CASES = [
    case(check, dtype)
    for dtype in setups.DTYPES
    for check in determinism.CHECKS
    if (check.name, dtype) != ("compilation", "bfloat16")
]


@pytest.mark.parametrize(("check", "dtype"), CASES)
def test_nothing_changes_a_bit(check, dtype):
    finding = determinism.run_check(check, setups.setup(dtype))
    assert finding.first is None
    assert finding.differing == 0
    assert finding.compared > 300
