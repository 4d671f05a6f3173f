"""Stored features: the bits that were saved, or a refusal."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax import safetensors
from deepinfer_jax.determinism.equality import bits
from deepinfer_jax.images import (
    Features,
    encode_images,
    load_features,
    origin_of,
    save_features,
    span_embeddings,
)
from deepinfer_jax.numerics import Numerics
from tests.images.towers import CFG, picture, weights

NATIVE = Numerics.native(False)
KEY = "0123456789abcdef" * 4


def origin(seed=0, cfg=CFG, numerics=NATIVE):
    return origin_of(weights(seed), cfg, numerics)


def features(dtype=jnp.bfloat16):
    rows = np.random.default_rng(0).normal(size=(6, CFG.hidden_size))
    return Features(rows.astype(dtype), 2, 3, KEY)


def test_encoded_elsewhere_stored_and_fed_in(tmp_path):
    (made,) = encode_images(weights(), [picture(7, 5)], CFG, NATIVE)
    path = save_features(tmp_path, made, origin())
    assert path.name == f"{picture(7, 5).key}.safetensors"
    read = load_features(tmp_path, picture(7, 5).key, origin())
    assert (read.height, read.width, read.key) == (made.height, made.width, made.key)
    assert read.rows.dtype == made.rows.dtype
    model = weights()["vision"]
    fed, direct = (span_embeddings(model, f) for f in (read, made))
    np.testing.assert_array_equal(bits(fed), bits(direct))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, np.float32])
def test_rows_on_a_device_are_saved_too(tmp_path, dtype):
    given = features(dtype)
    save_features(tmp_path, jax.tree.map(jnp.asarray, given), origin())
    np.testing.assert_array_equal(
        bits(load_features(tmp_path, KEY, origin()).rows), bits(given.rows)
    )


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (lambda: origin(seed=1), "are of model '"),
        (
            lambda: origin(cfg=dataclasses.replace(CFG, vision=dataclasses.replace(
                CFG.vision, rope_theta=5000.0))),
            "are of model '",
        ),
        (lambda: origin(numerics=Numerics.fp32()), "are of numerics '"),
    ],
    ids=["weights", "config", "numerics"],
)  # fmt: skip
def test_features_of_another_origin_are_refused(tmp_path, other, message):
    save_features(tmp_path, features(), origin())
    with pytest.raises(ValueError, match=f"{message}.*encode the picture with this model"):
        load_features(tmp_path, KEY, other())


def test_another_width_is_refused(tmp_path):
    narrow = dataclasses.replace(origin(), hidden=CFG.hidden_size + 1)
    with pytest.raises(ValueError, match=r"must be \(6, 65\) of this model, got \(6, 64\)"):
        save_features(tmp_path, features(), narrow)
    save_features(tmp_path, features(), origin())
    with pytest.raises(ValueError, match="width 65"):
        load_features(tmp_path, KEY, narrow)


def test_damage_is_refused(tmp_path):
    path = save_features(tmp_path, features(), origin())
    whole = path.read_bytes()
    path.write_bytes(whole[:-3] + bytes([whole[-3] ^ 1]) + whole[-2:])
    with pytest.raises(ValueError, match="damaged"):
        load_features(tmp_path, KEY, origin())
    path.write_bytes(whole[:-3])
    with pytest.raises(ValueError, match="damaged or no safetensors file"):
        load_features(tmp_path, KEY, origin())
    shard_metadata = {"key": KEY, "model": origin().model, "numerics": origin().numerics}
    safetensors.save(path, {"rows": features().rows}, shard_metadata)
    with pytest.raises(ValueError, match="does not hold the features of one picture"):
        load_features(tmp_path, KEY, origin())


def test_a_file_of_another_picture_is_refused(tmp_path):
    other = KEY[::-1]
    save_features(tmp_path, features(), origin()).rename(tmp_path / f"{other}.safetensors")
    with pytest.raises(ValueError, match="are of key '0123"):
        load_features(tmp_path, other, origin())


@pytest.mark.parametrize("key", ["", "../" + "a" * 61, "A" * 64, "a" * 63])
def test_a_key_that_is_none_is_refused(tmp_path, key):
    with pytest.raises(ValueError, match="64 hexadecimal digits"):
        load_features(tmp_path, key, origin())


def test_missing_features_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=KEY):
        load_features(tmp_path, KEY, origin())
