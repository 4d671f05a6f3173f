"""Operations as data: what each means, who can run it, and which of them runs on a machine.

`select` and `explain` are pure functions of values: an operation, a `Machine`, shapes, a `Policy`.
What is decided is written down (`docs/kernels.md`): nothing is replaced by something else in
silence, and what was never run is only chosen by name.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax

from kernels_bridge.machine import Machine

Transport = Literal["xla", "pallas", "ffi", "dlpack", "executor"]
Shapes = Sequence[jax.ShapeDtypeStruct]


class KernelRefusedError(ValueError):
    """No kernel, or not the one that was asked for, can run; the message says why, and the mend."""


@dataclasses.dataclass(frozen=True)
class Need:
    """A library or compiler that must be there, by the name under which `Machine` finds it.

    at_least, below: bounds of its release, as "2.6"; packages: the packages that count, where two
    share an import name (empty: any); mend: how to get it.
    """

    name: str
    at_least: str = ""
    below: str = ""
    packages: tuple[str, ...] = ()
    mend: str = ""

    def refusal(self, machine: Machine) -> str | None:
        """Why the machine does not meet it, None where it does."""
        found, wanted = machine.find(self.name), self._wanted()
        mend = self.mend or f"install {wanted}"
        if found is None:
            return f"{wanted} is not here: {mend}"
        if self.packages and found.package not in self.packages:
            return f"{found} is not {wanted}: {mend}"
        if not (self.at_least or self.below):
            return None
        release = release_of(found.version)
        if release is None and found.assumed:
            return f"{found.name} is only assumed there, of no version: {wanted} is needed"
        if release is None:
            return f"{found}: its version cannot be read, {wanted} is needed"
        low, high = release_of(self.at_least), release_of(self.below)
        if (low is not None and release < low) or (high is not None and release >= high):
            return f"{found} is not {wanted}: {mend}"
        return None

    def _wanted(self) -> str:
        bounds = [f">={self.at_least}"] if self.at_least else []
        bounds += [f"<{self.below}"] if self.below else []
        packages = f" ({' or '.join(self.packages)})" if self.packages else ""
        return f"{self.name}{','.join(bounds)}{packages}"


def release_of(version: str) -> tuple[int, ...] | None:
    """The numbers of a version before anything else, without zeros at their end; None: unreadable.

    "2.6.0+abc" -> (2, 6), which compares as releases do.
    """
    found = re.match(r"\d+(\.\d+)*", version)
    if not found:
        return None
    numbers = [int(part) for part in found.group().split(".")]
    while len(numbers) > 1 and not numbers[-1]:
        numbers.pop()
    return tuple(numbers)


@dataclasses.dataclass(frozen=True)
class Capability:
    """What an implementation can do, and what it needs.

    platforms        of XLA, as `Machine.platform`; empty: any
    architectures    major compute capabilities of NVIDIA GPUs; empty: any
    dtypes           of the operation's first operand; empty: any
    needs            libraries and compilers
    batch_invariant  whether the bits of a row depend on that row alone
    graph_safe       whether a CUDA graph may record it: it only writes into memory it is given
    """

    platforms: tuple[str, ...] = ()
    architectures: tuple[int, ...] = ()
    dtypes: tuple[str, ...] = ()
    needs: tuple[Need, ...] = ()
    batch_invariant: bool = False
    graph_safe: bool = False


def accepts_all(*shapes: jax.ShapeDtypeStruct, **static: Any) -> list[str]:
    """No demand on shapes beyond the operation's own."""
    return []


@dataclasses.dataclass(frozen=True)
class Impl:
    """One way to run an operation.

    name        what it is asked for by
    transport   how XLA reaches it; "executor": not at all, torch runs the program (docs/ascend.md)
    capability  what it can do
    what        what runs, for people
    run         (*operands, **static) -> results; None where `deepinfer_jax.numerics` holds it
    accepts     (*shapes, **static) -> what it demands beyond the operation's rule and is not met
    seen        where this project has run it; "" nowhere, and then it must be asked for
    by_name     why it must be asked for though it was run; ""
    never       why it cannot run on any machine as things are; ""
    """

    name: str
    transport: Transport
    capability: Capability
    what: str
    run: Callable[..., Any] | None = None
    accepts: Callable[..., list[str]] = accepts_all
    seen: str = ""
    by_name: str = ""
    never: str = ""


@dataclasses.dataclass(frozen=True)
class Op:
    """An operation.

    name      what it is called
    what      one line for people
    abstract  (*shapes, **static) -> shapes of the results; ValueError for operands that do not fit
    twin      (*operands, **static) -> results in plain JAX: the meaning and the gradient
              (both None where `deepinfer_jax.numerics` holds and calls the operation)
    impls     ways to run it; the first that can is the default
    """

    name: str
    what: str
    abstract: Callable[..., Any] | None
    twin: Callable[..., Any] | None
    impls: tuple[Impl, ...]

    def impl(self, name: str) -> Impl:
        """The implementation of that name; KernelRefusedError tells which there are."""
        for each in self.impls:
            if each.name == name:
                return each
        known = ", ".join(each.name for each in self.impls)
        raise KernelRefusedError(f"{self.name} has no implementation {name!r}: ask for {known}")


@dataclasses.dataclass(frozen=True)
class Policy:
    """What is demanded of whatever runs: row bits of the row alone, or fit for CUDA graphs."""

    batch_invariant: bool = True
    graph_safe: bool = False


INVARIANT = Policy()


