"""A model ready to run, by name: configuration, weights, constant tables, numerics, tokenizer."""

from __future__ import annotations

import dataclasses
import os
import reprlib
from pathlib import Path
from typing import Any, Literal, get_args

import jax
import numpy as np
import tokenizers

from deepinfer_jax import checkpoint, layout, resources, summaries, text
from deepinfer_jax.checkpoint.reading import Engram
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.layout import Onto
from deepinfer_jax.model import engram as memory
from deepinfer_jax.numerics import Form, Numerics, forms, startup
from deepinfer_jax.params import Params, decode, decoded_bytes
from deepinfer_jax.planning.calibration import TEMPERATURES_FILE, load_temperatures
from deepinfer_jax.tables import Tables, make_tables
from deepinfer_jax.text import Tokenizer
from deepinfer_jax.text.engram_map import MAP_FILE, TOKENIZER_FILE
from kernels_bridge import cuda, ffi
from kernels_bridge.machine import probe

# Longest sequence that a model is prepared for unless the caller asks for more. Rotation tables
# have a row per position: at the released 1M positions they would take half a gigabyte.
DEFAULT_LENGTH = 1 << 16
# Largest tree of decoded weights that `weights="auto"` makes on a CPU.
DECODED_LIMIT = 1 << 30


@dataclasses.dataclass(frozen=True, eq=False)
class Model:
    """What `load` returns: plain values, the arguments of the pure functions.

    `generate` and `stream` take it whole; `forward`, `steps`, `rounds` and `rl` take its parts.

    Attributes:
      name: what it was loaded as.
      cfg, numerics: the static configurations; both hashable.
      params: the weights, a tree as `params.abstract(cfg)` describes it.
      tables: rotation tables for `max_length` positions, and the Engram token map.
      tokenizer: ids of text and text of ids.
      confidence_temperatures: calibration of the drafter's confidence head, one per draft; ones
        where the folder has none. They decide what is verified, never what is said.
    """

    name: str
    cfg: ModelConfig
    numerics: Numerics
    params: Params
    tables: Tables
    tokenizer: Tokenizer
    confidence_temperatures: tuple[float, ...] = ()

    def __repr__(self) -> str:
        cfg, weights = self.cfg, summaries.size(summaries.bytes_of(self.params))
        return (
            f"Model({self.name!r}: {cfg.num_hidden_layers} layers of {cfg.hidden_size}, vocabulary "
            f"{cfg.vocab_size}, weights {weights}, max_length {self.max_length}, numerics "
            f"{self.numerics.fingerprint()} ({self.numerics.rows}, {self.numerics.dtype}))"
        )

    @property
    def max_length(self) -> int:
        """Most tokens of a sequence, prompt and reply together."""
        return self.tables.positions


