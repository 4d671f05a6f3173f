"""A program: a jaxpr as steps of torch calls, with its weights where it runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

from ascend.executor import finishing, kinds
from ascend.executor.builder import Builder
from ascend.executor.finishing import Memory, Slots, Step
from ascend.executor.kinds import torch
from ascend.executor.lowering import Lowering, Ops
from ascend.executor.rules import whole
from ascend.executor.values import Block, Instruction, Value

Branches = Literal["read", "select"]


@dataclasses.dataclass(eq=False)
class _Level:
    """Arguments that seldom change, the steps that follow from them, and those seen last."""

    slots: list[int]
    places: list[int]
    steps: list[Step]
    seen: list[Any]


class Program:
    """A jaxpr that torch runs. Called with tensors on its device, in the order of its arguments.

    steps: torch calls of one run without those of loops' further turns; called: the names of
    functions that came by; replaced: of those, the ones of `ops` that it uses.
    """

    def __init__(
        self, closed: Any, *, device: Any, levels: Sequence[Sequence[int]] = (),
        donated: Sequence[int] = (), ops: Ops | None = None, branches: Branches = "read",
    ) -> None:  # fmt: skip
        """`levels`: numbers of arguments that change seldom, the most seldom ones first: what
        follows from them alone is computed when one of them is another tensor. `donated`: of
        arguments that may be overwritten.

        Raises UnknownPrimitiveError.
        """
        self._device = torch.device(device)
        b = Builder(self._device, len(levels))
        own = {number: b.levels[k] for k, numbers in enumerate(levels) for number in numbers}
        avals = [v.aval for v in closed.jaxpr.invars]
        arguments = [
            b.parameter(a.shape, kinds.kept(a.dtype), own.get(i, b.call))
            for i, a in enumerate(avals)
        ]
        lowering = Lowering(b, ops or {}, branches)
        made = lowering.closed(closed, arguments)
        outputs = [
            whole(b, v, var.aval.shape) for v, var in zip(made, closed.jaxpr.outvars, strict=True)
        ]
        self.called = frozenset(lowering.called)
        self.replaced = frozenset(lowering.replaced)
        self._finish(b, arguments, outputs, levels, {*donated} - {*own})

    def _finish(
        self, b: Builder, arguments: list[Value], outputs: list[Value], levels: Any,
        donated: set[int],
    ) -> None:  # fmt: skip
        finishing.drop_unused(b.levels, b.call, outputs)
        outputs = _own(b.call, arguments, outputs, donated)
        coming = [(v, i in donated) for i, v in enumerate(arguments) if v.block is b.call]
        finishing.overwrite(b.call, coming, outputs, Memory())
        slots = Slots()
        for value in arguments:
            value.slot = slots.new()
        self._levels = [
            _Level(
                [arguments[i].slot for i in numbers], list(numbers),
                finishing.compiled(block, (), slots, keep=True), [],
            )
            for numbers, block in zip(levels, b.levels, strict=True)
        ]  # fmt: skip
        self._steps = finishing.compiled(b.call, outputs, slots)
        self._arguments = [(i, v.slot) for i, v in enumerate(arguments) if v.block is b.call]
        for value in outputs:
            if value.const is not None:
                slots.of_constant(value)
        self._outputs = [v.slot for v in outputs]
        self._kept: list[Any] = [None] * slots.count
        for slot, constant in slots.constants.items():
            self._kept[slot] = constant
        self.steps = _count(b.call)

    def __call__(self, arguments: Sequence[Any]) -> list[Any]:
        """The results, tensors of their own; donated arguments are of no use afterwards."""
        with torch.inference_mode():
            self._refresh(arguments)
            env = self._kept.copy()
            for number, slot in self._arguments:
                env[slot] = arguments[number]
            for step in self._steps:
                step(env)
            return [env[slot] for slot in self._outputs]

    def _refresh(self, arguments: Sequence[Any]) -> None:
        """Compute what follows from arguments of levels that are others than last time."""
        changed = False
        for number, level in enumerate(self._levels):
            given = [arguments[place] for place in level.places]
            same = len(level.seen) == len(given) and all(
                a is b or _one_tensor(a, b) for a, b in zip(level.seen, given, strict=True)
            )
            changed = changed or not same
            if changed:
                for later in self._levels[number:]:  # if a step fails, they are all still to do
                    later.seen = []
                for slot, value in zip(level.slots, given, strict=True):
                    self._kept[slot] = value
                for step in level.steps:
                    step(self._kept)
                level.seen = given


def _one_tensor(a: Any, b: Any) -> bool:
    """Whether two tensors are one: unsigned weights are viewed as signed ones at every call. What
    was seen last keeps its memory, so that nothing else can lie there.
    """
    return (a.data_ptr(), a.shape, a.stride(), a.dtype) == (
        b.data_ptr(), b.shape, b.stride(), b.dtype
    )  # fmt: skip


def _own(
    call: Block, arguments: list[Value], outputs: list[Value], donated: set[int]
) -> list[Value]:
    """Outputs that share memory with nothing: not with constants, weights or each other."""
    memory = Memory()
    finishing.shared(call, memory)
    foreign = {memory.place(v) for i, v in enumerate(arguments) if i not in donated}
    made = []
    for value in outputs:
        level = value.const is not None or value.block is not call
        if level or memory.place(value) in foreign:
            copy = Value(torch.empty_like(value.meta), call)
            call.code.append(Instruction(torch.clone, (value,), (copy,)))
            value = copy
        foreign.add(memory.place(value))
        made.append(value)
    return made


def _count(block: Block) -> int:
    inner = [b for one in block.code if one.region is not None for b in one.region.blocks]
    return len(block.code) + sum(map(_count, inner))
