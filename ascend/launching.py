"""Ways to launch a kernel of `ascend.kernels`: on an NPU by tilelang, on a CPU by the emulator.

Both take the operands of the kernel's source, of torch or of JAX, and have the few functions of
arrays that an operation needs to make them.
"""

from __future__ import annotations

import importlib
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from ascend import emulator, kernels
from ascend.kernels import Form, Kernel
from kernels_bridge.dlpack import import_torch
from kernels_bridge.registry import KernelRefusedError


class Launcher(Protocol):
    """How a kernel is reached."""

    def launch(self, kernel: Kernel, *operands: Any, **static: Any) -> Any:
        """Its results, a tuple where there are several."""
        ...

    def joined(self, first: Any, second: Any) -> Any:
        """Two arrays side by side, [T, S + E]."""
        ...

    def bits(self, x: Any) -> Any:
        """The bits of floats as float32, in uint32."""
        ...


def tuned(kernel: Kernel) -> dict[str, Any]:
    """Threads, cores and sizes of tasks for the model: they change no bit."""
    form = next(each for each in kernels.FLASH if each.kernel is kernel)
    return {n: form.static[n] for n in ("threads", "blocks", "group", "keys") if n in form.static}


class OnDevice:
    """Compiled by tilelang at the first call for its sizes, on tensors of torch_npu. Never run."""

    def launch(self, kernel: Kernel, *operands: Any, **static: Any) -> Any:
        """Raises KernelRefusedError where tilelang is missing."""
        try:
            module = importlib.import_module(f"ascend.kernels.{kernel.name}")
        except ImportError as error:
            raise KernelRefusedError(
                f"{kernel.name} needs tilelang ({error}): install it beside torch_npu"
            ) from error
        return getattr(module, kernel.name)(*operands, **tuned(kernel), **static)

    def joined(self, first: Any, second: Any) -> Any:
        return import_torch().cat([first, second], 1)

    def bits(self, x: Any) -> Any:
        torch = import_torch()
        return x.to(torch.float32).contiguous().view(torch.uint32)


class Emulated:
    """The committed source of a form, by `ascend.emulator`, inside jitted JAX on a CPU."""

    def launch(self, kernel: Kernel, *operands: Any, **static: Any) -> Any:
        """Raises KernelRefusedError where no committed form fits."""
        form = self.form(kernel, operands, static)
        if isinstance(form, str):
            raise KernelRefusedError(form)
        # One library for the forms of a kind: operations are seldom tried alone.
        kind = kernels.SMALL if form in kernels.SMALL else kernels.FLASH
        beside = [emulator.committed(each) for each in kind]
        return emulator.call(emulator.committed(form), *operands, beside=beside)

    @staticmethod
    def form(kernel: Kernel, operands: Any, static: dict[str, Any]) -> Form | str:
        """The committed form for these shapes, or why there is none."""
        sizes: dict[str, int] = {}
        for array, given in zip(kernel.operands, operands, strict=True):
            sizes.update(zip(array.axes.split(), given.shape, strict=True))
        for form in kernels.FORMS:
            fixed = {**form.sizes, **form.static}
            fits = form.kernel is kernel and all(
                fixed.get(name, value) == value for name, value in {**sizes, **static}.items()
            )
            if fits:
                return form
        asked = {**{n: sizes[n] for n in sorted(sizes)}, **static}
        told = ", ".join(f"{name}={value}" for name, value in asked.items())
        return f"no form of {kernel.name} for {told} is committed: add one to ascend.kernels"

    def joined(self, first: Any, second: Any) -> jax.Array:
        return jnp.concatenate([first, second], axis=1)

    def bits(self, x: Any) -> jax.Array:
        return lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