def load(
    model: str | Path = "spark-tiny", *, numerics: Numerics | None = None,
    max_length: int | None = None, weights: Literal["auto", "stored", "decoded"] = "auto",
    rows: Form | None = None, engram: Engram = "device",
    onto: Onto | tuple[Any, ...] | None = None,
) -> Model:  # fmt: skip
    """Load a shipped model by name, or a checkpoint in the released layout from its folder.

    Args:
      model: a name of `resources.model_names()`, or a folder with `config.json`, `tokenizer.json`
        and safetensors shards. A shipped name wins over a folder of that name (write `./NAME`).
      numerics: what fixes the bits; default `Numerics.native` for how the checkpoint is stored, in
        the form of the default back end.
      max_length: most tokens of a sequence; default is the model's own limit, at most 65,536.
      weights: "stored" keeps the released formats in memory; "decoded" decodes them once (see
        `params.decode`), which is several times faster on a CPU and gives the same bits; "auto"
        decodes on a CPU while the result stays below 1 GiB.
      rows: the form of the numerics (`Numerics.rows`), in place of what `numerics` says; default
        the first that keeps the promise here (docs/kernels.md "What runs where"). "ffi" is 1.4 to
        3 times as fast as "tiled" on a CPU and needs a C++ compiler; the two have other bits.
      engram: where the Engram tables are, with the same bits (docs/checkpoints.md 4): "device";
        "pinned" in the host's memory, read from there by the programs of one device; "mapped" in
        their files, for steps that are given the rows of their tokens (`fetching`).
      onto: a mesh, placements of experts on it, and rules (`layout.Onto`, or a tuple): each process
        reads what its devices hold, as an engine with that `Site` wants it. An engine that moves
        experts takes these weights over.

    Raises:
      FileNotFoundError: no such model or folder, or a file of it is missing.
      ValueError: a file is damaged or does not fit the others, `max_length` is out of range, or
        the numerics cannot run here, or not keep their promise under the settings of JAX and XLA.
      kernels_bridge.ffi.NoKernelsError: the kernels of "ffi" or "cuda" cannot be built here.
    """
    _check_ways(numerics, weights, engram, onto)
    folder = find_folder(model)
    cfg = ModelConfig.from_json(folder)
    length = resolve_length(cfg, max_length)
    numerics = _chosen(numerics, rows, cfg)
    _check_engram(folder, cfg)
    tokenizer = open_tokenizer(folder, cfg)
    tables = make_tables(cfg, _token_map(folder, cfg), length)
    return Model(
        name=str(model),
        cfg=cfg,
        numerics=numerics,
        params=_params(folder, cfg, weights, engram, onto),
        tables=tables,
        tokenizer=tokenizer,
        confidence_temperatures=_temperatures(folder, cfg),
    )


def _check_ways(numerics: Any, weights: str, engram: str, onto: Any) -> None:
    """Refuse arguments of `load` that are none, before anything is read."""
    if weights not in ("auto", "stored", "decoded"):
        raise ValueError(f'weights must be "auto", "stored" or "decoded", got {weights!r}')
    if numerics is not None and not isinstance(numerics, Numerics):
        raise TypeError(f"numerics must be a Numerics, such as Numerics.fp32(), got {numerics!r}")
    if engram not in get_args(Engram) or (onto is not None and engram != "device"):
        raise ValueError(
            f'engram must be one of {", ".join(get_args(Engram))}, and "device" on a mesh, got '
            f"{engram!r}"
        )


def config_of(model: str | Path) -> ModelConfig:
    """The configuration of a model by name or folder, without its weights; raises as `load`."""
    return ModelConfig.from_json(find_folder(model))


def _chosen(numerics: Numerics | None, rows: Form | None, cfg: ModelConfig) -> Numerics:
    """The numerics of `load`, able to run here."""
    if numerics is None:
        numerics = Numerics.native(cfg.quantized, rows or forms.choose(probe()))
    elif rows is not None:
        numerics = dataclasses.replace(numerics, rows=rows)
    startup.check(numerics, surroundings())
    if numerics.rows == "ffi":
        ffi.load()
    if numerics.rows == "cuda":
        cuda.load()
    return numerics


def _temperatures(folder: Path, cfg: ModelConfig) -> tuple[float, ...]:
    """Of the file that `planning.save_temperatures` writes, if the folder has one."""
    path, drafts = folder / TEMPERATURES_FILE, cfg.most_drafts
    return load_temperatures(path, drafts) if drafts and path.exists() else (1.0,) * drafts


def surroundings() -> startup.Surroundings:
    """The settings of this process that bits depend on."""
    config: Any = jax.config  # its flags are made when it is imported
    return startup.Surroundings(
        machine=probe(),
        xla_flags=os.environ.get("XLA_FLAGS", ""),
        matmul_precision=config.jax_default_matmul_precision,
        x64=config.jax_enable_x64,
        disable_jit=config.jax_disable_jit,
    )


def _check_engram(folder: Path, cfg: ModelConfig) -> None:
    """Refuse Engram sizes that no hashing fits, which would come to light while tracing."""
    try:
        memory.hash_constants(cfg)
    except ValueError as error:
        raise ValueError(f"{folder / 'config.json'}: {error}") from None


