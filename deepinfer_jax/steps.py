"""From rows to numbers: `extend` runs rows of any kind, `prefill` prompts, `score` whole sequences.

State in, state out: all are pure, take arrays as arguments and can be jitted with `cfg`, `numerics`
and the sizes static. Decoding, with and without drafts, is in `rounds`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from deepinfer_jax import edits as editing
from deepinfer_jax import layout, summaries
from deepinfer_jax import rows as row_sets
from deepinfer_jax import sampling as samplers
from deepinfer_jax.cache import Cache
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.edits import Edits
from deepinfer_jax.mirror import Split
from deepinfer_jax.model import draft, head, moe
from deepinfer_jax.model.capture import Capture, Captured
from deepinfer_jax.model.forward import OFF, Hidden, Replay, forward
from deepinfer_jax.numerics import Numerics
from deepinfer_jax.rows import Rows
from deepinfer_jax.sampling import Sampled, Sampling
from deepinfer_jax.tables import Tables

Loads = dict[str, jax.Array]  # [L, E] int32 of "layers" and "draft": tokens that each expert had
SCORE_ROWS = 1024  # rows whose logits exist at once while scoring


def extend(
    params: Any, tables: Tables, rows: Rows, cache: Cache, cfg: ModelConfig, numerics: Numerics,
    *, replay: Replay = OFF, prompt_lengths: jax.Array | None = None,
    capture: Capture | None = None, split: Split | None = None,
) -> tuple[Hidden, Cache]:  # fmt: skip
    """Run `rows` through the backbone and store the drafter's context; lengths stay as they are.

    capture: what of the inside to give back as `Hidden.captured` (static; `forward`).
    """
    hidden, after = forward(
        params, tables, rows, cache, cfg, numerics, replay=replay, prompt_lengths=prompt_lengths,
        capture=capture, split=split,
    )  # fmt: skip
    assert after is not None  # a cache went in
    if cfg.num_nextn_predict_layers:
        after = draft.store_context(params, tables, hidden, after, cfg, numerics)
    return hidden, after


def prefill(
    params: Any, tables: Tables, rows: Rows, cache: Cache, sampling: Sampling, cfg: ModelConfig,
    numerics: Numerics, *, replay: Replay = OFF, prompt_lengths: jax.Array | None = None,
    mask: jax.Array | None = None, edits: Edits | None = None, split: Split | None = None,
) -> tuple[Sampled, Cache]:  # fmt: skip
    """Run prompt rows (whole prompts or chunks) and sample the next token of every slot.

    Args:
      rows: T rows, continuing what the cache holds of each slot.
      sampling: parameters of the B slots.
      mask: [B, V] bool, True where the token to be sampled is allowed; default all.
      edits: of the B slots, what they change of their logits; default nothing.
      split: how devices share the rows, as in `forward`.

    Returns:
      (Sampled of [B], cache). The sample of a slot is that of its last row here, to be used when
      the row is the prompt's last; slots without rows give an arbitrary sample. `cache.lengths`
      becomes the end of each slot's rows.
    """
    sampled, _, cache = run_prompts(
        params, tables, rows, cache, sampling, cfg, numerics, replay=replay,
        prompt_lengths=prompt_lengths, mask=mask, edits=edits, split=split,
    )  # fmt: skip
    return sampled, cache


def run_prompts(
    params: Any, tables: Tables, rows: Rows, cache: Cache, sampling: Sampling, cfg: ModelConfig,
    numerics: Numerics, *, replay: Replay = OFF, prompt_lengths: jax.Array | None = None,
    mask: jax.Array | None = None, edits: Edits | None = None, split: Split | None = None,
) -> tuple[Sampled, Loads | None, Cache]:  # fmt: skip
    """`prefill` that also tells where tokens went, with experts on slots; None without."""
    check_sampling(sampling, cache.slots)
    check_mask(mask, cache.slots, None, cfg)
    rows = row_sets.seeded(rows, sampling.seed)
    hidden, cache = extend(
        params, tables, rows, cache, cfg, numerics, replay=replay, prompt_lengths=prompt_lengths,
        split=split,
    )  # fmt: skip
    last = last_rows(hidden.rows, cache.slots)
    logits = head.logits(params, hidden.output[last], numerics)
    # From the call's rows: a compact replay may have dropped every row of a slot's early chunk.
    target = jnp.where(rows.real, rows.slots, cache.slots)
    ends = jnp.zeros((cache.slots,), jnp.int32).at[target].max(rows.positions + 1, mode="drop")
    lengths = jnp.where(ends > 0, ends, cache.lengths)
    own, allowed = editing.edited(editing.spoken(logits, cfg), edits, ends, mask)
    sampled = samplers.sample(logits, sampling, ends, allowed, own)
    loads = loads_of(params, hidden.routed, rows, cfg)
    return sampled, loads, dataclasses.replace(cache, lengths=lengths)


def loads_of(params: Any, routed: jax.Array, rows: Rows, cfg: ModelConfig) -> Loads | None:
    """Where the tokens of real `rows` went in the backbone; None where no expert has a slot."""
    if not layout.has_placement(params):
        return None
    return {"layers": moe.counted(routed, rows.real, cfg.n_routed_experts)}


def check_sampling(sampling: Sampling, count: int) -> None:
    """Raise ValueError unless `sampling` has `count` rows.

    One row of parameters for each sequence: a single one would be broadcast, noise and all.
    """
    given = sampling.seed.shape[0]
    if given != count:
        raise ValueError(
            f"sampling has parameters of {given} rows for {count} sequences or slots: make one row "
            "for each, with a seed of its own (make_sampling)"
        )


def check_mask(
    mask: jax.Array | np.ndarray | None, slots: int, places: int | None, cfg: ModelConfig
) -> None:
    """Raise ValueError unless `mask` is bool [B, V], or [B, `places`, V] where those are given."""
    if mask is None:
        return
    whole, each = (slots, cfg.vocab_size), (slots, places, cfg.vocab_size)
    fits = mask.shape == whole or (places is not None and mask.shape == each)
    if not fits or mask.dtype != bool:
        wanted = f"{whole}" if places is None else f"{whole} or {each}"
        raise ValueError(
            f"mask must be bool of shape {wanted} (True: allowed), got {mask.dtype} of {mask.shape}"
        )


def last_rows(rows: Rows, slots: int) -> jax.Array:
    """The number of each slot's last row [B]; 0 where a slot has none."""
    number = jnp.arange(rows.slots.shape[0], dtype=jnp.int32)
    target = jnp.where(rows.real, rows.slots, slots)
    return jnp.zeros((slots,), jnp.int32).at[target].max(number, mode="drop")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Scores:
    """What the sampler saw of tokens [B, S]; entries at or beyond a row's length are arbitrary.

    raw, processed, kept_mass [B, S-1] float32: of token i+1 given tokens 0..i, as in `Sampled`.
    routed [L, B, S, k]: experts of every token, best first.
    top_ids int32, top_logprobs float32 [B, S-1, K]: the most probable tokens at place i+1 and their
    `raw` (`sampling.top_logprobs`); K is 0 unless they were asked for.
    captured: what was asked for of the inside of the model, by sequence.
    """

    raw: jax.Array
    processed: jax.Array
    kept_mass: jax.Array
    routed: jax.Array
    top_ids: jax.Array
    top_logprobs: jax.Array
    captured: Captured | None = None

    __repr__ = summaries.of_fields


