"""Generated AscendC on a CPU: compiled with the headers of `emu`, called from jitted JAX.

What is tested is the generated source and the logic of our kernels: which numbers are read and
written, in which order they are added, whether barriers and events are all there. It is not the
silicon: cube cores, FP8 and how the device rounds elementary functions are outside.

A launch takes a `Control`. In schedule 0 everything runs in program order, in others lanes and
pipes overtake each other wherever no barrier or event forbids it, so a source that lacks one gives
other bits or a fault. An instruction can be left out by its line, which shows whether that is
noticed (docs/ascend_kernels.md 3).
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import os
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from ascend import manifest
from ascend.kernels import Form
from kernels_bridge import building, handlers
from kernels_bridge.ops.operands import fit

ANOTHER = "run the operation's twin, by XLA"
HEADERS = Path(__file__).with_name("emu")
_INCLUDES = "#include <tl_templates/ascend/common.h>\n#include <tl_templates/ascend/debug.h>\n"
_ENTRY = re.compile(r'extern "C" __global__ __vector__ void (\w+)\((.*)\) \{')
_BUFFER = "(__ubuf__ uint8_t *)0;"
_SYNC = re.compile(r"\basc_(syncthreads|sync_notify|sync_wait)\(")


@dataclasses.dataclass(frozen=True)
class Control:
    """How a launch goes: its schedule, and up to two lines of the source that are left out."""

    schedule: int = 0
    without: tuple[int, ...] = ()

    def operand(self) -> jax.Array:
        """int32 [3], as the handlers take it."""
        return jnp.asarray([self.schedule, *self.without, 0, 0][:3], jnp.int32)


PROGRAM_ORDER = Control()


@dataclasses.dataclass(frozen=True)
class Source:
    """Generated source of a form: the committed one, or one that a test has changed."""

    form: Form
    text: str

    @property
    def symbol(self) -> str:
        """A name for C."""
        return self.form.name.replace("-", "_")

    def sync_lines(self, kind: str) -> tuple[int, ...]:
        """Lines with an instruction "syncthreads", "sync_notify" or "sync_wait"."""
        lines = enumerate(self.text.splitlines(), 1)
        return tuple(n for n, line in lines if (m := _SYNC.search(line)) and m[1] == kind)


def committed(form: Form) -> Source:
    """The source that is kept of a form."""
    return Source(form, manifest.generated_source(form))


def call(
    source: Source, *operands: jax.Array, beside: Sequence[Source] = (),
    control: Control | jax.Array = PROGRAM_ORDER,
) -> Any:  # fmt: skip
    """Results of a kernel, by its generated source; a tuple where there are several.

    beside: sources compiled into the same library. control: a `Control`, or its operand.

    Raises ValueError for operands that do not fit the form; NoKernelsError where nothing can be
    compiled. A fault (an event that never comes, lanes that part, a copy out of bounds) fails the
    program with its words.
    """
    form, sizes = source.form, dict(source.form.sizes)
    for array, given in zip(form.kernel.operands, operands, strict=True):
        shape = jax.ShapeDtypeStruct(given.shape, given.dtype)
        fit(form.name, sizes, operand=array.name, shape=shape, dims=array.axes,
            dtypes=(array.dtype,))  # fmt: skip
    shapes = [
        jax.ShapeDtypeStruct(each.shape(sizes), jnp.dtype(each.dtype))
        for each in form.kernel.results
    ]
    told = control.operand() if isinstance(control, Control) else control
    held = _library(tuple(dict.fromkeys([*beside, source])))
    made = handlers.call(held, source.symbol, shapes, told, *operands)
    return made[0] if len(made) == 1 else tuple(made)


@functools.cache
def _library(sources: tuple[Source, ...]) -> handlers.Library:
    # A name for XLA stands for one library, and a source may be in several.
    named = "\0".join(part for each in sources for part in (each.symbol, each.text))
    prefix = f"deepinfer_ascend_{manifest.digest(named)[:12]}_"
    path = _placed(translation_unit(sources, prefix))
    symbols = tuple(each.symbol for each in sources)
    return handlers.Library(path, symbols, prefix, ANOTHER)


def translation_unit(sources: Sequence[Source], prefix: str) -> str:
    """One C++ file with a handler of XLA for each source, under `prefix` and its symbol."""
    parts = ['#include "handler.h"\n#include "device.h"\n']
    for source in sources:
        text, entry = adapted(source)
        parts.append(text)
        parts.append(
            f'EMU_HANDLER({prefix}{source.symbol}, "{source.form.name}", '
            f"{source.form.static['blocks']}, {entry});\n"
        )
    return "\n".join(parts)


def adapted(source: Source) -> tuple[str, str]:
    """A generated source in a namespace of its own, and its call with the operands in `at`.

    Three places are changed: its includes, the linkage of the kernel, and the address of the
    unified buffer. Raises ValueError where they are not found as expected.
    """
    entry = _ENTRY.findall(source.text)
    if not source.text.startswith(_INCLUDES) or len(entry) != 1:
        raise ValueError(f"{source.form.name}: not the AscendC that the emulator was made for")
    text = source.text.replace(_INCLUDES, "\n\n").replace(_BUFFER, "emu::core->buffer();")
    text = _ENTRY.sub(r"static void \1(\2) {", text)
    name, parameters = entry[0]
    arrays = [*source.form.kernel.operands, *source.form.kernel.results]
    given = ", ".join(_argument(each, arrays) for each in parameters.split(", "))
    body = f'namespace {source.symbol} {{\n#line 1 "{source.form.name}.cce"\n{text}}}\n'
    return body, f"{source.symbol}::{name}({given})"


def _argument(parameter: str, arrays: list[Any]) -> str:
    """What is handed over for a parameter: an array by name, or the size of an open axis."""
    *kind, name = parameter.replace("*", " ").split()
    for place, array in enumerate(arrays):
        if array.name == name and kind[0] == "__gm__":
            return f"at.data<{kind[1]}>({place})"
    for place, array in enumerate(arrays):
        if name in array.axes.split():
            return f"at.size({place}, {array.axes.split().index(name)})"
    raise ValueError(f"the kernel has a parameter {parameter!r} that is no operand and no axis")


def _placed(text: str) -> Path:
    """The file of a translation unit, with the headers beside it, in a folder named by them all."""
    files = {path.name: path.read_text("utf-8") for path in sorted(HEADERS.glob("*.h"))}
    files["kernels.cc"] = text
    name = hashlib.sha256("\0".join([*files, *files.values()]).encode()).hexdigest()[:16]
    folder = building.cache_folder() / "ascend" / name
    folder.mkdir(parents=True, exist_ok=True)
    for file, content in files.items():
        if (folder / file).exists():
            continue
        with tempfile.NamedTemporaryFile("w", dir=folder, delete=False, suffix=".part") as part:
            part.write(content)
        os.replace(part.name, folder / file)
    return folder / "kernels.cc"
