"""The backbone, one row at a time (docs/model.md 4, 7, 10, 11).

Nothing here is shared with the package under test: the oracle is a second reading of
docs/model.md. It is slow on purpose: Python lists instead of rings, float64 instead of bf16.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from . import engram, hyper, memory, moe, rope
from .attention import Attention
from .basics import Params, norm
from .draft import Drafter
from .layout import Layout
from .state import Draft, Record, State

REPLAY = ("off", "mask", "compact")


class Oracle:
    """Logits, choices and state of a text model with optional image rows, in float64.

    config: the nested Hugging Face form. weights: released name -> dequantized array.
    token_map [V]: compressed id of every token id. quantize_kv keeps the KV and index round trips
    (the modes `fp32_kvq` and `fp32` of the goldens). quantize_activations rounds the inputs of
    fp8 and fp4 linears; it acts only if the config has a `quantization_config`, since otherwise
    no linear is stored that way. replay = (mode, keep) truncates the decoder part of a prompt.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        weights: Mapping[str, np.ndarray],
        token_map: np.ndarray,
        quantize_kv: bool = False,
        quantize_activations: bool = False,
        replay: tuple[str, int] = ("off", 0),
    ):
        self.text = config["text_config"]
        self.layout = Layout(self.text)
        self.pad = int(token_map[config["pad_token_id"]])
        self.token_map = token_map
        self.replay, self.keep = replay
        self._check_replay()
        wide = {name: np.asarray(value, np.float64) for name, value in weights.items()}
        stored_low = bool(config.get("quantization_config"))
        self.params = Params(wide, quantize_activations and stored_low)
        self.quantize_kv = quantize_kv
        self.eps = self.text["rms_norm_eps"]
        self.hashes = engram.hashes(self.text)
        self.base = rope.base_frequencies(self.text)
        self.yarn = rope.yarn_frequencies(self.text)
        self.drafter = Drafter(self.params, self.text, self.base, quantize_kv)

    def _check_replay(self) -> None:
        if self.replay not in REPLAY:
            raise ValueError(f"replay must be one of {REPLAY}, got {self.replay!r}")
        window, first = self.text["sliding_window"], self.layout.n_encoder
        if self.replay == "off":
            return
        if self.keep < window:
            raise ValueError(f"replay must keep at least the window {window}, got {self.keep}")
        if first is None or any(layer >= first for layer in self.text["engram_layer_ids"]):
            raise ValueError("replay needs a ratio-1 layer and every Engram layer before it")
        if any(layer < first for layer in self.text["dspark_target_layer_ids"]):
            raise ValueError(f"replay needs every draft tap at layer {first} or later")

    def new_state(self) -> State:
        """The state of an empty sequence."""
        sources = self.text["kv_source_layer_ids"]
        return State(
            window={layer: {} for layer in self.layout.layers},
            context={layer: {} for layer in self.layout.draft_layers},
            compressed={layer: [] for layer in sources},
            index_keys={layer: [] for layer in sources},
            pending={layer: [] for layer in sources},
        )

    def prefill(
        self,
        state: State,
        tokens: Sequence[int],
        images: Mapping[int, np.ndarray] | None = None,
    ) -> list[Record]:
        """Feed a whole prompt; `images` maps positions inside image spans to embeddings [D].

        With replay, `state` must be empty: the clip depends on the length of the whole prompt.
        """
        if self.replay != "off":
            if state.length:
                raise ValueError(
                    f"replay needs the whole prompt at once, got {state.length} before"
                )
            state.clip = max(0, len(tokens) - self.keep)
        images, start = images or {}, state.length
        return [self.step(state, t, images.get(start + i)) for i, t in enumerate(tokens)]

    def step(self, state: State, token: int, image: np.ndarray | None = None) -> Record:
        """Feed one token, updating `state`; `image` [D] replaces the embedding inside a span."""
        position, dead = state.length, image is not None
        state.ids.append(int(self.token_map[token]) if not dead else self.pad)
        state.dead.append(dead)
        x = np.asarray(image, np.float64) if dead else self.params["embed.weight"][token]
        record = Record(position, x)
        streams = np.tile(x, (self.text["hc_mult"], 1))
        pre = np.eye(len(streams))[0]
        topk, taps = np.zeros(0, int), []
        for layer in self.layout.layers:
            streams = self._engram(layer, streams, state, record)
            if layer in self.text["dspark_target_layer_ids"]:
                taps.append(streams.mean(axis=0))
            params = self.params.under(f"layers.{layer}")
            mix = hyper.mix_of(params, "attn", streams, self.text)
            x = norm(pre @ streams, params["attn_norm.weight"], self.eps)
            if self.layout.makes_kv(layer):
                self._remember(layer, x, state)
            if self._drops(layer, position, state):
                return record
            y, topk = self._attention(layer, x, topk, state, record)
            streams, pre = hyper.expand(mix, y, streams), mix.pre
            streams, pre = self._experts(layer, streams, pre, dead, record)
        self._finish(streams, pre, taps, state, record)
        return record

    def draft(self, state: State, anchor: int, block: int | None = None) -> Draft:
        """Greedy drafts after `anchor`, the token chosen for position `state.length`."""
        return self.drafter.draft(state, anchor, block or self.text["dspark_block_size"])

    def _drops(self, layer: int, position: int, state: State) -> bool:
        """Compact replay: a row below the clip ends after it gave the decoder its global KV."""
        clipped = self.replay == "compact" and position < state.clip
        return clipped and self.layout.in_decoder(layer)

    def _engram(self, layer: int, streams: np.ndarray, state: State, record: Record) -> np.ndarray:
        if layer not in self.hashes:
            return streams
        position = record.position
        rows = self.hashes[layer].rows(state.ids, state.dead, position, self.pad)
        params = self.params.under(f"layers.{layer}.engram")
        streams = engram.write(params, streams, rows, state.dead[position], self.eps)
        record.engram_rows[layer], record.after_engram[layer] = rows, streams
        return streams

    def _frequencies(self, layer: int) -> np.ndarray:
        return self.yarn if self.layout.ratio(layer) else self.base

    def _remember(self, layer: int, x: np.ndarray, state: State) -> None:
        """A Full layer pools its input and stores an entry when a group is complete."""
        params = self.params.under(f"layers.{layer}.attn")
        ratio = self.layout.ratio(layer)
        compressor = memory.Compressor(params, self.text, self.yarn, ratio, self.quantize_kv)
        latent = compressor.latent(x, state.pending[layer])
        if latent is not None:
            row, key = compressor.entry(latent, len(state.compressed[layer]))
            state.compressed[layer].append(row)
            state.index_keys[layer].append(key)

    def _attention(
        self, layer: int, x: np.ndarray, topk: np.ndarray, state: State, record: Record
    ) -> tuple[np.ndarray, np.ndarray]:
        """Output [D] of the attention sub-layer and the top-k list that later layers inherit."""
        position, ratio = record.position, self.layout.ratio(layer)
        params = self.params.under(f"layers.{layer}.attn")
        attention = Attention(params, self.text, self._frequencies(layer), self.quantize_kv)
        latent = attention.query_latent(x)
        bound = state.clip if self.layout.in_decoder(layer) else 0
        lowest = max(position - self.text["sliding_window"] + 1, bound)
        rows = state.window[layer]
        rows[position] = attention.window_row(x, position)
        keys = [rows[at] for at in range(lowest, position + 1)]
        if ratio:
            if self.layout.makes_index(layer):
                topk = self._select(layer, x, latent, state, record)
            compressed = state.compressed[self.layout.kv_source(layer)]
            keys += [compressed[group] for group in topk]
        y = attention(latent, keys, position)
        record.attn_out.append(y)
        return y, topk

    def _select(
        self, layer: int, x: np.ndarray, latent: np.ndarray, state: State, record: Record
    ) -> np.ndarray:
        """Top-k list of an index source; the stored entries are exactly the visible ones."""
        params = self.params.under(f"layers.{layer}.attn.indexer")
        indexer = memory.Indexer(params, self.text, self.yarn, self.quantize_kv)
        keys = state.index_keys[self.layout.kv_source(layer)]
        scores = indexer.scores(x, latent, keys, record.position)
        source, size = self.layout.candidate_source, self.text.get("candidate_block_size")
        if layer == source:
            marks, gap = memory.candidate_blocks(scores, self.text["candidate_topk_blocks"], size)
            record.candidate_blocks[layer], record.block_gap[layer] = marks, gap
        elif self.layout.uses_candidates(layer):
            scores = memory.restrict(scores, record.candidate_blocks[source], size)
        chosen = memory.select(scores, self.text["index_topk"])
        record.index_scores[layer] = scores
        record.index_topk[layer], record.index_gap[layer] = chosen.positions, chosen.gap
        return chosen.positions

    def _experts(
        self, layer: int, streams: np.ndarray, pre: np.ndarray, image: bool, record: Record
    ) -> tuple[np.ndarray, np.ndarray]:
        params = self.params.under(f"layers.{layer}")
        mix = hyper.mix_of(params, "ffn", streams, self.text)
        x = norm(pre @ streams, params["ffn_norm.weight"], self.eps)
        active = self.text["num_experts_per_tok"]
        y, route = moe.mixture(params.under("ffn"), x, active, image, self.text)
        streams = hyper.expand(mix, y, streams)
        record.ffn_out.append(y)
        record.block_out.append(streams)
        record.pre_mix.append(mix.pre)
        record.router_ids.append(route.experts)
        record.router_weights.append(route.weights)
        record.router_gap.append(route.gap)
        return streams, mix.pre

    def _finish(
        self, streams: np.ndarray, pre: np.ndarray, taps: list, state: State, record: Record
    ) -> None:
        """Head, and the draft layers' context rows for this position."""
        record.final_norm = norm(pre @ streams, self.params["norm.weight"], self.eps)
        record.logits = self.params.linear("head", record.final_norm)
        if self.layout.draft_layers:
            record.main_hidden = np.concatenate(taps)
            if record.position >= state.clip:
                self.drafter.remember(state, record.main_hidden, record.position)