def score(
    params: Any, tables: Tables, tokens: jax.Array, lengths: jax.Array, cfg: ModelConfig,
    numerics: Numerics, *, sampling: Sampling | None = None, remat: bool = False, top: int = 0,
    image: jax.Array | None = None, embeddings: jax.Array | None = None,
    capture: Capture | None = None, split: Split | None = None,
) -> Scores:  # fmt: skip
    """Log-probabilities of tokens [B, S] (right-padded, lengths [B]): what the sampler saw.

    sampling: parameters of the B sequences; None is temperature 1 without truncation, where
    `processed` equals `raw`. top: how many of the most probable tokens to name at every place
    (static). image [B, S] bool and embeddings [B, S, D]: where images stand, and what of them, as
    in `Rows`; default text. capture: what of the inside to give back (static; see `forward`).
    split: how devices share the rows, as in `forward`. No cache; differentiable in `params` when
    they are plain floats. The values are the sampler's in every bit, whatever the batch, the
    padding and the prefill, decode and draft schedule.
    """
    b, s = tokens.shape
    if sampling is not None:
        check_sampling(sampling, b)
    rows = row_sets.batch_rows(tokens, lengths)
    if sampling is not None:
        rows = row_sets.seeded(rows, sampling.seed)
    if image is not None and embeddings is not None:
        flat = embeddings.reshape(b * s, -1)
        rows = dataclasses.replace(rows, image=image.reshape(-1), embeddings=flat)
    hidden, _ = forward(
        params,
        tables,
        rows,
        None,
        cfg,
        numerics,
        length=s,
        remat=remat,
        capture=capture,
        split=split,
    )
    following = jnp.concatenate([tokens[:, 1:], tokens[:, :1]], axis=1).reshape(-1)
    each = None
    if sampling is not None:
        each = jax.tree.map(lambda x: jnp.repeat(jnp.asarray(x), s, axis=0), sampling)
    seen = _judge_rows(params, hidden.output, following, each, cfg, numerics, top)
    raw, processed, kept, ids, best = (x.reshape(b, s, *x.shape[1:])[:, :-1] for x in seen)
    routed = hidden.routed.reshape(-1, b, s, hidden.routed.shape[-1])
    inside = None if hidden.captured is None else hidden.captured.by_sequence(b)
    return Scores(raw, processed, kept, routed, ids, best, inside)


def _judge_rows(
    params: Any, output: jax.Array, tokens: jax.Array, sampling: Sampling | None,
    cfg: ModelConfig, numerics: Numerics, top: int,
) -> tuple[jax.Array, ...]:  # fmt: skip
    """(raw, processed, kept mass) of one token per row and (ids, raw) of the `top` most probable,
    in blocks of rows so that few logits exist at once.
    """
    count = output.shape[0]
    block = min(SCORE_ROWS, count)
    pad = -count % block

    @jax.checkpoint
    def one(part):
        x, token, sampling = part
        logits = head.logits(params, x, numerics)
        best = samplers.top_logprobs(logits, top)
        if sampling is None:
            raw = samplers.logprob(logits, token)
            return raw, raw, jnp.ones_like(raw), *best
        seen = samplers.judge(logits, token, sampling, edited=editing.spoken(logits, cfg))
        return seen.logprob_raw, seen.logprob_processed, seen.kept_mass, *best

    def blocks(x):
        padded = jnp.pad(x, [(0, pad)] + [(0, 0)] * (x.ndim - 1))
        return padded.reshape(-1, block, *x.shape[1:])

    parts = jax.tree.map(blocks, (output, tokens, sampling))
    # No -1: where nothing was asked for, K is 0.
    return jax.tree.map(lambda x: x.reshape(count + pad, *x.shape[2:])[:count], lax.map(one, parts))
