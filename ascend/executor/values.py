"""What a program is made of while it is being built: values, instructions and blocks of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

Kind = Literal["level", "call", "test", "body", "branch", "scan"]


@dataclasses.dataclass(eq=False, slots=True, repr=False)  # each leads to all others
class Value:
    """One tensor of a program.

    meta: a tensor without data (device "meta") that has its shape, strides and dtype; const: the
    tensor itself where it is known while the program is built; block: where it is made; columns:
    the pieces that a concatenation along the last axis was made of; range: the least and the most
    that its integers can be; maker: the call that makes it.
    """

    meta: Any
    block: Block
    const: Any = None
    columns: tuple[Value, ...] | None = None
    range: tuple[int, int] | None = None
    maker: Instruction | None = None
    slot: int = -1

    @property
    def shape(self) -> tuple[int, ...]:
        """Its own shape, which a broadcast value has before it is spread out."""
        return tuple(self.meta.shape)


@dataclasses.dataclass(eq=False, slots=True, repr=False)  # each leads to all others
class Block:
    """Instructions in order.

    level: run when arguments that seldom change have changed; call: in every call; test and body:
    of a loop; branch: where a predicate says so; scan: for every index of a known number.
    """

    kind: Kind
    parent: Block | None
    code: list[Instruction] = dataclasses.field(default_factory=list)
    known: dict[Any, Any] = dataclasses.field(default_factory=dict)  # what was computed already

    def chain(self) -> list[Block]:
        """From the outermost block to this one."""
        found: list[Block] = []
        block: Block | None = self
        while block is not None:
            found.append(block)
            block = block.parent
        return found[::-1]

    @property
    def depth(self) -> int:
        """Number of blocks around it."""
        return len(self.chain()) - 1


@dataclasses.dataclass(eq=False, slots=True, repr=False)  # each leads to all others
class Instruction:
    """outputs = fn(*inputs): tensors, or numbers that were read from the device.

    several: fn returns a tuple. in_place: what to call instead where operand 0 may be overwritten.
    region: of a loop, a branch or a scan, which are no plain calls.
    """

    fn: Callable[..., Any]
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    several: bool = False
    in_place: Callable[..., Any] | None = None
    region: Region | None = None


@dataclasses.dataclass(eq=False, slots=True, repr=False)  # each leads to all others
class Region:
    """What an instruction with blocks of its own runs.

    loop: blocks (test, body), the test's predicate is `reads[0]`; branch: one block for each case;
    scan: one block, `length` turns, `params` are the carry and then the slices of the operands.
    params: what the blocks know the carried values as; results: of each block, what it hands on.
    """

    kind: Literal["loop", "branch", "scan"]
    blocks: tuple[Block, ...]
    params: tuple[Value, ...] = ()
    results: tuple[tuple[Value, ...], ...] = ()
    reads: tuple[Value, ...] = ()
    carried: int = 0
    fixed: int = 0
    length: int = 0
    reverse: bool = False
