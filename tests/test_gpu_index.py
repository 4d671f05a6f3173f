"""The checks of test_index_kernels.py and test_attention_kernels.py with kernels compiled for the
device at hand.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from tests import test_attention_kernels as attention
from tests import test_index_kernels as kernels
from tests.test_index_kernels import CASES, IDS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning"),
]


def on_device(case):
    return dataclasses.replace(case, numerics=dataclasses.replace(case.numerics, interpret=False))


def compiled(name: str) -> kernels.Case:
    return on_device(CASES[name])


RELEASED = attention.Case(attention.NATIVE, width=512, window=128)
ATTENTION = [on_device(case) for case in (*attention.CASES.values(), RELEASED)]
both = pytest.mark.parametrize("case", ATTENTION, ids=[*attention.CASES, "released"])


@both
def test_attention_is_that_of_float64(case):
    attention.check_values(case)


@both
def test_attention_does_not_see_other_rows_or_how_keys_come(case):
    attention.check_bits(case)


@kernels.wanted
@pytest.mark.parametrize("name", CASES)
def test_scores_are_those_of_float64(name, ids):
    kernels.check_values(compiled(name), ids)


@kernels.wanted
@pytest.mark.parametrize("name", CASES)
def test_scores_do_not_see_rows_or_walks(name, ids):
    kernels.check_bits(compiled(name), ids)


@pytest.mark.parametrize("narrow", [True, False])
@pytest.mark.parametrize(
    ("n", "k"), [(7, 3), (512, 512), (2049, 512), (16384, 512), (32768, 2048), (150_001, 512)]
)
def test_the_best_columns(n, k, narrow):
    kernels.check_choice(n, k, 16384, narrow, False)


def test_every_row_is_its_own_among_many():
    case, ids = compiled("words"), IDS["all"]
    pick = np.random.default_rng(1).integers(0, kernels.T, 300)
    every = np.asarray(case.scores(ids))
    np.testing.assert_array_equal(np.asarray(case.scores(ids, pick)), every[pick])