def _params(
    folder: Path, cfg: ModelConfig, weights: str, engram: Engram,
    onto: Onto | tuple[Any, ...] | None,
) -> Params:  # fmt: skip
    """The weights as `load` wants them."""
    if weights == "auto":
        small = decoded_bytes(cfg) <= DECODED_LIMIT
        weights = "decoded" if small and jax.default_backend() == "cpu" else "stored"
    if onto is not None:
        onto = onto if isinstance(onto, Onto) else Onto(*onto)
        params = layout.load(folder, *onto, cfg=cfg)
        if weights == "stored":
            return params
        return layout.place(decode(params), cfg, onto.mesh, onto.rules)
    params = checkpoint.load_params(folder, cfg, engram=engram)
    if weights == "stored" or engram == "device":
        return decode(params) if weights == "decoded" else params
    # Tables that are elsewhere are no argument of the program that decodes.
    tables = [each.pop("embed") for each in params["engram"]]
    params = decode(params)
    kept = zip(params["engram"], tables, strict=True)
    return {**params, "engram": tuple({**each, "embed": table} for each, table in kept)}


def find_folder(model: str | Path) -> Path:
    """The folder of a shipped model or the given folder; FileNotFoundError tells what there is."""
    if not isinstance(model, str | os.PathLike):
        raise TypeError(f"model must be the name of a model or a path, got {reprlib.repr(model)}")
    shipped = resources.model_names()
    if model in shipped:
        return resources.model_folder(str(model))
    folder = Path(model)
    if folder.is_dir():
        return folder
    raise FileNotFoundError(
        f"unknown model {str(model)!r}: give one of the shipped names "
        f"({', '.join(shipped) or 'none in this installation'}) or the path of a folder with "
        "config.json, tokenizer.json and safetensors shards"
    )


def resolve_length(cfg: ModelConfig, max_length: int | None) -> int:
    """`max_length` checked against the model, or the default."""
    limit = cfg.max_position_embeddings
    if max_length is None:
        return min(limit, DEFAULT_LENGTH)
    if isinstance(max_length, bool) or not isinstance(max_length, int):
        raise TypeError(f"max_length must be an integer, got {max_length!r}")
    if not 1 <= max_length <= limit:
        raise ValueError(
            f"max_length must be in 1..{limit} (max_position_embeddings of the model), "
            f"got {max_length}; leave it out for the default"
        )
    return max_length


def open_tokenizer(folder: Path, cfg: ModelConfig) -> Tokenizer:
    """The folder's tokenizer; ValueError where it cannot be the one that the model learned with."""
    tokenizer = text.load_tokenizer(folder)
    if tokenizer.vocab_size > cfg.vocab_size:
        raise ValueError(
            f"{folder / TOKENIZER_FILE} has {tokenizer.vocab_size} ids, the model only "
            f"vocab_size={cfg.vocab_size}: this is another model's tokenizer"
        )
    for name, token in (("bos", tokenizer.bos), ("eos", tokenizer.eos)):
        expected = getattr(cfg, f"{name}_token_id")
        if token != expected:
            raise ValueError(
                f"{folder}: {name} is token {token} of tokenizer.json, but config.json says "
                f"{name}_token_id={expected}: the two files belong to different models"
            )
    return tokenizer


def _token_map(folder: Path, cfg: ModelConfig) -> np.ndarray | None:
    """The stored Engram map, or the same by rule from the tokenizer where none was stored."""
    if not cfg.engram_layer_ids:
        return None
    if (folder / MAP_FILE).is_file():
        return text.load_token_map(folder)
    derived = text.token_map(tokenizers.Tokenizer.from_file(str(folder / TOKENIZER_FILE)))
    size = int(derived.max()) + 1
    if size != cfg.engram_compressed_vocab_size:
        raise ValueError(
            f"the token map derived from {folder / TOKENIZER_FILE} has {size} compressed ids, "
            f"config.json says engram_compressed_vocab_size={cfg.engram_compressed_vocab_size}; "
            "put the model's own tokenizer.json there"
        )
    return derived
