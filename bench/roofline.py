"""How far are measured rounds from the roofline of a plan?

Rounds of eight layers of the released width on one H200, as `speculation_slice` measured them
(32 tokens in every slot, then rounds), and steps of such layers with later kernels, as `gpu_decode`
did, beside what `scale.plan` says of the same with the figures of the data sheet and with those
that were reached. Reads files; needs no device.

    python bench/roofline.py --machine h200-slice
    python bench/roofline.py --machine mine --rounds rounds.json    # see scale.read_measured
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import released
from environment import ROOT, write_result
from speculation_slice import slice_config

from deepinfer_jax import scale

STEPS = ROOT / "bench" / "results" / "gpu_decode-h200.json"
SLICE = ROOT / "bench" / "results" / "speculation_slice-h200.json"
CONTEXT = 64  # tokens of a slot in the middle of the measurement
FEW = 16  # sequences, from which on a device has enough to do


def rounds_of(path: Path, drafts: int) -> tuple[scale.Measured, ...]:
    """The table of a result of `speculation_slice`."""
    made = []
    for row in json.loads(path.read_text(encoding="utf-8"))["table"]:
        slots = row["slots"]
        made.append(scale.Measured(slots, slots, CONTEXT, 0, row["plain_ms"] / 1e3))
        for rows, ms in zip(row["rows"], row["ms"], strict=True):
            made.append(scale.Measured(slots, rows, CONTEXT, drafts * slots, ms / 1e3))
    return tuple(made)


def steps_of(path: Path) -> tuple[scale.Measured, ...]:
    """The steps of a result of `gpu_decode` with our kernels."""
    rows = json.loads(path.read_text(encoding="utf-8"))["results"]
    return tuple(
        scale.Measured(row["batch"], row["batch"], row["context"], 0, row["ms"] / 1e3)
        for row in rows
        if row["form"] == "pallas"
    )


def summary(found: scale.Comparison) -> dict[str, Any]:
    """Every round, the factor between, and the error with it and without."""
    rows = [
        {
            "slots": each.slots,
            "rows": each.rows,
            "context": each.context,
            "drafted": each.drafted,
            "measured_ms": 1e3 * each.seconds,
            "roofline_ms": 1e3 * seconds,
            "ratio": ratio,
        }
        for each, seconds, ratio in zip(found.measured, found.predicted, found.ratios, strict=True)
    ]
    return {
        "factor": found.factor,
        "largest_error": max(found.errors),
        "largest_error_with_factor": max(found.spread),
        "rounds": rows,
    }


def main() -> None:
    """Compare, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--machine", required=True)
    parser.add_argument("--hardware", default="h200")
    parser.add_argument("--rounds", type=Path, help="measured rounds of the slice")
    args = parser.parse_args()
    cfg, sheet = slice_config(small=False), scale.load_hardware(args.hardware)
    measured = (
        scale.read_measured(args.rounds) if args.rounds else rounds_of(SLICE, cfg.most_drafts)
    )
    results: dict[str, Any] = {}
    for name, hardware in (("data sheet", sheet), ("as measured", sheet.as_measured())):
        for kind, few in (("few", True), ("many", False)):
            chosen = [each for each in measured if (each.slots < FEW) == few]
            if chosen:
                results[f"{name}, {kind}"] = summary(scale.compare(cfg, hardware, chosen))
        if not args.rounds:
            found = scale.compare(released.slice_config(), hardware, steps_of(STEPS))
            results[f"{name}, later steps"] = summary(found)
    for name, one in results.items():
        print(f"{name}: measured {one['factor']:.2f} times the roofline, then within "
              f"{one['largest_error_with_factor']:.0%}")  # fmt: skip
    config = {"layers": cfg.num_hidden_layers, "hidden": cfg.hidden_size, "context": CONTEXT}
    source = {"rounds": (args.rounds or SLICE).name, "few": f"fewer than {FEW} sequences"}
    if not args.rounds:
        source["later steps"] = STEPS.name
    print(write_result("roofline", args.machine, __doc__, config | source, {"results": results}))


if __name__ == "__main__":
    main()
