"""Instructions from calls of torch functions on values: folded, shared and hoisted as they come.

A rule for a primitive reads like torch code: `b(torch.add, x, y)`. The call is carried out at once
where all operands are known, is not repeated where it was made before, and lands in the outermost
block that has its operands: what depends on weights alone is computed when weights change, what
does not change in a loop before the loop. Every function is run on tensors without data first,
which tells shape, dtype and whether the result shares memory with an operand.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from ascend.executor import kinds
from ascend.executor.kinds import torch
from ascend.executor.values import Block, Instruction, Value

_SMALL = 1 << 12  # elements of a constant that is compared with others


class Builder:
    """Blocks under construction. `block` is the innermost one, `device` where constants are."""

    def __init__(self, device: Any, levels: int) -> None:
        self.device = device
        self.levels: list[Block] = []
        for _ in range(levels):
            self.levels.append(Block("level", self.levels[-1] if self.levels else None))
        self.call = Block("call", self.levels[-1] if self.levels else None)
        self.block = self.call
        self._root = self.call.chain()[0]
        self._scalars: dict[Any, Value] = {}
        self._constants: dict[Any, Value] = {}

    # -- values ------------------------------------------------------------------------------------

    def const(self, tensor: Any) -> Value:
        """A tensor that is known; equal small ones are one value."""
        if tensor.numel() > _SMALL:
            return self._known(tensor)
        host = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)  # row-major
        content = host.reshape(-1).view(torch.uint8).numpy().tobytes()
        key = (tensor.dtype, tuple(tensor.shape), tensor.stride(), content)
        if key not in self._constants:
            self._constants[key] = self._known(tensor)
        return self._constants[key]

    def _known(self, tensor: Any) -> Value:
        meta = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        return Value(meta, self._root, tensor)

    def scalar(self, value: Any, dtype: Any) -> Value:
        """One number of a JAX dtype."""
        key = (str(dtype), repr(value))
        if key not in self._scalars:
            self._scalars[key] = self.const(kinds.scalar(value, dtype, self.device))
        return self._scalars[key]

    def parameter(self, shape: Sequence[int], dtype: Any, block: Block) -> Value:
        """A tensor that comes from outside, of a torch dtype."""
        return Value(torch.empty(tuple(shape), dtype=dtype, device="meta"), block)

    # -- calls -------------------------------------------------------------------------------------

    def __call__(self, fn: Callable[..., Any], *values: Value, **static: Any) -> Any:
        """The value (values, of a function that returns several) of fn(*values, **static)."""
        return self.emit(fn, values, static)

    def emit(
        self, fn: Callable[..., Any], values: Sequence[Value], static: dict[str, Any] | None = None,
        in_place: Callable[..., Any] | None = None, shaped: Any = None,
    ) -> Any:  # fmt: skip
        """`__call__`; `shaped`: metas of results for a function that cannot run without data."""
        static = static or {}
        values = tuple(values)
        home = self.home(values)
        key = _key(fn, values, static)
        if key is not None:
            for block in home.chain():
                if key in block.known:
                    return block.known[key][0]
        bound = functools.partial(fn, **static) if static else fn
        if all(v.const is not None for v in values) and shaped is None:
            made = bound(*(v.const for v in values))
            result = _mapped(self.const, made)
        else:
            made = bound(*(v.meta for v in values)) if shaped is None else shaped
            result = self._recorded(bound, values, made, home, in_place, static)
        if key is not None:
            home.known[key] = result, values  # kept alive, since the key has their numbers
        return result

    def _recorded(
        self, bound: Any, values: Any, made: Any, home: Block, in_place: Any, static: Any
    ) -> Any:
        for value in values:
            if made is value.meta:  # nothing to do, as in a conversion to the same dtype
                return value
        several = isinstance(made, tuple | list)
        outputs = tuple(Value(m, home) for m in (made if several else (made,)))
        changed = functools.partial(in_place, **static) if in_place and static else in_place
        made_by = Instruction(bound, values, outputs, several, changed)
        for output in outputs:
            output.maker = made_by
        home.code.append(made_by)
        return outputs if several else outputs[0]

    def home(self, values: Sequence[Value]) -> Block:
        """The outermost block in which a call of these operands may stand."""
        chain = self.block.chain()
        deepest = max((v.block.depth for v in values), default=0)
        place = deepest
        for step in range(deepest, len(chain) - 1):
            inner = chain[step + 1]
            # Branches are not always taken. What follows from a loop's state belongs to its body.
            held = inner.kind == "branch" or (inner.kind == "body" and place == step)
            if held and chain[place].kind != "level":
                place = step + 1
        return chain[place]


def _mapped(f: Callable[[Any], Any], made: Any) -> Any:
    return tuple(map(f, made)) if isinstance(made, tuple | list) else f(made)


def _key(fn: Any, values: tuple[Value, ...], static: dict[str, Any]) -> Hashable | None:
    """Equal for equal calls; None where that cannot be said."""
    key = (fn, tuple(map(id, values)), tuple(sorted((k, _frozen(v)) for k, v in static.items())))
    try:
        hash(key)
    except TypeError:
        return None
    return key


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
