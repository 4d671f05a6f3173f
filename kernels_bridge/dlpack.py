"""The `dlpack` transport: Python libraries on torch tensors, called from inside a compiled program.

A callback of XLA lends its buffers to torch without a copy. Work is queued on XLA's own stream, so
order needs no waiting. Four rules, of which each is checked where it can be seen
(`docs/kernels.md`):

- A kernel that a CUDA graph records writes into what it is given and allocates nothing: torch would
  give that memory to somebody else while the graph goes on writing to it.
- Its first call in a process compiles or loads something, and must not be recorded: `warm_up`.
- It calls nothing of JAX, waits for no device and returns nothing.
- Types that torch cannot see through DLPack travel as bytes.

`jax.experimental.buffer_callback`, which may change, is used in this file alone.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.buffer_callback import buffer_callback

from kernels_bridge.registry import KernelRefusedError

# Types that pass through DLPack into torch with their own name.
DTYPES = frozenset(
    "bfloat16 float16 float32 int32 int8 uint8 uint32 bool float8_e4m3fn float8_e5m2 "
    "float8_e8m0fnu".split()
)
# Why an implementation that allocates must be asked for by name.
UNRECORDED = "every call asks Python, and no CUDA graph records it"
Kernel = Callable[..., None]  # (results, *operands) -> None, all of them torch tensors
_warm: set[tuple[str, tuple[Any, ...]]] = set()
_recorded: dict[str, int] = {}


@functools.cache
def import_torch() -> Any:
    """torch; KernelRefusedError with the mend where it is not there."""
    try:
        import torch  # pyright: ignore[reportMissingImports]  # where a kernel asked for it
    except ImportError as error:
        raise KernelRefusedError(
            f"torch cannot be imported ({error}), which is needed here: pip install "
            "'.[kernels]' in the checkout; on a GPU a torch built for the CUDA that JAX uses"
        ) from error
    return torch


@functools.cache
def multiprocessors() -> int:
    """Of the GPU; KernelRefusedError where torch sees none."""
    torch = import_torch()
    if not torch.cuda.is_available():
        raise KernelRefusedError(
            f"torch {torch.__version__} sees no GPU: install a torch built for the CUDA that JAX "
            "uses"
        )
    return torch.cuda.get_device_properties(0).multi_processor_count


def call(
    kernel: Kernel, name: str, results: Any, *operands: jax.Array, graph_safe: bool = False,
    aliases: Mapping[int, int] | None = None,
) -> Any:  # fmt: skip
    """The results (a shape with dtype, or a sequence of them) that `kernel` writes.

    kernel(results, *operands) gets torch tensors over XLA's buffers, row-major and whole; name: for
    messages, one for each kernel. graph_safe: it may be recorded into a CUDA graph. aliases:
    operand -> result that takes over its memory. `jax.vmap` calls it once for each row.

    Raises KernelRefusedError where torch is missing or cannot see a dtype.
    """
    if jax.default_backend() == "gpu":
        multiprocessors()
    import_torch()
    shapes = list(results) if isinstance(results, Sequence) else [results]
    for each in (*shapes, *operands):
        if str(each.dtype) not in DTYPES:
            raise KernelRefusedError(
                f"{name}: torch cannot see {each.dtype} through DLPack: carry it as packed uint8"
            )
    made = buffer_callback(
        functools.partial(_run, kernel, name, graph_safe), shapes, vmap_method="sequential",
        input_output_aliases=dict(aliases or {}), command_buffer_compatible=graph_safe,
    )(*operands)  # fmt: skip
    return made if isinstance(results, Sequence) else made[0]


def _run(kernel: Kernel, name: str, graph_safe: bool, context: Any, results: Any, *operands: Any):
    torch = import_torch()
    views, given = [[_view(torch, each) for each in part] for part in (results, operands)]
    device = (views or given)[0].device
    key = name, tuple((each.dtype, tuple(each.shape)) for each in (*views, *given))
    with _stream(torch, context, device):
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            if key not in _warm:
                raise RuntimeError(
                    f"{name} is called for the first time while a CUDA graph is recorded, and "
                    "would compile or load in there: call kernels_bridge.dlpack.warm_up before"
                )
            _recorded[name] = _recorded.get(name, 0) + 1
        watched = graph_safe and key not in _warm  # afterwards another thread may allocate
        with _watched(torch, name, device) if watched else contextlib.nullcontext():
            if kernel(views, *given) is not None:
                raise RuntimeError(f"{name} returned something: results are written in place")
    _warm.add(key)


def _view(torch: Any, buffer: Any) -> Any:
    """A tensor over the buffer. Asked for without a stream: their order is `_stream`'s doing."""
    return torch.utils.dlpack.from_dlpack(buffer.__dlpack__())


def _stream(torch: Any, context: Any, device: Any) -> contextlib.AbstractContextManager[Any]:
    """XLA's stream as torch's current one."""
    if device.type != "cuda":
        return contextlib.nullcontext()
    return torch.cuda.stream(_external(device.index, context.stream))


@functools.cache
def _external(device: int, stream: int) -> Any:
    return import_torch().cuda.ExternalStream(stream, device=device)


@contextlib.contextmanager
def _watched(torch: Any, name: str, device: Any) -> Iterator[None]:
    """Refuse a kernel that said it allocates nothing and does."""
    if device.type == "cuda":
        before = _allocations(torch, device)
        yield
        count = _allocations(torch, device) - before
    else:
        with _allocation_counter()() as counter:
            yield
        count = counter.count
    if count:
        raise RuntimeError(
            f"{name} allocated memory {count} times and is declared fit for CUDA graphs, which go "
            "on writing there when torch has given it away: use variants that take out=, make "
            "every workspace a result, or declare it with graph_safe=False"
        )


def _allocations(torch: Any, device: Any) -> int:
    return torch.cuda.memory_stats(device).get("allocation.all.allocated", 0)


@functools.cache
def _allocation_counter() -> Any:
    """A torch mode that counts results on memory of no operand; it sees a CPU's operations."""
    from torch.utils._python_dispatch import (  # pyright: ignore[reportMissingImports]
        TorchDispatchMode,
    )
    from torch.utils._pytree import tree_leaves  # pyright: ignore[reportMissingImports]

    torch = import_torch()

    class Counter(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            made = func(*args, **(kwargs or {}))
            given, fresh = (
                {leaf.untyped_storage().data_ptr() for leaf in tree_leaves(part)
                 if isinstance(leaf, torch.Tensor)}
                for part in ((args, kwargs), made)
            )  # fmt: skip
            self.count += bool(fresh - given)
            return made

    return Counter


def warm_up(function: Callable[..., Any], *operands: Any, **static: Any) -> Any:
    """Run `function` of JAX arrays once outside any graph, so that what it calls is loaded.

    operands: arrays, or shapes with dtypes, for which zeros are made. Call it with the shapes that
    a program will use: each is compiled for by itself. Returns the results.
    """
    given = [
        jnp.zeros(each.shape, each.dtype) if isinstance(each, jax.ShapeDtypeStruct) else each
        for each in operands
    ]
    return jax.block_until_ready(function(*given, **static))


def recordings() -> dict[str, int]:
    """How often each kernel was recorded into a CUDA graph in this process, by name."""
    return dict(_recorded)
