"""Checkpoints on meshes, and Engram tables that are not on the device (docs/checkpoints.md)."""

from __future__ import annotations

import dataclasses
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import deepinfer_jax as di
from deepinfer_jax import (
    axes,
    checkpoint,
    cli,
    fetching,
    layout,
    loading,
    params,
    planning,
    quant,
    tables,
)
from deepinfer_jax.axes import Rules
from deepinfer_jax.checkpoint import reading, shards
from deepinfer_jax.model import engram
from deepinfer_jax.numerics import Numerics
from deepinfer_jax.rows import batch_rows, spans_of
from deepinfer_jax.safetensors import Shard
from tests.small import CONFIG, bits, random_bits, same_tree

# 61 and 121 rows of tables, which no mesh divides; as many experts as eight devices need.
CFG = dataclasses.replace(
    CONFIG, n_routed_experts=8, dspark_n_routed_experts=8, engram_num_embeddings=(61, 121)
)
PADDED = ("engram_rows",)
RULES = dataclasses.replace(
    Rules.of(expert=("data", "expert"), engram_rows=("data", "expert"), heads="data"),
    padded=PADDED,
)
SHARD = 60_000


@pytest.fixture(scope="module")
def tree() -> params.Params:
    return random_bits(CFG)


@pytest.fixture(scope="module")
def folder(tree: params.Params, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("storage")
    checkpoint.save_params(tree, CFG, path, max_shard_bytes=SHARD)
    (path / "tokenizer.json").write_text("{}")
    return path


def mesh(data: int = 2, expert: int = 2) -> jax.sharding.Mesh:
    return layout.device_mesh(data, expert, jax.devices()[: data * expert])


# -- onto a mesh -----------------------------------------------------------------------------------


class Watched(np.ndarray):
    """An array that notes in `read` (per byte of its file, False at first) what is taken of it."""

    read: np.ndarray
    places: np.ndarray

    def __array_finalize__(self, whole: Any) -> None:
        """Of the same bytes by another name of their type."""
        self.read = getattr(whole, "read", np.zeros(0, bool))
        self.places = getattr(whole, "places", np.zeros(0, int))

    def __getitem__(self, index: Any) -> Any:
        self.read[self.places[index]] = True
        return np.asarray(self)[index]


def watch(monkeypatch: pytest.MonkeyPatch) -> dict[str, np.ndarray]:
    """File -> which of its bytes were taken out of views."""
    read: dict[str, np.ndarray] = {}
    view = Shard.view

    def watched(shard: Shard, name: str) -> np.ndarray:
        array = view(shard, name)
        made = array.view(Watched)
        tensor = shard.tensors[name]
        made.read = read.setdefault(shard.path.name, np.zeros(shard.path.stat().st_size, bool))
        made.places = np.arange(tensor.start, tensor.stop).reshape(*array.shape, -1)
        return made

    monkeypatch.setattr(Shard, "view", watched)
    return read


@pytest.mark.parametrize("processes", [2, 4])
def test_a_process_reads_the_bytes_of_its_devices_and_no_others(
    folder, tree, processes, monkeypatch
):
    """Four devices, of which each process has some: what it takes of the files, byte by byte."""
    specs = jax.tree.leaves(axes.padded(params.abstract(CFG), mesh(), RULES))
    placed = jax.tree.leaves(axes.shardings(params.abstract(CFG), mesh(), RULES))
    stored = shards.open_folder(folder)
    every: list[dict[str, np.ndarray]] = []
    sharded = [i for i, how in enumerate(placed) if not how.is_fully_replicated]
    assert len(sharded) > 10
    for devices in np.array_split(np.array(jax.devices()[:4]), processes):
        own = [
            [
                dataclasses.replace(region, devices=held)
                for region in reading._regions(i, spec, placed[i])
                if (held := tuple(d for d in region.devices if d in devices))
            ]
            for i, spec in enumerate(specs)
        ]
        with monkeypatch.context() as patched:
            read = watch(patched)
            buffers = reading._fill(specs, own, stored)
        every.append(read)
        asked = sum(int(mask.sum()) for mask in read.values())
        held = 0
        for region, buffer in buffers.items():
            leaf = np.asarray(jax.tree.leaves(tree)[region.leaf])
            part = leaf[tuple(slice(*r) for r in region.ranges)]
            np.testing.assert_array_equal(bits(buffer[tuple(map(slice, part.shape))]), bits(part))
            held += part.nbytes
        assert asked == held  # not one byte more
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(tree))
    together = sum(np.logical_or.reduce([r[f] for r in every]).sum() for f in every[0])
    assert together == size
    split = sum(jax.tree.leaves(tree)[i].nbytes for i in sharded)
    for mine in every:
        assert sum(int(mask.sum()) for mask in mine.values()) < size - split // 4


