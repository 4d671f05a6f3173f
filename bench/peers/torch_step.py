"""One decode step of the model in torch's own operations: what `gpu_peers.py` measures beside ours.

Written from docs/model.md. Weights, cache and activations are plain floats of one dtype: torch has
no product of FP4, and whoever runs bfloat16 weights quantizes nothing else either, so that the
quantizers of activations and cache are left out (`Numerics` with both switched off says the same).
Shapes are fixed and nothing is read back, so that a CUDA graph can record a step; the state is
written in place.

B slots, one token each; D hidden, C streams, H heads, W window, E entries that a slot has room for.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from deepinfer_jax import params, tables
from deepinfer_jax.config import LayerKind, ModelConfig
from deepinfer_jax.model.engram import hash_constants

Attend = Callable[[Tensor, Tensor, Tensor, Tensor, float], Tensor]
Experts = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, float], Tensor]


@dataclasses.dataclass
class State:
    """What a step reads and writes.

    rows     [N, Hd]: windows of layer and slot, then entries of source and slot; key and value
    keys     [B, E, K] of each source of KV
    pending  [pooled, B, 2, Hd] float32: (projection, gate) of the newest token
    history  [B, lookback] int64: compressed ids of the tokens before, newest first
    lengths  [B] int64: tokens held
    """

    rows: Tensor
    keys: list[Tensor]
    pending: Tensor
    history: Tensor
    lengths: Tensor


@dataclasses.dataclass(frozen=True)
class Shape:
    """Where what lies: slots B, room for tokens (in whole groups of 8 entries)."""

    cfg: ModelConfig
    slots: int
    room: int

    def entries(self, source: int) -> int:
        """E of the source's slots."""
        size = self.cfg.candidate_block_size
        return -(-self.room // (self.cfg.compress_ratios[source] * size)) * size

    def base(self, source: int) -> int:
        """First row of the source's entries."""
        cfg = self.cfg
        before = cfg.kv_source_layer_ids[: cfg.kv_source_layer_ids.index(source)]
        windows = cfg.num_hidden_layers * cfg.sliding_window
        return self.slots * (windows + sum(self.entries(each) for each in before))

    def state(self, device: Any, dtype: torch.dtype) -> State:
        """Of slots that hold nothing."""
        cfg, b = self.cfg, self.slots
        sources = cfg.kv_source_layer_ids
        pooled = sum(cfg.compress_ratios[source] > 1 for source in sources)
        count = self.base(sources[-1]) + b * self.entries(sources[-1])
        make = lambda *shape, dtype=dtype: torch.zeros(shape, dtype=dtype, device=device)  # noqa: E731
        return State(
            make(count, cfg.head_dim),
            [make(b, self.entries(source), cfg.index_head_dim) for source in sources],
            make(pooled, b, 2, cfg.head_dim, dtype=torch.float32),
            make(b, cfg.engram_lookback, dtype=torch.int64) - 1,
            make(b, dtype=torch.int64),
        )


# -- pieces ----------------------------------------------------------------------------------------


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    y = x.float()
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    return (weight.float() * y).to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The last features of x [B, ..., K] by cos and sin [B, R/2], in adjacent pairs."""
    width = 2 * cos.shape[-1]
    shape = (len(x), *[1] * (x.ndim - 2), width // 2)
    cos, sin = cos.view(shape), sin.view(shape)
    a, b = x[..., -width::2].float(), x[..., x.shape[-1] - width + 1 :: 2].float()
    turned = torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)
    return torch.cat([x[..., :-width], turned.to(x.dtype)], -1)


def mixes(p: Any, streams: Tensor, cfg: ModelConfig) -> tuple[Tensor, Tensor, Tensor]:
    """Of streams [B, C, D]: pre [B, C], post [B, C], comb [B, C source, C destination]."""
    z, c = streams.flatten(1).float(), cfg.hc_mult
    raw = F.linear(z, p["fn"]) * torch.rsqrt(z.square().mean(-1, keepdim=True) + cfg.rms_norm_eps)
    return split(raw, p["scale"], p["base"], c, cfg.hc_sinkhorn_iters, cfg.hc_eps)


def split(
    raw: Tensor, scale: Tensor, base: Tensor, c: int, turns: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    pre = torch.sigmoid(raw[:, :c] * scale[0] + base[:c]) + eps
    post = 2 * torch.sigmoid(raw[:, c : 2 * c] * scale[1] + base[c : 2 * c])
    comb = (raw[:, 2 * c :] * scale[2] + base[2 * c :]).view(-1, c, c).softmax(-1) + eps
    comb = comb / (comb.sum(1, keepdim=True) + eps)
    for _ in range(turns - 1):
        comb = comb / (comb.sum(2, keepdim=True) + eps)
        comb = comb / (comb.sum(1, keepdim=True) + eps)
    return pre, post, comb


def collapse(pre: Tensor, streams: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The normalised input [B, D] of a sub-layer."""
    return norm((pre[..., None] * streams.float()).sum(1).to(streams.dtype), weight, eps)


def expand(y: Tensor, post: Tensor, comb: Tensor, streams: Tensor) -> Tensor:
    own = post[..., None] * y.float()[:, None]
    return (own + comb.transpose(1, 2) @ streams.float()).to(streams.dtype)


def activate(both: Tensor, limit: float) -> Tensor:
    """silu(gate) * up of [gate, up] side by side; the gate is clamped from above only. float32."""
    gate, up = both.float().chunk(2, -1)
    return F.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)


