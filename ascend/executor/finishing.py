"""From blocks to steps: what nobody uses is dropped, memory is reused, every value gets a slot.

A step is a closure over slot numbers: `env[out] = fn(env[a], env[b])`. Slots of values that are
used for the last time are given to the next ones, which is also what frees their memory. Where an
operand that would be copied first is nobody's any more, it is overwritten instead: a donated cache
is updated where it lies.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ascend.executor import shaping
from ascend.executor.kinds import torch
from ascend.executor.values import Block, Instruction, Region, Value

Env = list[Any]
Step = Callable[[Env], None]


def drop_unused(levels: Sequence[Block], call: Block, wanted: Iterable[Value]) -> None:
    """Keep the instructions that `wanted` values need; a region is kept whole or not at all."""
    needed = {id(v) for v in wanted}
    for block in [call, *reversed(levels)]:
        _sweep(block, needed)


def _sweep(block: Block, needed: set[int]) -> None:
    kept = []
    for one in reversed(block.code):
        if not any(id(v) in needed for v in one.outputs):
            continue
        kept.append(one)
        needed.update(map(id, one.inputs))
        if one.region is not None:
            for inner, results in _blocks(one.region):
                needed.update(map(id, results))
                _sweep(inner, needed)
    block.code[:] = kept[::-1]


def _blocks(region: Region) -> list[tuple[Block, tuple[Value, ...]]]:
    """The blocks of a region with what each hands on, the one that runs last first."""
    pairs = list(zip(region.blocks, region.results, strict=True))
    if region.kind == "loop":
        (test, _), body = pairs
        return [body, (test, region.reads)]
    return pairs


# -- overwriting -----------------------------------------------------------------------------------


class Memory:
    """Which values lie in one piece of memory, and whether it may be overwritten."""

    def __init__(self) -> None:
        self._group: dict[int, int] = {}
        self._members: dict[int, list[Value]] = {}
        self._owned: dict[int, bool] = {}

    def _of(self, value: Value) -> int:
        storage = value.meta.untyped_storage()._cdata
        group = self._group.setdefault(storage, storage)
        while (further := self._group.get(group, group)) != group:
            group = further
        self._members.setdefault(group, [])
        return group

    def note(self, value: Value, owned: bool) -> int:
        """A value that is made, or comes in; views lie where their base lies."""
        group = self._of(value)
        self._members[group].append(value)
        self._owned.setdefault(group, owned and value.const is None)
        return group

    def owned(self, value: Value) -> bool:
        """Whether nobody outside the program has it."""
        return value.const is None and self._owned.get(self._of(value), False)

    def own(self, value: Value) -> None:
        """From now on it may be overwritten."""
        self._owned[self._of(value)] = True

    def place(self, value: Value) -> int:
        """A number that values in one piece of memory share."""
        return self._of(value)

    def alone(self, value: Value, others: Sequence[Value]) -> bool:
        """Whether exactly one of `others` lies where this value does."""
        return sum(self._of(v) == self._of(value) for v in others) == 1

    def together(self, one: Value, other: Value) -> bool:
        """Whether they lie in one piece of memory."""
        return self._of(one) == self._of(other)

    def members(self, value: Value) -> list[Value]:
        """Every value that lies where this one does."""
        return self._members[self._of(value)]

    def join(self, one: Value, other: Value) -> None:
        """They may lie in one piece of memory, as what a branch hands on does: only where both may
        be overwritten may one be.
        """
        kept, gone = self._of(one), self._of(other)
        if kept == gone:
            return
        self._members[kept] += self._members.pop(gone)
        self._owned[kept] = self._owned.get(kept, False) and self._owned.pop(gone, False)
        self._group[gone] = kept

    def same(self, new: Value, old: Value) -> None:
        """`new` lies where `old` does, since it overwrites it."""
        group = self._of(old)
        self._group[new.meta.untyped_storage()._cdata] = group
        self._members[group].append(new)


def overwrite(block: Block, inputs: Iterable[tuple[Value, bool]], wanted: Sequence[Value],
              memory: Memory) -> set[int]:  # fmt: skip
    """Let instructions of a block, and of those inside, overwrite what is used for the last time.

    inputs: values that come in, and whether they may be overwritten. Returns the ids of those that
    are.
    """
    for value, owned in inputs:
        memory.note(value, owned)
    last = _last_uses(block, wanted)
    mine = {id(v) for v, owned in inputs if owned}
    touched: set[int] = set()
    copies: dict[int, list[Instruction]] = {}
    for place, one in enumerate(block.code):
        if one.region is not None:
            copies[place] = _overwrite_region(one, place, last, memory)
        elif one.in_place is not None:
            target = one.inputs[0]
            made_here = target.block is block or id(target) in mine
            dead = memory.owned(target) and all(
                last.get(id(v), -1) <= place and (id(v) in mine or _within(v, block))
                for v in memory.members(target)
            )
            alone = memory.alone(target, one.inputs)
            if made_here and dead and alone and target.meta.is_contiguous():
                one.fn, one.in_place = one.in_place, None
                touched |= {id(v) for v in memory.members(target)}
                memory.same(one.outputs[0], target)
                continue
        for made in one.outputs:
            memory.note(made, True)
        hand_on(one, memory)
    code = [(*copies.get(place, ()), one) for place, one in enumerate(block.code)]
    block.code[:] = [each for some in code for each in some]
    return touched


def _within(value: Value, block: Block) -> bool:
    """Whether a value is made anew in every run of a block; those of a loop's test, too, are."""
    home = block.parent if block.kind == "body" else block
    return home in value.block.chain()