def test_rules_with_padding_lay_out_what_no_mesh_divides(folder, tree):
    loaded = layout.load(folder, mesh(), rules=RULES)
    specs = params.by_path(axes.padded(params.abstract(CFG), mesh(), RULES))
    whole = params.by_path(tree)
    for path, leaf in params.by_path(loaded).items():
        assert leaf.sharding == axes.sharding_of(specs[path], mesh(), RULES), path
        got, want = np.asarray(leaf), whole[path]
        inside = got[tuple(map(slice, want.shape))]
        np.testing.assert_array_equal(bits(inside), bits(want), err_msg=path)
        if got.shape != want.shape:
            assert not got[len(want) :].any()
    table = loaded["engram"][0]["embed"]
    assert table.codes.shape[0] == 64
    assert {shard.data.shape[0] for shard in table.codes.addressable_shards} == {16}


def test_experts_go_from_the_files_to_their_slots(folder, tree):
    """What placing the whole tree gives, replicas and placements too."""
    over = mesh(1, 4)
    placements = layout.initial_placements(CFG, 4, least=2)
    rules = dataclasses.replace(Rules.of(expert="expert", engram_rows="expert"), padded=PADDED)
    whole = layout.on_slots(jax.tree.map(jnp.asarray, tree), placements)
    want = layout.place(whole, CFG, over, rules)
    got = layout.load(folder, over, placements, rules)
    same_tree(got, want)
    assert jax.tree.all(
        jax.tree.map(lambda a, b: a.sharding.is_equivalent_to(b.sharding, a.ndim), got, want)
    )
    layout.check_placed(got, CFG, layout.Onto(over, placements, rules))
    with pytest.raises(ValueError, match=r"engram\.0\.embed\.codes lies as .*the rules .* want"):
        layout.check_placed(got, CFG, layout.Onto(over, placements))
    with pytest.raises(ValueError, match="lie on other slots than the placement says"):
        layout.check_placements(got, layout.initial_placements(CFG, 4, least=6))
    wrong = layout.initial_placements(CONFIG, 1)
    with pytest.raises(ValueError, match=r"'layers' must be of \(layers, experts\) = \(5, 8\)"):
        layout.load(folder, mesh(1, 1), wrong)


# -- Orbax -----------------------------------------------------------------------------------------


