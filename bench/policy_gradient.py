"""Do sampler and trainer agree in every bit while a policy learns?

A small policy-gradient loop on the shipped model: groups of replies to held-out sorting problems,
reward 1 for a right answer, advantages within the group, Adam. Every step samples with the weights
of that step (with and without drafts in turns) and differentiates the log-probs of the same tokens;
the largest |trainer - sampler| of raw and processed log-probs must be exactly 0. Exit status 1
otherwise.

    python bench/policy_gradient.py --machine cpu2
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from environment import write_result

import deepinfer_jax as di
from deepinfer_jax import params as parameters
from deepinfer_jax import rl
from deepinfer_jax.training import corpus, dataset, evaluate

WIDTH = 80  # tokens of a prompt at most

_rollout = jax.jit(rl.rollout, static_argnames=("cfg", "numerics", "new", "size"))
_gradient = jax.jit(rl.policy_gradient, static_argnames=("cfg", "numerics", "remat"))


@dataclasses.dataclass(frozen=True)
class Problems:
    """tokens [B, P] of the prompts, lengths [B], and their examples; groups of equal prompts."""

    tokens: np.ndarray
    lengths: np.ndarray
    examples: list[corpus.Example]


def problems(step: int, groups: int, members: int) -> Problems:
    """Sorting problems that training held out; sampled at temperature 1, many come out wrong."""
    drawn = corpus.heldout("sort", groups, seed=1000 + step)
    examples = [example for example in drawn for _ in range(members)]
    prompts = [corpus.render(example, dataset.load_tokenizer())[0] for example in examples]
    tokens = np.zeros((len(prompts), WIDTH), np.int32)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = prompt
    return Problems(tokens, np.array([len(prompt) for prompt in prompts], np.int32), examples)


def rewards(made: rl.Rollout, asked: Problems) -> np.ndarray:
    """1 where the example's own check accepts the reply, else 0."""
    rows = zip(made.tokens, asked.lengths, made.lengths, asked.examples, strict=True)
    replies = [
        evaluate.Reply(example, [], row[start:stop].tolist(), 0)
        for row, start, stop, example in rows
    ]
    return np.array([evaluate.is_right(reply) for reply in replies], np.float32)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--machine", default="local", help="short name for the result file")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--groups", type=int, default=4, help="prompts of a step")
    parser.add_argument("--members", type=int, default=8, help="replies to each prompt")
    parser.add_argument("--new", type=int, default=96, help="most tokens of a reply")
    parser.add_argument("--rate", type=float, default=3e-5)
    parser.add_argument("--out", type=Path, help="folder of the result, default bench/results")
    given = parser.parse_args()
    model = di.load("spark-tiny", weights="stored")
    weights: Any = parameters.widen(model.params)
    optimizer = optax.adam(given.rate)
    state = optimizer.init(weights)
    stops = np.array([model.cfg.eos_token_id], np.int32)
    count, log = given.groups * given.members, []
    for step in range(given.steps):
        start = time.perf_counter()
        asked = problems(step, given.groups, given.members)
        seeds = [1_000_000 * step + member for member in range(count)]
        sampling = di.make_sampling(count, 1.0, 0.95, seeds=seeds)
        size = model.cfg.dspark_block_size * (step % 2)
        made = jax.tree.map(np.asarray, _rollout(
            weights, model.tables, asked.tokens, asked.lengths, sampling, stops, model.cfg,
            model.numerics, new=given.new, size=size,
        ))  # fmt: skip
        reward = rewards(made, asked)
        grouped = reward.reshape(given.groups, given.members)
        advantage = (grouped - grouped.mean(axis=1, keepdims=True)).reshape(-1)
        slope, seen = _gradient(
            weights, model.tables, made, jnp.asarray(advantage), sampling, model.cfg,
            model.numerics, remat=True,
        )  # fmt: skip
        updates, state = optimizer.update(slope, state)
        weights = optax.apply_updates(weights, updates)
        log.append({
            "reward": float(reward.mean()), "tokens": int(seen.tokens), "drafts": size,
            "raw_difference": float(seen.raw), "processed_difference": float(seen.processed),
            "kl": float(seen.kl), "s": time.perf_counter() - start,
        })  # fmt: skip
        print(step, {name: round(value, 6) for name, value in log[-1].items()}, flush=True)
    settings = {
        "name": "spark-tiny", "numerics": dataclasses.asdict(model.numerics),
        **{name: getattr(given, name) for name in ("steps", "groups", "members", "new", "rate")},
    }  # fmt: skip
    results = {
        "largest_raw_difference": max(each["raw_difference"] for each in log),
        "largest_processed_difference": max(each["processed_difference"] for each in log),
        "largest_kl": max(each["kl"] for each in log),
        "rewards": [each["reward"] for each in log],
        "tokens": sum(each["tokens"] for each in log),
    }
    found = {"samples": log, "results": results}
    path = write_result("policy_gradient", given.machine, __doc__, settings, found, given.out)
    print(path)
    return 1 if any(each["raw_difference"] or each["processed_difference"] for each in log) else 0


if __name__ == "__main__":
    sys.exit(main())
