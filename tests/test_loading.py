"""Models by name and by folder, and the folders that are refused."""

import dataclasses
import json
import shutil
import subprocess
import sys

import jax
import numpy as np
import pytest

import deepinfer_jax
from deepinfer_jax import checkpoint, loading, params
from deepinfer_jax.numerics import Numerics
from kernels_bridge import ffi, machine
from tests import tiny_model

WITH_COMPILER = machine.named("cpu", (machine.Found(machine.COMPILER),))


@pytest.fixture
def folder(tmp_path):
    """A copy that a test may damage."""
    return shutil.copytree(tiny_model.folder(), tmp_path / "model")


def change_config(folder, **fields):
    path = folder / "config.json"
    data = json.loads(path.read_text("utf-8"))
    for key, value in fields.items():
        (data["text_config"] if key in data["text_config"] else data)[key] = value
    path.write_text(json.dumps(data), "utf-8")


def test_a_folder_becomes_a_model():
    model = loading.load(str(tiny_model.folder()), weights="stored")
    expected = checkpoint.load_params(tiny_model.folder())
    jax.tree.map(np.testing.assert_array_equal, model.params, expected)
    assert model.numerics == Numerics.native(model.cfg.quantized)
    assert model.max_length == model.cfg.max_position_embeddings
    assert model.tokenizer.eos == model.cfg.eos_token_id
    assert model.name == str(tiny_model.folder())


def test_numerics_and_length_can_be_given():
    model = loading.load(tiny_model.folder(), numerics=Numerics.fp32(), max_length=77)
    assert model.numerics == Numerics.fp32()
    assert model.max_length == 77


def test_the_form_of_the_rows_can_be_given(monkeypatch):
    monkeypatch.setattr(ffi, "load", lambda: None)
    monkeypatch.setattr(loading, "probe", lambda: WITH_COMPILER)
    for given in (None, Numerics.fp32()):
        model = loading.load(tiny_model.folder(), numerics=given, rows="ffi")
        expected = Numerics.native(model.cfg.quantized) if given is None else given
        assert model.numerics == dataclasses.replace(expected, rows="ffi")
    with pytest.raises(ValueError, match='rows="pallas" cannot run here, it is for cuda'):
        loading.load(tiny_model.folder(), rows="pallas")


def test_kernels_that_cannot_be_built_are_said_before_weights_are_read(monkeypatch):
    def none():
        raise ffi.NoKernelsError("no compiler here")

    monkeypatch.setattr(ffi, "load", none)
    monkeypatch.setattr(loading, "probe", lambda: WITH_COMPILER)
    monkeypatch.setattr(checkpoint, "load_params", None)
    with pytest.raises(ffi.NoKernelsError, match="no compiler here"):
        loading.load(tiny_model.folder(), rows="ffi")


def test_without_a_compiler_the_form_that_needs_one_is_refused(monkeypatch):
    monkeypatch.setattr(loading, "probe", lambda: machine.named("cpu"))
    with pytest.raises(ValueError, match=r'rows="ffi" cannot run .*g\+\+\): use rows="tiled"'):
        loading.load(tiny_model.folder(), rows="ffi")


def test_weights_are_decoded_on_a_cpu_while_they_are_small(monkeypatch):
    stored = loading.load(tiny_model.folder(), weights="stored").params
    small = loading.load(tiny_model.folder()).params
    assert small["layers"]["attn"]["wq_a"].format == "bf16_bits"
    jax.tree.map(np.testing.assert_array_equal, small, params.decode(stored))
    monkeypatch.setattr(loading, "DECODED_LIMIT", 1000)
    large = loading.load(tiny_model.folder()).params
    jax.tree.map(np.testing.assert_array_equal, large, stored)


def test_an_unknown_form_of_the_weights_is_refused():
    with pytest.raises(ValueError, match=r"weights must be .*got 'wide'"):
        loading.load(tiny_model.folder(), weights="wide")  # pyright: ignore[reportArgumentType]


def test_numerics_are_no_name():
    with pytest.raises(TypeError, match=r"must be a Numerics, .*got 'fp32'"):
        loading.load(tiny_model.folder(), numerics="fp32")  # pyright: ignore[reportArgumentType]


def test_the_representation_holds_no_arrays():
    assert len(repr(tiny_model.model())) < 500


def test_an_unknown_name_is_refused_with_the_shipped_ones():
    with pytest.raises(FileNotFoundError, match=r"'spark-huge'.*spark-tiny.*folder with config"):
        loading.load("spark-huge")


def test_a_folder_without_a_model_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no config\.json"):
        loading.load(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.json", "model.safetensors.index.json"])
def test_a_missing_file_is_named(folder, name):
    (folder / name).unlink()
    with pytest.raises(FileNotFoundError, match=name):
        loading.load(folder)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"engram_vocab_size": 1 << 25}, "engram_vocab_size must be at most 16777216"),
        ({"engram_num_embeddings": [3]}, "engram_num_embeddings: the table of layer . has 3 rows"),
    ],
)
def test_engram_sizes_are_checked_before_weights_are_read(folder, monkeypatch, fields, message):
    monkeypatch.setattr(checkpoint, "load_params", lambda *args: pytest.fail("read too early"))
    change_config(folder, **fields)
    with pytest.raises(ValueError, match=rf"config\.json: {message}"):
        loading.load(folder)


def test_the_token_map_is_derived_where_none_is_stored(folder):
    for name in ("engram_token_map.bin", "engram_token_map.json"):
        (folder / name).unlink()
    derived = loading.load(folder).tables.token_map
    np.testing.assert_array_equal(derived, tiny_model.model().tables.token_map)
    change_config(folder, engram_compressed_vocab_size=1641)
    with pytest.raises(ValueError, match=r"has 1640 compressed ids.*=1641"):
        loading.load(folder)


def test_a_tokenizer_of_another_model_is_refused(folder):
    change_config(folder, eos_token_id=5)
    with pytest.raises(ValueError, match=r"eos is token 1 .*eos_token_id=5"):
        loading.load(folder)
    change_config(folder, eos_token_id=1, vocab_size=2016)
    with pytest.raises(ValueError, match="has 2048 ids, the model only vocab_size=2016"):
        loading.load(folder)


@pytest.mark.parametrize(
    ("length", "error", "message"),
    [
        (0, ValueError, r"in 1\.\.1024 \(max_position_embeddings of the model\), got 0"),
        (1025, ValueError, "got 1025"),
        (True, TypeError, "must be an integer"),
        (12.0, TypeError, "must be an integer"),
    ],
)
def test_a_length_out_of_range_is_refused(length, error, message):
    with pytest.raises(error, match=message):
        loading.load(tiny_model.folder(), max_length=length)


def test_public_names_are_listed_and_found():
    names = set(deepinfer_jax.__all__)
    assert names == {"__version__", *deepinfer_jax._HOMES}
    assert names <= set(dir(deepinfer_jax))
    for name in names:
        assert getattr(deepinfer_jax, name) is not None
    assert {"rl", "planning"} <= set(dir(deepinfer_jax))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        deepinfer_jax.nothing  # noqa: B018


def test_a_module_is_found_by_its_name_alone():
    """In a fresh process, where nothing has imported it yet; the package alone stays light."""
    program = (
        "import sys, deepinfer_jax as di; before = set(sys.modules);"
        "assert not {'jax', 'numpy', 'deepinfer_jax.strict_json'} & before;"
        "assert di.strict_json.__name__ == 'deepinfer_jax.strict_json'"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