def attend(q: Tensor, rows: Tensor, ids: Tensor, sink: Tensor, scale: float) -> Tensor:
    """q [B, H, Hd] over rows [N, Hd] at ids [B, S], -1: nobody; `sink` [H] has no value."""
    keys = rows[ids.clamp(min=0)]
    s = torch.bmm(q, keys.mT).float() * scale
    s = s.masked_fill((ids < 0)[:, None], -math.inf)
    s = torch.cat([s, sink.expand(len(s), -1)[..., None]], -1)
    return torch.bmm(s.softmax(-1)[..., :-1].to(keys.dtype), keys)


def experts_gathered(
    x: Tensor, experts: Tensor, weights: Tensor, up: Tensor, down: Tensor, limit: float
) -> Tensor:
    """Routed experts of x [B, D], each row with copies of its own: [B, k, D]."""
    b, k = experts.shape
    flat = experts.flatten()
    both = torch.bmm(x.repeat_interleave(k, 0)[:, None], up[flat].mT)
    hidden = (weights.flatten()[:, None, None] * activate(both, limit)).to(x.dtype)
    return torch.bmm(hidden, down[flat].mT).view(b, k, -1)


def experts_grouped(
    x: Tensor, experts: Tensor, weights: Tensor, up: Tensor, down: Tensor, limit: float
) -> Tensor:
    """The same by torch's grouped product, rows sorted by expert."""
    b, k = experts.shape
    chosen, order = experts.flatten().sort(stable=True)
    number = torch.arange(len(up), device=x.device)
    ends = torch.searchsorted(chosen, number, right=True).int()
    both = F.grouped_mm(x[order // k], up.mT, offs=ends)
    hidden = (weights.flatten()[order, None] * activate(both, limit)).to(x.dtype)
    y = F.grouped_mm(hidden, down.mT, offs=ends)
    return torch.empty_like(y).index_copy_(0, order, y).view(b, k, -1)


# -- the step --------------------------------------------------------------------------------------


@dataclasses.dataclass
class Model:
    """The weights, and how some of it is done.

    weights as `params.abstract` names them, layers stacked; of each layer's experts w1 and w3 stand
    side by side: experts[layer] = (up [E, 2I, D], down [E, D, I]). best: the largest values of rows
    and their columns, by default in torch's order among equal ones.
    """

    cfg: ModelConfig
    weights: Any
    experts: list[tuple[Tensor, Tensor]]
    token_map: Tensor
    shape: Shape
    attention: Attend = attend
    routed: Experts = experts_gathered
    best: Callable[[Tensor, int], Any] = torch.topk

    def __post_init__(self) -> None:
        device, cfg = self.token_map.device, self.cfg
        self.kinds = cfg.kinds()
        self.slot = torch.arange(self.shape.slots, device=device)
        self.angles = {}
        for name, frequency in (
            ("base", tables.base_frequencies(cfg)), ("yarn", tables.yarn_frequencies(cfg)),
        ):  # fmt: skip
            turned = tables.rotation(frequency, self.shape.room)
            self.angles[name] = [_tensor(each, device) for each in (turned.cos, turned.sin)]
        self.hashes = [
            [torch.tensor(part, device=device) for part in dataclasses.astuple(each)]
            for each in hash_constants(cfg)
        ]
        self.pad = self.token_map[cfg.engram_pad_token_id]

    def angle(self, name: str, positions: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = self.angles[name]
        return cos[positions], sin[positions]

    @torch.no_grad()
    def step(self, tokens: Tensor, state: State) -> Tensor:
        """Logits [B, V] float32 of the tokens [B]; `state` takes them in."""
        cfg, w = self.cfg, self.weights
        position = state.lengths
        x = w["embed"][tokens][:, None].repeat(1, cfg.hc_mult, 1)
        pre = F.one_hot(torch.zeros_like(tokens), cfg.hc_mult).float()
        recent = torch.cat([self.token_map[tokens][:, None], state.history], 1)
        choice: dict[str, Tensor] = {}
        for i, kind in enumerate(self.kinds):
            if kind.engram is not None:
                x = self.remember(kind.engram, recent, x)
            p = w["layers"]
            pre_next, post, comb = mixes(_at(p["hc_attn"], i), x, cfg)
            h = collapse(pre, x, p["attn_norm"][i], cfg.rms_norm_eps)
            y = self.attend_layer(i, kind, h, position, state, choice)
            x, pre = expand(y, post, comb, x), pre_next
            pre_next, post, comb = mixes(_at(p["hc_ffn"], i), x, cfg)
            h = collapse(pre, x, p["ffn_norm"][i], cfg.rms_norm_eps)
            x, pre = expand(self.mixture(i, h), post, comb, x), pre_next
        output = collapse(pre, x, w["norm"], cfg.rms_norm_eps)
        state.history.copy_(recent[:, :-1])
        state.lengths.add_(1)
        return F.linear(output, w["head"]).float()

    def attend_layer(
        self, i: int, kind: LayerKind, x: Tensor, position: Tensor, state: State,
        choice: dict[str, Tensor],
    ) -> Tensor:  # fmt: skip
        cfg, p, b = self.cfg, _at(self.weights["layers"]["attn"], i), len(x)
        cos, sin = self.angle("yarn" if kind.ratio else "base", position)
        low = norm(F.linear(x, p["wq_a"]), p["q_norm"], cfg.rms_norm_eps)
        q = F.linear(low, p["wq_b"]).view(b, cfg.num_attention_heads, cfg.head_dim)
        q = rotate(q, cos, sin)
        k = norm(F.linear(x, p["wkv"]), p["kv_norm"], cfg.rms_norm_eps)
        window = cfg.sliding_window
        first = (i * b + self.slot) * window
        state.rows.index_copy_(0, first + position % window, rotate(k, cos, sin))
        place = torch.arange(window, device=x.device)
        ids = torch.where(place <= position[:, None], first[:, None] + place, -1)
        if kind.ratio:
            source = max(s for s in cfg.kv_source_layer_ids if s <= i)
            if kind.kv_source:
                self.publish(source, x, position, state)
            if kind.index_source:
                self.choose(i, kind, source, x, low, position, state, choice)
            begin = self.shape.base(source) + self.slot * self.shape.entries(source)
            picked = choice["selected"]
            ids = torch.cat([ids, torch.where(picked >= 0, picked + begin[:, None], -1)], 1)
        sink, scale = p["attn_sink"], cfg.head_dim**-0.5
        o = rotate(self.attention(q, state.rows, ids, sink, scale), cos, -sin)
        groups = p["wo_a"].view(cfg.o_groups, cfg.o_lora_rank, -1)
        low = torch.bmm(o.reshape(b, cfg.o_groups, -1).transpose(0, 1), groups.mT)
        return F.linear(low.transpose(0, 1).reshape(b, -1), p["wo_b"])

    def publish(self, source: int, x: Tensor, position: Tensor, state: State) -> None:
        """The entry that ends at this token; of an odd group's first token one that nobody sees and
        the next token overwrites.
        """
        cfg, ratio = self.cfg, self.cfg.compress_ratios[source]
        number = cfg.kv_source_layer_ids.index(source)
        w = self.weights["compressor"]
        raw = F.linear(x, w["wkv"][number])
        if ratio > 1:
            pooled = [s for s in cfg.kv_source_layer_ids if cfg.compress_ratios[s] > 1]
            pooled = pooled.index(source)
            gate = F.linear(x.float(), w["wgate"][pooled].float())
            pair = torch.stack([F.linear(x.float(), w["wkv"][number].float()), gate], 1)
            both = torch.stack([state.pending[pooled], pair], 1)
            raw = (both[:, :, 0] * both[:, :, 1].softmax(1)).sum(1).to(x.dtype)
            state.pending[pooled].copy_(pair)
        eps, keys = cfg.rms_norm_eps, self.weights["indexer"]
        latent = norm(raw, w["norm"][number], eps)
        entry = position // ratio
        cos, sin = self.angle("yarn", entry * ratio)
        key = norm(F.linear(latent, keys["wk"][number]), keys["k_norm"][number], eps)
        state.keys[number][self.slot, entry] = rotate(key, cos, sin)
        begin = self.shape.base(source) + self.slot * self.shape.entries(source)
        state.rows.index_copy_(0, begin + entry, rotate(latent, cos, sin))

    def choose(
        self, i: int, kind: LayerKind, source: int, x: Tensor, low: Tensor, position: Tensor,
        state: State, choice: dict[str, Tensor],
    ) -> None:  # fmt: skip
        """The entries that this and the following layers attend to, and where it says so the blocks
        that later layers choose from.
        """
        cfg, b = self.cfg, len(x)
        at = cfg.index_source_layer_ids.index(i)
        p, size = self.weights["indexer"], cfg.candidate_block_size
        q = F.linear(low, p["wq_b"][at]).view(b, cfg.index_n_heads, -1)
        q = rotate(q, *self.angle("yarn", position))
        scale = cfg.index_head_dim**-0.5 * cfg.index_n_heads**-0.5
        weight = F.linear(x, p["weights_proj"][at]) * scale
        keys = state.keys[cfg.kv_source_layer_ids.index(source)]
        ids = torch.arange(keys.shape[1], device=x.device).expand(b, -1)
        if kind.uses_candidates:
            blocks = choice["candidates"][..., None]
            ids = torch.where(blocks >= 0, blocks * size + ids[0, :size], -1).flatten(1)
            keys = keys[self.slot[:, None], ids.clamp(min=0)]
        visible = ((position + 1) // kind.ratio)[:, None]
        score = torch.bmm(weight[:, None], torch.bmm(q, keys.mT).relu())[:, 0]
        score = score.masked_fill((ids < 0) | (ids >= visible), -math.inf)
        best, place = self.best(score, min(cfg.index_topk, score.shape[1]))
        choice["selected"] = torch.where(best > -math.inf, ids.gather(1, place), -1)
        if kind.candidate_source:
            top = score.view(b, -1, size).amax(-1)
            top = top.scatter(1, (visible - 1) // size, math.inf)
            best, place = self.best(top, min(cfg.candidate_topk_blocks, top.shape[1]))
            kept = torch.where(best > -math.inf, place, -1)
            choice["candidates"] = kept.sort(1).values  # so that ties go to the lower entry

    def mixture(self, i: int, x: Tensor) -> Tensor:
        cfg, p = self.cfg, _at(self.weights["layers"]["ffn"], i)
        logits = F.linear(x.float(), p["gate"]["weight"].float()) / cfg.gate_temp
        score = F.softplus(logits).sqrt()
        chosen = (score + p["gate"]["bias"]).topk(cfg.num_experts_per_tok).indices
        weight = score.gather(1, chosen)
        weight = weight / (weight.sum(1, keepdim=True) + 1e-20) * cfg.routed_scaling_factor
        up, down = self.experts[i]
        y = self.routed(x, chosen, weight, up, down, cfg.swiglu_limit).float().sum(1)
        shared = p["shared_experts"]
        both = torch.cat([F.linear(x, shared["w1"]), F.linear(x, shared["w3"])], 1)
        own = F.linear(activate(both, cfg.swiglu_limit).to(x.dtype), shared["w2"])
        return (y + own.float()).to(x.dtype)

    def remember(self, ordinal: int, recent: Tensor, x: Tensor) -> Tensor:
        """The streams x [B, C, D] with what the table has for the last tokens [B, 4] of each."""
        cfg, p = self.cfg, self.weights["engram"][ordinal]
        primes, offsets, multipliers = self.hashes[ordinal]
        terms = torch.where(recent >= 0, recent, self.pad) * multipliers
        mixed, rows = terms[:, 0], []
        for order in range(1, cfg.engram_max_ngram_size):
            mixed = mixed ^ terms[:, order]
            rows.append(mixed[:, None] % primes[order - 1])
        e = p["embed"][torch.cat(rows, 1) + offsets].flatten(1)
        c, d, eps = cfg.hc_mult, cfg.hidden_size, cfg.rms_norm_eps
        both = F.linear(e, p["wkv"])
        key, value = both[:, : c * d].view(-1, c, d).float(), both[:, c * d :].float()
        own = x.float()
        scale = torch.rsqrt(own.square().mean(-1) + eps) * torch.rsqrt(key.square().mean(-1) + eps)
        weight = p["q_weight"].float() * p["k_weight"].float()
        size = (own * weight * key).sum(-1) * scale * d**-0.5
        gate = torch.sigmoid(torch.copysign(size.abs().clamp(min=1e-6).sqrt(), size))
        return (own + gate[..., None] * value[:, None]).to(x.dtype)


def _at(tree: Any, i: int) -> Any:
    """Layer i of stacked weights."""
    return (
        {name: _at(each, i) for name, each in tree.items()} if isinstance(tree, dict) else tree[i]
    )


def _tensor(array: Any, device: Any) -> Tensor:
    return torch.from_numpy(np.array(array)).to(device)


def sampled(logits: Tensor) -> Tensor:
    """A token [B] of each row at temperature 1, by noise that a graph draws anew each time."""
    return (logits - torch.empty_like(logits).exponential_().log_()).argmax(-1)


# -- weights ---------------------------------------------------------------------------------------


def taken(tree: Any, device: Any) -> tuple[Any, list[tuple[Tensor, Tensor]]]:
    """Float32 parameters of ours as `weights` and `experts` of a `Model`."""
    made = jax.tree.map(lambda leaf: _tensor(leaf, device), tree)
    stacks = made["layers"]["ffn"].pop("experts")
    up = torch.cat([stacks["w1"], stacks["w3"]], 2)
    return made, list(zip(up, stacks["w2"], strict=True))


def drawn(cfg: ModelConfig, device: Any, sets: int) -> tuple[Any, list[tuple[Tensor, Tensor]]]:
    """Random bfloat16 weights on the device; what the release keeps in float32 stays there.

    Layers share `sets` stacks of experts, in turns: what a step reads is as much as with stacks of
    their own, since no cache of the chip holds what one layer reads until another reads it again.
    """
    generator = torch.Generator(device).manual_seed(0)

    def draw(leaf: Any) -> Tensor:
        spec = leaf.codes if params.is_weight(leaf) else leaf
        dtype = torch.float32 if spec.storage == "F32" else torch.bfloat16
        made = torch.empty(spec.shape, dtype=dtype, device=device)
        if spec.constant:
            return made.fill_(spec.init)
        return made.normal_(0, float(spec.init), generator=generator)

    tree = params.abstract(dataclasses.replace(cfg, quantized=False))
    stacks = tree["layers"]["ffn"].pop("experts")
    _, _, width, d = stacks["w1"].shape

    def stack() -> tuple[Tensor, Tensor]:
        shapes = (cfg.n_routed_experts, 2 * width, d), (cfg.n_routed_experts, d, width)
        made = [torch.empty(each, dtype=torch.bfloat16, device=device) for each in shapes]
        return tuple(x.normal_(0, x.shape[-1] ** -0.5, generator=generator) for x in made)

    kept = [stack() for _ in range(sets)]
    made = jax.tree.map(draw, tree, is_leaf=params.is_weight)
    return made, [kept[i % sets] for i in range(cfg.num_hidden_layers)]
