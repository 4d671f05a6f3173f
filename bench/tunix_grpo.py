"""Does tunix's own GRPO loop see any difference between this engine's rollouts and its trainer?

The loop is `GRPOLearner` of the installed package `google-tunix`, on the shipped model: questions
of `rl.examples.questions`, groups of replies by `rl.tunix.TunixRollout`, two updates on each batch.
In the first of the two, sampler and trainer have the same weights: tunix's own metrics of the
distance between them (log ratio, importance ratio) must say exactly 0 and 1 in every step; so must
its KL from the reference before the first update. With `--rate 0` both updates are of that kind.
Exit status 1 otherwise.

tunix takes log-sum-exps by plain XLA operations; on a CPU this flag keeps their order:

    XLA_FLAGS=--xla_cpu_experimental_ynn_fusion_type=LIBRARY_FUSION_TYPE_DOT \\
        python bench/tunix_grpo.py --machine cpu2-flag
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from environment import write_result
from jax.sharding import Mesh
from tunix.rl import rl_cluster as clusters
from tunix.rl.grpo import grpo_learner
from tunix.rl.rollout.base_rollout import RolloutConfig

import deepinfer_jax as di
from deepinfer_jax.rl.examples.policy import NEW, WIDTH
from deepinfer_jax.rl.examples.questions import KINDS, question
from deepinfer_jax.rl.tunix import ChatTokenizer, Policy, TunixRollout

METRICS = ("log_ratio/abs_mean", "is_ratio/max", "is_ratio/min", "ppo_kl", "kl")


class Recorder:
    """An aggregation of tunix's metrics that keeps what it was given."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def __call__(self, values: Any) -> Any:
        self.values += [float(value) for value in np.ravel(np.asarray(values))]
        return np.mean(np.asarray(values))


class Watched(TunixRollout):
    """The adapter, which notes how its two log-probs compare: of the sampler, and asked for."""

    sampled: list[np.ndarray]
    largest: float = 0.0
    compared: int = 0
    updates: int = 0

    def generate(self, prompts: Any, rollout_config: Any, **others: Any) -> Any:
        made = super().generate(prompts, rollout_config, **others)
        self.sampled = made.logprobs
        return made

    def get_per_token_logps(self, prompt_tokens: Any, completion_tokens: Any) -> Any:
        found = super().get_per_token_logps(prompt_tokens, completion_tokens)
        for row, own in zip(np.asarray(found), self.sampled, strict=True):
            Watched.largest = max(Watched.largest, float(np.abs(row[: len(own)] - own).max()))
            Watched.compared += len(own)
        return found

    def update_params(self, params: Any, filter_types: Any = None) -> None:
        super().update_params(params, filter_types)
        Watched.updates += 1


def dataset(given: argparse.Namespace, tokenizer: ChatTokenizer) -> list[dict[str, np.ndarray]]:
    """One batch for each step: rendered questions, and their names for the reward."""
    kinds, batches = list(KINDS), []
    for step in range(given.steps):
        names = [f"{step}-{number}/{kinds[number % len(kinds)]}" for number in range(given.prompts)]
        texts = [asked(name).text for name in names]
        prompts = [
            tokenizer.apply_chat_template([{"role": "user", "content": text}]) for text in texts
        ]
        batches.append({"prompts": np.array(prompts), "name": np.array(names)})
    return batches


def asked(name: str) -> Any:
    return question(7, *str(name).split("/"))


def rewards(prompts: Any, completions: list[str], name: Any, **_: Any) -> list[float]:
    """What tunix calls with the texts of the replies."""
    return [asked(each).reward(reply) for each, reply in zip(name, completions, strict=True)]


def learner(given: argparse.Namespace, model: di.Model, tokenizer: ChatTokenizer) -> Any:
    """tunix's learner on one device, and a recorder for each metric."""
    mesh = Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
    config = clusters.ClusterConfig(
        role_to_mesh=dict.fromkeys(
            (clusters.Role.ACTOR, clusters.Role.REFERENCE, clusters.Role.ROLLOUT), mesh
        ),
        rollout_engine=Watched,
        training_config=clusters.RLTrainingConfig(
            actor_optimizer=optax.adam(given.rate),
            eval_every_n_steps=10_000,
            max_steps=2 * given.steps,
        ),
        rollout_config=RolloutConfig(
            max_tokens_to_generate=NEW, max_prompt_length=WIDTH, temperature=given.temperature,
            return_logprobs=True,
        ),
    )  # fmt: skip
    cluster = clusters.RLCluster(
        actor=Policy(model), reference=Policy(model), tokenizer=tokenizer, cluster_config=config
    )
    made = grpo_learner.GRPOLearner(
        rl_cluster=cluster,
        algo_config=grpo_learner.GRPOConfig(
            num_generations=given.members, num_iterations=2, beta=0.04
        ),
        reward_fns=rewards,
    )
    recorders = {name: Recorder() for name in METRICS}
    cluster.actor_trainer.with_rl_metrics_to_log(recorders)
    return made, recorders


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--machine", default="local", help="short name for the result file")
    parser.add_argument("--steps", type=int, default=5, help="batches, two updates each")
    parser.add_argument("--prompts", type=int, default=2)
    parser.add_argument("--members", type=int, default=4)
    parser.add_argument("--rate", type=float, default=1e-4)
    parser.add_argument("--temperature", type=float, default=0.9)
    parser.add_argument("--rows", default="ffi", help="form of the numerics")
    parser.add_argument("--out", type=Path, help="folder of the result, default bench/results")
    given = parser.parse_args()
    model = di.load("spark-tiny", rows=given.rows, weights="stored", max_length=256)
    tokenizer = ChatTokenizer(model.tokenizer)
    start = time.perf_counter()
    made, recorders = learner(given, model, tokenizer)
    made.train(dataset(given, tokenizer))
    seen = {name: recorder.values for name, recorder in recorders.items()}
    same = slice(None, None, 1 if given.rate == 0 else 2)  # updates with the sampler's own weights
    results = {
        "updates": len(seen["kl"]),
        "syncs": Watched.updates,
        "log_ratio_abs_mean": max(seen["log_ratio/abs_mean"][same]),
        "is_ratio_max": max(seen["is_ratio/max"][same]),
        "is_ratio_min": min(seen["is_ratio/min"][same]),
        "ppo_kl": max(map(abs, seen["ppo_kl"][same])),
        "first_reference_kl": seen["kl"][0],
        "logprobs_compared": Watched.compared,
        "largest_logprob_difference": Watched.largest,
    }
    settings = {
        "name": "spark-tiny", "numerics": dataclasses.asdict(model.numerics),
        "tunix": metadata.version("google-tunix"), "flax": metadata.version("flax"),
        **{name: getattr(given, name) for name in
           ("steps", "prompts", "members", "rate", "temperature")},
    }  # fmt: skip
    found = {"samples": {**seen, "seconds": time.perf_counter() - start}, "results": results}
    path = write_result("tunix_grpo", given.machine, __doc__, settings, found, given.out)
    print(results)
    print(path)
    zeros = ("log_ratio_abs_mean", "ppo_kl", "first_reference_kl", "largest_logprob_difference")
    right = not any(results[name] for name in zeros)
    return 0 if right and results["is_ratio_max"] == results["is_ratio_min"] == 1 else 1


if __name__ == "__main__":
    sys.exit(main())
