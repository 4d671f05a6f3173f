"""Does the engine keep its promises over thousands of mixed requests, and what do they cost?

Prompts of 4 to 2,000 random tokens, replies of 1 to 500, all in one run: none lost, none twice,
memory flat, and for how long the device had nothing to do. Some of them are also answered one by
one: equal in every bit, and the speed to compare with. The same numbers of tokens in requests of
equal lengths say what mixing costs.

    python bench/engine.py --machine cpu2
    python bench/engine.py --machine cpu2 --count 200 --longest 400 --new 100    # in minutes
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from environment import machine, write_result

import deepinfer_jax as di
from deepinfer_jax import engine, prompts
from deepinfer_jax.requests import Options, Request, Result


def mixed(count: int, longest: int, new: int, vocab: int) -> list[dict[str, Any]]:
    """Prompts of log-uniform lengths with replies of log-uniform lengths."""
    rng = np.random.default_rng(11)
    lengths = np.exp(rng.uniform(np.log(4), np.log(longest), count)).astype(int)
    replies = np.exp(rng.uniform(0, np.log(new), count)).astype(int)
    return [
        {"tokens": rng.integers(8, vocab, n).tolist(), "id": str(i), "max_tokens": int(m)}
        for i, (n, m) in enumerate(zip(lengths, replies, strict=True))
    ]


def equal(like: list[dict[str, Any]], vocab: int) -> list[dict[str, Any]]:
    """As many requests of the mean lengths."""
    rng = np.random.default_rng(12)
    n = round(np.mean([len(each["tokens"]) for each in like]))
    m = round(np.mean([each["max_tokens"] for each in like]))
    return [
        {"tokens": rng.integers(8, vocab, n).tolist(), "id": str(i), "max_tokens": m}
        for i in range(len(like))
    ]


def requests_of(model: di.Model, asked: list[dict[str, Any]]) -> list[Request]:
    # Replies of the lengths that were drawn: what random tokens are answered with ends at once.
    options = Options(seed=3, ignore_eos=True)
    return prompts.make_requests(asked, options, model.tokenizer, model.cfg, model.max_length)


def answered(model: di.Model, asked: list[dict[str, Any]], batch: int) -> dict[str, Any]:
    """Results by number, seconds, the process's largest memory after each tenth of them, and the
    engine's statistics.
    """
    requests, found, grown = requests_of(model, asked), {}, []
    running = engine.start(model, requests, batch_size=batch)
    running.warm_up()
    start = time.perf_counter()
    for update in running.updates():
        if update.result is None:
            continue
        if update.index in found:
            raise SystemExit(f"request {update.index} has two results")
        found[update.index] = update.result
        if len(found) % max(len(requests) // 10, 1) == 0:
            grown.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
            print(f"{len(found)} of {len(requests)}, {grown[-1] / 2**20:.0f} MiB", flush=True)
    seconds = time.perf_counter() - start
    return {
        "results": found, "s": seconds, "max_rss_bytes": grown,
        "statistics": running.statistics(),
    }  # fmt: skip


def one_by_one(
    model: di.Model, requests: list[Request], longest: dict[str, Any]
) -> tuple[list[Result], float]:
    """The results of requests in an engine of one slot and of the capacity for all, and seconds."""
    sizes = engine.sizes_for(requests_of(model, [longest]), model.cfg, model.max_length, 1)
    running = engine.Engine(model, sizes)
    for request in requests:
        running.submit(request)
    running.warm_up()
    start, found = time.perf_counter(), {}
    for update in running.updates():
        if update.result is not None:
            found[update.index] = update.result
    return [found[number] for number in range(len(requests))], time.perf_counter() - start


def made(results: dict[int, Result]) -> int:
    return sum(len(result.tokens) for result in results.values())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--machine", default="local", help="short name for the result file")
    parser.add_argument("--rows", help="form of the numerics, default as `load` chooses")
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--longest", type=int, default=2000, help="tokens of a prompt")
    parser.add_argument("--new", type=int, default=500, help="tokens of a reply")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--alone", type=int, default=100, help="requests also answered one by one")
    parser.add_argument("--out", type=Path, help="folder of the result, default bench/results")
    given = parser.parse_args()
    start, model = machine(), di.load("spark-tiny", rows=given.rows)
    asked = mixed(given.count, given.longest, given.new, model.cfg.vocab_size)
    longest = max(asked, key=lambda each: len(each["tokens"]) + each["max_tokens"])
    others = [each for each in asked[: given.batch_size] if each is not longest]
    answered(model, [longest, *others], given.batch_size)  # compiles
    whole = answered(model, asked, given.batch_size)
    lost = given.count - len(whole["results"])
    rng = np.random.default_rng(13)
    chosen = rng.choice(given.count, min(given.alone, given.count), replace=False).tolist()
    requests = requests_of(model, asked)
    few = [requests[number] for number in chosen]
    again, seconds = one_by_one(model, few, longest)
    tokens = sum(len(result.tokens) for result in again)
    pairs = zip(chosen, again, strict=True)
    differing = sum(result != whole["results"][number] for number, result in pairs)
    same = answered(model, equal(asked, model.cfg.vocab_size), given.batch_size)
    speed = made(whole["results"]) / whole["s"]
    figures = {
        "lost": lost,
        "differing": differing,
        "compared_alone": len(chosen),
        "tokens": made(whole["results"]),
        "tokens_per_s": speed,
        "over_one_by_one": speed / (tokens / seconds),
        "over_equal_lengths": speed / (made(same["results"]) / same["s"]),
        "idle_share": whole["statistics"].idle_share,
        "recompiled": whole["statistics"].recompiled,
        "preempted": whole["statistics"].preempted,
        "peak_pages": whole["statistics"].peak_pages,
        "pages": whole["statistics"].pages,
        "max_rss_bytes": whole["max_rss_bytes"],
    }
    for name, value in figures.items():
        print(name, value)
    settings = {
        "name": "spark-tiny", "numerics": model.numerics.fingerprint(),
        **{n: getattr(given, n) for n in ("count", "longest", "new", "batch_size", "alone")},
    }  # fmt: skip
    print(write_result("engine", given.machine, __doc__, settings, {"results": figures}, given.out,
                       start))  # fmt: skip
    return 1 if lost or differing else 0


if __name__ == "__main__":
    sys.exit(main())
