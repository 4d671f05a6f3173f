"""Replies that XLA gave, to compare the executor's with: `python -m tests.ascend.recorded`.

Two libraries' sums are near enough for every choice to be the same one. Recorded, so that these
tests compile no program of XLA.
"""

from __future__ import annotations

import functools
import itertools
import json
from pathlib import Path
from typing import Any

import deepinfer_jax as di
from deepinfer_jax import loading
from deepinfer_jax.training import corpus
from tests import tiny_model

FILE = Path(__file__).with_name("recorded.json")
OPTIONS: dict[str, Any] = {"seed": 5, "max_tokens": 24}


def prompts(count: int) -> list[dict[str, Any]]:
    """Prompts of the corpus: greedy, sampled and truncated ones in turns."""
    ways: list[dict[str, Any]] = [{"temperature": 0}, {"temperature": 0.8}, {"top_p": 0.9}]
    return [
        {"messages": list(example.prompt_messages), "id": str(i), **ways[i % 3]}
        for i, example in enumerate(itertools.islice(corpus.examples(11), count))
    ]


@functools.cache
def model(name: str) -> di.Model:
    """In float32: "tiny", of two random layers, or "spark-tiny"; "stored": tiny with all the
    roundings of how it is stored.
    """
    if name == "stored":
        return tiny_model.model()
    folder = tiny_model.folder() if name == "tiny" else name
    return loading.load(folder, numerics=di.Numerics.fp32())


COUNTS = {"tiny": 3, "stored": 2, "spark-tiny": 20}


def replies(name: str) -> list[di.Result]:
    """By XLA."""
    return di.generate(model(name), prompts(COUNTS[name]), **OPTIONS)


def read(name: str) -> list[dict[str, Any]]:
    """What was recorded of a model: tokens and log-probabilities of each reply."""
    return json.loads(FILE.read_text("utf-8"))[name]


def main() -> None:
    """Record."""
    found = {
        name: [
            {"tokens": list(r.tokens), "logprobs": [round(x, 5) for x in r.logprobs]}
            for r in replies(name)
        ]
        for name in COUNTS
    }
    FILE.write_text(json.dumps(found, separators=(",", ":")) + "\n", "utf-8")


if __name__ == "__main__":
    main()
