"""Everything recorded in `fp32_kvq`: float32 linears, but quantized KV and index vectors.

Noise of 1e-6 on a value next to a rounding tie flips one FP8 or FP4 code, and the flip reaches
every later position through the caches. So: tight agreement up to the first flip, no claim after
it, and for the recorded folders a claim on how late or how rare the flips are.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.golden import adapter, compare
from tests.golden.reader import Arrays, Folder

MODE = "fp32_kvq"
pytestmark = pytest.mark.slow
BOUND = 1e-4
MEDIAN = 1e-5
FLIPPED = 1e-3
FEW = 0.2
STAGES = ("prefill", "decode")


def _logit_errors(folder: Folder, scratch: Path) -> tuple[np.ndarray, np.ndarray]:
    """Positions [n] of the recorded logits, ascending, and the error of each [B, n]."""
    golden, run = folder.golden(MODE), adapter.run(folder, MODE, scratch)
    places, errors = [], []
    if "prefill.logits" in golden:
        where = golden.wide("prefill.logits_pos")
        got = run.stage("prefill").wide("prefill.logits")[:, where]
        places.append(where)
        errors.append(compare.error_per_position(got, golden.wide("prefill.logits")))
    if "decode.logits" in golden:
        got = run.stage("decode").wide("decode.logits")
        places.append(golden.wide("decode.pos"))
        errors.append(compare.error_per_position(got, golden.wide("decode.logits")))
    if not places:
        pytest.skip(f"{folder.name} records no logits in {MODE}")
    return np.concatenate(places), np.concatenate(errors, axis=1)


def _sound_until(folder: Folder, scratch: Path) -> list[int]:
    """Per batch row: how many positions are known to precede any flip."""
    positions, errors = _logit_errors(folder, scratch)
    sound = [compare.first_flip(row, BOUND, FLIPPED) for row in errors]
    total = adapter.run(folder, MODE, scratch).total
    return [total if n == len(positions) else int(positions[n - 1]) + 1 if n else 0 for n in sound]


def test_logits_agree_up_to_the_first_flip(folder: Folder, mode: str, scratch: Path) -> None:
    positions, errors = _logit_errors(folder, scratch)
    for row, error in enumerate(errors):
        sound = error[: compare.first_flip(error, BOUND, FLIPPED)]
        assert sound.max(initial=0.0) <= BOUND, (
            f"batch row {row}: error {sound.max():.3g} at position {positions[sound.argmax()]}"
        )


def test_flips_are_rare(folder: Folder, mode: str, scratch: Path) -> None:
    positions, errors = _logit_errors(folder, scratch)
    if folder.name == "micro-bf16":
        assert np.median(errors) < MEDIAN
        assert (errors > FLIPPED).mean() < 0.02
    elif folder.name == "mini":  # a correct implementation flips near position 355
        assert np.median(errors[:, positions < 256]) < MEDIAN
    else:
        pytest.skip(f"no claim is recorded for {folder.name}: where flips fall depends on the seed")


@pytest.mark.parametrize("stage", STAGES)
def test_choices_agree_up_to_the_first_flip(
    folder: Folder, mode: str, stage: str, scratch: Path
) -> None:
    golden = folder.golden(mode)
    names = [n for n in compare.recorded(golden, stage) if compare.is_choice(n)]
    if not names:
        pytest.skip(f"{folder.name} records no {stage} choices in {mode}")
    produced = adapter.run(folder, mode, scratch).stage(stage)
    start = 0 if stage == "prefill" else int(golden.wide("decode.pos")[0])
    problems = []
    for row, end in enumerate(_sound_until(folder, scratch)):
        count = max(0, end - start)
        for name in names:
            got, want = (_one_row(a, name, row, count) for a in (produced, golden))
            got = compare.comparable(name, got, want)
            problems.append(compare.equal(f"{name} (batch row {row})", got, want))
    assert not any(problems), "\n".join(p for p in problems if p)


def _one_row(arrays: Arrays, name: str, row: int, count: int) -> np.ndarray:
    """The first `count` positions of one batch row."""
    axes = compare.AXES[compare.kind(name)]
    picked = np.take(arrays.wide(name), [row], axis=axes.index("batch"))
    axis = axes.index("position")
    return np.take(picked, np.arange(min(count, picked.shape[axis])), axis=axis)


def test_drafts_agree_up_to_the_first_flip(folder: Folder, mode: str, scratch: Path) -> None:
    """The drafter quantizes vectors of its own: a flip among them reaches every number drafted at
    its place, and no logit shows it. How many there are depends on the processor's last bits.
    """
    golden = folder.golden(mode)
    names = compare.recorded(golden, "dspark")
    if not names:
        pytest.skip(f"{folder.name} records no drafts in {mode}")
    produced = adapter.run(folder, mode, scratch).stage("dspark")
    at, places = golden.wide("dspark.pos"), []
    for row, end in enumerate(_sound_until(folder, scratch)):
        sound = np.flatnonzero(at < end)
        errors = np.zeros(sound.size)
        for name in names:
            got, want = (a.wide(name)[sound, row] for a in (produced, golden))
            if compare.is_choice(name):
                assert compare.equal(name, got, want) is None, f"batch row {row}"
            else:
                assert compare.close(name, got, want, FLIPPED) is None, f"batch row {row}"
                apart = np.abs(got - want)
                of_place = tuple(range(1, apart.ndim))
                errors = np.maximum(errors, apart.max(axis=of_place, initial=0.0))
        places.append(errors)
    compared = np.concatenate(places)
    if not compared.size:
        pytest.skip(f"every draft of {folder.name} comes after a flip")
    assert np.median(compared) < MEDIAN
    assert (compared > BOUND).mean() <= FEW, f"largest errors of the places: {compared}"
