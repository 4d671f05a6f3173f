"""Every check of `check-determinism` on the model with every role, in both numerics."""

from __future__ import annotations

import pytest

from deepinfer_jax import determinism
from tests.invariance import setups

COSTLY = {"engine", "scan", "compilation", "gradient", "remat"}  # programs of their own


def case(check, dtype):
    slow = [pytest.mark.slow] if check.name in COSTLY or dtype == "bfloat16" else []
    return pytest.param(check, dtype, id=f"{check.name}-{dtype}", marks=slow)


# The persistent cache holds programs, whatever their numbers are: once is enough.
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
    assert finding.compared > 400
