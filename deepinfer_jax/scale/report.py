"""A plan as text and as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from deepinfer_jax.info import table
from deepinfer_jax.scale.planned import SHARE, Plan, Step


def _gb(size: float) -> str:
    return f"{size / 1e9:,.3f}"


def format_plan(plan: Plan, programs: Sequence[Any] = (), note: str = "") -> str:
    """What `deepinfer-jax plan` prints.

    programs: of `scale.compiled`; note: what to know about them, or why there are none.
    """
    parts = (
        _what(plan),
        _memory(plan),
        _step("decode", plan.decode),
        _step("prefill", plan.prefill),
    )
    parts = (*parts, _speed(plan), _compiled(programs, note))
    return "\n\n".join(part for part in parts if part) + "\n"


def _what(plan: Plan) -> str:
    work, hardware = plan.workload, plan.hardware
    mesh = " x ".join(f"{name} {size}" for name, size in plan.layout.mesh if size > 1)
    alike = plan.layout.devices // plan.layout.parts("slot")
    held = f"{plan.slots} on a device" + (
        f", the same ones on {alike} devices" if alike > 1 else ""
    )
    text = (
        f"{plan.layout.name}: {plan.layout.devices} x {hardware.name}, mesh {mesh or 'of one'}\n"
        f"{work.concurrency} sequences of {work.context:,} tokens, {held}; "
        f"{work.drafts} drafts; arithmetic {work.arithmetic}; exchange {work.exchange}; "
        f"balance {work.balance:g}"
    )
    names = {"vocab": "vocabulary", "engram_rows": "Engram rows", "entry": "global KV"}
    cut = [name for logical, name in names.items() if plan.layout.parts(logical) > 1]
    if cut:
        text += f"\ndivided too: {' and '.join(cut)}"
    return text


def _memory(plan: Plan) -> str:
    rows: list[tuple[str, ...]] = []

    def add(title: str, parts: Any, total: int) -> None:
        rows.append((title, _gb(total), _gb(sum(p.host for p in parts))))
        rows.extend((f"  {p.kind}", _gb(p.device), _gb(p.host)) for p in parts)

    add("weights", plan.weights, sum(p.device for p in plan.weights))
    add("caches", plan.caches, sum(p.device for p in plan.caches))
    add("intermediate values, at once", plan.activations, plan.at_once)
    rows.append(("needed", _gb(plan.needed), ""))
    rows.append((f"{SHARE:.0%} of the memory", _gb(plan.room), ""))
    fits = "it fits" if plan.feasible else (
        f"it does not fit: {_gb(plan.needed - plan.room)} GB too much; more devices, fewer "
        "sequences or a shorter context"
    )  # fmt: skip
    most = f"{fits}; at most {plan.largest:,} sequences of this context on the mesh"
    return f"{table(('memory of a device', 'GB', 'GB of hosts'), rows)}\n{most}"


def _step(name: str, step: Step) -> str:
    rows = [
        (s.name, f"{1e3 * s.seconds:.3f}", s.limit, f"{s.flops / 1e12:.2f}", _gb(s.nbytes))
        for s in step.sections
    ]
    whole = (f"all {step.rows} rows", f"{1e3 * step.seconds:.3f}", step.limit, "", "")
    head = (f"{name}, roofline", "ms", "limited by", "TFLOP", "GB")
    long = f"longest: {step.longest.name}, limited by {step.longest.limit}"
    return f"{table(head, [*rows, whole], left=1)}\n{long}"


def _speed(plan: Plan) -> str:
    work = plan.workload
    assumed = (
        f"honest, {work.emitted:.2f} tokens a round ({work.acceptance:.0%} acceptance, assumed)"
    )
    rows = [
        (f"decode, {assumed}", f"{plan.tokens_per_second:,.0f}"),
        (f"decode, full acceptance, {1 + work.drafts} a round", f"{plan.full_acceptance:,.0f}"),
        ("prefill", f"{plan.prefill_tokens_per_second:,.0f}"),
    ]
    return table(("tokens/s of a device, at most", ""), rows)


def _compiled(programs: Sequence[Any], note: str) -> str:
    if not programs:
        return f"not compiled: {note}" if note else ""
    rows = []
    for made in programs:
        moved = ", ".join(f"{count} {name}" for name, count, _ in made.collectives)
        times = f"{made.trace_s:.0f} + {made.compile_s:.0f}"
        rows.append((made.name, _gb(made.argument_bytes), moved or "none", times))
    head = ("compiled over virtual devices", "GB of arguments", "collectives", "s")
    return table(head, rows) + (f"\n{note}" if note else "")


def as_json(plan: Plan, programs: Sequence[Any] = ()) -> dict[str, Any]:
    """Everything as plain values, derived ones included."""
    made = dataclasses.asdict(plan)
    made["layout"]["rules"] = dict(plan.layout.rules.table)
    made["layout"]["padded"] = plan.layout.rules.padded
    made["layout"]["mesh"] = dict(plan.layout.mesh)
    for name in ("flops", "sources", "measured"):
        made["hardware"][name] = dict(getattr(plan.hardware, name))
    for name in ("decode", "prefill"):
        step = getattr(plan, name)
        made[name] |= {"seconds": step.seconds, "limit": step.limit, "longest": step.longest.name}
    derived = (
        "needed", "room", "feasible", "tokens_per_second", "full_acceptance",
        "prefill_tokens_per_second",
    )  # fmt: skip
    made |= {name: getattr(plan, name) for name in derived}
    made["programs"] = [dataclasses.asdict(program) for program in programs]
    return made
