"""Jitted functions called with torch tensors: traced once for each kind of arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import dtypes

from ascend.executor import kinds
from ascend.executor.kinds import torch
from ascend.executor.lowering import Ops
from ascend.executor.program import Branches, Program

_UNSIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
_SIGNED = {"uint16": torch.uint16, "uint32": torch.uint32, "uint64": torch.uint64}
_NAMES = {
    torch.bool: "bool", torch.uint8: "uint8", torch.uint16: "uint16", torch.uint32: "uint32",
    torch.uint64: "uint64", torch.int8: "int8", torch.int16: "int16", torch.int32: "int32",
    torch.int64: "int64", torch.float16: "float16", torch.bfloat16: "bfloat16",
    torch.float32: "float32", torch.float64: "float64", torch.float8_e4m3fn: "float8_e4m3fn",
    torch.float8_e5m2: "float8_e5m2", torch.float8_e8m0fnu: "float8_e8m0fnu",
}  # fmt: skip


_WIDE = (torch.int64, torch.uint64, torch.float64)
_TORCH = {name: dtype for dtype, name in _NAMES.items()}


def place(tree: Any, device: Any) -> Any:
    """A tree of arrays as tensors on `device`, with their own dtypes; tensors stay as they are."""

    def one(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return leaf
        dtype = np.asarray(leaf).dtype if not hasattr(leaf, "dtype") else leaf.dtype
        made = kinds.to_torch(leaf, device)
        return made.view(_SIGNED[np.dtype(dtype).name]) if kinds.hidden(dtype) else made

    return jax.tree.map(one, tree)


def fetch(tree: Any) -> Any:
    """A tree of tensors as NumPy arrays, in one copy from the device."""
    leaves, structure = jax.tree.flatten(tree)
    names = [_NAMES[leaf.dtype] for leaf in leaves]
    kept = [leaf.view(_UNSIGNED.get(leaf.dtype, leaf.dtype)) for leaf in leaves]
    if any(leaf.device.type != "cpu" for leaf in kept):
        kept = _together(kept)
    made = [kinds.to_numpy(leaf, name) for leaf, name in zip(kept, names, strict=True)]
    return jax.tree.unflatten(structure, made)


def _together(tensors: Sequence[Any]) -> list[Any]:
    """The same tensors on the host: their bytes travel as one tensor."""
    parts = [t.contiguous().reshape(-1).view(torch.uint8) for t in tensors]
    host, made, start = torch.cat(parts).cpu(), [], 0
    for tensor, part in zip(tensors, parts, strict=True):
        own = host[start : start + part.numel()].clone()
        made.append(own.view(tensor.dtype).reshape(tensor.shape))
        start += part.numel()
    return made


class Executed:
    """A jitted function, run by torch on `device`.

    Called as the function is, with tensors (or arrays) where it takes arrays. It is traced and
    written as a `Program` for each kind of arguments once. Results are tensors.
    """

    def __init__(
        self, function: Any, *, device: Any, levels: Sequence[Sequence[str]] = (),
        donated: Sequence[str] = (), ops: Ops | None = None, branches: Branches = "read",
        fetched: Callable[[Any], Any] | None = None, threads: int | None = None,
    ) -> None:  # fmt: skip
        """levels, donated: names of arguments, as `Program` numbers them; a level may name some
        that this function does not have. fetched: of the result, what is made of it for the caller
        (such as a part brought to the host). threads: of torch's, while it runs; None: as it is.

        Raises ValueError where `donated` names no argument.
        """
        self.__name__ = getattr(function, "__name__", "function")
        self._function, self._device = function, torch.device(device)
        self._levels, self._donated = levels, donated
        self._ops, self._fetched, self._threads = ops, fetched, threads
        self._branches: Branches = branches
        self._signature = inspect.signature(function)
        strange = sorted({*donated} - {*self._signature.parameters})
        if strange:
            raise ValueError(f"donated: {self.__name__} has no arguments {strange}, name its own")
        self._programs: dict[Any, tuple[Program, Any]] = {}

    def __call__(self, *args: Any, **more: Any) -> Any:
        (program, out), leaves = self._found(args, more)
        given = [self._given(x) for x in leaves if _is_array(x)]
        made = jax.tree.unflatten(out[0], [
            value.view(_SIGNED[name]) if name in _SIGNED else value
            for value, name in zip(self._run(program, given), out[1], strict=True)
        ])  # fmt: skip
        return made if self._fetched is None else self._fetched(made)

    def _run(self, program: Program, given: list[Any]) -> list[Any]:
        if self._threads is None:
            return program(given)
        before = torch.get_num_threads()
        torch.set_num_threads(self._threads)
        try:
            return program(given)
        finally:
            torch.set_num_threads(before)

    def program(self, *args: Any, **more: Any) -> Program:
        """What runs a call with such arguments."""
        return self._found(args, more)[0][0]

    @property
    def called(self) -> frozenset[str]:
        """Names of the functions that came by in the programs written so far."""
        return frozenset().union(*(program.called for program, _ in self._programs.values()))

    def _found(self, args: Any, more: Any) -> tuple[tuple[Program, Any], list[Any]]:
        """The program of such arguments, how its results are put together, and the arguments."""
        named = self._signature.bind(*args, **more)
        leaves, structure = jax.tree.flatten((named.args, named.kwargs))
        leaves = [self._narrowed(x) for x in leaves]
        key = (structure, tuple(map(_kind, leaves)))
        if key not in self._programs:
            self._programs[key] = self._write(leaves, structure)
        return self._programs[key], leaves

    def _given(self, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return kinds.to_torch(leaf, self._device)
        leaf = leaf.contiguous()  # programs are written for such
        return leaf.view(_UNSIGNED[leaf.dtype]) if leaf.dtype in _UNSIGNED else leaf

    def _narrowed(self, leaf: Any) -> Any:
        """As `jax.jit` takes it: of 32 bits, unless 64 are switched on."""
        if isinstance(leaf, torch.Tensor):
            if leaf.dtype not in _WIDE:
                return leaf
            return leaf.to(_TORCH[np.dtype(dtypes.canonicalize_dtype(_NAMES[leaf.dtype])).name])
        if isinstance(leaf, np.ndarray | np.generic):
            return np.asarray(leaf, dtypes.canonicalize_dtype(leaf.dtype))
        return leaf

    def _write(self, leaves: list[Any], structure: Any) -> tuple[Program, Any]:
        shaped = [_shape(x) if _is_array(x) else x for x in leaves]
        args, more = jax.tree.unflatten(structure, shaped)
        traced = self._function.trace(*args, **more)
        arrays, wanted = sum(map(_is_array, leaves)), len(traced.jaxpr.jaxpr.invars)
        if arrays != wanted:
            raise TypeError(
                f"{self.__name__} takes {wanted} arrays that are not static, {arrays} came: give "
                "numbers as arrays, such as np.int32(3)"
            )
        numbers = self._numbers(args, more)
        program = Program(
            traced.jaxpr, device=self._device, ops=self._ops, branches=self._branches,
            levels=[[i for name in names for i in numbers.get(name, ())] for names in self._levels],
            donated=[i for name in self._donated for i in numbers.get(name, ())],
        )  # fmt: skip
        names = [np.dtype(v.aval.dtype).name for v in traced.jaxpr.jaxpr.outvars]
        return program, (jax.tree.structure(traced.out_info), names)

    def _numbers(self, args: Any, more: Any) -> dict[str, list[int]]:
        """The numbers of the arrays of each argument."""
        found: dict[str, list[int]] = {}
        count = 0
        named = [*zip(self._signature.parameters, args, strict=False), *sorted(more.items())]
        for name, tree in named:
            arrays = sum(map(_is_array, jax.tree.leaves(tree)))
            found[name] = list(range(count, count + arrays))
            count += arrays
        return found


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor | jax.Array | np.ndarray | np.generic
                      | jax.ShapeDtypeStruct)  # fmt: skip


def _shape(leaf: Any) -> jax.ShapeDtypeStruct:
    dtype = _NAMES[leaf.dtype] if isinstance(leaf, torch.Tensor) else leaf.dtype
    return jax.ShapeDtypeStruct(tuple(leaf.shape), np.dtype(dtype))


def _kind(leaf: Any) -> Any:
    return (tuple(leaf.shape), str(leaf.dtype)) if _is_array(leaf) else (type(leaf), leaf)
