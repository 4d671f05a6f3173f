"""The comparisons themselves: they accept the reference's own spread, and notice mistakes."""

from __future__ import annotations

import json
import lzma
import struct
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from tests.golden import compare, reader
from tests.golden.reader import Arrays, Folder

MICRO = Folder(reader.HERE / "micro-bf16")


def test_every_recorded_model_is_here() -> None:
    """The other tests of this folder run on the models that they find."""
    assert {folder.name: folder.modes for folder in reader.folders(reader.HERE)} == {
        "micro-bf16": ("fp32", "fp32_kvq", "native"),
        "micro-fp8fp4": ("fp32", "native"),
        "micro-vl": ("fp32", "native"),
        "mini": ("fp32", "fp32_kvq", "native"),
    }


@pytest.fixture
def golden() -> Arrays:
    return MICRO.golden("fp32")


def everywhere(golden: Arrays, stage: str) -> Arrays:
    """What a perfect model would produce: recorded arrays spread to all positions, NaN between."""
    out = Arrays()
    for name in compare.recorded(golden, stage):
        value, where = golden.wide(name), compare.recorded_positions(golden, name)
        if where is not None:
            axis = compare.position_axis(name)
            full = np.full((*value.shape[:axis], 75, *value.shape[axis + 1 :]), np.nan, np.float32)
            np.moveaxis(full, axis, 0)[where] = np.moveaxis(value, axis, 0)
            value = full
        out[name] = value
    return out


@pytest.mark.parametrize("stage", ["prefill", "decode"])
def test_the_recorded_arrays_pass(golden: Arrays, stage: str) -> None:
    names = compare.recorded(golden, stage)
    produced = everywhere(golden, stage)
    assert len(names) > 8
    assert [compare.check(golden, produced, n, 1e-4) for n in names] == [None] * len(names)


def test_decoding_from_one_token_is_the_prefill_of_the_reference(golden: Arrays) -> None:
    """The spread of the reference against itself, which the bound must leave room for."""
    prompt = golden.wide("prefill.logits")[:, :24]
    for count in (1, 2, 3):
        name = f"short{count}.logits"
        assert compare.close(name, golden.wide(name), prompt, 2e-5) is None


def test_every_planted_mistake_is_noticed(golden: Arrays) -> None:
    for name in compare.recorded(golden, "prefill"):
        produced = everywhere(golden, "prefill")
        value = produced[name] = produced[name].copy()
        where = tuple(np.argwhere(np.isfinite(value))[-1])
        value[where] += 1 if compare.is_choice(name) else 2e-4
        message = compare.check(golden, produced, name, 1e-4)
        assert message is not None, name
        assert message.startswith(name), message


def test_messages_name_the_first_place() -> None:
    want = np.zeros((2, 1, 3, 4), np.int64)
    got = want.copy()
    got[1, 0, 2, 3] = 7
    message = compare.equal("prefill.router_i", got, want)
    assert message == (
        "prefill.router_i: 1 of 24 decisions differ; first at layer 1, batch 0, position 2, "
        "rank 3: got 7, recorded 0"
    )


def test_infinities_must_coincide_and_nan_is_never_close() -> None:
    want = np.array([[[0.0, -np.inf, np.inf]]], np.float32)
    assert compare.close("prefill.logits", want.copy(), want, 1e-4) is None
    for wrong in ([0.0, 0.0, np.inf], [0.0, -np.inf, -np.inf], [np.nan, -np.inf, np.inf]):
        got = np.array([[wrong]], np.float32)
        assert compare.close("prefill.logits", got, want, 1e-4) is not None


def test_shape_differences_are_reported_not_broadcast() -> None:
    message = compare.close("prefill.logits", np.zeros((1, 5)), np.zeros((3, 5)), 1.0)
    assert message is not None
    assert "shape" in message


def test_chosen_rows_sorts_and_keeps_surplus_entries() -> None:
    rows = np.array([[5, -1, 2], [1, 4, 3]])
    assert compare.chosen_rows(rows, 3).tolist() == [[2, 5, -1], [1, 3, 4]]
    assert compare.chosen_rows(rows[:1], 2).tolist() == [[2, 5]]
    assert compare.chosen_rows(rows, 2).shape == (2, 3)
    assert compare.chosen_rows(rows[:1], 5).tolist() == [[2, 5, -1, -1, -1]]


def test_block_mask_ignores_empty_entries() -> None:
    ids = np.array([[2, -1, 0], [-1, -1, -1]])
    assert compare.block_mask(ids, 4).tolist() == [[1, 0, 1, 0], [0, 0, 0, 0]]


def test_mostly_equal_wants_share_median_and_largest() -> None:
    want = np.zeros((10, 10), np.float32)
    got = want.copy()
    got[0, :3] = 0.01
    assert compare.mostly_equal("x.y", got, want, 0.97, 0.02) is None
    assert compare.mostly_equal("x.y", got, want, 0.98, 0.02) is not None
    assert compare.mostly_equal("x.y", got, want, 0.97, 0.005) is not None
    got[:, 0] = 0.001
    assert compare.mostly_equal("x.y", got, want, 0.5, 0.02) is not None


def test_stale_slots_are_left_out(golden: Arrays) -> None:
    name = "cache_prefill.comp_kv_state.1"
    produced = Arrays({name: golden[name].copy()})
    produced[name][:, 1] = 99.0  # 75 tokens, ratio 2: slot 0 is pending, slot 1 stale
    assert compare.check_cache(golden, produced, name, 75, 1e-4) is None
    produced[name][:, 0] += 1.0
    assert compare.check_cache(golden, produced, name, 75, 1e-4) is not None


def test_first_flip() -> None:
    limits = (1e-4, 1e-3)
    assert compare.first_flip(np.array([1e-6, 1e-5, 2e-3, 1e-6]), *limits) == 2
    assert compare.first_flip(np.array([1e-6, 1e-5]), *limits) == 2
    assert compare.first_flip(np.array([1e-6, 5e-4, 2e-3, 1e-6]), *limits) == 1
    assert compare.first_flip(np.array([1e-6, 5e-4, 1e-6, 2e-3]), *limits) == 3
    assert compare.first_flip(np.array([1e-6, 5e-4, 1e-6]), *limits) == 3


def test_reader_reads_every_storage_type_and_compressed_files(tmp_path: Path) -> None:
    parts, header, offset = [], {}, 0
    for tag, dtype in reader.DTYPES.items():
        raw = np.arange(6, dtype=np.uint8).repeat(np.dtype(dtype).itemsize).tobytes()
        if tag == "BOOL":
            raw = bytes([0, 1, 0, 1, 1, 0])
        header[tag] = {"dtype": tag, "shape": [2, 3], "data_offsets": [offset, offset + len(raw)]}
        parts.append(raw)
        offset += len(raw)
    text = json.dumps({"__metadata__": {"a": "b"}, **header}).encode()
    data = struct.pack("<Q", len(text)) + text + b"".join(parts)
    (tmp_path / "plain.safetensors").write_bytes(data)
    (tmp_path / "packed.safetensors.xz").write_bytes(lzma.compress(data))
    for name in ("plain.safetensors", "packed.safetensors"):
        path = reader.find(tmp_path, name)
        assert path is not None
        arrays = reader.read(path)
        assert set(arrays) == set(reader.DTYPES)
        assert all(a.shape == (2, 3) for a in arrays.values())
        assert arrays["F8_E8M0"].dtype == ml_dtypes.float8_e8m0fnu
        assert arrays.wide("I16").dtype == np.int64
        assert arrays.wide("F8_E4M3").dtype == np.float32
