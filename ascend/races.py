"""Generated AscendC under ThreadSanitizer: lanes are threads, a missing barrier is a data race.

The schedules of `emulator` show a missing barrier by what it does to a result; this shows it in any
run, whatever the numbers, and costs a program of its own (docs/ascend_kernels.md 3).
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ascend.emulator import HEADERS, Source, adapted
from kernels_bridge import building

# Threads instead of lanes on stacks of their own, which the sanitizer does not follow.
FLAGS = ("-std=c++17", "-O1", "-g", "-fsanitize=thread", "-DEMU_THREADS", "-ffp-contract=off")
_RACE = re.compile(r"WARNING: ThreadSanitizer: data race.*?(?=\n=====|\Z)", re.S)
_MAIN = """
int main(int count, char** given) {{
  emu::Files files;
{arrays}
  const emu::Control control{{0, {{std::atoi(given[1]), 0}}}};
  emu::launch(files.arrays, {blocks}, control, [](const emu::Arrays& at) {{
    {entry};
  }});
}}
"""


def program(source: Source, operands: Sequence[np.ndarray], folder: Path) -> list[str]:
    """Compile a source for these operands into `folder`; the command that runs it, but for the line
    that is left out (0: none).

    Raises NoKernelsError where nothing can be compiled with the sanitizer.
    """
    text, entry = adapted(source)
    sizes, lines, paths = dict(source.form.sizes), [], []
    for i, (array, given) in enumerate(zip(source.form.kernel.operands, operands, strict=True)):
        sizes.update(zip(array.axes.split(), given.shape, strict=True))
        paths.append(folder / f"{array.name}.bin")
        paths[-1].write_bytes(np.ascontiguousarray(given).tobytes())
        lines.append(f"  files.operand({_braces(given.shape)}, given[{i + 2}]);")
    for array in source.form.kernel.results:
        shape, width = array.shape(sizes), {"bfloat16": 2}.get(array.dtype, 4)
        lines.append(f"  files.result({_braces(shape)}, {width});")
    blocks = source.form.static["blocks"]
    main = _MAIN.format(arrays="\n".join(lines), blocks=blocks, entry=entry)
    unit, made = folder / "races.cc", folder / "races"
    unit.write_text(f'#include "files.h"\n#include "device.h"\n{text}{main}', "utf-8")
    command = [building.find_compiler(), *FLAGS, "-I", str(HEADERS), str(unit), "-o", str(made)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise building.NoKernelsError(f"no program with -fsanitize=thread: {done.stderr[:400]}")
    return [str(made), *map(str, paths)]


def found(command: Sequence[str], without: int = 0) -> list[str]:
    """What the sanitizer says of a run, a text for each race; empty: none.

    Raises RuntimeError where the program ends in another way.
    """
    made, *paths = command
    # Its shadow memory does not fit every random layout of addresses.
    run = ["setarch", "--addr-no-randomize", made, str(without), *paths]
    done = subprocess.run(run, capture_output=True, text=True, check=False)
    races = _RACE.findall(done.stderr)
    if done.returncode and not races:
        raise RuntimeError(f"{made} ended with {done.returncode}: {done.stderr[:400]}")
    return races


def _braces(shape: Sequence[int]) -> str:
    return "{" + ", ".join(map(str, shape)) + "}"
