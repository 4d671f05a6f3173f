"""Every check of `check-determinism` on the model with every role, in both numerics."""

from __future__ import annotations

import pytest

from deepinfer_jax import determinism
from tests.invariance import setups

# What the default run shows in float32; the rest of it there is exhaustive, as are, in bfloat16,
# checks that share no program with another test. Recomputation is shown by tests/rl, devices by
# tests/test_parallel.py, donation by the schedules of this folder, whose small calls donate.
FLOAT32 = {"compilation"}
ALONE = {"devices", "donation", "engine", "gradient", "padding", "remat", "scan", "speculation"}


def case(check, dtype):
    more = check.name not in FLOAT32 if dtype == "float32" else check.name in ALONE
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
