"""Does training for coupled acceptance give more accepted drafts than training for the distance?

Two runs of `training.run --stage draft` with equal seeds see the same rows and the same anchors at
every step; their logs are compared line by line, as far as both go: the exact acceptance of each
draft fed the true tokens, under shared noise and greedily. The tokens of a round follow from it as
if drafts were accepted independently. Errors are standard errors over lines.

    for o in distance coupled; do python -m deepinfer_jax.training.run --stage draft \\
        --resume spark-tiny --fresh --objective $o --seed 2 --tokens 900_000_000 --out $o; done
    python bench/draft_objectives.py --pair distance coupled --machine h200
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
from environment import machine, write_result

ROWS, CONTEXT = 64, 512  # of a step of training
KINDS = ("acceptance", "greedy")


def lines(folder: Path) -> list[dict[str, Any]]:
    text = (folder / "draft.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def round_tokens(shares: np.ndarray) -> np.ndarray:
    """Tokens [L] of a round, the model's own included, from shares [L, N] of drafts accepted."""
    return 1 + np.cumprod(shares, axis=1).sum(axis=1)


def compared(first: list[dict[str, Any]], second: list[dict[str, Any]]) -> dict[str, Any]:
    """The second half of what both logs have."""
    pairs = [(a, b) for a, b in zip(first, second, strict=False) if a["step"] == b["step"]]
    pairs = pairs[len(pairs) // 2 :]
    steps = [pairs[0][0]["step"], pairs[-1][0]["step"]]
    answer: dict[str, Any] = {"steps": steps, "tokens": [n * ROWS * CONTEXT for n in steps]}
    answer["rates"] = [[pairs[0][i]["rate"], pairs[-1][i]["rate"]] for i in (0, 1)]
    for kind in KINDS:
        one, other = (np.array([pair[i][kind] for pair in pairs]) for i in (0, 1))
        ratio = round_tokens(other) / round_tokens(one)
        answer[kind] = {
            "distance": one.mean(axis=0).round(4).tolist(),
            "coupled_minus_distance": (other - one).mean(axis=0).round(4).tolist(),
            "error": ((other - one).std(axis=0) / np.sqrt(len(pairs))).round(4).tolist(),
            "tokens_of_a_round_gained": round(float(ratio.mean()) - 1, 4),
            "tokens_error": round(float(ratio.std() / np.sqrt(len(pairs))), 4),
        }
    return answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--machine", default="local", help="short name for the result file")
    parser.add_argument("--pair", type=Path, nargs=2, action="append", required=True,
                        metavar=("DISTANCE", "COUPLED"), help="folders of two runs")  # fmt: skip
    parser.add_argument("--out", type=Path, help="folder of the result, default bench/results")
    given = parser.parse_args()
    found = [compared(*map(lines, pair)) for pair in given.pair]
    print(json.dumps(found, indent=1))
    settings = {"name": "spark-tiny", "rows": ROWS, "context": CONTEXT}
    print(write_result("draft_objectives", given.machine, __doc__, settings, {"results": found},
                       given.out, machine()))  # fmt: skip


if __name__ == "__main__":
    main()
