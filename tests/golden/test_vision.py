"""What the tower and the aligner made of the recorded images, in float32.

Independent implementations were seen to stay within 5e-7 (aligner) and 2e-6 (tower, whose rows are
of size 4). What the model makes of it, logits, experts, caches, is in test_fp32.py: image rows come
from the tower there too.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from deepinfer_jax.images.spans import IMAGE
from tests.golden import adapter, adapter_images, compare
from tests.golden.reader import Folder

MODE = "fp32"
BOUND = 1e-5


def test_tower_and_aligner(folder: Folder, mode: str, scratch: Path) -> None:
    golden = folder.golden(mode)
    names = compare.recorded(golden, "vision")
    if not names:
        pytest.skip(f"{folder.name} records no images in {mode}")
    model = adapter.load(folder, mode, scratch)
    produced = adapter_images.encoded(folder, *model.images, model.numerics)
    assert set(names) == set(produced)
    checked = [compare.check(golden, produced, name, BOUND) for name in names]
    assert not any(checked), "\n".join(c for c in checked if c)


def test_image_rows_are_those_of_the_aligner(folder: Folder, mode: str, scratch: Path) -> None:
    """`encode_images` and `span_embeddings`, one picture at a time, put them into the prompt."""
    golden = folder.golden(mode)
    if not compare.recorded(golden, "vision"):
        pytest.skip(f"{folder.name} records no images in {mode}")
    model, given = adapter.load(folder, mode, scratch), adapter_images.pictures(folder)
    rows = adapter_images.spans(folder, *model.images, model.numerics)
    types = folder.inputs["token_types"]
    counts = [len(golden[f"vision.{k}.aligner_out"]) for k in range(len(given))]
    made = np.split(rows[types[types >= 0] == IMAGE], np.cumsum(counts)[:-1])
    names = [f"vision.{k}.aligner_out" for k in range(len(given))]
    pairs = zip(names, made, strict=True)
    checked = [compare.close(name, got, golden.wide(name), BOUND) for name, got in pairs]
    assert not any(checked), "\n".join(c for c in checked if c)
