"""Which objective trains the better drafter, and how good are the bundled heads beside it?

Heads on one backbone draft a block after every token of the same held-out replies, since replies do
not depend on heads. Compared are the tokens of a verification, the model's own included, and the
share of rounds that accept each draft and all before it, at temperatures 0 and 1; the difference to
the first heads that are named, with its standard error over replies; and the calibration of the
confidence head on half of the replies, before and after temperatures are fitted to the other half.

    python bench/draft_heads.py bundled=spark-tiny distance=DIR coupled=DIR --machine h200
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
from environment import machine, weights, write_result

import deepinfer_jax as di
from deepinfer_jax import loading, planning
from deepinfer_jax.training import calibrate, corpus, evaluate

SEED = evaluate.SEED + 2  # of the examples: others than those of evaluation and calibration
HEATS = (0.0, 1.0)


def held_out(model: di.Model, count: int, file: Path | None) -> dict[float, list[evaluate.Reply]]:
    """Replies to `count` examples of each task by temperature, from `file` where it has them."""
    examples = [e for task in corpus.TASKS for e in corpus.heldout(task, count, SEED)]
    if file is not None and file.is_file():
        kept = json.loads(file.read_text(encoding="utf-8"))
        return {
            heat: [evaluate.Reply(e, *r) for e, r in zip(examples, kept[str(heat)], strict=True)]
            for heat in HEATS
        }
    made = {heat: evaluate.replies(model, examples, heat) for heat in HEATS}
    if file is not None:
        rows = {str(t): [[r.prompt, r.reply, r.seed] for r in made[t]] for t in HEATS}
        file.write_text(json.dumps(rows), encoding="utf-8")
    return made


def rounds(
    model: di.Model, made: list[evaluate.Reply], heat: float
) -> tuple[list[list[int]], list[tuple[np.ndarray, np.ndarray]]]:
    """By reply: accepted drafts of the rounds that decode it, whose first token is the prefill's;
    and confidences [A, N] and accepted drafts [A] of a round after every token that has a block
    behind it.
    """
    size, decoding, everywhere = model.cfg.dspark_block_size, [], []
    for row, drafts, logits in evaluate.drafted(model, made, heat):
        tokens, first = np.array(row.prompt + row.reply), len(row.prompt)
        decoding.append(list(evaluate.accepted_counts(tokens.tolist(), first, drafts).values()))
        anchors = np.arange(first, len(tokens) - size)
        right = drafts[anchors] == tokens[anchors[:, None] + 1 + np.arange(size)]
        everywhere.append((logits[anchors], np.cumprod(right, axis=1).sum(axis=1)))
    return decoding, everywhere


def answer(decoding: list[list[int]], size: int) -> dict[str, Any]:
    """Rounds, tokens of one with and without the model's own, survival of each draft."""
    counts = np.concatenate([np.array(each, int) for each in decoding])
    survival = [float(np.mean(counts > k)) for k in range(size)]
    return {
        "rounds": len(counts),
        "tokens_per_round": 1 + float(counts.mean()),
        "accepted_per_round": float(counts.mean()),
        "survival": survival,
        "kept_if_reached": [b / a for a, b in zip([1.0, *survival], survival, strict=False)],
    }


def gain(decoding: list[list[int]], first: list[list[int]]) -> dict[str, float]:
    """Tokens of a round over those of the `first` heads; the error by drawing replies anew."""
    sums = np.array([[len(x) + sum(x), len(x), len(y) + sum(y), len(y)]
                     for x, y in zip(decoding, first, strict=True)], float)  # fmt: skip
    rng = np.random.default_rng(0)
    drawn = [sums[rng.integers(0, len(sums), len(sums))].sum(axis=0) for _ in range(400)]
    whole = sums.sum(axis=0)
    ratios = [a / b / (c / d) for a, b, c, d in drawn]
    return {"gain": float(whole[0] / whole[1] / (whole[2] / whole[3])) - 1,
            "standard_error": float(np.std(ratios))}  # fmt: skip


def calibration(everywhere: list[tuple[np.ndarray, np.ndarray]]) -> dict[str, Any]:
    """Errors of the survivals of every second reply, under temperatures fitted to the others."""
    fit, check = (
        tuple(np.concatenate(part) for part in zip(*everywhere[start::2], strict=True))
        for start in (0, 1)
    )
    found = planning.fit_temperatures(*fit)
    return {
        "rounds": [len(fit[1]), len(check[1])],
        "temperatures": found.temperatures.tolist(),
        "error_before": calibrate.errors(*check, np.ones_like(found.temperatures)),
        "error_after": calibrate.errors(*check, found.temperatures),
    }


def same_backbone(one: di.Model, other: di.Model) -> bool:
    """Whether all tensors but the drafter's are equal in every bit."""
    pairs = [
        jax.tree.leaves({k: v for k, v in each.params.items() if k != "draft"})
        for each in (one, other)
    ]
    return all(np.array_equal(np.asarray(x).view(np.uint8), np.asarray(y).view(np.uint8))
               for x, y in zip(*pairs, strict=True))  # fmt: skip


def trained(folder: Path) -> dict[str, Any] | None:
    """The last line of the log of training, where the folder has one."""
    log = folder / "draft.jsonl"
    return json.loads(log.read_text("utf-8").splitlines()[-1]) if log.is_file() else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("heads", nargs="+", metavar="NAME=MODEL", help="folders or shipped names")
    parser.add_argument("--machine", default="local", help="short name for the result file")
    parser.add_argument("--count", type=int, default=40, help="examples of each task")
    parser.add_argument("--replies", type=Path, help="file that keeps the replies")
    parser.add_argument("--out", type=Path, help="folder of the result, default bench/results")
    given = parser.parse_args()
    named = dict(each.split("=", 1) for each in given.heads)
    start, found, first = machine(), [], {}
    models = {name: di.load(folder) for name, folder in named.items()}
    base = next(iter(models.values()))
    replies = held_out(base, given.count, given.replies)
    for name, model in models.items():
        folder = loading.find_folder(named[name])
        row: dict[str, Any] = {"heads": name, "weights": weights(folder),
                               "same_backbone": same_backbone(base, model),
                               "last_step": trained(folder)}  # fmt: skip
        for heat in HEATS:
            decoding, everywhere = rounds(model, replies[heat], heat)
            first.setdefault(heat, decoding)
            row[f"temperature {heat:g}"] = {
                **answer(decoding, model.cfg.dspark_block_size),
                "over_first": gain(decoding, first[heat]),
                "calibration": calibration(everywhere),
            }
        found.append(row)
        print(json.dumps(row), flush=True)
    settings = {
        "name": base.name, "numerics": base.numerics.fingerprint(), "count": given.count,
        "replies": {str(heat): len(made) for heat, made in replies.items()},
    }  # fmt: skip
    print(write_result(
        "draft_heads", given.machine, __doc__, settings, {"results": found}, given.out, start
    ))  # fmt: skip


if __name__ == "__main__":
    main()
