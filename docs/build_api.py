"""Writes the pages of `docs/api` from the docstrings: `python docs/build_api.py`.

Sources are read, not imported: it needs no package and gives the same on every machine.
"""

from __future__ import annotations

import argparse
import ast
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = "deepinfer_jax"
HEAD = "<!-- Written by docs/build_api.py from the docstrings; change those. -->\n\n"
# Page -> what it is about, and the modules that it shows, in order.
PAGES = {
    "start": ("Load, generate, score", "loading generation llm scoring requests prompts"),
    "model": (
        "The model as functions",
        "config params tables rows cache model.forward model.capture steps",
    ),
    "sampling": ("Sampling and its noise", "sampling noise edits rounds rejection"),
    "planning": ("How many drafts to verify", "planning profiling"),
    "engine": ("The batch engine", "engine scheduling snapshots grammar"),
    "images": ("Images", "images"),
    "rl": ("Reinforcement learning", "rl rl.tunix rl.examples.grpo"),
    "scale": ("More than one device", "axes parallel mirror layout moving eplb scale"),
    "plots": ("Pictures", "plots"),
    "numerics": ("Numbers and their bits", "numerics quant determinism"),
    "files": ("Checkpoints and texts", "checkpoint safetensors text info evaluation"),
}


@dataclass(frozen=True)
class Found:
    """A public name: how it is called, where it is defined, and its definition."""

    name: str
    module: str
    node: ast.FunctionDef | ast.ClassDef


def source(module: str) -> ast.Module:
    """The syntax tree of a module of the package, by its dotted name inside it."""
    path = ROOT.joinpath(PACKAGE, *module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(file.read_text("utf-8"))


def public(module: str) -> list[Found]:
    """Functions and classes that a module offers: those of its `__all__`, or all it defines."""
    tree, origins = source(module), dict[str, tuple[str, str]]()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(PACKAGE + "."):
            inside = (node.module or "").removeprefix(PACKAGE + ".")
            origins |= {each.asname or each.name: (inside, each.name) for each in node.names}
    names = _listed(tree)
    if names is None:
        return [Found(node.name, module, node) for node in _definitions(tree)]
    found = []
    for name in names:
        home, inner = origins.get(name, (module, name))
        nodes = {node.name: node for node in _definitions(source(home))}
        if inner in nodes:
            found.append(Found(name, home, nodes[inner]))
    return found


def _listed(tree: ast.Module) -> list[str] | None:
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return list(ast.literal_eval(node.value))
    return None


def _definitions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.ClassDef]:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            yield node


def described(found: Found) -> str:
    """The entry of one name."""
    node = found.node
    text = [f"### {found.name}\n\n```python\n{_head(node, found.name)}\n```\n"]
    text += _words(node)
    if isinstance(node, ast.ClassDef):
        for method in node.body:
            shown = isinstance(method, ast.FunctionDef) and not method.name.startswith("_")
            if shown and ast.get_docstring(method):
                text.append(f"```python\n{_head(method, method.name)}\n```\n")
                text += _words(method)
    return "\n".join(text)


def _head(node: ast.AST, name: str) -> str:
    """A definition's first lines: how it is called, or which fields it has."""
    if isinstance(node, ast.FunctionDef):
        ahead = [f"@{ast.unparse(each)}\n" for each in node.decorator_list
                 if ast.unparse(each) in ("property", "classmethod", "staticmethod")]  # fmt: skip
        result = f" -> {ast.unparse(node.returns)}" if node.returns else ""
        line = f"def {name}({ast.unparse(node.args)}){result}"
        if len(line) > 100:
            each = textwrap.wrap(ast.unparse(node.args), 92, break_long_words=False)
            line = f"def {name}(\n" + "".join(f"    {part}\n" for part in each) + f"){result}"
        return "".join(ahead) + line
    assert isinstance(node, ast.ClassDef)
    bases = ", ".join(ast.unparse(base) for base in node.bases)
    fields = [ast.unparse(each) for each in node.body if isinstance(each, ast.AnnAssign)]
    fields = [field for field in fields if not field.startswith("_")]
    head = f"class {name}({bases})" if bases else f"class {name}"
    return "\n".join([head, *(f"    {field}" for field in fields)])


def _words(node: ast.FunctionDef | ast.ClassDef) -> list[str]:
    words = ast.get_docstring(node)
    return [f"```text\n{words}\n```\n"] if words else []


def pages() -> dict[str, str]:
    """File name -> text of all pages."""
    made, index = {}, [HEAD + "# API reference\n"]
    for page, (title, modules) in PAGES.items():
        text, linked = [HEAD + f"# {title}\n"], []
        for module in modules.split():
            about = ast.get_docstring(source(module)) or ""
            text.append(f"## {PACKAGE}.{module}\n\n```text\n{about}\n```\n")
            text += [described(found) for found in public(module)]
            linked.append(f"`{module}`")
        made[f"{page}.md"] = "\n".join(text)
        index.append(f"- [{title}]({page}.md): {', '.join(linked)}")
    text = "\nShapes stand in square brackets; every module says what its letters mean.\n"
    made["README.md"] = "\n".join(index) + "\n" + text
    return made


def main() -> int:
    """Write the pages; with --check only say whether they are as they would be written."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--check", action="store_true", help="write nothing; status 1 if out of date"
    )
    check, folder, made = parser.parse_args().check, ROOT / "docs" / "api", pages()
    if check:
        stale = [n for n, text in made.items() if not (folder / n).is_file()
                 or (folder / n).read_text("utf-8") != text]  # fmt: skip
        extra = {path.name for path in folder.glob("*.md")} - made.keys()
        for name in (*stale, *sorted(extra)):
            print(f"docs/api/{name} is out of date: run `python docs/build_api.py`")
        return 1 if stale or extra else 0
    folder.mkdir(exist_ok=True)
    for name, text in made.items():
        (folder / name).write_text(text, "utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
