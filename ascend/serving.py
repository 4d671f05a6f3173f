"""The engine on torch's device: the same host loop, other programs.

An engine asks its `Site` where arrays lie and which programs run. Here both are torch's: weights,
caches and slots are tensors on one device, and every program of the engine is its jaxpr run by the
executor. What the host reads of a call comes in one copy.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Sequence
from typing import Any, Literal, Unpack

import jax

from ascend import built, functions
from ascend.executor import Executed, fetch, place
from ascend.executor.lowering import Ops
from ascend.executor.program import Branches
from deepinfer_jax import generation
from deepinfer_jax.engine import programs
from deepinfer_jax.engine.sites import Site, State
from deepinfer_jax.loading import Model
from deepinfer_jax.planning.policies import OFF, Policy
from deepinfer_jax.requests import OptionArguments, Result
from kernels_bridge.dlpack import import_torch

Kernels = Literal["built", "torch"]
_LEVELS = (("params", "tables"), ("sampling",))


def _first(made: Any) -> Any:
    """The round on the host, the state on the device."""
    return (fetch(made[0]), *made[1:])


def _programs(device: Any, ops: Ops, branches: Branches, threads: int | None) -> Any:
    """The programs of `deepinfer_jax.engine.programs`, by the same names."""

    def executed(function: Any, donated: Sequence[str] = (), fetched: Any = None) -> Executed:
        return Executed(
            function, device=device, levels=_LEVELS, donated=donated, ops=ops, branches=branches,
            fetched=fetched, threads=threads,
        )  # fmt: skip

    return types.SimpleNamespace(
        fill_program=executed(programs.fill_program, ("cache",), _first),
        decode_program=executed(programs.decode_program, ("cache",), _first),
        propose_program=executed(programs.propose_program, (), fetch),
        settle_program=executed(programs.settle_program, ("cache",), _first),
        seat_program=executed(programs.seat_program),
        edit_program=executed(programs.edit_program, ("edits",)),
        take_program=executed(programs.take_program, ("snapshots",)),
        restore_program=executed(programs.restore_program, ("cache",)),
    )


@dataclasses.dataclass(frozen=True, eq=False)
class TorchSite(Site):
    """One device of torch's, the model on it and the programs written for it so far.

    `model` has the form of numerics that torch runs (`placed`).
    """

    device: Any = None
    model: Model | None = None
    held: Any = None
    run: Any = None

    @property
    def programs(self) -> Any:
        """The engine's programs, run by the executor."""
        return self.run

    def slots(self, tree: Any) -> Any:
        """Arrays of the host on the device."""
        return place(tree, self.device)

    def all(self, tree: Any) -> Any:
        """Arrays of the host on the device."""
        return place(tree, self.device)

    def whole(self, tree: Any) -> Any:
        """Arrays of slots on the host."""
        return fetch(tree)

    def state(self, model: Model, sizes: Any, sampling: Any) -> State:
        """Nobody sits in the slots; the weights are those of `placed`."""
        assert model is self.model, "a site runs the model that was placed on it"
        made = Site.state(Site(), model, sizes, sampling)
        moved = place(made[:4], self.device)
        return State(*moved, *self.held)

    def widened(self, running: Any, sizes: Any, vocab: int) -> Any:
        """`programs.widened`."""
        host = jax.tree.map(jax.numpy.asarray, fetch(running))
        return place(programs.widened(host, sizes, vocab), self.device)


