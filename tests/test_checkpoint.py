"""Checkpoints: bit-exact round trips, any layout of devices, one clear error for what is wrong."""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from deepinfer_jax import axes, checkpoint, params, safetensors
from deepinfer_jax.axes import Rules
from deepinfer_jax.checkpoint import reading
from deepinfer_jax.config import ModelConfig
from tests.golden import reader
from tests.small import CONFIG, PLAIN, WINDOW_ONLY, bits, random_bits, same_tree

INDEX = "model.safetensors.index.json"
CONFIGS = {"quantized": CONFIG, "plain": PLAIN, "window only": WINDOW_ONLY}
SHARD = 60_000  # bytes: several shards, some blocks alone in theirs


@pytest.fixture(scope="module")
def tree() -> params.Params:
    return random_bits(CONFIG)


@pytest.fixture(scope="module")
def folder(tree: params.Params, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small model in several shards; tests that damage it take a copy."""
    path = tmp_path_factory.mktemp("checkpoint")
    checkpoint.save_params(tree, CONFIG, path, max_shard_bytes=SHARD)
    return path


@pytest.fixture
def copy(folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folder, tmp_path / "copy"))


def mesh() -> jax.sharding.Mesh:
    return axes.make_mesh({"data": 2, "model": 2}, jax.devices()[:4])


def rewrite(file: Path, change: Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]]) -> None:
    """Replace the arrays of a shard."""
    arrays = {name: np.array(array) for name, array in safetensors.load(file).items()}
    safetensors.save(file, change(arrays))


def placed(folder: Path) -> dict[str, str]:
    return json.loads((folder / INDEX).read_text())["weight_map"]


def write_index(folder: Path, weight_map: Any) -> None:
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))


# -- round trips -----------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [1 << 40, SHARD, 1])
@pytest.mark.parametrize("name", CONFIGS)
def test_saving_and_loading_keeps_every_bit(name: str, limit: int, tmp_path: Path) -> None:
    cfg = CONFIGS[name]
    given = random_bits(cfg, seed=limit % 7)
    checkpoint.save_params(given, cfg, tmp_path, max_shard_bytes=limit)
    loaded = checkpoint.load_params(tmp_path)
    same_tree(loaded, given)
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(loaded))
    assert ModelConfig.from_json(tmp_path) == cfg
    assert (tmp_path / INDEX).exists() == (limit < 1 << 40)


def test_drawn_weights_survive(tmp_path: Path) -> None:
    given = params.init(jax.random.key(0), CONFIG)
    checkpoint.save_params(given, CONFIG, tmp_path)
    same_tree(checkpoint.load_params(tmp_path), given)


def test_files_hold_the_released_names_and_storage(folder: Path, tree: params.Params) -> None:
    """Read back by the parser of the recorded vectors, which shares nothing with the package."""
    stored: dict[str, np.ndarray] = {}
    for file in sorted(folder.glob("*.safetensors")):
        stored.update(reader.read(file))
    leaves = zip(jax.tree.leaves(tree), params.specs(CONFIG), strict=True)
    wanted = {name: (leaf[i], spec) for leaf, spec in leaves for i, name in spec.tensors()}
    assert stored.keys() == wanted.keys() == placed(folder).keys()
    for name, (array, spec) in wanted.items():
        assert stored[name].dtype == np.dtype(reader.DTYPES[spec.storage]), name
        assert stored[name].shape == array.shape, name
        np.testing.assert_array_equal(bits(stored[name]), bits(array), err_msg=name)
    size = sum(array.nbytes for array in stored.values())
    metadata = json.loads((folder / INDEX).read_text())["metadata"]
    assert metadata == {"total_size": size}
    assert size == params.census(CONFIG).total_bytes


def test_blocks_never_straddle_shards(folder: Path) -> None:
    files: dict[str, set[str]] = {}
    for name, file in placed(folder).items():
        parts = name.split(".")
        if parts[0] in ("layers", "mtp"):
            unit = ".".join(parts[:2]) + (" engram" if parts[2] == "engram" else "")
            files.setdefault(unit, set()).add(file)
    assert len(files) == 5 + 2 + 2
    assert all(len(used) == 1 for used in files.values())
    sizes = [sum(a.nbytes for a in reader.read(f).values()) for f in folder.glob("*.safetensors")]
    assert len(sizes) > 3
    assert sum(size > SHARD for size in sizes) <= 7  # only blocks that are larger by themselves


def test_equal_parameters_give_equal_files(
    folder: Path, tree: params.Params, tmp_path: Path
) -> None:
    checkpoint.save_params(jax.tree.map(jnp.asarray, tree), CONFIG, tmp_path, max_shard_bytes=SHARD)
    names = sorted(path.name for path in folder.iterdir())
    assert names == sorted(path.name for path in tmp_path.iterdir())
    for name in names:
        assert (folder / name).read_bytes() == (tmp_path / name).read_bytes()


def test_recorded_models_load(golden_root: Path, tmp_path: Path) -> None:
    folders = reader.folders(golden_root)
    if not folders:
        reader.missing(golden_root, "model folder")
    for recorded in folders:
        path = recorded.unpacked_model(tmp_path)
        cfg = ModelConfig.from_json(path)
        stored = reader.read(path / "model.safetensors")
        leaves = jax.tree.leaves(checkpoint.load_params(path))
        for leaf, spec in zip(leaves, params.specs(cfg), strict=True):
            for index, name in spec.tensors():
                want = stored[name]
                if spec.dtype != np.uint8:
                    want = want.astype(spec.dtype)
                np.testing.assert_array_equal(bits(np.asarray(leaf)[index]), bits(want))


# -- devices ---------------------------------------------------------------------------------------

RULES = {
    "experts": Rules.of(expert="model", vocab="model", heads="model", embed="data"),
    "tables": Rules.of(engram_rows=("data", "model"), expert=("model", "data"), vocab="data"),
    "rows": Rules.of(embed=("data", "model"), group_in="data", vision="model"),
    "columns": Rules.of(expert_mlp="model", stream_embed=("data", "model"), q_rank=None),
}


Divisible = tuple[Path, params.Params, ModelConfig]


@pytest.fixture(scope="module")
def divisible(tmp_path_factory: pytest.TempPathFactory) -> Divisible:
    """A checkpoint whose sizes divide where the rules split."""
    cfg = dataclasses.replace(
        CONFIG,
        vocab_size=132,
        hidden_size=128,
        moe_intermediate_size=64,
        num_attention_heads=4,
        o_groups=2,
        n_routed_experts=8,
        engram_num_embeddings=(64, 84),
    )
    given = random_bits(cfg, seed=2)
    path = tmp_path_factory.mktemp("divisible")
    checkpoint.save_params(given, cfg, path, max_shard_bytes=SHARD)
    return path, given, cfg


@pytest.mark.parametrize("name", RULES)
def test_every_layout_of_devices_holds_the_same(
    name: str, divisible: Divisible, tmp_path: Path
) -> None:
    path, given, cfg = divisible
    wanted = axes.shardings(params.abstract(cfg), mesh(), RULES[name])
    loaded = checkpoint.load_params(path, sharding=wanted)
    same_tree(loaded, given)
    assert jax.tree.all(jax.tree.map(lambda a, s: a.sharding == s, loaded, wanted))
    split = [leaf for leaf in jax.tree.leaves(loaded) if not leaf.is_fully_replicated]
    assert len(split) > 10
    checkpoint.save_params(loaded, cfg, tmp_path, max_shard_bytes=SHARD)
    for file in path.iterdir():
        assert (tmp_path / file.name).read_bytes() == file.read_bytes()


def test_a_sharding_may_be_a_function_or_one_for_all(folder: Path, tree: params.Params) -> None:
    device = SingleDeviceSharding(jax.devices()[2])
    whole = NamedSharding(mesh(), PartitionSpec())
    for how in (device, whole, lambda spec: device if spec.storage == "BF16" else whole):
        loaded = checkpoint.load_params(folder, sharding=how)
        same_tree(loaded, tree)
        leaves = zip(jax.tree.leaves(loaded), params.specs(CONFIG), strict=True)
        assert all(leaf.sharding == (how(s) if callable(how) else how) for leaf, s in leaves)


def test_without_a_sharding_arrays_are_free_to_move(folder: Path) -> None:
    loaded = checkpoint.load_params(folder)
    assert not any(leaf.committed for leaf in jax.tree.leaves(loaded))


def test_a_sharding_of_another_tree_is_refused(folder: Path) -> None:
    wanted = axes.shardings(params.abstract(PLAIN), mesh(), Rules())
    with pytest.raises(
        ValueError, match=r"sharding must be None, a Sharding, .* of the same config"
    ):
        checkpoint.load_params(folder, sharding=wanted)


def test_a_sharding_that_does_not_divide_names_the_leaf(folder: Path) -> None:
    odd = NamedSharding(mesh(), PartitionSpec("data"))
    with pytest.raises(ValueError, match=r"layers\.\{\}\.attn.* does not fit \(5, "):
        checkpoint.load_params(folder, sharding=lambda s: odd if s.shape[0] == 5 else None)


def test_pieces_of_any_size_give_the_same(
    folder: Path, tree: params.Params, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "_PIECE", 100)
    same_tree(checkpoint.load_params(folder), tree)


def test_arrays_adopt_the_memory_they_were_read_into(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy here would hold the largest leaf twice."""
    made: set[int] = set()
    host_buffer = reading._host_buffer

    def record(region, dtype):
        buffer = host_buffer(region, dtype)
        made.add(buffer.ctypes.data)
        return buffer

    monkeypatch.setattr(reading, "_HOST", (record, reading._host_write))
    loaded = checkpoint.load_params(folder)
    assert all(leaf.unsafe_buffer_pointer() in made for leaf in jax.tree.leaves(loaded))


def test_pages_are_dropped_as_they_are_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every byte of every tensor is read, in the order of each file, and dropped."""
    dropped: dict[Path, list[tuple[int, int]]] = {}
    monkeypatch.setattr(
        safetensors.Shard,
        "release",
        lambda shard, start, stop: dropped.setdefault(shard.path, []).append((start, stop)),
    )
    checkpoint.load_params(folder)
    for file in folder.glob("*.safetensors"):
        tensors = sorted(t.start for t in safetensors.open_shard(file).tensors.values())
        starts, stops = zip(*dropped[file], strict=True)
        assert list(starts) == tensors
        assert list(stops) == [*tensors[1:], file.stat().st_size]


def test_device_buffers_fill_like_host_buffers() -> None:
    """The path of accelerators, on CPU devices: pieces land in every holder."""
    region = reading._Region(0, ((2, 5), (0, 7), (1, 3)), tuple(jax.devices()[1:3]))
    host = reading._host_buffer(region, np.dtype(np.uint8))
    device = reading._device_buffer(region, np.dtype(np.uint8))
    for place in range(3):
        for row in (0, 3):
            piece = np.arange(10 * place + row, 10 * place + row + 6, dtype=np.uint8)
            piece = piece.reshape(1, 3, 2)
            host = reading._host_write(host, (place, row, 0), piece)
            device = reading._device_write(device, (place, row, 0), piece)
    assert [array.devices().pop() for array in device] == jax.devices()[1:3]
    for array in device:
        np.testing.assert_array_equal(np.asarray(array)[:, :6], host[:, :6])


# -- lenient where it is safe ----------------------------------------------------------------------


def test_names_may_carry_a_prefix(copy: Path, tree: params.Params) -> None:
    for file in copy.glob("*.safetensors"):
        rewrite(file, lambda arrays: {f"model.{n}": a for n, a in arrays.items()})
    write_index(copy, {f"model.{name}": file for name, file in placed(copy).items()})
    same_tree(checkpoint.load_params(copy), tree)


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
def test_narrower_floats_widen_exactly(dtype: Any, copy: Path) -> None:
    name = "layers.3.hc_attn_scale"
    values = np.array([1.5, -0.25, 2.0**-14], dtype)
    rewrite(copy / placed(copy)[name], lambda arrays: {**arrays, name: values})
    scale = checkpoint.load_params(copy)["layers"]["hc_attn"]["scale"]
    assert scale.dtype == jnp.float32
    np.testing.assert_array_equal(scale[3], values.astype(np.float32))


# -- what is refused -------------------------------------------------------------------------------


def test_one_error_names_missing_extra_and_wrong(copy: Path) -> None:
    def change(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        del arrays["layers.2.attn.q_norm.weight"], arrays["layers.2.hc_ffn_base"]
        arrays["layers.2.hc_head_fn"] = np.zeros(2, np.float32)
        arrays["layers.2.attn.attn_sink"] = np.zeros(7, np.float32)
        arrays["layers.2.attn_norm.weight"] = np.zeros(64, np.float32)  # wider than declared
        return arrays

    file = placed(copy)["layers.2.attn.q_norm.weight"]
    rewrite(copy / file, change)
    write_index(copy, dict(_all_names(copy)))
    with pytest.raises(ValueError, match="does not hold the tensors of its config") as caught:
        checkpoint.load_params(copy)
    lines = str(caught.value).splitlines()
    assert str(copy) in lines[0]
    assert sorted(lines[1].removeprefix("  2 missing: ").split("; ")) == [
        "layers.2.attn.q_norm.weight",
        "layers.2.hc_ffn_base",
    ]
    assert lines[2] == "  1 not in the configuration: layers.2.hc_head_fn"
    assert lines[3].startswith("  2 wrong: ")
    assert "layers.2.attn.attn_sink is F32 (7,), expected F32 (6,)" in lines[3]
    assert "layers.2.attn_norm.weight is F32 (64,), expected BF16 (64,)" in lines[3]
    assert len(lines) == 4


def _all_names(folder: Path) -> list[tuple[str, str]]:
    files = sorted(folder.glob("model-*.safetensors"))
    return [(name, file.name) for file in files for name in safetensors.open_shard(file).tensors]


def test_long_lists_are_cut(folder: Path) -> None:
    with pytest.raises(
        ValueError, match=r"\d+ not in the configuration: .*; and \d+ more"
    ) as caught:
        checkpoint.load_params(folder, WINDOW_ONLY)
    assert max(len(line.split("; ")) for line in str(caught.value).splitlines()) == 11


def test_codes_are_never_reinterpreted(copy: Path) -> None:
    name = "layers.0.attn.wkv.weight"
    rewrite(copy / placed(copy)[name], lambda a: {**a, name: a[name].view(np.uint8)})
    with pytest.raises(
        ValueError, match=r"wkv.weight is U8 \(32, 64\), expected F8_E4M3 \(32, 64\)"
    ):
        checkpoint.load_params(copy)


def test_a_truncated_shard_is_named(copy: Path) -> None:
    file = copy / placed(copy)["mtp.1.norm.weight"]
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ValueError, match=rf"shard .*{file.name} is damaged .*: truncated"):
        checkpoint.load_params(copy)


def test_absent_shards_are_named(copy: Path) -> None:
    file = placed(copy)["mtp.1.norm.weight"]
    (copy / file).unlink()
    with pytest.raises(FileNotFoundError, match=rf"lacks shard\(s\) {file}"):
        checkpoint.load_params(copy)


def test_an_index_that_contradicts_its_shards_is_refused(copy: Path) -> None:
    weight_map = placed(copy)
    files = sorted(set(weight_map.values()))
    weight_map["norm.weight"] = next(f for f in files if f != weight_map["norm.weight"])
    weight_map["ghost"] = files[0]
    del weight_map["embed.weight"]
    write_index(copy, weight_map)
    with pytest.raises(ValueError, match=r"shards and index of .* disagree: ") as caught:
        checkpoint.load_params(copy)
    message = str(caught.value)
    assert "holds norm.weight, which the index does not place there" in message
    assert "holds embed.weight, which the index does not place there" in message
    assert f"{files[0]} lacks ghost" in message


def test_a_tensor_in_two_shards_is_refused(copy: Path) -> None:
    first = copy / placed(copy)["embed.weight"]
    rewrite(first, lambda arrays: {**arrays, "model.embed.weight": arrays["embed.weight"]})
    write_index(copy, {**placed(copy), "model.embed.weight": first.name})
    with pytest.raises(ValueError, match=rf"is also in {first.name}"):
        checkpoint.load_params(copy)


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        "[" * 100_000,
        '{"weight_map": 3}',
        '{"weight_map": {"a": 3}}',
        '{"weight_map": {"a": "../b"}}',
        '{"weight_map": {"a": ".."}}',
        '{"weight_map": {"a": ""}}',
    ],
)
def test_an_unusable_index_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / INDEX).write_text(text)
    with pytest.raises(
        ValueError,
        match=r"index\.json (is no index|must map tensor|is not JSON|is nested|must hold)",
    ):
        checkpoint.load_params(tmp_path, CONFIG)


def test_a_folder_without_checkpoint_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no model\.safetensors and no .*index\.json in"):
        checkpoint.load_params(tmp_path, CONFIG)


def test_two_checkpoints_in_one_folder_are_refused(copy: Path) -> None:
    shutil.copy(next(copy.glob("model-*")), copy / "model.safetensors")
    with pytest.raises(ValueError, match=r"has both .*: remove the stale one"):
        checkpoint.load_params(copy)


def test_saving_refuses_a_folder_in_use(copy: Path, tree: params.Params, tmp_path: Path) -> None:
    with pytest.raises(FileExistsError, match=r"already holds model-00001.*: choose an empty"):
        checkpoint.save_params(tree, CONFIG, copy)
    (tmp_path / "config.json").write_text(json.dumps(PLAIN.to_dict()))
    with pytest.raises(FileExistsError, match="is another model's"):
        checkpoint.save_params(tree, CONFIG, tmp_path)


def test_saving_refuses_another_tree(tree: params.Params, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="params do not fit the configuration: missing"):
        checkpoint.save_params({**tree, "head": tree["norm"]}, PLAIN, tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_an_interrupted_save_leaves_no_checkpoint(
    tree: params.Params, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, calls = safetensors.write, []

    def fail_at_third(*args: Any) -> None:
        calls.append(args)
        if len(calls) == 3:
            raise OSError("no space left")
        write(*args)

    monkeypatch.setattr(safetensors, "write", fail_at_third)
    with pytest.raises(OSError, match="no space left"):
        checkpoint.save_params(tree, CONFIG, tmp_path, max_shard_bytes=SHARD)
    assert list(tmp_path.iterdir()) == []


# -- Orbax -----------------------------------------------------------------------------------------


@pytest.fixture
def orbax() -> None:
    pytest.importorskip("orbax.checkpoint", reason="the extra `orbax` is not installed")


@pytest.mark.usefixtures("orbax")
def test_orbax_keeps_every_bit_on_any_mesh(divisible: Divisible, tmp_path: Path) -> None:
    _, given, cfg = divisible
    wanted = axes.shardings(params.abstract(cfg), mesh(), RULES["columns"])
    sharded = jax.tree.map(jax.device_put, given, wanted)
    checkpoint.save_orbax(sharded, cfg, tmp_path / "x")
    assert ModelConfig.from_json(tmp_path / "x") == cfg
    same_tree(checkpoint.restore_orbax(tmp_path / "x"), given)
    other = axes.shardings(params.abstract(cfg), mesh(), RULES["experts"])
    restored = checkpoint.restore_orbax(tmp_path / "x", cfg, other)
    same_tree(restored, given)
    assert jax.tree.all(jax.tree.map(lambda a, s: a.sharding == s, restored, other))
    with pytest.raises(FileExistsError, match="already holds params"):
        checkpoint.save_orbax(sharded, cfg, tmp_path / "x")
    with pytest.raises(ValueError, match=r"does not fit .*: missing draft.* and \d+ more"):
        checkpoint.restore_orbax(tmp_path / "x", PLAIN)


@pytest.mark.usefixtures("orbax")
def test_orbax_keeps_a_model_with_empty_stacks(tmp_path: Path) -> None:
    given = jax.tree.map(jnp.asarray, random_bits(WINDOW_ONLY))
    assert any(leaf.size == 0 for leaf in jax.tree.leaves(given))
    checkpoint.save_orbax(given, WINDOW_ONLY, tmp_path)
    same_tree(checkpoint.restore_orbax(tmp_path), given)


@pytest.mark.usefixtures("orbax")
def test_orbax_refusals(tree: params.Params, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no params in .*written by save_orbax"):
        checkpoint.restore_orbax(tmp_path, CONFIG)
    with pytest.raises(ValueError, match="params do not fit the configuration"):
        checkpoint.save_orbax(tree, PLAIN, tmp_path)


def test_a_missing_orbax_is_explained(
    tree: params.Params, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "orbax", None)
    monkeypatch.setitem(sys.modules, "orbax.checkpoint", None)
    with pytest.raises(ImportError, match=r"needs the extra 'orbax': pip install 'deepinfer-jax\["):
        checkpoint.save_orbax(tree, CONFIG, tmp_path)
