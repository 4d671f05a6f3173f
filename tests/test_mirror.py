"""The mirrored split agrees with recorded vectors."""

from __future__ import annotations

import numpy as np
import pytest

from deepinfer_jax import mirror


def test_splits_are_the_recorded_ones(recorded):
    cases = recorded("engine_misc/cp_mirror.json")["mirror"]
    assert len(cases) >= 5
    for case in cases:
        lengths, ranks = case["seq_lens"], case["cp_size"]
        made = mirror.mirrored(lengths, ranks)
        assert made.reverse.tolist() == case["reverse_index"]
        for rank, want in enumerate(case["per_rank"]):
            assert made.own[rank].tolist() == want["mirror_index"]
            for place, ratio in enumerate(case["compress_ratios"]):
                start, end = mirror.visible(made, lengths, case["seq_ks"], ratio)
                assert start[rank].tolist() == want["ks"][place]
                assert end[rank].tolist() == want["ke"][place]


def test_suffixes_are_the_recorded_ones(recorded):
    for case in recorded("engine_misc/cp_mirror.json")["suffix_boundary"]:
        lengths, kept = case["seq_lens"], case["keep_lens"]
        made = mirror.mirrored(lengths, case["cp_size"])
        given, place = mirror.suffixes(made, lengths, kept)
        assert [each.tolist() for each in given] == case["contributions"]
        assert place.tolist() == case["gathered_reverse"]
        assert max(map(len, given)) == case["pad_len"]


def test_every_row_is_at_one_place_and_causal_work_is_even():
    made = mirror.mirrored([64], 4)
    assert sorted(made.own.ravel().tolist()) == list(range(64))
    np.testing.assert_array_equal(made.own.ravel()[made.reverse], np.arange(64))
    assert len({int(row.sum()) for row in made.own}) == 1
    with pytest.raises(ValueError, match="expected ranks >= 1"):
        mirror.mirrored([3], 0)