def test_there_and_back_again_by_other_meshes(folder, tree, tmp_path, capsys):
    """Released to Orbax over four devices, restored onto other shapes, and released again; Engram
    tables padded differently each time.
    """
    pytest.importorskip("orbax.checkpoint", reason="the extra `orbax` is not installed")
    made, back = tmp_path / "orbax", tmp_path / "released"
    assert checkpoint.convert(folder, made, (mesh(2, 2), RULES)) == "orbax"
    rules = dataclasses.replace(Rules.of(expert="expert", engram_rows="expert"), padded=PADDED)
    for sizes in ((1, 8), (4, 2)):
        restored = layout.restore(made, mesh(*sizes), rules)
        same_tree(restored, layout.place(jax.tree.map(jnp.asarray, tree), CFG, mesh(*sizes), rules))
        layout.check_placed(restored, CFG, layout.Onto(mesh(*sizes), {}, rules))
    same_tree(checkpoint.restore_orbax(made), tree)
    given = ["convert", str(made), str(back), "--shard-gigabytes", str(SHARD / (1 << 30))]
    assert cli.main(given) == 0
    assert capsys.readouterr().out == f"{back}: released\n"
    names = sorted(path.name for path in folder.iterdir())
    assert sorted(path.name for path in back.iterdir()) == names
    for name in names:
        assert (back / name).read_bytes() == (folder / name).read_bytes()
    assert cli.main(given) == 2
    assert "already holds model-00001" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda source: source / "nothing", "no checkpoint in .*give a folder with"),
        (lambda source: (source / "params").mkdir() or source, "move one of them away"),
    ],
)
def test_folders_that_cannot_be_converted_are_refused(folder, tmp_path, capsys, change, said):
    source = tmp_path / "source"
    source.mkdir()
    (source / "model.safetensors").write_bytes(b"")
    with pytest.raises((FileNotFoundError, ValueError), match=said):
        checkpoint.convert(change(source), tmp_path / "new")
    assert cli.main(["convert", str(folder), "x", "--shard-gigabytes", "0"]) == 2
    assert "--shard-gigabytes must be above 0, got 0.0" in capsys.readouterr().err


# -- Engram tables off the device ------------------------------------------------------------------

B, S = 3, 9
NUMERICS = Numerics.fp32_kvq()


def some_tokens() -> np.ndarray:
    return np.random.default_rng(4).integers(0, CFG.vocab_size, (B, S)).astype(np.int32)


def some_tables() -> tables.Tables:
    map_ = np.random.default_rng(5).integers(0, CFG.engram_compressed_vocab_size, CFG.vocab_size)
    return tables.make_tables(CFG, map_.astype(np.int32), S)


def device_rows(tokens, image=None) -> list[np.ndarray]:
    """What the forward asks the tables for."""
    made, rows = some_tables(), batch_rows(jnp.asarray(tokens), jnp.full(B, S, jnp.int32))
    if image is not None:
        rows = dataclasses.replace(rows, image=jnp.asarray(image.reshape(-1)))
    compressed = engram.compress_tokens(made, rows)
    before = engram.lookback(compressed, None, rows, spans_of(rows, B), CFG)
    pad = made.token_map[CFG.engram_pad_token_id]
    return [np.asarray(engram.table_rows(before, pad, c)) for c in engram.hash_constants(CFG)]


@pytest.mark.parametrize("images", [False, True])
def test_rows_found_on_the_host_are_those_of_the_device(images):
    tokens = some_tokens()
    image = np.random.default_rng(6).random((B, S)) < 0.2 if images else None
    found = fetching.table_rows(tokens, some_tables(), CFG, image)
    for got, want in zip(found, device_rows(tokens, image), strict=True):
        np.testing.assert_array_equal(got, want)


read = jax.jit(engram.read_table, static_argnames="numerics")


