"""Every check of `check-determinism` on the model with every role, in both numerics."""

from __future__ import annotations

import pytest

from deepinfer_jax import determinism
from tests.invariance import setups

# Checks with programs of their own run in one of the two numerics by default.
ONCE = {
    "float32": {"compilation", "devices"},
    "bfloat16": {"engine", "scan", "gradient", "remat", "speculation"},
}
COSTLY = set.union(*ONCE.values())


def case(check, dtype):
    marks = [pytest.mark.slow] if check.name in COSTLY or dtype == "bfloat16" else []
    if check.name in COSTLY - ONCE[dtype]:
        marks.append(pytest.mark.exhaustive)
    return pytest.param(check, dtype, id=f"{check.name}-{dtype}", marks=marks)


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
