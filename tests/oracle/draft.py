"""The DSpark draft head: context rows, the draft block, Markov and confidence (docs/model.md 9)."""

from dataclasses import dataclass

import numpy as np

from . import hyper, moe
from .attention import Attention
from .basics import Params, norm
from .layout import Text
from .state import Draft, State


@dataclass(frozen=True)
class Drafter:
    """The draft layers over the whole model's `params`; greedy drafts only."""

    params: Params
    text: Text
    frequencies: np.ndarray
    quantize_kv: bool

    def remember(self, state: State, main_hidden: np.ndarray, position: int) -> None:
        """Store this position's context row of every draft layer from taps [taps * D]."""
        if not state.context:
            return
        first = self.params.under("mtp.0")
        projected = first.quantized_linear("main_proj", main_hidden)
        feature = norm(projected, first["main_norm.weight"], self.text["rms_norm_eps"])
        for layer, rows in state.context.items():
            rows[position] = self._attention(layer).window_row(feature, position)

    def draft(self, state: State, anchor: int, block: int) -> Draft:
        """Draft `block` tokens after `anchor`, which sits at position `state.length`."""
        noise = self.text["dspark_noise_token_id"]
        tokens = [anchor] + [noise] * (block - 1)
        copies = self.text["hc_mult"]
        streams = [np.tile(self.params["embed.weight"][t], (copies, 1)) for t in tokens]
        pres = [np.eye(copies)[0]] * block
        block_out, router_ids = [], []
        for layer in state.context:
            streams, pres = self._attend(layer, streams, pres, state)
            streams, pres, experts = self._experts(layer, streams, pres)
            block_out.append(np.stack(streams))
            router_ids.append(experts)
        collapsed = [pre @ rows for pre, rows in zip(pres, streams, strict=True)]
        return self._heads(collapsed, anchor, np.stack(block_out), np.stack(router_ids))

    def _attention(self, layer: int) -> Attention:
        params = self.params.under(f"mtp.{layer}.attn")
        return Attention(params, self.text, self.frequencies, self.quantize_kv)

    def _attend(self, layer: int, streams: list, pres: list, state: State) -> tuple[list, list]:
        """Rows see the window of context before the block and every row of the block."""
        params, attention = self.params.under(f"mtp.{layer}"), self._attention(layer)
        first, eps = state.length, self.text["rms_norm_eps"]
        mixes = [hyper.mix_of(params, "attn", rows, self.text) for rows in streams]
        weight = params["attn_norm.weight"]
        xs = [norm(pre @ rows, weight, eps) for pre, rows in zip(pres, streams, strict=True)]
        lowest = max(first - self.text["sliding_window"], state.clip, 0)
        keys = [state.context[layer][at] for at in range(lowest, first)]
        keys += [attention.window_row(x, first + i) for i, x in enumerate(xs)]
        ys = [attention(attention.query_latent(x), keys, first + i) for i, x in enumerate(xs)]
        streams = [hyper.expand(*row) for row in zip(mixes, ys, streams, strict=True)]
        return streams, [mix.pre for mix in mixes]

    def _experts(self, layer: int, streams: list, pres: list) -> tuple[list, list, np.ndarray]:
        params = self.params.under(f"mtp.{layer}")
        weight, eps = params["ffn_norm.weight"], self.text["rms_norm_eps"]
        active = self.text["dspark_num_experts_per_tok"]
        new_streams, new_pres, experts = [], [], []
        for pre, rows in zip(pres, streams, strict=True):
            mix = hyper.mix_of(params, "ffn", rows, self.text)
            x = norm(pre @ rows, weight, eps)
            y, route = moe.mixture(params.under("ffn"), x, active, False, self.text)
            new_streams.append(hyper.expand(mix, y, rows))
            new_pres.append(mix.pre)
            experts.append(route.experts)
        return new_streams, new_pres, np.stack(experts)

    def _heads(
        self, collapsed: list, anchor: int, block_out: np.ndarray, router_ids: np.ndarray
    ) -> Draft:
        """One pass in order: each draft biases the next; confidence reads both vectors."""
        last = self.params.under(f"mtp.{len(block_out) - 1}")
        eps, previous = self.text["rms_norm_eps"], anchor
        base, logits, confidence, ids = [], [], [], []
        for u in collapsed:
            base.append(self.params.linear("head", norm(u, last["norm.weight"], eps)))
            bias = last["markov_head.embed.weight"][previous]
            logits.append(base[-1] + last.linear("markov_head.head", bias))
            confidence.append(last.linear("confidence_head.proj", np.concatenate([u, bias]))[0])
            previous = int(np.argmax(logits[-1]))
            ids.append(previous)
        return Draft(
            np.array(ids),
            np.stack(base),
            np.stack(logits),
            np.array(confidence),
            block_out,
            router_ids,
        )
