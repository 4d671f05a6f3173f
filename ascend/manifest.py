"""What is kept of generated source: `generated/*.cce` and hashes of what each was made from.

`python -m ascend.lower` writes both, where tilelang is installed. Reading and checking them needs
nothing (docs/ascend_kernels.md).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ascend.kernels import FORMS, Form

FOLDER = Path(__file__).with_name("generated")
SOURCES = Path(__file__).with_name("kernels")
COMMAND = "python -m ascend.lower"


def generated_path(form: Form, folder: Path = FOLDER) -> Path:
    """Where the generated source of a form is kept."""
    return folder / f"{form.name}.cce"


def generated_source(form: Form, folder: Path = FOLDER) -> str:
    """The committed AscendC of a form. Raises OSError where there is none."""
    return generated_path(form, folder).read_text("utf-8")


def parameters(form: Form) -> dict[str, Any]:
    """All that a form hands to the compiler besides its source file, as JSON can hold it."""
    kernel = form.kernel
    arrays = [[each.name, each.dtype, each.axes] for each in (*kernel.operands, *kernel.results)]
    return {"arrays": arrays, "sizes": dict(form.sizes), "static": dict(form.static)}


def entry(form: Form, output: str, release: str) -> dict[str, Any]:
    """What the manifest says of a form whose generated source is `output`."""
    return {
        "kernel": form.kernel.name,
        "parameters": parameters(form),
        "source_sha256": digest((SOURCES / f"{form.kernel.name}.py").read_text("utf-8")),
        "output_sha256": digest(output),
        "tilelang": release,
    }


def digest(text: str) -> str:
    """SHA-256 of a text."""
    return hashlib.sha256(text.encode()).hexdigest()


def written(entries: Mapping[str, Any]) -> str:
    """The text of a manifest."""
    return json.dumps(dict(entries), indent=1, sort_keys=True) + "\n"


def kept(folder: Path = FOLDER) -> dict[str, Any]:
    """The entries of the manifest by the names of forms; none where there is no manifest."""
    path = folder / "manifest.json"
    return json.loads(path.read_text("utf-8")) if path.exists() else {}


def changed(form: Form, folder: Path = FOLDER) -> str | None:
    """Why the committed source of a form is not what its entry says; None: it is."""
    old, path = kept(folder).get(form.name), generated_path(form, folder)
    if old is None or not path.exists():
        return f"{form.name} was never lowered: run {COMMAND}"
    new = json.loads(json.dumps(entry(form, path.read_text("utf-8"), old["tilelang"])))
    other = [name for name in new if new[name] != old.get(name)]
    return f"{form.name}: {', '.join(other)} changed: run {COMMAND}" if other else None


def differences(folder: Path = FOLDER, forms: Sequence[Form] = FORMS) -> list[str]:
    """What of the committed files does not belong together; empty: all does.

    Compares sources, parameters and generated files with the manifest, and names files and entries
    that nobody knows.
    """
    said = [why for form in forms if (why := changed(form, folder))]
    names = {form.name for form in forms}
    strange = sorted({*kept(folder), *(path.stem for path in folder.glob("*.cce"))} - names)
    return said + [f"{name} belongs to no form: remove it and run {COMMAND}" for name in strange]
