"""How many drafts does coupled acceptance lose against rejection sampling, and is it as predicted?

The same prompts, at the same temperature, are answered in rounds that draft and verify a whole
block, once by each rule. Measured: the share of rounds that accept draft k and all before it, and
the mean accepted length. Predicted, from the distributions p of the target and q of the drafter at
every anchor of the coupled replies (drafter fed the true tokens): for one draft
sum_i 1 / sum_j max(p_j/p_i, q_j/q_i) by coupled acceptance and 1 - TV(p, q) by rejection; the
product along a block is what survives.

    python bench/acceptance.py --machine cpu2
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from environment import machine, versions, write_result
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


def play(
    model: di.Model, asked: list[dict[str, Any]], temperature: float, mode: str
) -> tuple[np.ndarray, list[list[int]]]:
    """Accepted drafts of every round that had a whole block before it, and the sequences."""
    tokens, lengths = padded(asked)
    b, cfg = len(asked), model.cfg
    options = jax.device_put(di.make_sampling(b, temperature, seeds=range(b)))
    cache = di.init_cache(cfg, model.numerics, b, WIDTH)
    rows = row_sets.batch_rows(tokens, lengths)
    first, cache = _prefill(model.params, model.tables, rows, cache, options, cfg, model.numerics)
    size = cfg.dspark_block_size
    running = di.Running(
        tokens=first.token,
        active=first.token != cfg.eos_token_id,
        left=jnp.asarray(WIDTH - lengths - 1 - size),
        stops=jnp.full((b, 1), cfg.eos_token_id, jnp.int32),
    )
    made, *_ = _decode(
        model.params, model.tables, running, cache, options, cfg, model.numerics, steps=STEPS,
        size=size, mode=mode,
    )  # fmt: skip
    made, first = jax.device_get((made, first.token))
    counts, sequences = [], []
    for row in range(b):
        sequence = asked[row]["tokens"] + [int(first[row])]
        for step in np.flatnonzero(made.emitted[:, row].any(axis=1)):
            emitted = made.sampled.token[step, row][made.emitted[step, row]].tolist()
            sequence += emitted
            if cfg.eos_token_id not in emitted:  # the end of a reply cuts its last round short
                counts.append(int(made.accepted[step, row]))
        sequences.append(sequence)
    return np.array(counts), sequences


@jax.jit
def _probabilities(made: jax.Array, target: jax.Array, temperature: jax.Array):
    q, p = (jax.nn.softmax(x.astype(jnp.float32) / temperature, axis=-1) for x in (made, target))
    coupled = samplers.acceptance_probability(p, q)
    rejection = jnp.minimum(p, q).sum(axis=-1)
    return jnp.cumprod(coupled, axis=-1), jnp.cumprod(rejection, axis=-1)


def predicted(
    model: di.Model, asked: list[dict[str, Any]], sequences: list[list[int]], temperature: float
) -> tuple[np.ndarray, np.ndarray]:
    """Mean survival [N] of both rules over every anchor of the replies."""
    cfg, size = model.cfg, model.cfg.dspark_block_size

    def logits(params, tokens, lengths, positions):
        rows = row_sets.batch_rows(tokens, lengths)
        hidden, _ = forward.forward(
            params, model.tables, rows, None, cfg, model.numerics, length=tokens.shape[1]
        )
        anchors = training.Anchors(positions, jnp.ones((*positions.shape, size), bool))
        made = training.heads(
            params, model.tables, hidden.taps, tokens, anchors, cfg, model.numerics
        )
        place = positions[..., None] + jnp.arange(size, dtype=jnp.int32)
        output = hidden.output[place.reshape(-1)]
        return made.logits, head.logits(params, output, model.numerics).reshape(made.logits.shape)

    run, both = jax.jit(logits), []
    for each, sequence in zip(asked, sequences, strict=True):
        last = len(sequence) - 1 - size  # the last anchor with a whole block behind it
        positions = np.arange(len(each["tokens"]), last + 1, dtype=np.int32)
        if not len(positions):
            continue
        tokens = np.zeros((1, WIDTH), np.int32)
        tokens[0, : len(sequence)] = sequence
        wide = np.full((1, WIDTH), positions[0], np.int32)
        wide[0, : len(positions)] = positions
        made, target = run(model.params, tokens, np.array([len(sequence)], np.int32), wide)
        found = _probabilities(made[: len(positions)], target[: len(positions)], temperature)
        both.append(np.stack(found))
    mean = np.concatenate(both, axis=1).mean(axis=1)
    return mean[0], mean[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--machine", default="local", help="short name for the result file")
    parser.add_argument("--count", type=int, default=64, help="prompts")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.7, 1.0])
    parser.add_argument("--out", type=Path, help="folder of the result, default bench/results")
    given = parser.parse_args()
    start, model, found = machine(), di.load("spark-tiny"), []
    size = model.cfg.dspark_block_size
    for temperature in given.temperatures:
        asked = prompts(given.count, temperature, WIDTH)
        asked = [each for each in asked if len(each["tokens"]) < WIDTH // 2]
        row: dict[str, Any] = {"temperature": temperature, "prompts": len(asked)}
        for mode in ("coupled", "rejection"):
            counts, sequences = play(model, asked, temperature, mode)
            survival = [float(np.mean(counts > k)) for k in range(size)]
            row[mode] = {"rounds": len(counts), "survival": survival, "accepted": sum(survival)}
            if mode == "coupled":
                expected = predicted(model, asked, sequences, temperature)
        for mode, values in zip(("coupled", "rejection"), expected, strict=True):
            row[mode]["predicted_survival"] = values.tolist()
            row[mode]["predicted_accepted"] = float(values.sum())
        # Both count the token that needs no draft.
        row["length_lost"] = 1 - (1 + row["coupled"]["accepted"]) / (
            1 + row["rejection"]["accepted"]
        )
        row["predicted_length_lost"] = 1 - (1 + row["coupled"]["predicted_accepted"]) / (
            1 + row["rejection"]["predicted_accepted"]
        )
        found.append(row)
        print(row, flush=True)
    print(write_result("acceptance", given.machine, {
        "question": __doc__.splitlines()[0],
        "machine": start,
        "versions": versions(),
        "config": {"name": "spark-tiny", "numerics": model.numerics.fingerprint(),
                   "count": given.count},
        "results": found,
    }, given.out))  # fmt: skip


if __name__ == "__main__":
    main()
