"""How many drafts does coupled acceptance lose against rejection sampling, and is it as predicted?

The same prompts, at the same temperature, are answered in rounds that draft and verify a whole
block, once by each rule. Measured: the share of rounds that accept draft k and all before it, and
the mean accepted length, with the standard error over prompts. Predicted at the same rounds, from
the distributions p of the target and q of the drafter fed the true tokens x: draft k and all before
it are accepted with probability

    E_x [ a_1(x_1) / p_1(x_1) ... a_(k-1)(x_(k-1)) / p_(k-1)(x_(k-1))  sum_v a_k(v) ]

where a(v) is the probability that target and draft both say v and the draft is accepted:
1 / sum_j max(p_j / p_v, q_j / q_v) by coupled acceptance, min(p_v, q_v) by rejection (then the sums
are `sampling.acceptance_probability` and 1 - TV).

    python bench/acceptance.py --machine cpu2
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from environment import machine, write_result
from speculation import prompts

import deepinfer_jax as di
from deepinfer_jax import rows as row_sets
from deepinfer_jax import sampling as samplers
from deepinfer_jax.model import forward, head
from deepinfer_jax.training import draft as training

WIDTH, STEPS = 256, 48  # longest prompt and reply together; rounds

_prefill = jax.jit(di.prefill, static_argnames=("cfg", "numerics"))
_decode = jax.jit(
    di.decode_many, static_argnames=("cfg", "numerics", "steps", "size", "rows", "mode")
)


def padded(asked: list[dict[str, Any]]) -> tuple[np.ndarray, np.ndarray]:
    """Tokens [B, width of the longest] and lengths [B]."""
    lengths = np.array([len(each["tokens"]) for each in asked], np.int32)
    tokens = np.zeros((len(asked), lengths.max()), np.int32)
    for row, each in zip(tokens, asked, strict=True):
        row[: len(each["tokens"])] = each["tokens"]
    return tokens, lengths


@dataclasses.dataclass(frozen=True)
class Played:
    """One run: by prompt its sequence, the anchors of its rounds and what they accepted.

    Only rounds that verified a whole block with a block of tokens behind the anchor are kept.
    """

    sequences: list[list[int]]
    anchors: list[np.ndarray]
    accepted: list[np.ndarray]


def play(model: di.Model, asked: list[dict[str, Any]], temperature: float, mode: str) -> Played:
    """Answer the prompts, at most STEPS rounds each."""
    tokens, lengths = padded(asked)
    b, cfg, size = len(asked), model.cfg, model.cfg.most_drafts
    options = jax.device_put(di.make_sampling(b, temperature, seeds=range(b)))
    cache = di.init_cache(cfg, model.numerics, b, WIDTH)
    rows = row_sets.batch_rows(tokens, lengths)
    first, cache = _prefill(model.params, model.tables, rows, cache, options, cfg, model.numerics)
    running = di.Running(
        tokens=first.token,
        active=first.token != cfg.eos_token_id,
        left=jnp.asarray(WIDTH - lengths - 1),
        stops=jnp.full((b, 1), cfg.eos_token_id, jnp.int32),
    )
    made, *_ = _decode(
        model.params, model.tables, running, cache, options, cfg, model.numerics, steps=STEPS,
        size=size, mode=mode,
    )  # fmt: skip
    made, first = jax.device_get((made, first.token))
    played = Played([], [], [])
    for row in range(b):
        sequence, rounds = asked[row]["tokens"] + [int(first[row])], []
        for step in np.flatnonzero(made.emitted[:, row].any(axis=1)):
            rounds.append((len(sequence) - 1, made.accepted[step, row], made.scheduled[step, row]))
            sequence += made.sampled.token[step, row][made.emitted[step, row]].tolist()
        kept = [
            (anchor, accepted)
            for anchor, accepted, scheduled in rounds
            if scheduled == size and anchor + size < len(sequence)
        ]
        played.sequences.append(sequence)
        played.anchors.append(np.array([anchor for anchor, _ in kept], np.int32))
        played.accepted.append(np.array([accepted for _, accepted in kept], np.int32))
    return played


@functools.partial(jax.jit, static_argnames="mode")
def _survival(made: jax.Array, target: jax.Array, following: jax.Array, heat: float, mode: str):
    """[A, N] of the formula above for logits [A, N, V] and the true tokens [A, N]."""
    q, p = (jax.nn.softmax(x.astype(jnp.float32) / heat, axis=-1) for x in (made, target))
    p_x, q_x = (jnp.take_along_axis(x, following[..., None], axis=-1) for x in (p, q))
    if mode == "coupled":
        whole = samplers.acceptance_probability(p, q)
        worst = jnp.maximum(p / p_x, q / jnp.maximum(q_x, 1e-30))
        ratio = 1 / (worst.sum(axis=-1) * p_x[..., 0])
    else:
        whole = jnp.minimum(p, q).sum(axis=-1)
        ratio = jnp.minimum(q_x / p_x, 1)[..., 0]
    before = jnp.cumprod(ratio, axis=-1)
    return jnp.concatenate([jnp.ones_like(before[:, :1]), before[:, :-1]], axis=-1) * whole


def predicted(model: di.Model, played: Played, temperature: float, mode: str) -> np.ndarray:
    """Mean survival [N] at the rounds that were played."""
    cfg, size = model.cfg, model.cfg.most_drafts
    found = []
    for sequence, anchors in zip(played.sequences, played.anchors, strict=True):
        if not len(anchors):
            continue
        tokens = np.zeros((1, WIDTH), np.int32)
        tokens[0, : len(sequence)] = sequence
        wide = np.full((1, STEPS), anchors[0], np.int32)
        wide[0, : len(anchors)] = anchors
        made, target = _logits(
            model.params, model.tables, tokens, np.array([len(sequence)], np.int32), wide, cfg,
            model.numerics,
        )  # fmt: skip
        following = tokens[0][wide[0][:, None] + 1 + np.arange(size)]
        survival = _survival(made, target, following, temperature, mode)
        found.append(np.asarray(survival)[: len(anchors)])
    return np.concatenate(found).mean(axis=0)


@functools.partial(jax.jit, static_argnames=("cfg", "numerics"))
def _logits(params, tables, tokens, lengths, positions, cfg, numerics):
    """Logits [A, N, V] of the drafter, fed the true tokens, and of the target at anchors [1, A]."""
    size = cfg.most_drafts
    rows = row_sets.batch_rows(tokens, lengths)
    hidden, _ = forward.forward(params, tables, rows, None, cfg, numerics, length=tokens.shape[1])
    anchors = training.Anchors(positions, jnp.ones((*positions.shape, size), bool))
    made = training.heads(params, tables, hidden.taps, tokens, anchors, cfg, numerics)
    place = positions[..., None] + jnp.arange(size, dtype=jnp.int32)
    output = hidden.output[place.reshape(-1)]
    return made.logits, head.logits(params, output, numerics).reshape(made.logits.shape)


def answer(played: Played, expected: np.ndarray, size: int) -> dict[str, Any]:
    """What one rule did, beside what was expected of it."""
    counts = np.concatenate(played.accepted)
    survival = [float(np.mean(counts > k)) for k in range(size)]
    rng, groups = np.random.default_rng(0), [each for each in played.accepted if len(each)]
    drawn = [
        np.mean(np.concatenate([groups[i] for i in rng.integers(0, len(groups), len(groups))]))
        for _ in range(200)
    ]
    return {
        "rounds": len(counts),
        "survival": survival,
        "accepted": sum(survival),
        "standard_error": float(np.std(drawn)),
        "predicted_survival": expected.tolist(),
        "predicted_accepted": float(expected.sum()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--machine", default="local", help="short name for the result file")
    parser.add_argument("--rows", help="form of the numerics, default as `load` chooses")
    parser.add_argument("--count", type=int, default=64, help="prompts")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.7, 1.0])
    parser.add_argument("--out", type=Path, help="folder of the result, default bench/results")
    given = parser.parse_args()
    start, model, found = machine(), di.load("spark-tiny", rows=given.rows), []
    for temperature in given.temperatures:
        asked = prompts(given.count, temperature, WIDTH)
        asked = [each for each in asked if len(each["tokens"]) < WIDTH // 2]
        row: dict[str, Any] = {"temperature": temperature, "prompts": len(asked)}
        for mode in ("coupled", "rejection"):
            played = play(model, asked, temperature, mode)
            expected = predicted(model, played, temperature, mode)
            row[mode] = answer(played, expected, model.cfg.most_drafts)
        # Lengths count the token that needs no draft.
        for name, key in (("length_lost", "accepted"), ("predicted_length_lost",
                                                        "predicted_accepted")):  # fmt: skip
            row[name] = 1 - (1 + row["coupled"][key]) / (1 + row["rejection"][key])
        found.append(row)
        print(row, flush=True)
    print(write_result(
        "acceptance", given.machine, __doc__,
        {"name": "spark-tiny", "numerics": model.numerics.fingerprint(), "count": given.count},
        {"results": found}, given.out, start,
    ))  # fmt: skip


if __name__ == "__main__":
    main()