def test_tables_elsewhere_give_the_bits_of_tables_on_the_device(folder, monkeypatch):
    """Pinned, and mapped with the rows fetched before the call; of the map only these are read."""
    tokens, made = some_tokens(), some_tables()
    index = [jnp.asarray(each) for each in device_rows(tokens)]
    here = checkpoint.load_params(folder)
    pinned = checkpoint.load_params(folder, engram="pinned")
    with monkeypatch.context() as patched:
        taken = watch(patched)
        mapped = checkpoint.load_params(folder, engram="mapped")
        before = {file: mask.sum() for file, mask in taken.items()}
        ((_, ready),) = fetching.prefetched(mapped, made, [tokens], CFG)
    more = sum(int(mask.sum() - before[file]) for file, mask in taken.items())
    assert (
        0
        < more
        == sum(
            np.unique(i).size * (CFG.engram_head_dim + CFG.engram_head_dim // quant.GROUP)
            for i in index
        )
    )
    for each, there, held, rows in zip(
        index, pinned["engram"], here["engram"], ready["engram"], strict=True
    ):
        want = bits(read(held["embed"], each, numerics=NUMERICS))
        assert there["embed"].codes.sharding.memory_kind == "pinned_host"
        np.testing.assert_array_equal(bits(read(there["embed"], each, numerics=NUMERICS)), want)
        np.testing.assert_array_equal(bits(read(rows["embed"], each, numerics=NUMERICS)), want)
        with pytest.raises(ValueError, match="fetch them for the tokens of this call"):
            read(rows["embed"], each[1:], numerics=NUMERICS)
        with pytest.raises(TypeError, match=r"on disk; give the step `fetching\.fetched"):
            read(mapped["engram"][0]["embed"], each, numerics=NUMERICS)
    with pytest.raises(ValueError, match=r"are in memory: load the model with engram=.mapped"):
        fetching.fetched(here, made, tokens, CFG)


def test_rows_of_the_next_call_are_read_while_one_is_at_work(folder):
    """Two calls ahead of what was taken, never more; the rows are each call's own."""
    mapped, made, begun = checkpoint.load_params(folder, engram="mapped"), some_tables(), []

    def calls():
        for number in range(4):
            begun.append(number)
            yield np.roll(some_tokens(), number)

    number = -1
    for number, (tokens, ready) in enumerate(fetching.prefetched(mapped, made, calls(), CFG)):
        assert len(begun) == min(number + 2, 4)
        want = fetching.fetched(mapped, made, tokens, CFG)
        same_tree(ready["engram"], want["engram"])
    assert number == 3


def test_where_nothing_can_be_pinned_it_is_said(folder, monkeypatch):
    monkeypatch.setattr(reading, "PINNED", "pinned_elsewhere")
    with pytest.raises(ValueError, match=r"needs devices with memory .*'cpu' have .*\"mapped\""):
        checkpoint.load_params(folder, engram="pinned")
    with pytest.raises(ValueError, match=r"engram must be one of device, pinned, mapped.*'tape'"):
        loading.load("spark-tiny", engram="tape")  # pyright: ignore[reportArgumentType]


# -- whole runs ------------------------------------------------------------------------------------


@pytest.mark.exhaustive  # two processes
def test_two_processes_write_orbax_together(folder, tree, tmp_path):
    pytest.importorskip("orbax.checkpoint", reason="the extra `orbax` is not installed")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    command = [
        sys.executable, "-m", "deepinfer_jax", "convert", str(folder), str(tmp_path / "made"),
        "--coordinator", f"127.0.0.1:{port}", "--processes", "2", "--process-id",
    ]  # fmt: skip
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    both = [
        subprocess.Popen(
            [*command, str(n)], env=environment, stderr=subprocess.PIPE, text=True,
            cwd=Path(__file__).parents[1],
        )
        for n in range(2)
    ]  # fmt: skip
    said = [each.communicate(timeout=300)[1] for each in both]
    assert [each.returncode for each in both] == [0, 0], said
    restored = layout.restore(tmp_path / "made", mesh())
    same_tree(restored, tree)


@pytest.mark.exhaustive  # compiles the programs of an engine
@pytest.mark.parametrize("drafts", [0, 2])
def test_replies_with_pinned_tables_are_those_of_tables_on_the_device(drafts):
    prompts, policy = ["Add 3 and 4.", "Name a color."], planning.Fixed(drafts)
    found = [
        di.generate(
            di.load("spark-tiny", engram=place, max_length=128), prompts, max_tokens=12, seed=1,
            speculative=policy,
        )
        for place in get_args(reading.Engram)[:2]
    ]  # fmt: skip
    for here, there in zip(*found, strict=True):
        assert here.tokens == there.tokens
        assert here.logprobs == there.logprobs
