"""Measures a model on the held-out split: task accuracy, bits per byte, draft acceptance.

Everything runs through the package's own generation and scoring. `python -m
deepinfer_jax.training.evaluate [--model spark-tiny] [--count N] [--out FILE.json]`
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import math
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from deepinfer_jax import cache as caches
from deepinfer_jax import generation, loading, sampling, scoring
from deepinfer_jax import rows as row_sets
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.loading import Model
from deepinfer_jax.model import draft, forward
from deepinfer_jax.numerics import Numerics
from deepinfer_jax.sampling import Sampling
from deepinfer_jax.training import corpus, dataset

SPAN = 512  # tokens a sequence may have
TOGETHER = 4  # sequences in one call
SEED = 20_000  # of the evaluation's examples and of their noise


@dataclasses.dataclass(frozen=True)
class Reply:
    """One held-out example with what the model wrote: token ids of the prompt and of the reply."""

    example: corpus.Example
    prompt: list[int]
    reply: list[int]
    seed: int


def replies(
    model: Model, examples: Sequence[corpus.Example], temperature: float, batch_size: int = 8
) -> list[Reply]:
    """The model's replies to examples; example i draws its noise with seed SEED + i."""
    tokenizer = dataset.load_tokenizer()
    prompts = [corpus.render(example, tokenizer)[0] for example in examples]
    requests: list[dict[str, Any]] = [
        {"tokens": prompt, "seed": SEED + i, "max_tokens": min(256, SPAN - len(prompt))}
        for i, prompt in enumerate(prompts)
    ]
    results = generation.generate(model, requests, temperature=temperature, batch_size=batch_size)
    return [
        Reply(example, prompt, list(result.tokens), SEED + i)
        for i, (example, prompt, result) in enumerate(zip(examples, prompts, results, strict=True))
    ]


def is_right(reply: Reply) -> bool:
    """Whether the example's own check accepts the reply."""
    tokens = reply.reply[:-1] if reply.reply[-1:] == [dataset.EOS] else reply.reply
    text = dataset.load_tokenizer().decode(tokens, skip_special_tokens=False)
    return reply.example.check(text)


# -- bits per byte ---------------------------------------------------------------------------------


def bits_per_byte(model: Model, examples: Sequence[corpus.Example]) -> float:
    """Bits that the model needs for the completions, end token included, per byte of their text."""
    tokenizer = dataset.load_tokenizer()
    parts = [corpus.render(example, tokenizer) for example in examples]
    parts = [(prompt, answer) for prompt, answer in parts if len(prompt) + len(answer) <= SPAN]
    scored = scoring.score_sequences(model, [prompt + answer for prompt, answer in parts])
    nats, size = 0.0, 0
    for row, (prompt, answer) in zip(scored, parts, strict=True):
        nats -= float(row.logprobs[len(prompt) - 1 :].astype(np.float64).sum())
        size += len(tokenizer.decode(answer, skip_special_tokens=True).encode())
    return nats / math.log(2) / size


# -- drafts ----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Acceptance:
    """What drafting a whole block after every token would have brought.

    survival [N]: share of rounds that accept at least k + 1 drafts; tokens: mean emitted per round,
    the model's own included.
    """

    survival: tuple[float, ...]
    tokens: float


