"""Does the planner pay at the released width, where rows cost bytes of experts?

Eight of the forty layers of DeepSeek-V4.1-Flash (every kind, all 384 experts) with its three draft
blocks and its head, random weights. Random weights accept nothing, so only the times are measured:
the engine's own rounds, by slots and rows verified (`profiling.measure`). Rounds are then played
with them: every request draws confidences, drafts are accepted with exactly these probabilities,
the policies see what they would see, and each round takes the time measured for its rows. Three
kinds of text: drafts nearly always right, mixed, and nearly never.

    python bench/speculation_slice.py --machine h200
    python bench/speculation_slice.py --machine cpu2 --small --slots 1 3    # tries the script
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from environment import ROOT, machine, write_result

import deepinfer_jax as di
from deepinfer_jax import params, planning, profiling, quant, resources, rounds, tables
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.numerics import Numerics, rows_for

LENGTH = 4096
LOOK = 16  # rounds between looks of the host
TEXTS = {"easy": 0.95, "mixed": 0.7, "hard": 0.1}  # mean probability that a draft is right
FIXED = (1, 3, 5)  # the sizes that are measured
CALM = 4.0  # of the beta distribution it is drawn from


def slice_config(small: bool) -> ModelConfig:
    """Layers of every kind: window, window with Engram, pooled source and reuser, unpooled source
    with candidates, reuser, second index source, reuser.
    """
    if small:
        return ModelConfig.from_json(resources.config_file("tiny-s"))
    path = ROOT / "configs" / "deepseek-v4.1-flash" / "config.json"
    data = json.loads(path.read_text(encoding="utf-8"))
    data["text_config"] |= {
        "num_hidden_layers": 8,
        "compress_ratios": [0, 0, 2, 2, 1, 1, 1, 1, 0, 0, 0],
        "kv_source_layer_ids": [2, 4],
        "index_source_layer_ids": [2, 4, 6],
        "candidate_source_layer_id": 4,
        "engram_layer_ids": [1],
        "engram_vocab_size": 20_000,
        "engram_num_embeddings": [600_000],
        "dspark_target_layer_ids": [5, 6, 7],
    }
    return ModelConfig.from_dict(data)


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _weight(key: jax.Array, shape: tuple[int, ...], std: float, kind: str) -> Any:
    """One matrix of normals as `kind` stores it, repeated over the leading axes."""
    matrix = jax.random.normal(key, shape[-2:], jnp.bfloat16) * std
    stored = quant.quantize(matrix, kind)
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (*shape[:-2], *x.shape[-2:])), stored)


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _floats(key: jax.Array, shape: tuple[int, ...], std: float, dtype: Any) -> jax.Array:
    return (jax.random.normal(key, shape, jnp.float32) * std).astype(dtype)


def random_weights(cfg: ModelConfig) -> params.Params:
    """Made on the device. All experts of a matrix are equal: bytes and work are what is timed."""
    keys = iter(jax.random.split(jax.random.key(0), 1000))

    def one(leaf: Any) -> Any:
        if not params.is_weight(leaf):
            if leaf.constant:
                return jnp.full(leaf.shape, leaf.init, leaf.dtype)
            return _floats(next(keys), leaf.shape, float(leaf.init), leaf.dtype)
        shape = leaf.codes.shape
        if leaf.format == "fp4_group":
            shape = (*shape[:-1], 2 * shape[-1])
        return _weight(next(keys), shape, float(leaf.codes.init), leaf.format)

    return jax.tree.map(one, params.abstract(cfg), is_leaf=params.is_weight)


def sliced(small: bool, weights: bool = True) -> di.Model:
    """The model; it has no tokenizer, since nothing is read or written. Without `weights` there are
    their shapes and types only.
    """
    cfg = slice_config(small)
    token_map = np.arange(cfg.vocab_size, dtype=np.int32) % cfg.engram_compressed_vocab_size
    nothing: Any = None
    return di.Model(
        name="slice",
        cfg=cfg,
        numerics=Numerics.native(cfg.quantized, rows_for(jax.default_backend())),
        params=random_weights(cfg) if weights else jax.eval_shape(lambda: random_weights(cfg)),
        tables=tables.make_tables(cfg, token_map, min(LENGTH, cfg.max_position_embeddings)),
        tokenizer=nothing,
        confidence_temperatures=(1.0,) * cfg.most_drafts,
    )


def round_ms(curve: planning.Curve, rows: int, size: int) -> float:
    """Of the smallest program that holds `rows`; drafting fewer than a block counts as a block."""
    if not size:
        return curve.plain_ms
    return min(ms for most, ms in zip(curve.rows, curve.ms, strict=True) if most >= rows)


def played(policy: planning.Policy, curve: planning.Curve, block: int, mean: float, tokens: int,
           seed: int) -> dict[str, float]:  # fmt: skip
    """Rounds until `tokens` tokens a slot: tokens per second, drafts verified and lost."""
    rng, slots = np.random.default_rng(seed), curve.slots
    memory, spent, made, count, verified, right = policy.start(slots, block), 0.0, 0, 0, 0, 0
    most = np.full(slots, block, np.int32)
    while made < tokens * slots:
        move = policy.move(memory, slots)
        seen = []
        for _ in range(move.rounds or LOOK):
            p = rng.beta(CALM * mean, CALM * (1 - mean), (slots, block))
            p = np.clip(p, 1e-6, 1 - 1e-6).astype(np.float32)
            confidence = np.log(p / (1 - p))
            lengths = np.asarray(_lengths(move.schedule, confidence, most, np.int32(move.rows)))
            hits = np.cumprod(rng.random((slots, block)) < p, axis=1).sum(axis=1)
            accepted = np.minimum(hits, lengths)
            spent += round_ms(curve, move.rows, move.size)
            made, count = made + slots + int(accepted.sum()), count + 1
            verified, right = verified + int(lengths.sum()), right + int(accepted.sum())
            seen.append(confidence[:, : move.size])
        memory = policy.learn(memory, move, np.stack(seen), np.tile(most, (len(seen), 1)))
    return {
        "tokens_per_s": 1e3 * made / spent,
        "tokens_per_pass": made / slots / count,
        "verified_rows": verified,
        "wasted_rows": verified - right,
    }


@jax.jit
def _lengths(schedule: planning.Schedule, confidence: Any, most: Any, rows: Any) -> jax.Array:
    """Drafts that a round of `rows` rows verifies, as `rounds.speculate` cuts them."""
    asked = schedule.lengths(confidence, most, rows - most.shape[0])
    return rounds.fitting(asked, most, rows)


def measured(small: bool, slots: list[int], file: Path | None) -> planning.CostTable:
    """Times by slots, those that `file` has from there; it is given the others."""
    known = planning.read_table(file) if file is not None and file.is_file() else None
    missing = sorted(set(slots) - {curve.slots for curve in (known.curves if known else ())})
    if known and not missing:
        return known
    table = profiling.measure(sliced(small), missing, lambda text: print(text, flush=True))
    table = planning.merged(table, known) if known else table
    if file is not None:
        planning.save_table(file, table)
    return table


def simulated(table: planning.CostTable, block: int, tokens: int) -> list[dict[str, Any]]:
    """Every policy on every text with the times of `table`, by its numbers of slots."""
    heat = (1.0,) * block  # confidences are the probabilities
    policies: dict[str, planning.Policy] = {
        "off": planning.OFF,
        **{f"fixed {n}": planning.Fixed(n) for n in FIXED if n <= block},
        "threshold 0.5": planning.Threshold(0.5, heat),
        "planner": planning.Planner(table, heat),
    }
    found = []
    for curve in table.curves:
        for text, mean in TEXTS.items():
            rows = {
                name: played(policy, curve, block, mean, tokens, seed=1)
                for name, policy in policies.items()
            }
            for row in rows.values():
                row["over_off"] = row["tokens_per_s"] / rows["off"]["tokens_per_s"]
            best = max(rows[n]["tokens_per_s"] for n in rows if n.startswith(("off", "fixed")))
            regret = 1 - rows["planner"]["tokens_per_s"] / best
            found.append(
                {"slots": curve.slots, "text": text, "policies": rows, "planner_regret": regret}
            )
            shown = ", ".join(f"{name} {row['over_off']:.2f}" for name, row in rows.items())
            print(f"{curve.slots} slots, {text}: {shown}; regret {regret:.3f}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--machine", default="local", help="short name for the result file")
    parser.add_argument("--slots", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--table", type=Path, help="file that keeps the measured times")
    parser.add_argument("--tokens", type=int, default=2000, help="of every slot")
    parser.add_argument("--small", action="store_true", help="the tiny configuration instead")
    parser.add_argument("--out", type=Path, help="folder of the result, default bench/results")
    given = parser.parse_args()
    start, model = machine(), sliced(given.small, weights=False)
    stored = sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(model.params))
    table = measured(given.small, given.slots, given.table)
    with jax.default_device(jax.devices("cpu")[0]):  # many small calls
        found = simulated(table, model.cfg.most_drafts, given.tokens)
    settings = {
        "layers": model.cfg.num_hidden_layers, "hidden": model.cfg.hidden_size,
        "experts": model.cfg.n_routed_experts, "bytes": stored,
        "numerics": model.numerics.fingerprint(), "texts": TEXTS, "calm": CALM,
        "tokens": given.tokens,
    }  # fmt: skip
    answers = {
        "measured": "times of rounds; acceptance is simulated (see the script)",
        "table": [dataclasses.asdict(curve) for curve in table.curves],
        "results": found,
    }
    print(write_result(
        "speculation_slice", given.machine, __doc__, settings, answers, given.out, start
    ))  # fmt: skip


if __name__ == "__main__":
    main()
