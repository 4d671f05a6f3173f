"""What a configuration amounts to: layer roles, parameters, bytes. All from the abstract tree."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re

import jax

from deepinfer_jax import cache, params, quant
from deepinfer_jax.config import LayerKind, ModelConfig
from deepinfer_jax.numerics import Numerics
from deepinfer_jax.params import Census, Spec

# Component -> pattern of its released names; the first that matches takes a leaf.
_COMPONENTS = (
    ("compressors", r"layers\..*\.compressor\."),
    ("index keys", r"layers\..*\.indexer\.(wk|k_norm)\."),
    ("index queries", r"layers\..*\.indexer\."),
    ("attention", r"layers\..*\.attn\."),
    ("routed experts", r"layers\..*\.experts\."),
    ("shared experts", r"layers\..*\.shared_experts\."),
    ("routers", r"layers\..*\.gate\."),
    ("hyper-connections", r"layers\..*\.hc_"),
    ("block norms", r"layers\..*_norm\."),
    ("Engram tables", r"layers\..*\.engram\.embed\."),
    ("Engram dense", r"layers\..*\.engram\."),
    ("embedding", r"embed\."),
    ("head", r"head\."),
    ("final norm", r"norm\."),
    ("DSpark draft", r"mtp\."),
    ("vision tower", r"vision\."),
    ("aligner and delimiters", r"aligner\.|image_"),
)
# A few rows per token are looked up, or it is no part of a token's step: not counted as active.
_IDLE = frozenset(
    ("embedding", "Engram tables", "DSpark draft", "vision tower", "aligner and delimiters")
)


@dataclasses.dataclass(frozen=True)
class Layers:
    """Consecutive backbone layers `first`..`last` that do the same and read the same.

    `kv` is the layer whose global KV they read, `index` the one whose top-k list they use,
    `candidates` the one whose candidate blocks restrict it; each None where there is none.
    """

    first: int
    last: int
    kind: LayerKind
    kv: int | None
    index: int | None
    candidates: int | None


@dataclasses.dataclass(frozen=True)
class Component:
    """Parameters of one part, those at work on a prefilled and on a decoded token, stored bytes."""

    name: str
    parameters: int
    prefill: int
    decode: int
    nbytes: int


@dataclasses.dataclass(frozen=True)
class Info:
    """See `describe`. Bytes per token are of global KV; `state` is bytes per sequence, by kind."""

    layers: tuple[Layers, ...]
    components: tuple[Component, ...]
    census: Census
    main_kv_bytes: float
    index_key_bytes: float
    state: tuple[tuple[str, int], ...]

    @property
    def kv_bytes_per_token(self) -> float:
        """Bytes of global KV that a token adds: compressed KV and index keys."""
        return self.main_kv_bytes + self.index_key_bytes


def describe(cfg: ModelConfig) -> Info:
    """Roles, counts and sizes of a model, without weights (docs/model.md 2, 10, 13)."""
    entries = sum(len(cfg.kv_sources(m)) / m for m in cfg.ratios)
    return Info(
        layers=_layers(cfg),
        components=_components(cfg),
        census=params.census(cfg),
        main_kv_bytes=entries * quant.main_bytes(cfg.head_dim),
        index_key_bytes=entries * quant.index_bytes(cfg.index_head_dim),
        state=_state(cfg),
    )


def _layers(cfg: ModelConfig) -> tuple[Layers, ...]:
    def source(layer: int, of: tuple[int, ...]) -> int | None:
        has_global = cfg.compress_ratios[layer] > 0
        return max((s for s in of if s <= layer), default=None) if has_global else None

    def one(layer: int, kind: LayerKind) -> Layers:
        index = source(layer, cfg.index_source_layer_ids)
        candidates = cfg.candidate_source_layer_id if kind.uses_candidates else None
        return Layers(layer, layer, kind, source(layer, cfg.kv_source_layer_ids), index, candidates)

    rows = [one(layer, kind) for layer, kind in enumerate(cfg.kinds())]
    groups = itertools.groupby(rows, lambda row: dataclasses.replace(row, first=0, last=0))
    runs = [list(run) for _, run in groups]
    return tuple(dataclasses.replace(run[0], last=run[-1].last) for run in runs)


def _components(cfg: ModelConfig) -> tuple[Component, ...]:
    totals = {name: [0, 0, 0, 0] for name, _ in _COMPONENTS}
    for spec in params.specs(cfg):
        name = component_of(spec)
        elements = math.prod(spec.shape)
        # scales are no parameters, a packed FP4 byte is two
        count = elements * {"F8_E8M0": 0, "I8": 2}.get(spec.storage, 1)
        active = (0, 0) if name in _IDLE else _active(cfg, spec, count)
        added = (count, *active, elements * spec.dtype.itemsize)
        totals[name] = [t + a for t, a in zip(totals[name], added, strict=True)]
    return tuple(Component(name, *total) for name, total in totals.items() if total[0])


def component_of(spec: Spec) -> str:
    """Name of the part that a leaf belongs to, as in `Info.components`."""
    return next(name for name, pattern in _COMPONENTS if re.match(pattern, spec.template))


def _active(cfg: ModelConfig, spec: Spec, count: int) -> tuple[int, int]:
    """Of `count` parameters, those at work on a prompt token (encoder) and on a decoded one."""
    parts = spec.template.split(".")
    if parts[0] != "layers":
        return 0, count
    if "experts" in parts:
        count = count * cfg.num_experts_per_tok // cfg.n_routed_experts
    numbers = spec.stack[0] if spec.stack else (int(parts[1]),)
    encoder = [n for n in numbers if n < cfg.num_encoder_layers]
    return count * len(encoder) // max(1, len(numbers)), count


def _state(cfg: ModelConfig) -> tuple[tuple[str, int], ...]:
    """Bytes per sequence that do not grow with its length, packed, at the cache's default slack."""
    shapes = cache.cache_shapes(cfg, Numerics(rows="pallas"), 1, max(cfg.ratios, default=1))

    def nbytes(leaf: jax.Array) -> int:
        return math.prod(leaf.shape) * leaf.dtype.itemsize

    return (
        ("window rings", nbytes(shapes.window)),
        ("draft rings", nbytes(shapes.draft)),
        ("pending pooling", nbytes(shapes.pending)),
        ("n-gram history", nbytes(shapes.history)),
    )