@functools.partial(jax.jit, static_argnames=("cfg", "numerics"))
def drafts_everywhere(
    params: Any, tables: Any, tokens: jax.Array, lengths: jax.Array, options: Sampling,
    cfg: ModelConfig, numerics: Numerics,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """Drafts and raw confidences [B, S, N] of every anchor in tokens [B, S], by the engine's step.

    `options` of the B sequences: what they were sampled with. The context ring is as long as the
    sequences, so one cache serves every anchor.
    """
    batch, length = tokens.shape
    rows = row_sets.batch_rows(tokens, lengths)
    hidden, _ = forward.forward(params, tables, rows, None, cfg, numerics, length=length)
    cache = caches.init_cache(cfg, numerics, batch, length, slack=length)
    cache = draft.store_context(params, tables, hidden, cache, cfg, numerics)
    each = jax.tree.map(lambda x: jnp.repeat(x, length, axis=0), options)

    def pick(logits: jax.Array, index: jax.Array, _: Sequence[jax.Array]) -> jax.Array:
        return sampling.sample(logits, each, index).token

    made = draft.draft(
        params, tables, cache, rows.slots, rows.positions, rows.tokens, pick, cfg, numerics
    )
    return made.tokens.reshape(batch, length, -1), made.confidence.reshape(batch, length, -1)


def accepted_counts(tokens: Sequence[int], first: int, drafts: np.ndarray) -> dict[int, int]:
    """Accepted drafts by anchor when `tokens` are decoded from the anchor at index `first`.

    At the end of `tokens` fewer than a block can be right.
    """
    counts, anchor = {}, first
    while anchor < len(tokens) - 1:
        following = tokens[anchor + 1 : anchor + 1 + drafts.shape[1]]
        count = 0
        while count < len(following) and drafts[anchor, count] == following[count]:
            count += 1
        counts[anchor] = count
        anchor += count + 1
    return counts


def drafted(
    model: Model, made: Sequence[Reply], temperature: float
) -> Iterator[tuple[Reply, np.ndarray, np.ndarray]]:
    """Every reply with the drafts and confidences [S, N] after each of its tokens, prompt first.

    `temperature` is the replies': the drafter draws as the model did.
    """
    for start in range(0, len(made), TOGETHER):
        group = made[start : start + TOGETHER]
        tokens, lengths = scoring.padded([r.prompt + r.reply for r in group], TOGETHER, SPAN)
        seeds = [r.seed for r in group] + [0] * (TOGETHER - len(group))
        options = jax.device_put(sampling.make_sampling(TOGETHER, temperature, seeds=seeds))
        found = drafts_everywhere(
            model.params, model.tables, tokens, lengths, options, model.cfg, model.numerics
        )
        yield from zip(group, *map(np.asarray, found), strict=False)


def acceptance(model: Model, made: Sequence[Reply], temperature: float) -> Acceptance:
    """Acceptance over replies: rounds from the first token of each, the block size drafted."""
    size = model.cfg.dspark_block_size
    counts: list[int] = []
    emitted = 0
    for row, drafts, _ in drafted(model, made, temperature):
        counts += accepted_counts(row.prompt + row.reply, len(row.prompt), drafts).values()
        emitted += len(row.reply) - 1
    survival = tuple(float(np.mean(np.array(counts) > k)) for k in range(size))
    return Acceptance(survival, emitted / len(counts))


def evaluate(model: Model, count: int, seed: int = SEED) -> dict[str, Any]:
    """All measurements on `count` held-out examples of each task."""
    report: dict[str, Any] = {"model": model.name, "count": count, "seed": seed}
    accuracy, bits = {}, {}
    greedy: list[Reply] = []
    drawn: list[Reply] = []
    for task in corpus.TASKS:
        examples = corpus.heldout(task, count, seed)
        made = replies(model, examples, 0.0)
        accuracy[task] = sum(map(is_right, made)) / len(made)
        bits[task] = bits_per_byte(model, examples)
        some = examples[: max(1, count // 4)]
        greedy += made[: len(some)]
        drawn += replies(model, some, 1.0)
        print(f"{task}: accuracy {accuracy[task]:.1%}, {bits[task]:.3f} bits/byte", flush=True)
    mixed = [next(iter(corpus.examples(seed + i, "heldout"))) for i in range(count)]
    report["accuracy"] = accuracy
    report["bits_per_byte"] = {**bits, "all": bits_per_byte(model, mixed)}
    for name, made, heat in (("greedy", greedy, 0.0), ("temperature 1", drawn, 1.0)):
        result = acceptance(model, made, heat)
        report[name] = dataclasses.asdict(result)
        print(f"{name}: {result.tokens:.2f} tokens per verification, {result.survival}", flush=True)
    return report


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="spark-tiny", help="shipped name or folder")
    parser.add_argument("--count", type=int, default=50, help="examples of each task")
    parser.add_argument("--out", type=pathlib.Path, help="JSON file to write")
    options = parser.parse_args()
    report = evaluate(loading.load(options.model), options.count)
    text = json.dumps(report, indent=1)
    print(text)
    if options.out is not None:
        options.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
