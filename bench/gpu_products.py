"""What do products cost on a GPU whose rows never see how many rows there are?

The products of one layer of the released model: times of the invariant kernels (`rows="pallas"`)
against plain XLA (`rows="batched"`, which decodes a stored weight before every product), for
weights in bfloat16 and as the release stores them, and for the routed experts the time that reading
their bytes would take. Times are device times of the kernels alone, from the profiler, each the
median over several weights, so that no weight is found in a cache.

    python bench/gpu_products.py --machine h200
    python bench/gpu_products.py --machine h200 --rows 1 256 --storages bf16 --no-experts
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from environment import write_result
from jax.experimental.mosaic.gpu import profiler
from layer import PRODUCTS

from deepinfer_jax import numerics as nx
from deepinfer_jax import quant
from deepinfer_jax.numerics import Numerics

EXPERTS, ACTIVE, HIDDEN, WIDTH = 384, 6, 5120, 2304
FORMS = ("pallas", "batched")
_SAMPLES = 5
_BYTES = 150e6  # of the weights among which a measurement goes around: several times the L2 cache


@functools.partial(jax.jit, static_argnames="numerics")
def product(x: jax.Array, weight: Any, numerics: Numerics) -> jax.Array:
    """A linear of the model without its input's quantizer."""
    return nx.linear(x, weight, numerics)


@functools.partial(jax.jit, static_argnames="numerics")
def experts_up(x: jax.Array, ids: jax.Array, stack: Any, numerics: Numerics) -> jax.Array:
    """One product of the routed experts, on rows that are in place already."""
    groups = nx.group_rows(ids, stack, numerics)
    return nx.grouped_linear(nx.spread(groups, x, ACTIVE), stack, 0, groups, numerics)


def normal(seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape).astype(jnp.bfloat16)


def device_us(run: Callable, argument_sets: list[tuple]) -> list[float]:
    """Device microseconds of one call, a sample per set of arguments."""
    measured = profiler.measure(run)
    return [1e3 * (measured(*each)[1] or 0.0) for each in argument_sets]


def weights(k: int, n: int, storage: str) -> list[Any]:
    count = int(np.clip(_BYTES // (2 * k * n), 3, _SAMPLES))
    made = [normal(i, n, k) for i in range(count)]
    if storage == "bf16":
        return made
    return [jax.jit(quant.quantize, static_argnums=1)(w, storage) for w in made]


def time_dots(name: str, storage: str, counts: list[int]) -> list[dict[str, Any]]:
    """One weight of the layer at every number of rows, in both forms."""
    k, n, times, released = PRODUCTS[name]
    kind = released if storage == "released" and released else "bf16"
    held = weights(k, n, kind)
    cases = [(m, form) for m in counts for form in FORMS]

    def compiled(case):
        m, form = case
        numerics = Numerics.native(False, form)
        x = normal(99, m, k)
        return x, product.lower(x, held[0], numerics).compile()

    with ThreadPoolExecutor(8) as pool:
        programs = dict(zip(cases, pool.map(compiled, cases), strict=True))
    rows = []
    for m in counts:
        row = {"name": name, "k": k, "n": n, "times": times, "storage": kind, "rows": m}
        for form in FORMS:
            x, program = programs[m, form]
            samples = device_us(program, [(x, w) for w in held])
            row[form] = {"us": statistics.median(samples), "samples": samples}
        rows.append(row)
    return rows


def time_experts(counts: list[int]) -> list[dict[str, Any]]:
    """One product of the routed experts in FP4, every token choosing six of all at random."""
    key = jax.random.key(0)
    layers = 2  # one alone is out of a kernel's reach (`stored.addressable`)
    codes = jax.random.bits(key, (layers, EXPERTS, WIDTH, HIDDEN // 2), jnp.uint8)
    scale = jax.random.randint(key, (layers, EXPERTS, WIDTH, HIDDEN // 32), 110, 120)
    scale = scale.astype(jnp.uint8)
    stack = quant.Quantized(codes, scale, "fp4_group")
    rows = []
    for m in counts:
        rng = np.random.default_rng(m)
        ids = np.stack([rng.choice(EXPERTS, ACTIVE, replace=False) for _ in range(m)])
        touched = len(np.unique(ids))
        row: dict[str, Any] = {"rows": m, "touched": touched}
        row["bytes"] = touched * WIDTH * HIDDEN * 17 // 32
        arguments = (normal(m, m, HIDDEN), jnp.asarray(ids.reshape(-1), jnp.int32), stack)
        for form in FORMS:
            if form == "batched" and m > 64:  # it decodes a weight for every tile of rows
                continue
            numerics = Numerics.native(False, form)
            run = experts_up.lower(*arguments, numerics).compile()
            samples = device_us(run, [arguments] * 3)
            row[form] = {"us": statistics.median(samples), "samples": samples}
        rows.append(row)
    return rows


def sums(dots: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Microseconds of one layer's products by storage and rows, in both forms."""
    totals: dict[tuple[str, int], dict[str, float]] = {}
    for row in dots:
        total = totals.setdefault((row["of"], row["rows"]), dict.fromkeys(FORMS, 0.0))
        for form in FORMS:
            total[form] += row["times"] * row[form]["us"]
    return [
        {"storage": of, "rows": m, **us, "pallas_over_batched": us["pallas"] / us["batched"]}
        for (of, m), us in totals.items()
    ]


def show(result: dict[str, Any]) -> None:
    print(f"{'storage':10} {'K':>6} {'N':>6} {'rows':>5} {'pallas us':>10} {'xla us':>10} ratio")
    for row in result["dots"]:
        ours, plain = row["pallas"]["us"], row["batched"]["us"]
        print(
            f"{row['storage']:10} {row['k']:6} {row['n']:6} {row['rows']:5} {ours:10.1f} "
            f"{plain:10.1f} {ours / plain:6.2f}"
        )
    for row in result["layer"]:
        print(
            f"layer, {row['storage']:9} {row['rows']:5} rows: {row['pallas']:8.1f} us against "
            f"{row['batched']:8.1f}, {row['pallas_over_batched']:.2f}"
        )
    for row in result["experts"]:
        plain = row.get("batched", {}).get("us", float("nan"))
        print(
            f"experts up, {row['rows']:5} rows, {row['touched']:4} experts: "
            f"{row['pallas']['us']:8.1f} us against {plain:8.1f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--machine", default="local", help="short name for the result file")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64, 256, 1024, 4096])
    parser.add_argument("--storages", nargs="*", default=["bf16", "released"])
    parser.add_argument("--experts", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--out", type=Path, help="folder of the result, default bench/results")
    arguments = parser.parse_args()
    if jax.default_backend() != "gpu":
        raise SystemExit(f"this needs an NVIDIA GPU, the back end is {jax.default_backend()}")
    start = time.perf_counter()
    dots = [
        {**row, "of": storage}
        for storage in arguments.storages
        for name in PRODUCTS
        for row in time_dots(name, storage, arguments.rows)
    ]
    settings = {"name": "deepseek-v4.1-flash", "numerics": "native, input quantizers left out"}
    result = {
        "dots": dots,
        "layer": sums(dots),
        "experts": time_experts(arguments.rows) if arguments.experts else [],
    }
    result["seconds"] = time.perf_counter() - start
    show(result)
    write_result("gpu_products", arguments.machine, __doc__, settings, result, arguments.out)


if __name__ == "__main__":
    main()