@dataclasses.dataclass(frozen=True)
class Verdict:
    """An implementation and why it will not run; no reason: it can."""

    impl: Impl
    reasons: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What runs on a machine (None: nothing), and what of each candidate was found.

    able: names of those that run when they are asked for.
    """

    op: Op
    machine: Machine
    chosen: str | None
    verdicts: tuple[Verdict, ...]
    able: tuple[str, ...] = ()

    def __str__(self) -> str:
        able = "" if self.chosen or not self.able else f", by name {' or '.join(self.able)}"
        lines = [f"{self.op.name}: {self.chosen or 'nothing'}{able} ({self.op.what})"]
        for verdict in self.verdicts:
            impl = verdict.impl
            state = "runs" if impl.name == self.chosen else "could run"
            lines.append(f"  {impl.name}: {state if not verdict.reasons else 'no'}, {impl.what}")
            lines += [f"    because {reason}" for reason in verdict.reasons]
            if impl.transport != "xla" and impl.seen:
                lines.append(f"    it was run on {impl.seen}")
        return "\n".join(lines)


def refusals(
    impl: Impl, machine: Machine, policy: Policy, shapes: Shapes | None = None,
    static: Mapping[str, Any] | None = None, *, asked: bool = False,
) -> tuple[str, ...]:  # fmt: skip
    """Every reason why `impl` will not run there; empty: it can.

    shapes, static: of the operands, where they are known; asked: whether it was asked for by name.
    """
    can, reasons = impl.capability, []
    if impl.never:
        reasons.append(impl.never)
    interpreted = impl.transport == "pallas" and machine.interpreter
    if can.platforms and machine.platform not in can.platforms and not interpreted:
        reasons.append(f"it is for {' and '.join(can.platforms)}, this is {machine.platform}")
    elif impl.transport != "executor" and not machine.has_xla:
        reasons.append(f"XLA runs it, and has no back end for {machine.platform}")
    elif can.architectures and not _fits(can.architectures, machine):
        wanted = " or ".join(f"sm_{major}x" for major in can.architectures)
        reasons.append(f"it is compiled for {wanted}, this is {machine}")
    reasons += [said for need in can.needs if (said := need.refusal(machine))]
    if policy.batch_invariant and not can.batch_invariant:
        reasons.append("a row's bits may depend on the other rows, and the policy forbids it")
    if policy.graph_safe and not can.graph_safe:
        reasons.append("it allocates memory, which a CUDA graph must not record")
    if shapes and can.dtypes and str(shapes[0].dtype) not in can.dtypes:
        reasons.append(f"it takes {' or '.join(can.dtypes)}, not {shapes[0].dtype}")
    if shapes is not None:
        reasons += impl.accepts(*shapes, **(static or {}))
    if not asked and impl.by_name:
        reasons.append(f"it has to be asked for by name: {impl.by_name}")
    elif not asked and not impl.seen and not impl.never:
        reasons.append("it has to be asked for by name: never run on such a chip by this project")
    return tuple(reasons)


def _fits(majors: Sequence[int], machine: Machine) -> bool:
    """An unknown architecture fits none: a guess would end in a kernel that is not there."""
    return machine.architecture is not None and machine.architecture[0] in majors


def select(
    op: Op, machine: Machine, policy: Policy = INVARIANT, shapes: Shapes | None = None,
    static: Mapping[str, Any] | None = None, asked: str | None = None,
) -> Impl:  # fmt: skip
    """The implementation that runs `op` on `machine`: `asked`, or the first that can.

    Raises KernelRefusedError where it cannot run, or none can: with every reason.
    """
    candidates = [op.impl(asked)] if asked is not None else op.impls
    said = []
    for impl in candidates:
        reasons = refusals(impl, machine, policy, shapes, static, asked=asked is not None)
        if not reasons:
            return impl
        said.append(f"{impl.name}: {'; '.join(reasons)}")
    able = _able(op, machine, policy, shapes, static)
    mend = f"; {', '.join(able)} can: ask for it by name" if able else ""
    raise KernelRefusedError(f"{op.name} cannot run on {machine} ({', '.join(said)}){mend}")


def _able(
    op: Op, machine: Machine, policy: Policy, shapes: Shapes | None,
    static: Mapping[str, Any] | None,
) -> tuple[str, ...]:  # fmt: skip
    """Names of what runs when it is asked for."""
    return tuple(
        impl.name for impl in op.impls
        if not refusals(impl, machine, policy, shapes, static, asked=True)
    )  # fmt: skip


def joined(ops: Sequence[Op], more: Mapping[str, Sequence[Impl]]) -> tuple[Op, ...]:
    """`ops`, each with the implementations that `more` has for its name behind its own.

    Raises ValueError for a name that is none of theirs.
    """
    strange = set(more) - {op.name for op in ops}
    if strange:
        raise ValueError(f"no operation is called {', '.join(sorted(strange))}")
    return tuple(dataclasses.replace(op, impls=(*op.impls, *more.get(op.name, ()))) for op in ops)


def explain(
    op: Op, machine: Machine, policy: Policy = INVARIANT, shapes: Shapes | None = None,
    static: Mapping[str, Any] | None = None,
) -> Explanation:  # fmt: skip
    """What `select` does without a name, and every candidate's reasons; `str` prints it."""
    verdicts = tuple(
        Verdict(impl, refusals(impl, machine, policy, shapes, static)) for impl in op.impls
    )
    chosen = next((verdict.impl.name for verdict in verdicts if not verdict.reasons), None)
    return Explanation(op, machine, chosen, verdicts, _able(op, machine, policy, shapes, static))
