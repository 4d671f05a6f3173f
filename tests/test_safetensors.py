"""The file format: independent parsing, alignment, streaming, and every way to be damaged."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer_jax import safetensors
from deepinfer_jax.safetensors import DTYPES, Tensor
from tests.golden import reader
from tests.small import bits


def every_storage(seed: int = 0) -> dict[str, np.ndarray]:
    """One array of each storage, of random bits, plus a scalar and an empty one."""
    rng = np.random.default_rng(seed)
    arrays = {"scalar": np.float32(3).reshape(()), "none": np.zeros((0, 5), np.int16)}
    for number, (storage, dtype) in enumerate(DTYPES.items()):
        shape = (3, 5 + number)
        raw = rng.bytes(dtype.itemsize * 3 * (5 + number))
        if storage == "BOOL":
            raw = bytes(b & 1 for b in raw)
        arrays[f"of.{storage}"] = np.frombuffer(raw, dtype).reshape(shape)
    return arrays


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "some.safetensors"
    safetensors.save(path, every_storage(), {"format": "pt"})
    return path


# -- round trips -----------------------------------------------------------------------------------


def test_every_storage_survives(file: Path) -> None:
    shard = safetensors.open_shard(file)
    want = every_storage()
    assert shard.metadata == {"format": "pt"}
    assert shard.tensors.keys() == want.keys()
    for name, array in want.items():
        got = shard.view(name)
        assert (got.dtype, got.shape) == (array.dtype, array.shape)
        np.testing.assert_array_equal(bits(got), bits(array), err_msg=name)
    assert safetensors.load(file).keys() == want.keys()


def test_recorded_files_read_the_same_by_an_independent_parser(golden_root: Path) -> None:
    files = sorted(golden_root.glob("*/*.safetensors"))
    if not files:
        reader.missing(golden_root, "uncompressed safetensors file")
    for path in files:
        got, want = safetensors.load(path), reader.read(path)
        assert got.keys() == want.keys()
        for name, array in want.items():
            assert (got[name].dtype, got[name].shape) == (array.dtype, array.shape)
            np.testing.assert_array_equal(bits(got[name]), bits(array))


def test_written_files_read_the_same_by_an_independent_parser(tmp_path: Path) -> None:
    arrays = {n: a for n, a in every_storage().items() if a.dtype.name in _known_to_reader()}
    safetensors.save(tmp_path / "x", arrays)
    for name, array in reader.read(tmp_path / "x").items():
        np.testing.assert_array_equal(bits(array), bits(arrays[name]))


def _known_to_reader() -> set[str]:
    return {np.dtype(dtype).name for dtype in reader.DTYPES.values()}


def test_views_are_read_only_aligned_and_not_copied(file: Path) -> None:
    shard = safetensors.open_shard(file)
    base = np.frombuffer(shard.data, np.uint8).ctypes.data
    for name, tensor in shard.tensors.items():
        view = shard.view(name)
        if view.size:
            assert view.ctypes.data == base + tensor.start
            assert view.ctypes.data % view.dtype.itemsize == 0
            assert not view.flags.writeable
    assert min(tensor.start for tensor in shard.tensors.values()) % 8 == 0


def test_released_pages_read_again(file: Path) -> None:
    shard = safetensors.open_shard(file)
    before = {name: bits(shard.view(name)).copy() for name in shard.tensors}
    shard.release(0, file.stat().st_size)
    for name, want in before.items():
        np.testing.assert_array_equal(bits(shard.view(name)), want)


def test_a_view_outlives_its_shard(file: Path) -> None:
    view = safetensors.open_shard(file).view("of.F32")
    np.testing.assert_array_equal(bits(view), bits(every_storage()["of.F32"]))


def test_a_file_larger_than_memory_is_only_mapped(tmp_path: Path) -> None:
    """A sparse file of 64 GB: nothing is read but what is looked at."""
    size = 1 << 36
    header = json.dumps({"x": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    path = tmp_path / "large"
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + size)
    view = safetensors.open_shard(path).view("x")
    assert view.shape == (size,)
    assert view[0] == view[-1] == 0


# -- writing ---------------------------------------------------------------------------------------


def test_equal_input_gives_equal_bytes(tmp_path: Path) -> None:
    arrays = every_storage()
    safetensors.save(tmp_path / "a", arrays, {"x": "1", "y": "2"})
    safetensors.save(tmp_path / "b", dict(reversed(arrays.items())), {"y": "2", "x": "1"})
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_tensors_stand_by_storage_then_name(tmp_path: Path) -> None:
    """Scales of an expert are neighbours, and so are its codes, as in the release."""
    names = [f"experts.{e}.{w}.{part}" for e in (0, 1) for w in ("w1", "w2") for part in ("a", "s")]
    tensors = {n: Tensor("F8_E8M0" if n.endswith("s") else "I8", (2, 3)) for n in names}
    safetensors.write(tmp_path / "x", tensors, lambda name: np.zeros((2, 3), np.uint8))
    shard = safetensors.open_shard(tmp_path / "x")
    order = sorted(names, key=lambda name: shard.tensors[name].start)
    assert order == [*sorted(names[1::2]), *sorted(names[::2])]


def test_only_one_tensor_is_held(tmp_path: Path) -> None:
    alive: list[weakref.ref] = []

    def read(name: str) -> np.ndarray:
        assert not any(ref() is not None for ref in alive)
        array = np.full((7, 11), float(name), np.float32)
        alive.append(weakref.ref(array))
        return array

    tensors = {str(i): Tensor("F32", (7, 11)) for i in range(4)}
    safetensors.write(tmp_path / "x", tensors, read)
    assert len(alive) == 4
    assert safetensors.load(tmp_path / "x")["3"][6, 10] == 3


def test_bytes_stand_in_for_narrow_storage(tmp_path: Path) -> None:
    codes = np.arange(6, dtype=np.uint8).reshape(2, 3)
    safetensors.write(tmp_path / "x", {"w": Tensor("F8_E4M3", (2, 3))}, lambda name: codes)
    assert safetensors.open_shard(tmp_path / "x").tensors["w"].storage == "F8_E4M3"
    np.testing.assert_array_equal(bits(safetensors.load(tmp_path / "x")["w"]), codes.ravel())


@pytest.mark.parametrize(
    "array", [np.zeros((3, 2), np.float32), np.zeros((2, 3)), np.zeros((2, 3), np.uint8)]
)
def test_a_wrong_array_is_refused_and_nothing_is_left(array: np.ndarray, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"tensor 'w' must be F32 \(2, 3\), got"):
        safetensors.write(tmp_path / "x", {"w": Tensor("F32", (2, 3))}, lambda name: array)
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_write_keeps_the_old_file(file: Path) -> None:
    before = file.read_bytes()

    def fail(name: str) -> np.ndarray:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        safetensors.write(file, {"w": Tensor("F32", (2,))}, fail)
    assert file.read_bytes() == before
    assert [path.name for path in file.parent.iterdir()] == [file.name]


def test_a_dtype_without_storage_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="array 'z' of dtype complex64 has no safetensors storage"):
        safetensors.save(tmp_path / "x", {"z": np.zeros(2, np.complex64)})


# -- damage ----------------------------------------------------------------------------------------


def build(header: object, data: bytes = bytes(24)) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(dtype: object = "F32", shape: object = (2, 3), offsets: object = (0, 24)) -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


TWICE = b'{"w":{"dtype":"U8","shape":[24],"data_offsets":[0,24]},"w":{}}'
DAMAGED = {
    "empty file": (b"", "0 bytes, too short for a header length"),
    "short file": (b"1234567", "7 bytes, too short"),
    "header beyond the file": ((999).to_bytes(8, "little") + b"{}", "header length 999 does not"),
    "huge header": (
        (1 << 60).to_bytes(8, "little") + bytes(99),
        "header length 1152921504606846976",
    ),
    "no JSON": (build(b"{'w': 1}"), "its header is not JSON"),
    "no text": (build(b"\xff\xfe\xfd"), "its header is not JSON"),
    "too deep": (build(b"[" * 100_000), "its header is not JSON"),
    "no object": (build([1, 2]), "its header is not a JSON object"),
    "name twice": (build(TWICE), "its header names 'w' twice"),
    "metadata": (build({"__metadata__": {"a": 1}}, b""), "__metadata__ must map strings"),
    "metadata list": (build({"__metadata__": []}, b""), "__metadata__ must map strings"),
    "entry": (build({"w": 3}), "entry 'w' must have dtype, shape and data_offsets"),
    "entry key": (build({"w": {**entry(), "x": 1}}), "entry 'w' must have"),
    "dtype": (build({"w": entry("F7")}), "tensor 'w' has unknown dtype 'F7'; known: F64, "),
    "dtype kind": (build({"w": entry(["F32"])}), "tensor 'w' has unknown dtype"),
    "shape": (build({"w": entry(shape=6)}), "tensor 'w' has shape 6, not a list"),
    "negative": (build({"w": entry(shape=(-2, -3))}), "has shape .*, not a list of sizes"),
    "fraction": (build({"w": entry(shape=(2.0, 3))}), "has shape .*, not a list of sizes"),
    "bool": (build({"w": entry(shape=(True, 6))}), "has shape .*, not a list of sizes"),
    "offsets": (build({"w": entry(offsets=(0, 24, 48))}), r"not \[start, stop\]"),
    "backwards": (build({"w": entry(offsets=(24, 0))}), "needs 24 bytes, .* give -24"),
    "size": (build({"w": entry(offsets=(0, 20))}, bytes(20)), "needs 24 bytes, .* give 20"),
    "product": (build({"w": entry(shape=(1 << 40, 1 << 40))}), "needs .* bytes"),
    "hole": (build({"w": entry(offsets=(8, 32))}, bytes(32)), "'w' at byte .* leaves a hole"),
    "overlap": (
        build({"v": entry(), "w": entry(offsets=(12, 36))}, bytes(36)),
        "'w' at byte .* overlaps the one before it",
    ),
    "truncated": (build({"w": entry()}, bytes(23)), "truncated: the header describes"),
    "longer": (build({"w": entry()}, bytes(25)), "followed by unknown bytes"),
}


@pytest.mark.parametrize("kind", DAMAGED)
def test_damage_is_named_with_the_file(kind: str, tmp_path: Path) -> None:
    data, message = DAMAGED[kind]
    path = tmp_path / "model-00002-of-00003.safetensors"
    path.write_bytes(data)
    with pytest.raises(ValueError, match=message) as caught:
        safetensors.open_shard(path)
    assert str(caught.value).startswith(f"shard {path} is damaged or no safetensors file: ")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no safetensors file at .*gone"):
        safetensors.open_shard(tmp_path / "gone")


def opens_or_refuses(data: bytes, path: Path) -> None:
    """Whatever the bytes: a ValueError, or tensors inside the file."""
    path.write_bytes(data)
    try:
        shard = safetensors.open_shard(path)
    except ValueError:
        return
    for name in shard.tensors:
        bits(shard.view(name))


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Callable[[bytes], None]:
    path = tmp_path_factory.mktemp("damage") / "x"
    return lambda data: opens_or_refuses(data, path)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("whole") / "x"
    safetensors.save(path, every_storage(), {"format": "pt"})
    return path.read_bytes()


@given(cut=st.floats(0, 1, exclude_max=True))
def test_every_truncation_is_refused(cut: float, whole: bytes, tmp_path_factory) -> None:
    path = tmp_path_factory.getbasetemp() / "cut"
    path.write_bytes(whole[: int(cut * len(whole))])
    with pytest.raises(ValueError, match=r"shard .*cut is damaged"):
        safetensors.open_shard(path)


@given(place=st.floats(0, 1, exclude_max=True), value=st.integers(0, 255))
def test_a_changed_byte_never_escapes_the_checks(
    place: float, value: int, whole: bytes, scratch: Callable[[bytes], None]
) -> None:
    header = 8 + int.from_bytes(whole[:8], "little")
    at = int(place * header)
    scratch(whole[:at] + bytes([value]) + whole[at + 1 :])
