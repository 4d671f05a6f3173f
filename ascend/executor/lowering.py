"""From a jaxpr to blocks of instructions: calls flattened, loops of known length written out.

What a function is called by (`jax.jit`, `custom_jvp`, `custom_vjp`) is the name under which `ops`
may replace it; everything else is opened up. A loop whose end follows from constants is written out
or counted; one that waits for the device reads its predicate, once a turn. A branch that follows
from values of a level is decided when these change; one that waits for the device is read, or both
sides are computed and selected from (`branches`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

from jax.extend import core

from ascend.executor import elementwise, indexing, kinds, ranges, reducing, shaping
from ascend.executor.builder import Builder
from ascend.executor.kinds import torch
from ascend.executor.rules import (
    RULES,
    UnknownPrimitiveError,
    full,
    refuse,
    source_of,
    whole,
)
from ascend.executor.values import Block, Instruction, Region, Value

__all__ = ["Lowering", "Ops", "UnknownPrimitiveError", "elementwise", "indexing", "reducing"]


@dataclasses.dataclass(frozen=True)
class Written:
    """An entry of `ops` that is written like a rule, as write(b, eqn, *values): what it makes of
    weights alone is then made once. None: not of these, open the function up.
    """

    write: Callable[..., Any]


Op = Callable[..., Any] | Written
Ops = Mapping[str, Op]
WRITTEN_OUT = 4000  # equations of a loop that is written out, all turns together


def read(predicate: Any) -> int:
    """A number from the device: the host waits for it."""
    return int(predicate.item())


@dataclasses.dataclass(eq=False)
class Lowering:
    """Writes jaxprs into the blocks of `b`.

    branches: "read" or "select", for predicates that the device makes in a call. called: names of
    the functions that came by; replaced: of those, the ones of `ops` that were used.
    """

    b: Builder
    ops: Ops
    branches: Literal["read", "select"]
    called: set[str] = dataclasses.field(default_factory=set)
    replaced: set[str] = dataclasses.field(default_factory=set)

    def closed(self, closed: Any, values: Sequence[Value]) -> list[Value]:
        """The results of a closed jaxpr."""
        consts = [self.b.const(kinds.to_torch(c, self.b.device)) for c in closed.consts]
        return self.jaxpr(closed.jaxpr, [*consts, *values])

    def jaxpr(self, jaxpr: Any, values: Sequence[Value]) -> list[Value]:
        """The results of an open jaxpr, its constants first among `values`."""
        known: dict[Any, Value] = dict(zip([*jaxpr.constvars, *jaxpr.invars], values, strict=True))

        def value(var: Any) -> Value:
            if isinstance(var, core.Literal):
                aval: Any = var.aval
                return self.b.scalar(var.val, aval.dtype)
            return known[var]

        for eqn in jaxpr.eqns:
            made = self.equation(eqn, [value(v) for v in eqn.invars])
            known.update(zip(eqn.outvars, made, strict=True))
        return [value(v) for v in jaxpr.outvars]

    def equation(self, eqn: Any, values: list[Value]) -> Sequence[Value]:
        """The results of one equation."""
        name = eqn.primitive.name
        special = _SPECIAL.get(name)
        if special is not None:
            return special(self, eqn, values)
        if name in _COMPARED and not kinds.hidden(eqn.invars[0].aval.dtype):
            told = ranges.decided(name, values)
            if told is not None:
                return [self.b.scalar(told, bool)]
        found = RULES.get(name)
        if found is None:
            raise refuse(eqn, "no rule is known for it")
        try:
            made = found(self.b, eqn, *values)
        except kinds.DtypeError as error:
            raise refuse(eqn, str(error)) from error
        made = [made] if isinstance(made, Value) else list(made)
        ranges.after(eqn, values, made)
        return made

    # -- functions ---------------------------------------------------------------------------------

    def call(self, eqn: Any, values: list[Value]) -> Sequence[Value]:
        """A function with a name: one of `ops`, or what it is made of."""
        closed = next(
            eqn.params[k] for k in ("jaxpr", "call_jaxpr", "fun_jaxpr") if k in eqn.params
        )
        name = eqn.params.get("name") or _name_of(closed)
        self.called.add(name)
        if name in self.ops:
            made = self._replaced(name, eqn, values)
            if made is not None:
                self.replaced.add(name)
                return made
        quick = _quick(name, closed, values)
        if quick is not None:
            made = self.b(quick, *values)
            if name == "remainder":
                made.range = made.range or (0, max(int(values[1].const.max()) - 1, 0))
            elif (found := ranges.known(values[0])) is not None and values[1].const.dim() == 0:
                divisor = int(values[1].const)
                made.range = made.range or (found[0] // divisor, found[1] // divisor)
            return [made]
        if hasattr(closed, "consts"):
            return self.closed(closed, values)
        return self.jaxpr(closed, values)

    def _replaced(self, name: str, eqn: Any, values: list[Value]) -> Sequence[Value] | None:
        fn = self.ops[name]
        if isinstance(fn, Written):
            made = fn.write(self.b, eqn, *values)
            return [made] if isinstance(made, Value) else made
        given = [full(self.b, v, var.aval.shape) for v, var in zip(values, eqn.invars, strict=True)]
        shaped = tuple(
            torch.empty(v.aval.shape, dtype=kinds.kept(v.aval.dtype), device="meta")
            for v in eqn.outvars
        )
        single = len(shaped) == 1
        held = _held_to(name, fn, tuple((tuple(m.shape), m.dtype) for m in shaped))
        made = self.b.emit(held, given, shaped=shaped[0] if single else shaped)
        return [made] if single else made

    # -- branches ----------------------------------------------------------------------------------

    def cond(self, eqn: Any, values: list[Value]) -> Sequence[Value]:
        """A branch: decided here, read, or selected."""
        index, *operands = values
        branches = eqn.params["branches"]
        if index.const is not None:
            chosen = min(max(int(index.const), 0), len(branches) - 1)
            return self.closed(branches[chosen], operands)
        avals = [v.aval for v in eqn.outvars]
        if self.branches == "select" and index.block.kind != "level":
            every = [self.closed(branch, operands) for branch in branches]
            return [self._selected(index, cases) for cases in zip(*every, strict=True)]
        number = self._number(index)
        blocks, results = [], []
        for branch in branches:
            block = Block("branch", self.b.block)
            with self._in(block):
                made = self.closed(branch, operands)
            blocks.append(block)
            results.append(self._within(block, made, avals))
        return self._region(
            Region("branch", tuple(blocks), results=tuple(results)), [number], avals
        )

    def _number(self, index: Value) -> Value:
        """`index` on the host."""
        return self.b.emit(read, [index], shaped=torch.empty((), dtype=torch.int64, device="meta"))

    def _selected(self, index: Value, cases: Sequence[Value]) -> Value:
        made = cases[0]
        for number, case in enumerate(cases[1:], 1):
            if case is not made:
                which = self.b(torch.eq, index, self.b.scalar(number, "int32"))
                made = self.b(torch.where, which, case, made)
        return made

    @contextlib.contextmanager
    def _in(self, block: Block) -> Iterator[None]:
        """What is written inside the `with` stands in `block`, or further out."""
        before, self.b.block = self.b.block, block
        try:
            yield
        finally:
            self.b.block = before

    def _within(
        self, block: Block, made: Sequence[Value], avals: Sequence[Any]
    ) -> tuple[Value, ...]:
        """Results of a block as whole tensors."""
        with self._in(block):
            return tuple(whole(self.b, m, a.shape) for m, a in zip(made, avals, strict=True))

    def _region(self, region: Region, inputs: list[Value], avals: Sequence[Any]) -> list[Value]:
        """The results of an instruction with blocks of its own."""
        home = self.b.block
        made = [self.b.parameter(a.shape, kinds.kept(a.dtype), home) for a in avals]
        home.code.append(Instruction(_never, tuple(inputs), tuple(made), True, region=region))
        return made

    # -- loops -------------------------------------------------------------------------------------

    def while_(self, eqn: Any, values: list[Value]) -> Sequence[Value]:
        """A loop: written out while its predicate is known, else read turn by turn."""
        p = eqn.params
        tests, bodies = values[: p["cond_nconsts"]], values[p["cond_nconsts"] :]
        bodies, carry = bodies[: p["body_nconsts"]], bodies[p["body_nconsts"] :]
        written = _size(p["body_jaxpr"].jaxpr)
        for turn in range(max(1, WRITTEN_OUT // max(written, 1))):
            holds = self.closed(p["cond_jaxpr"], [*tests, *carry])[0]
            if holds.const is None:
                if turn:
                    break  # it was known for a while: go on from here
                return self._loop(eqn, tests, bodies, carry)
            if not bool(holds.const):
                return carry
            carry = self.closed(p["body_jaxpr"], [*bodies, *carry])
        return self._loop(eqn, tests, bodies, carry)

    def _loop(
        self, eqn: Any, tests: list[Value], bodies: list[Value], carry: Sequence[Value]
    ) -> list[Value]:
        p, b = eqn.params, self.b
        avals = [v.aval for v in eqn.outvars]
        first = [whole(b, v, a.shape) for v, a in zip(carry, avals, strict=True)]
        test = Block("test", b.block)
        params = [b.parameter(a.shape, kinds.kept(a.dtype), test) for a in avals]
        with self._in(test):
            holds = self.closed(p["cond_jaxpr"], [*tests, *params])[0]
            body = Block("body", test)
            with self._in(body):
                made = self.closed(p["body_jaxpr"], [*bodies, *params])
        made = self._within(body, made, avals)
        region = Region("loop", (test, body), tuple(params), ((), made), (holds,), len(params))
        return self._region(region, first, avals)

    def scan(self, eqn: Any, values: list[Value]) -> Sequence[Value]:
        """A loop of known length: written out, or a block that is run so often."""
        p, b = eqn.params, self.b
        fixed, carried, length = p["num_consts"], p["num_carry"], p["length"]
        if _size(p["jaxpr"].jaxpr) * length > WRITTEN_OUT:
            return self._counted(eqn, values)
        shapes = [v.aval.shape for v in eqn.invars[fixed + carried :]]
        consts, carry = values[:fixed], values[fixed : fixed + carried]
        slices = [full(b, v, s) for v, s in zip(values[fixed + carried :], shapes, strict=True)]
        order = range(length)[::-1] if p["reverse"] else range(length)
        made: dict[int, Sequence[Value]] = {}
        for turn in order:
            own = [b(torch.select, s, dim=0, index=turn) for s in slices]
            after = self.closed(p["jaxpr"], [*consts, *carry, *own])
            carry, made[turn] = after[:carried], after[carried:]
        stacks = []
        for place, var in enumerate(eqn.outvars[carried:]):
            parts = [full(b, made[turn][place], var.aval.shape[1:]) for turn in range(length)]
            stacks.append(self._stacked(parts, var.aval))
        return [*carry, *stacks]

    def _stacked(self, parts: list[Value], aval: Any) -> Value:
        if not parts:
            return self.b.const(
                torch.empty(aval.shape, dtype=kinds.kept(aval.dtype), device=self.b.device)
            )
        return shaping.stacked(self.b, parts, 0)

    def _counted(self, eqn: Any, values: list[Value]) -> list[Value]:
        p, b = eqn.params, self.b
        fixed, carried = p["num_consts"], p["num_carry"]
        avals = [v.aval for v in eqn.outvars]
        ins = [v.aval for v in eqn.invars]
        given = [whole(b, v, a.shape) for v, a in zip(values[fixed:], ins[fixed:], strict=True)]
        block = Block("scan", b.block)
        shapes = [a.shape for a in ins[fixed : fixed + carried]]
        shapes += [a.shape[1:] for a in ins[fixed + carried :]]
        params = [
            b.parameter(s, kinds.kept(a.dtype), block)
            for s, a in zip(shapes, ins[fixed:], strict=True)
        ]
        with self._in(block):
            made = self.closed(p["jaxpr"], [*values[:fixed], *params])
        wanted = [_Shaped(a.shape[i >= carried :]) for i, a in enumerate(avals)]
        region = Region(
            "scan", (block,), tuple(params), (self._within(block, made, wanted),), (), carried,
            length=p["length"], reverse=p["reverse"],
        )  # fmt: skip
        return self._region(region, given, avals)


@functools.cache  # equal calls are one function, which is how the builder knows them
def _held_to(name: str, fn: Callable[..., Any], wanted: tuple[Any, ...]) -> Callable[..., Any]:
    """`fn`, whose results must be what the rest of the program was written for."""

    def run(*tensors: Any) -> Any:
        made = fn(*tensors)
        results = made if isinstance(made, tuple | list) else (made,)
        came = tuple([(tuple(r.shape), r.dtype) for r in results])
        if came != wanted:
            raise ValueError(
                f"ops[{name!r}] must return tensors of shapes and dtypes {wanted}, got {came}"
            )
        whole = tuple([r.contiguous() for r in results])
        return whole if len(wanted) > 1 else whole[0]

    return run


@dataclasses.dataclass(frozen=True)
class _Shaped:
    shape: tuple[int, ...]


def _never(*_: Any) -> Any:
    raise AssertionError("an instruction with blocks of its own is run by its region")


def _opened(closed: Any) -> Any:
    return getattr(closed, "jaxpr", closed)


def _name_of(closed: Any) -> str:
    info = getattr(_opened(closed), "debug_info", None)
    return getattr(info, "func_name", "") or ""


_QUICK = {"remainder": torch.remainder, "floor_divide": torch.floor_divide}


def _quick(name: str, closed: Any, values: list[Value]) -> Any:
    """torch's own form of a function of jax.numpy on integers, by a divisor that is not zero."""
    if name not in _QUICK or len(values) != 2:
        return None
    info = getattr(_opened(closed), "debug_info", None)
    from_jax = "/jax/_src/numpy/" in str(getattr(info, "func_filename", ""))
    avals = [v.aval for v in _opened(closed).invars]
    divisor = values[1].const
    if divisor is None or any(a.dtype.kind != "i" for a in avals):
        return None
    return _QUICK[name] if from_jax and bool((divisor > 0).all()) else None