def placed(
    model: Model, device: str = "npu", *, ops: Ops | None = None, branches: Branches | None = None,
    kernels: Kernels | None = None, threads: int | None = None,
) -> TorchSite:  # fmt: skip
    """`model` on a device of torch's ("npu", through torch_npu, or "cpu"), ready to generate.

    Args:
      ops: functions by name that replace those of the model, beside those of `kernels`. The names
        are `functions.NAMES`.
      branches: how a decision that the device takes reaches the host: "read", which waits for the
        device, or "select", which computes both sides. Default: "read" on a CPU, else "select".
      kernels: "built", single operations made by the system's compiler at first use
        (`ascend.built`, for a CPU), or "torch", a few torch calls for each (`ascend.functions`).
        Default: "built" on a CPU, else "torch".
      threads: of torch's while a program runs. Default: 1 on a CPU, where most calls are too small
        to share, else what torch has.

    Raises TypeError where model is none, ValueError for another device, branches, kernels or
    threads, or a name in `ops` that no program calls, KernelRefusedError where torch, or torch_npu
    for "npu", cannot be imported, NoKernelsError where kernels="built" cannot be built.
    """
    if not isinstance(model, Model):
        raise TypeError(f"model must be what `load` returns, got {model!r}: load it")
    where = torch_device(device)
    if branches not in (None, "read", "select"):
        raise ValueError(f'branches must be "read", "select" or None, got {branches!r}')
    on_cpu, ops = where.type == "cpu", ops or {}
    _check(kernels, threads, ops, on_cpu)
    plain = dataclasses.replace(model.numerics, rows="batched")
    model = dataclasses.replace(model, numerics=plain)
    known = functions.named(model.cfg, plain)
    if (kernels or ("built" if on_cpu else "torch")) == "built":
        known = {**known, **built.named(model.cfg, plain)}
    run = _programs(
        where, {**known, **ops}, branches or ("read" if on_cpu else "select"),
        threads or (1 if on_cpu else None),
    )  # fmt: skip
    held = place((model.params, model.tables), where)
    return TorchSite(device=where, model=model, held=held, run=run)


def _check(kernels: Any, threads: Any, ops: Ops, on_cpu: bool) -> None:
    if kernels not in (None, "built", "torch"):
        raise ValueError(f'kernels must be "built", "torch" or None, got {kernels!r}')
    if kernels == "built" and not on_cpu:
        raise ValueError(
            'kernels="built" are for torch\'s CPU: leave kernels out, and put what the chip has '
            "into ops"
        )
    if threads is not None and (type(threads) is not int or threads < 1):
        raise ValueError(f"threads must be a positive int or None, got {threads!r}")
    strange = sorted({*ops} - {*functions.NAMES})
    if strange:
        raise ValueError(
            f"ops: no program calls {', '.join(map(repr, strange))}; the names are "
            f"{', '.join(sorted(functions.NAMES))}"
        )


def torch_device(device: str) -> Any:
    """A device of torch's by name; "npu" imports torch_npu, which makes it known.

    Raises ValueError for another one, KernelRefusedError where torch_npu cannot be imported.
    """
    torch = import_torch()
    kind = device.split(":")[0] if isinstance(device, str) else None
    if kind not in ("npu", "cpu"):
        raise ValueError(
            f'device must be "npu", "npu:1" and so on, or "cpu", got {device!r}: for a GPU there '
            "is XLA, by deepinfer_jax.generate"
        )
    if kind == "npu":
        from kernels_bridge.registry import KernelRefusedError

        try:
            import torch_npu  # noqa: F401  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise KernelRefusedError(
                f"torch_npu cannot be imported ({error}), and device={device!r} is reached through "
                'it: install CANN and torch_npu for this torch, or pass device="cpu"'
            ) from error
    return torch.device(device)


def generate(
    model: Model | TorchSite, prompts: Sequence[Any], *, device: str | None = None,
    batch_size: int | None = None, speculative: Policy = OFF, progress: bool = True,
    **options: Unpack[OptionArguments],
) -> list[Result]:  # fmt: skip
    """`deepinfer_jax.generate` with every program run by torch on `device`, default "npu".

    model: a model, or what `placed` made of one, whose programs are then kept from call to call and
    whose device is that of `placed`.
    The other arguments, the results and the errors are those of `deepinfer_jax.generate`. The
    results agree with XLA's up to the order of sums: the promise about bits is not made here.
    """
    site = model if isinstance(model, TorchSite) else placed(model, device or "npu")
    if device is not None and torch_device(device) != site.device:
        raise ValueError(
            f"device={device!r}, but the model was placed on {str(site.device)!r}: leave device "
            "out, or place the model there"
        )
    assert site.model is not None, "a site is made by `placed`"
    return generation.generate(
        site.model, prompts, batch_size=batch_size, speculative=speculative, progress=progress,
        site=site, **options,
    )  # fmt: skip
