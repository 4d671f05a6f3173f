"""Which share of its arithmetic peak does a GPU reach on a chunk of a prompt, at released widths?

The slice of the released model (`released.py`) takes a chunk of one prompt's tokens behind others
that its cache holds already. Counted is the arithmetic of products with weights, two operations for
each weight that a token meets; their time is that of the product kernels in a profile, the peak is
that of a large bfloat16 product measured in the same run.

    python bench/gpu_prefill.py --machine h200
    python bench/gpu_prefill.py --machine local --small --tokens 16 --held 32    # tries it
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import statistics
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import released
from environment import machine, write_result
from gpu_decode import WITHOUT_GRAPHS, breakdown, longest, numerics_of, places
from recording import Kernel, recorded

from deepinfer_jax import quant
from deepinfer_jax.cache import Cache
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.model.forward import forward
from deepinfer_jax.numerics import Numerics, stored
from deepinfer_jax.rows import text_rows

PRODUCTS = ("product", "grouped_product", "few_rows", "many_rows", "gemm", "cutlass", "nvjet")


def bare(name: str) -> str:
    """A kernel's name without what C++ puts before it ("void deepinfer::many_rows<...>")."""
    return name.removeprefix("void ").removeprefix("deepinfer::")


def peak(size: int, repeats: int = 10) -> float:
    """Operations per second of a square bfloat16 product."""
    x = jax.random.normal(jax.random.key(0), (size, size), jnp.bfloat16)
    run = jax.jit(lambda x, y: x @ y)
    run(x, x).block_until_ready()
    times = []
    for _ in range(3):
        start = time.perf_counter()
        y = x
        for _ in range(repeats):
            y = run(x, x)
        y.block_until_ready()
        times.append((time.perf_counter() - start) / repeats)
    return 2 * size**3 / min(times)


def weights_met(params: Any, cfg: ModelConfig) -> float:
    """Entries of weights that one token is multiplied with in the backbone."""

    def entries(tree: Any) -> float:
        leaves = jax.tree.leaves(tree, is_leaf=lambda leaf: isinstance(leaf, quant.Quantized))
        return sum(float(np.prod(stored.shape(leaf))) for leaf in leaves)

    layers = params["layers"]
    matrices = ("wq_a", "wq_b", "wkv", "wo_a", "wo_b")
    total = entries({name: layers["attn"][name] for name in matrices})
    total += entries(layers["ffn"]["gate"]["weight"]) + entries(layers["ffn"]["shared_experts"])
    share = cfg.num_experts_per_tok / cfg.n_routed_experts
    total += share * entries(layers["ffn"]["experts"])
    total += entries([layers["hc_attn"]["fn"], layers["hc_ffn"]["fn"]])
    total += entries([each["wkv"] for each in params["engram"]])
    total += entries({name: params["indexer"][name] for name in ("wq_b", "weights_proj", "wk")})
    return total + entries({name: params["compressor"][name] for name in ("wkv", "wgate")})


@functools.partial(jax.jit, static_argnames=("cfg", "numerics", "count"), donate_argnames="cache")
def chunk(
    params: Any, tables: Any, cache: Cache, cfg: ModelConfig, numerics: Numerics, count: int
) -> tuple[jax.Array, Cache]:  # fmt: skip
    """`count` tokens of slot 0 behind what it holds: (last hidden row, cache)."""
    place = jnp.arange(count, dtype=jnp.int32)
    rows = text_rows(place * 7919 % cfg.vocab_size, place * 0, cache.lengths[0] + place)
    hidden, after = forward(params, tables, rows, cache, cfg, numerics)
    assert after is not None  # a cache went in
    return hidden.output[-1], dataclasses.replace(after, lengths=cache.lengths)


def product_us(ran: list[Kernel]) -> float:
    products = [kernel for kernel in ran if bare(kernel.name).startswith(PRODUCTS)]
    return sum((kernel.end - kernel.begin) / 1e3 for kernel in products)


def measured(
    made: tuple[Any, Any], cfg: ModelConfig, numerics: Numerics, given: argparse.Namespace
) -> dict[str, Any]:
    """Milliseconds of a chunk, and what its profile says."""
    room = given.held + given.tokens
    cache = released.filled_cache(cfg, numerics, 1, room, given.held)
    lowered = chunk.lower(*made, cache, cfg, numerics, given.tokens)
    program, samples = lowered.compile(), []
    for _ in range(given.repeats + 1):
        start = time.perf_counter()
        _, cache = jax.block_until_ready(program(*made, cache))
        samples.append(1e3 * (time.perf_counter() - start))
    found: dict[str, Any] = {"samples_ms": samples[1:], "ms": statistics.median(samples[1:])}
    if jax.default_backend() == "cpu":
        return found
    apart = lowered.compile(WITHOUT_GRAPHS)
    _, ran = recorded(lambda: apart(*made, cache))
    where = places(apart.as_text() or "")
    longest(ran, where, 1, given.kernels)
    return found | {"profile": breakdown(ran, where, 1), "product_us": product_us(ran)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--machine", default="local", help="short name for the result file")
    parser.add_argument("--tokens", type=int, default=4096, help="of the chunk")
    parser.add_argument("--held", type=int, default=4096, help="tokens that the cache holds before")
    parser.add_argument(
        "--forms", nargs="+", default=["pallas"], choices=["pallas", "cuda", "batched"]
    )
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--kernels", type=int, default=0, help="print the longest so many")
    parser.add_argument("--small", action="store_true", help="tiny widths, to try the script")
    parser.add_argument("--out", type=Path, help="folder of the result, default bench/results")
    given = parser.parse_args()
    start, cfg = machine(), released.slice_config(given.small)
    most = peak(256 if given.small else 8192)
    made = jax.block_until_ready(released.make(cfg, given.held + given.tokens))
    operations = 2 * weights_met(made[0], cfg) * given.tokens
    found = []
    for form in given.forms:
        row = measured(made, cfg, numerics_of(form, given.small), given)
        row = {"form": form, "tokens": given.tokens, "operations": operations, **row}
        row["tokens_per_s"] = 1e3 * given.tokens / row["ms"]
        row["share_of_peak"] = operations / most / (row["ms"] / 1e3)
        if "product_us" in row:
            row["products_share_of_peak"] = operations / most / (row["product_us"] / 1e6)
        found.append(row)
        print({name: value for name, value in row.items() if name != "profile"}, flush=True)
        for name, us in row.get("profile", {}).get("role_us", {}).items():
            print(f"    {name:10} {us:10.1f} us")
    settings = {
        "layers": cfg.num_hidden_layers, "weight_bytes": released.nbytes(made[0]),
        "numerics": {form: Numerics.native(rows=form).fingerprint() for form in given.forms},
        **{name: getattr(given, name) for name in ("tokens", "held", "repeats")},
    }  # fmt: skip
    answers = {"peak_operations_per_s": most, "results": found}
    print(write_result("gpu_prefill", given.machine, __doc__, settings, answers, given.out, start))


if __name__ == "__main__":
    main()