def hand_on(one: Instruction, memory: Memory) -> None:
    """Results of blocks may lie where an operand does: of a branch that changes nothing, of a loop
    without turns.
    """
    if one.region is None:
        return
    carried = zip(one.inputs, one.region.params[: one.region.carried], strict=False)
    for made, sources in zip(one.outputs, carried, strict=False):
        for source in sources:
            memory.join(made, source)
    handed = one.region.results[-1:] if one.region.params else one.region.results
    count = one.region.carried if one.region.kind == "scan" else len(one.outputs)  # rows are copied
    for results in handed:
        for made, source in zip(one.outputs[:count], results[:count], strict=True):
            memory.join(made, source)


def shared(block: Block, memory: Memory) -> None:
    """Note what of a block, and of those inside, may lie in one piece of memory."""
    for one in block.code:
        for inner in one.region.blocks if one.region is not None else ():
            shared(inner, memory)
        for made in one.outputs:
            memory.note(made, True)
        hand_on(one, memory)


def _last_uses(block: Block, wanted: Sequence[Value]) -> dict[int, int]:
    """Where in a block each value is used last; what leaves it, and what a loop goes on with, never
    is.
    """
    last: dict[int, int] = {}
    for place, one in enumerate(block.code):
        for value in _used(one):
            last[id(value)] = place
    for value in wanted:
        last[id(value)] = len(block.code)
    return last


def _used(one: Instruction) -> Iterable[Value]:
    """Operands of an instruction, and whatever its blocks use."""
    yield from one.inputs
    if one.region is not None:
        yield from one.region.reads
        for inner, results in _blocks(one.region):
            yield from results
            for each in inner.code:
                yield from _used(each)


def _overwrite_region(
    one: Instruction, place: int, last: dict[int, int], memory: Memory
) -> list[Instruction]:
    """`overwrite` of the blocks of a region; what has to be copied before it."""
    region = one.region
    assert region is not None
    if region.kind == "branch":
        for block, results in _blocks(region):
            overwrite(block, (), results, memory)
        return []
    body, results = region.blocks[-1], region.results[-1]
    carried = region.params[: region.carried]
    for block in region.blocks[:-1]:
        overwrite(block, [(p, False) for p in region.params], region.reads, memory)
    for param in carried:
        memory.own(param)
    coming = [(p, i < region.carried) for i, p in enumerate(region.params)]
    touched = overwrite(body, coming, results, memory)
    changed = _changed(carried, results, touched, memory)
    if not changed:
        return []
    _own_results(body, region, results, changed, memory)
    return _own_inputs(one, changed, place, last, memory)


def _changed(
    carried: Sequence[Value], results: Sequence[Value], touched: set[int], memory: Memory
) -> list[int]:
    """Carried values that some turn overwrites: it may have been another one's the turn before."""
    found = {i for i, p in enumerate(carried) if id(p) in touched}
    while True:
        before = {j for i in found for j, p in enumerate(carried) if memory.together(results[i], p)}
        if before <= found:
            return sorted(found)
        found |= before