# -- as text ---------------------------------------------------------------------------------------


def format_info(info: Info) -> str:
    """The report of `deepinfer-jax info`: layer roles, parameters, stored bytes, cache bytes."""
    return "\n\n".join((_roles(info), _counts(info), _storage(info), _cache_bytes(info))) + "\n"


def table(head: tuple[str, ...], rows: list[tuple[str, ...]], left: int = 1) -> str:
    """Columns as wide as their longest entry; the first `left` are flush left."""
    wide = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]

    def line(row: tuple[str, ...]) -> str:
        cells = [c.ljust(wide[i]) if i < left else c.rjust(wide[i]) for i, c in enumerate(row)]
        return "  ".join(cells).rstrip()

    return "\n".join(line(row) for row in [head, *rows])


def _roles(info: Info) -> str:
    head = ("layers", "role", "half", "ratio", "kv of", "top-k of", "candidates", "engram", "tap")
    rows = []
    for run in info.layers:
        kind = run.kind
        span = str(run.first) if run.first == run.last else f"{run.first}..{run.last}"
        half = "decoder" if kind.decoder else "encoder"
        sources = (run.kv, run.index, run.candidates, kind.engram)
        cells = ["-" if s is None else str(s) for s in sources]
        rows.append((span, kind.role, half, str(kind.ratio), *cells, "yes" if kind.tap else "-"))
    return table(head, rows, left=3)


def _counts(info: Info) -> str:
    head = ("component", "parameters", "per prefill token", "per decode token", "bytes")
    rows: list[tuple[str, ...]] = [
        (c.name, f"{c.parameters:,}", f"{c.prefill:,}", f"{c.decode:,}", f"{c.nbytes:,}")
        for c in info.components
    ]
    numbers = [(c.parameters, c.prefill, c.decode, c.nbytes) for c in info.components]
    rows.append(("total", *(f"{sum(column):,}" for column in zip(*numbers, strict=True))))
    return table(head, rows)


def _storage(info: Info) -> str:
    rows = [(k, f"{v:,}") for k, v in sorted(info.census.bytes_by_storage.items())]
    rows.append(("total", f"{info.census.total_bytes:,}"))
    return f"{table(('storage', 'bytes'), rows)}\n{info.census.tensors:,} tensors"


def _cache_bytes(info: Info) -> str:
    rows = [
        ("global KV per token", f"{info.kv_bytes_per_token:,g}"),
        ("  compressed KV", f"{info.main_kv_bytes:,g}"),
        ("  index keys", f"{info.index_key_bytes:,g}"),
        *((f"{name} per sequence", f"{size:,}") for name, size in info.state),
    ]
    return table(("cache", "bytes"), rows)
