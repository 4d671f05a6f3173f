"""Lowers our TileLang kernels to AscendC for Ascend 950: `python -m ascend.lower [--check]`.

Needs tilelang in a release that `RELEASE` names (extra `ascend`, in an environment of its own) and
neither CANN nor an NPU: what it makes is source text. --check writes nothing, and fails where the
committed files are not what would be written (docs/ascend_kernels.md).
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import sys
from pathlib import Path

from ascend import manifest
from ascend.kernels import FORMS, Form

RELEASE = "0.1.15"
OPEN = 7  # rows of operands that are only described; the generated source takes any number


def lowered(form: Form) -> str:
    """The AscendC of a form.

    Raises ImportError without tilelang, and RuntimeError for another release than `RELEASE`.
    """
    release = importlib.metadata.version("tilelang")
    if release != RELEASE:
        raise RuntimeError(
            f"tilelang {release} may generate other source than {RELEASE}, which the manifest is "
            f"for: install tilelang=={RELEASE}"
        )
    import tilelang  # pyright: ignore[reportMissingImports]
    import torch  # pyright: ignore[reportMissingImports]
    from tvm.target import Target  # pyright: ignore[reportMissingImports]

    name = form.kernel.name
    function = getattr(importlib.import_module(f"ascend.kernels.{name}"), name)
    sizes = {**dict.fromkeys(form.open_axes, OPEN), **form.sizes}
    operands = [
        torch.empty(each.shape(sizes), dtype=getattr(torch, each.dtype))
        for each in form.kernel.operands
    ]
    program = function.get_tir(*operands, **form.static)
    with Target({"kind": "ascend"}) as target:
        made = tilelang.lower(
            program, target=target, enable_device_compile=False, enable_host_codegen=False
        )
    return made.kernel_source.rstrip() + "\n"


def write(folder: Path = manifest.FOLDER) -> None:
    """Lower every form whose entry is not up to date, write its source, and the manifest."""
    entries = {}
    for form in FORMS:
        path = manifest.generated_path(form, folder)
        if manifest.changed(form, folder):
            path.write_text(lowered(form), "utf-8")
        entries[form.name] = manifest.entry(form, path.read_text("utf-8"), RELEASE)
    (folder / "manifest.json").write_text(manifest.written(entries), "utf-8")


def stale(folder: Path = manifest.FOLDER) -> list[str]:
    """What the committed files lack to be what lowering makes now; empty: nothing."""
    said = manifest.differences(folder)
    for form in FORMS:
        path = manifest.generated_path(form, folder)
        if path.exists() and path.read_text("utf-8") != lowered(form):
            said.append(f"{path.name} is not what {form.kernel.name}.py lowers to")
    return said


def main(arguments: list[str] | None = None) -> int:
    """The command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m ascend.lower", description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare, and write nothing")
    args = parser.parse_args(arguments)
    try:
        said = stale() if args.check else write()
    except ImportError as error:
        print(f"{error}: pip install '.[ascend]' in an environment of its own", file=sys.stderr)
        return 2
    for line in said or ():
        print(line, file=sys.stderr)
    return 1 if said else 0


if __name__ == "__main__":
    sys.exit(main())