def _own_results(
    body: Block, region: Region, results: tuple[Value, ...], changed: list[int], memory: Memory
) -> None:
    """What is overwritten in the next turn must be nobody else's: copy what is."""
    mended = list(results)
    for i in changed:
        value = results[i]
        alone = memory.owned(value) and memory.alone(value, results[: region.carried])
        if not (alone and (value.block is body or value in region.params)):
            copy = Value(torch.empty_like(value.meta), body)
            memory.note(copy, True)
            body.code.append(Instruction(torch.clone, (value,), (copy,)))
            mended[i] = copy
    region.results = (*region.results[:-1], tuple(mended))


def _own_inputs(
    one: Instruction, changed: list[int], place: int, last: dict[int, int], memory: Memory
) -> list[Instruction]:
    """Copies of what goes into a loop that overwrites it, unless it is of no use any more."""
    inputs, copies = list(one.inputs), []
    home = one.outputs[0].block
    for i in changed:
        value = inputs[i]
        dead = memory.owned(value) and all(
            last.get(id(v), -1) <= place for v in memory.members(value)
        )
        if not (dead and value.block is home and memory.alone(value, inputs)):
            copy = Value(torch.empty_like(value.meta), home)
            memory.note(copy, True)
            copies.append(Instruction(torch.clone, (value,), (copy,)))
            inputs[i] = copy
    one.inputs = tuple(inputs)
    return copies


# -- slots -----------------------------------------------------------------------------------------


@dataclasses.dataclass
class Slots:
    """Numbers given out; those of constants and of levels stay taken."""

    count: int = 0
    constants: dict[int, Any] = dataclasses.field(default_factory=dict)

    def new(self) -> int:
        """A number of its own."""
        self.count += 1
        return self.count - 1

    def of_constant(self, value: Value) -> int:
        """Where a constant lies."""
        if value.slot < 0:
            value.slot = self.new()
            self.constants[value.slot] = value.const
        return value.slot


def compiled(block: Block, wanted: Sequence[Value], slots: Slots, *, keep: bool = False
             ) -> list[Step]:  # fmt: skip
    """The steps of a block; `keep`: its values are used again in later calls."""
    last = _last_uses(block, wanted)
    ending: dict[int, list[Value]] = {}
    mine = {id(v): v for one in block.code for v in one.outputs}
    for number, place in last.items():
        if number in mine and place < len(block.code):
            ending.setdefault(place, []).append(mine[number])
    free: list[int] = []
    steps = []
    for place, one in enumerate(block.code):
        inputs = tuple(_slot(v, slots) for v in one.inputs)
        inner = _run_region(one, slots) if one.region is not None else None
        if not keep:
            free += [v.slot for v in ending.get(place, ()) if v not in one.outputs]
        for made in one.outputs:
            made.slot = free.pop() if free else slots.new()
        outputs = tuple(v.slot for v in one.outputs)
        if not keep:
            free += [v.slot for v in one.outputs if id(v) not in last]
        steps.append(_step(one, inputs, outputs) if inner is None else inner(inputs, outputs))
    return steps


def _slot(value: Value, slots: Slots) -> int:
    if value.const is not None:
        return slots.of_constant(value)
    assert value.slot >= 0, "a value is used before it is made"
    return value.slot


def _step(one: Instruction, inputs: tuple[int, ...], outputs: tuple[int, ...]) -> Step:
    fn = _direct(one.fn)
    if one.several:
        return _several(fn, inputs, outputs)
    (out,) = outputs
    if len(inputs) == 1:
        return _unary(fn, *inputs, out)
    if len(inputs) == 2:
        return _binary(fn, *inputs, out)
    if len(inputs) == 3:
        return _ternary(fn, *inputs, out)
    return _many(fn, inputs, out)


_METHODS = {
    shaping.view: ("view", ("shape",)),
    torch.select: ("select", ("dim", "index")),
    torch.narrow: ("narrow", ("dim", "start", "length")),
    torch.Tensor.expand: ("expand", ("size",)),
    torch.Tensor.permute: ("permute", ("dims",)),
    torch.Tensor.to: ("to", ("dtype",)),
}


