"""Values that hold arrays are shown in a line; no array is read for it."""

from __future__ import annotations

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import deepinfer_jax as di
from deepinfer_jax import cache, images, params, rl, summaries
from deepinfer_jax.model.capture import Captured
from deepinfer_jax.quant import Quantized
from tests import tiny_model
from tests.test_forward import DEEP


def test_arrays_are_shown_by_dtype_and_shape():
    shown = repr(di.text_rows(jnp.arange(3), jnp.zeros(3), jnp.arange(3)))
    assert shown == (
        "Rows(tokens=int32[3], slots=int32[3], positions=int32[3], image=bool[3]; 39 B)"
    )


def test_values_inside_values_and_long_lists_are_short():
    captured = Captured(router_load=jnp.ones((2, 7)), places=(("router_load", (0, 3)),))
    assert repr(captured) == "Captured(router_load=float32[2,7]; 56 B)"
    many = Quantized(np.ones((2, 3), np.uint8), [np.float32(n) for n in range(9)], "fp8_block")
    assert repr(many).count("float32[]") == summaries.MOST
    assert summaries.shown({"a": np.ones(2), "b": {"c": np.ones(3)}}) == "{2 arrays, 40 B}"


def test_shapes_and_traced_values_can_be_shown():
    held = cache.cache_shapes(DEEP, di.Numerics(), 2, 40)
    assert len(repr(held)) < 400
    assert "window=uint16[11,2,16,32]" in repr(held)
    seen = []
    jax.eval_shape(lambda x: seen.append(repr(rl.Logprobs(x, x, x))), jnp.ones((2, 5)))
    assert seen == ["Logprobs(raw=float32[2,5], processed=float32[2,5], "
                    "kept_mass=float32[2,5]; 120 B)"]  # fmt: skip


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (890, "890 B"), (999, "999 B"), (1000, "1 kB"), (1_254_321, "1.25 MB"),
     (999_900, "1 MB"), (510_286_023_000, "510 GB"), (2e15, "2e+03 TB")],
)  # fmt: skip
def test_sizes_have_three_digits(count, text):
    assert summaries.size(count) == text


def test_a_model_and_its_weights_are_shown_in_short():
    model = tiny_model.model()
    assert repr(model).startswith(f"Model({model.name!r}: 2 layers of 96, vocabulary 2048, weights")
    assert model.numerics.fingerprint() in repr(model)
    first, *lines = params.summary(model.params).splitlines()
    assert first.split() == ["part", "arrays", "bytes", "dtypes"]
    assert [line.split()[0] for line in lines] == [*model.params, "all"]
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(model.params))
    assert summaries.size(held) in lines[-1]


def arrays(value):
    """Names of the fields of a dataclass that are declared as arrays and shown."""
    shown = [field for field in dataclasses.fields(value) if field.repr]
    return [field.name for field in shown if re.search("Array|ndarray", str(field.type))]


def test_every_public_value_with_arrays_is_shown_in_short():
    """Each says how large it is, not what is in it; but `Agreement` is seven numbers to be read."""
    modules = (di, rl, images, di.steps)
    offered = [(module, getattr(module, "__all__", dir(module))) for module in modules]
    values = [getattr(module, name) for module, names in offered for name in names]
    held = {v for v in values if isinstance(v, type) and dataclasses.is_dataclass(v) and arrays(v)}
    assert {di.Cache, di.Rows, di.Sampling, di.steps.Scores, rl.Rollout, images.Features} < held
    others = {value for value in held if value.__repr__ is not summaries.of_fields}
    assert others == {rl.Agreement}
