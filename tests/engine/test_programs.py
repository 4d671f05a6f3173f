"""Rows of the engine's calls."""

import numpy as np
import pytest

from deepinfer_jax.engine.programs import make_rows


@pytest.mark.parametrize("part", [[], [(7, 1, 3)], [(7, 0, 0), (9, 0, 1), (5, 2, 4)]])
def test_rows_are_padded_to_their_size(part):
    rows = make_rows(part, 4)
    want = part + [(0, -1, 0)] * (4 - len(part))
    found = zip(*map(np.asarray, (rows.tokens, rows.slots, rows.positions)), strict=True)
    assert [tuple(map(int, row)) for row in found] == want
    assert not np.asarray(rows.image).any()
