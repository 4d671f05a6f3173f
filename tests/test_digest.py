"""The digest of a checkpoint: other weights in the same folder are noticed."""

import shutil

import numpy as np
import pytest

from deepinfer_jax import checkpoint, safetensors
from deepinfer_jax.checkpoint import shards
from tests.small import PLAIN, random_bits


def test_the_digest_is_of_the_weights(tmp_path):
    """Not of where they are; any bit of a small shard changes it."""
    here, there = tmp_path / "here", tmp_path / "there"
    checkpoint.save_params(random_bits(PLAIN), PLAIN, here, max_shard_bytes=60_000)
    shutil.copytree(here, there)
    (there / "notes.md").write_text("mine")
    assert checkpoint.digest(here) == checkpoint.digest(there)
    shard = max(there.glob("*.safetensors"), key=lambda path: path.stat().st_size)
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    assert checkpoint.digest(here) != checkpoint.digest(there)


@pytest.mark.parametrize("name", ["large", "small", "last"])
def test_every_tensor_of_a_large_shard_has_a_say(tmp_path, name):
    """Trained a little, one of many: the head of a drafter, say."""
    rng = np.random.default_rng(1)
    sizes = {"large": shards._WHOLE, "small": 3, "last": 1000}
    tensors = {n: rng.standard_normal(size).astype(np.float32) for n, size in sizes.items()}
    (tmp_path / "config.json").write_text("{}")
    safetensors.save(tmp_path / shards.SINGLE, tensors)
    before = checkpoint.digest(tmp_path)
    safetensors.save(tmp_path / shards.SINGLE, tensors)
    assert checkpoint.digest(tmp_path) == before
    tensors[name] *= np.float32(1.001)
    safetensors.save(tmp_path / shards.SINGLE, tensors)
    assert checkpoint.digest(tmp_path) != before