def _size(jaxpr: Any) -> int:
    """Equations, those of inner jaxprs included, loops as often as they turn."""
    count = 0
    for eqn in jaxpr.eqns:
        inner = 0
        for value in eqn.params.values():
            for one in value if isinstance(value, tuple | list) else (value,):
                opened = getattr(one, "jaxpr", one)
                if hasattr(opened, "eqns"):
                    inner += _size(opened)
        count += 1 + inner * (eqn.params["length"] if eqn.primitive.name == "scan" else 1)
    return count


def _refused(lowering: Lowering, eqn: Any, values: list[Value]) -> Sequence[Value]:
    raise UnknownPrimitiveError(
        eqn.primitive.name, "it spreads work over devices, and the executor has one", source_of(eqn)
    )


_COMPARED = ("lt", "le", "gt", "ge", "eq", "ne")
_SPECIAL: dict[str, Callable[..., Sequence[Value]]] = {
    **dict.fromkeys(
        ("jit", "pjit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call",
         "remat", "checkpoint", "remat2", "custom_lin"),
        Lowering.call,
    ),
    **dict.fromkeys(("shard_map", "psum", "all_gather", "all_to_all", "ppermute"), _refused),
    "cond": Lowering.cond,
    "while": Lowering.while_,
    "scan": Lowering.scan,
}  # fmt: skip