def _direct(fn: Any) -> Any:
    """The same call with fewer steps on the way: a method with positional arguments."""
    known = _METHODS.get(fn.func) if isinstance(fn, functools.partial) and not fn.args else None
    if known is None or {*fn.keywords} != {*known[1]}:
        return fn
    return operator.methodcaller(known[0], *(fn.keywords[name] for name in known[1]))


def _unary(fn: Any, a: int, out: int) -> Step:
    def step(env: Env) -> None:
        env[out] = fn(env[a])

    return step


def _binary(fn: Any, a: int, b: int, out: int) -> Step:
    def step(env: Env) -> None:
        env[out] = fn(env[a], env[b])

    return step


def _ternary(fn: Any, a: int, b: int, c: int, out: int) -> Step:
    def step(env: Env) -> None:
        env[out] = fn(env[a], env[b], env[c])

    return step


def _many(fn: Any, inputs: tuple[int, ...], out: int) -> Step:
    def step(env: Env) -> None:
        env[out] = fn(*[env[i] for i in inputs])

    return step


def _several(fn: Any, inputs: tuple[int, ...], outputs: tuple[int, ...]) -> Step:
    def step(env: Env) -> None:
        made = fn(*[env[i] for i in inputs])
        for out, value in zip(outputs, made, strict=True):
            env[out] = value

    return step


# -- regions ---------------------------------------------------------------------------------------


def _run_region(one: Instruction, slots: Slots) -> Callable[[Any, Any], Step]:
    region = one.region
    assert region is not None
    for param in region.params:
        param.slot = slots.new()
    params = tuple(p.slot for p in region.params)
    if region.kind == "loop":
        test, body = region.blocks
        head = compiled(test, [*region.reads, *_all_used(body, region.results[-1])], slots)
        tail = compiled(body, region.results[-1], slots)
        predicate = _slot(region.reads[0], slots)
        made = tuple(_slot(v, slots) for v in region.results[-1])
        return lambda i, o: _loop(head, tail, predicate, params, made, i, o)
    parts = [compiled(b, results, slots) for b, results in _blocks(region)]
    made = [tuple(_slot(v, slots) for v in results) for results in region.results]
    if region.kind == "branch":
        return lambda i, o: _branch(parts, made, i, o)
    return lambda i, o: _scan(parts[0], made[0], region, params, i, o)


def _all_used(block: Block, results: Sequence[Value]) -> list[Value]:
    return [*results, *(v for one in block.code for v in _used(one))]


def _loop(
    head: list[Step], tail: list[Step], predicate: int, params: Any, made: Any, inputs: Any,
    outputs: Any,
) -> Step:  # fmt: skip
    def step(env: Env) -> None:
        carry = [env[i] for i in inputs]
        while True:
            for param, value in zip(params, carry, strict=True):
                env[param] = value
            for one in head:
                one(env)
            if not env[predicate].item():
                break
            for one in tail:
                one(env)
            carry = [env[i] for i in made]
        for out, value in zip(outputs, carry, strict=True):
            env[out] = value

    return step


def _branch(parts: list[list[Step]], made: list[Any], inputs: Any, outputs: Any) -> Step:
    (number,) = inputs

    def step(env: Env) -> None:
        chosen = min(max(env[number], 0), len(parts) - 1)
        for one in parts[chosen]:
            one(env)
        for out, value in zip(outputs, [env[i] for i in made[chosen]], strict=True):
            env[out] = value

    return step


def _scan(part: list[Step], made: Any, region: Region, params: Any, inputs: Any, outputs: Any
          ) -> Step:  # fmt: skip
    carried, length = region.carried, region.length
    order = range(length)[::-1] if region.reverse else range(length)

    def step(env: Env) -> None:
        carry = [env[i] for i in inputs[:carried]]
        stacks = [env[i] for i in inputs[carried:]]
        rows: list[Any] = [[None] * length for _ in made[carried:]]
        for turn in order:
            for param, value in zip(params[:carried], carry, strict=True):
                env[param] = value
            for param, stack in zip(params[carried:], stacks, strict=True):
                env[param] = stack[turn]
            for one in part:
                one(env)
            carry = [env[i] for i in made[:carried]]
            for row, i in zip(rows, made[carried:], strict=True):
                row[turn] = env[i]
        done = [*carry, *(torch.stack(row) for row in rows)]
        for out, value in zip(outputs, done, strict=True):
            env[out] = value

    return step
