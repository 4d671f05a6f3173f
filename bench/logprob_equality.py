"""Are the log-probs of 65,536 sampled tokens the trainer's, with and without drafts, in every bit?

128 prompts of mixed length are answered with 512 tokens each: one token at a time, and with drafts
verified at a random schedule. Both must give the same tokens and numbers, and `score`, which sees
whole sequences and no cache, must recompute them: raw and processed log-probs and kept mass,
compared as unsigned integers. Exit status 1 if a bit differs.

    python bench/logprob_equality.py --machine cpu2
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
from environment import write_result

import deepinfer_jax as di
from deepinfer_jax import rl
from deepinfer_jax.training import corpus, dataset

NUMBERS = ("raw", "processed", "kept_mass")
NO_STOPS = np.array([-1], np.int32)

_rollout = jax.jit(rl.rollout, static_argnames=("cfg", "numerics", "new", "size"))
_score = jax.jit(di.score, static_argnames=("cfg", "numerics", "remat"))


def prompts(count: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """`count` prompts of the corpus as [count, width], cut to mixed lengths, and the lengths."""
    tokenizer = dataset.load_tokenizer()
    tokens, lengths = np.zeros((count, width), np.int32), np.zeros(count, np.int32)
    examples = corpus.examples(4242)
    for row in range(count):
        prompt: list[int] = []
        while len(prompt) < 8:
            prompt, _ = corpus.render(next(examples), tokenizer)
        lengths[row] = min(len(prompt), 8 + (row * 37) % (width - 7))
        tokens[row, : lengths[row]] = prompt[: lengths[row]]
    return tokens, lengths


def options(rows: range) -> di.Sampling:
    """Temperatures from 0.7 to 1.2, a third of the rows with top-p, a third with top-k."""
    return di.make_sampling(
        len(rows),
        [0.7 + 0.1 * (row % 6) for row in rows],
        [0.9 if row % 3 == 1 else 1.0 for row in rows],
        [40 if row % 3 == 2 else -1 for row in rows],
        seeds=[1_000_003 * row + 17 for row in rows],
    )


@dataclasses.dataclass
class Tally:
    """compared and differing by what was compared; largest |difference| of raw log-probs."""

    compared: dict[str, int] = dataclasses.field(default_factory=dict)
    differing: dict[str, int] = dataclasses.field(default_factory=dict)
    largest: float = 0.0

    def add(self, name: str, got: np.ndarray, want: np.ndarray) -> None:
        different = np.asarray(got).view(np.uint32) != np.asarray(want).view(np.uint32)
        self.compared[name] = self.compared.get(name, 0) + different.size
        self.differing[name] = self.differing.get(name, 0) + int(different.sum())
        if name.endswith("raw"):
            self.largest = max(self.largest, float(np.abs(got - want).max()))


def part(model: di.Model, rows: range, given: argparse.Namespace, tally: Tally, spent: dict) -> int:
    """Sample, draft and score some of the prompts; the number of rounds with drafts."""
    tokens, lengths = (x[rows.start : rows.stop] for x in given.prompts)
    sampling, rng = options(rows), np.random.default_rng(rows.start)
    size = model.cfg.dspark_block_size
    schedule = rng.integers(0, size + 1, (64, len(rows))).astype(np.int32)

    def roll(size: int, scheduled: np.ndarray | None) -> rl.Rollout:
        start = time.perf_counter()
        made = _rollout(
            model.params, model.tables, tokens, lengths, sampling, NO_STOPS, model.cfg,
            model.numerics, new=given.new, size=size, scheduled=scheduled,
        )  # fmt: skip
        made = jax.tree.map(np.asarray, made)
        name = "sample_with_drafts" if size else "sample"
        spent.setdefault(name, []).append(time.perf_counter() - start)
        return made

    plain, drafted = roll(0, None), roll(size, schedule)
    tally.add("tokens, drafts against none", drafted.tokens, plain.tokens)
    for name in NUMBERS:
        tally.add(f"drafts against none, {name}", getattr(drafted, name), getattr(plain, name))
    for first in range(0, len(rows), given.score_batch):
        some = slice(first, first + given.score_batch)
        start = time.perf_counter()
        seen = _score(
            model.params, model.tables, plain.tokens[some], plain.lengths[some], model.cfg,
            model.numerics, sampling=jax.tree.map(lambda x, some=some: x[some], sampling),
        )  # fmt: skip
        where = plain.sampled[some]
        for name in NUMBERS:
            got = np.asarray(getattr(seen, name))[where]
            tally.add(f"score against sampler, {name}", got, getattr(plain, name)[some][where])
        spent.setdefault("score", []).append(time.perf_counter() - start)
    return int(drafted.rounds)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--machine", default="local", help="short name for the result file")
    parser.add_argument("--model", default="spark-tiny")
    parser.add_argument("--prompts", type=int, default=128)
    parser.add_argument("--prompt-tokens", type=int, default=128, help="longest prompt")
    parser.add_argument("--new", type=int, default=512, help="tokens sampled per prompt")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--score-batch", type=int, default=8)
    parser.add_argument("--out", type=Path, help="folder of the result, default bench/results")
    given = parser.parse_args()
    model = di.load(given.model)
    count, longest = given.prompts, given.prompt_tokens
    given.prompts = prompts(count, longest)
    tally, spent, rounds = Tally(), {}, []
    for first in range(0, count, given.batch):
        rows = range(first, min(first + given.batch, count))
        rounds.append(part(model, rows, given, tally, spent))
        print(
            f"{rows.stop}/{count} prompts, {sum(tally.differing.values())} differences", flush=True
        )
    results: dict[str, Any] = {
        "tokens": count * given.new,
        "compared": tally.compared,
        "differing": tally.differing,
        "largest_raw_difference": tally.largest,
        "rounds_with_drafts": rounds,
        "rounds_without": given.new - 1,
    }
    settings = {
        "name": Path(given.model).name,
        "numerics": dataclasses.asdict(model.numerics),
        "fingerprint": model.numerics.fingerprint(),
        "prompts": count, "longest_prompt": longest, "new": given.new,
    }  # fmt: skip
    found = {"samples": spent, "results": results}
    path = write_result("logprob_equality", given.machine, __doc__, settings, found, given.out)
    for name, number in tally.compared.items():
        print(f"{name:45}{number:>9} compared{tally.differing[name]:>7} differing")
    print(path)
    return 1 if sum(tally.differing.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
