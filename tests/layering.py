"""What the house rules say about source text, as pure functions; used by test_layering.py."""

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

PACKAGE, BRIDGE = "deepinfer_jax", "kernels_bridge"

# Data flows down this list, so an import goes up it. An entry names a module or a sub-package, or a
# part of one that stands elsewhere; modules below one entry may import each other as long as they
# form no cycle when they run (an import for annotations only may). "" is the package's own
# __init__, the public names. Modules of the other package, `kernels_bridge`, keep its name.
ORDER = (
    "resources",
    "whole_files",
    "strict_json",
    "summaries",
    "validity",
    "config",
    "axes",
    "quant",
    "kernels_bridge.building",
    "kernels_bridge",
    "numerics",
    "tables",
    "rows",
    "mirror",
    "eplb",
    "params",
    "safetensors",
    "checkpoint",
    "cache",
    "snapshots",
    "info",
    "model",
    "layout",
    "moving",
    "fetching",
    "images",
    "noise",
    "sampling",
    "rejection",
    "edits",
    "planning",
    "scheduling",
    "steps",
    "rounds",
    "text",
    "grammar",
    "loading",
    "scoring",
    "requests",
    "rendering",
    "prompts",
    "transcript",
    "engine",
    "generation",
    "llm",
    "profiling",
    "rl",
    "parallel",
    "scale",
    "determinism",
    "plots",
    "",
    "training",
    "evaluation",
    "rl.examples",
    "kernels_bridge.ops.pages",
    "kernels_bridge.ops.plan",
    "kernels_bridge.ops.operands",
    "kernels_bridge.adapters",
    "kernels_bridge.ops",
    "kernels_bridge.catalogue",
    "published",
    "cli",
    "__main__",
)
SUMS_ALLOWED = ("numerics", "training")
# `kernels_bridge.building` asks where to keep libraries, also for programs without a command line.
ENVIRONMENT_ALLOWED = ("loading", "cli", "__main__", "kernels_bridge.building")
NAMELESS = {"utils", "util", "common", "misc", "helpers"}
FILE_LINES = 500
FUNCTION_LINES = 50

_SUMS = {
    "jax.numpy": "sum nansum mean nanmean average std nanstd var nanvar cumsum nancumsum "
    "cumulative_sum dot vdot vecdot matvec vecmat inner matmul tensordot einsum trace trapezoid "
    "convolve correlate cov corrcoef add.reduce add.accumulate add.at add.reduceat "
    "linalg.norm linalg.vector_norm linalg.matrix_norm linalg.matmul linalg.vecdot "
    "linalg.tensordot linalg.multi_dot",
    "jax.lax": "dot dot_general batch_matmul ragged_dot ragged_dot_general conv "
    "conv_general_dilated psum pmean psum_scatter reduce_sum cumsum cumlogsumexp scatter_add",
    "jax.nn": "softmax log_softmax logsumexp logmeanexp standardize dot_product_attention "
    "scaled_matmul scaled_dot_general",
    "jax.scipy.special": "logsumexp softmax log_softmax",
    "jax.ops": "segment_sum",
    "jax.experimental.pallas": "dot",
}
SUMS = {f"{module}.{name}" for module, names in _SUMS.items() for name in names.split()}
# These sum or do not sum depending on the function they are given.
REDUCERS = {"jax.lax.reduce", "jax.lax.reduce_window", "jax.lax.associative_scan"}
EXACT = {
    f"{module}.{name}"
    for module, names in {
        "jax.lax": "max min bitwise_and bitwise_or bitwise_xor",
        "jax.numpy": "maximum minimum logical_and logical_or bitwise_and bitwise_or bitwise_xor",
    }.items()
    for name in names.split()
}
SUM_METHODS = {"sum", "mean", "dot", "cumsum", "std", "var", "trace"}
INTEGER = re.compile(r"u?int(4|8|16|32|64|p)?|bool_?")
# A numbered section of a page, or one by its title: docs/model.md 3.1, docs/model.md 4, 5 and 6.2.
_GAP = r"[\s#]+"  # a reference may go on behind the `#` of the next line
_NUMBER = r"\d+(?:\.\d+)*"
REFERENCE = re.compile(
    rf"(?<!main/)docs/(?P<page>[\w-]+\.md)"
    rf"(?:{_GAP}(?P<numbers>{_NUMBER}(?:(?:,|{_GAP}and|{_GAP}to){_GAP}{_NUMBER})*)"
    rf'|{_GAP}"(?P<title>[^"]+)")?'
)
HEADING = re.compile(rf"^#+ (?:(?P<number>{_NUMBER})\.? )?(?P<title>.+)$", re.MULTILINE)
NO_PAGE = re.compile(rf"\bspec(?:ification)?s?{_GAP}(?:section{_GAP})?{_NUMBER}", re.IGNORECASE)


@dataclass(frozen=True)
class Module:
    """One source file: dotted name inside the package ("" is its __init__; of the bridge with its
    name), path and text.
    """

    name: str
    path: str
    text: str

    @property
    def is_package(self) -> bool:
        return Path(self.path).name == "__init__.py"


def read_modules(folder: Path, root: Path, inside: Path | None = None) -> list[Module]:
    """Every Python file below `folder`; names are inside of `inside` (default: `folder`), paths
    relative to `root`.
    """
    modules = []
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(inside or folder).with_suffix("").parts
        if parts[-1] == "__init__":
            parts = parts[:-1]
        text = path.read_text(encoding="utf-8")
        modules.append(Module(".".join(parts), str(path.relative_to(root)), text))
    return modules


def entry_of(name: str) -> str | None:
    """The entry of ORDER that `name` belongs to: the longest that it is or lies in."""
    while name not in ORDER:
        name, dot, _ = name.rpartition(".")
        if not dot:
            return None
    return name


def imports_of(module: Module, known: frozenset[str]) -> Iterator[tuple[int, str]]:
    """(line, module name inside the package) for each import of the two packages' own modules."""
    yield from _imports(module, known, ast.parse(module.text))


def _imports(module: Module, known: frozenset[str], tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(module, node)
            targets = [f"{base}.{alias.name}" for alias in node.names]
        else:
            continue
        for target in targets:
            root, _, inside = target.partition(".")
            if root not in (PACKAGE, BRIDGE):
                continue
            name, least = (inside, "") if root == PACKAGE else (target, BRIDGE)
            while name not in known and name != least:
                name = name.rpartition(".")[0]
            yield node.lineno, name


def _absolute(module: Module, node: ast.ImportFrom) -> str:
    if node.level == 0:
        return node.module or ""
    parts = [*filter(None, module.name.split("."))]
    parts = parts if parts[:1] == [BRIDGE] else [PACKAGE, *parts]
    parts = parts[: len(parts) - node.level + (1 if module.is_package else 0)]
    return ".".join([*parts, *filter(None, [node.module])])


def wrong_imports(modules: list[Module]) -> Iterator[str]:
    """Modules without a place in ORDER, and imports that do not go up it."""
    known = frozenset(module.name for module in modules)
    for module in modules:
        here = entry_of(module.name)
        if here is None:
            yield f"{module.path}: {module.name} has no place in ORDER of tests/layering.py"
            continue
        for line, target in imports_of(module, known):
            there = entry_of(target)
            if there is None or there == here:
                continue
            if ORDER.index(there) > ORDER.index(here):
                name = target or PACKAGE
                yield f"{module.path}:{line}: imports {name}, which comes later in the data flow"


def import_cycles(modules: list[Module]) -> Iterator[str]:
    """Cycles among the package's modules, each reported once by its members."""
    known = frozenset(module.name for module in modules)
    graph = {}
    for module in modules:
        tree = _AtRunTime().visit(ast.parse(module.text))
        graph[module.name] = {target for _, target in _imports(module, known, tree)} - {module.name}
    reach = {name: _reachable(graph, name) for name in graph}
    seen: set[frozenset[str]] = set()
    for name in graph:
        ring = frozenset(other for other in reach[name] if name in reach.get(other, ()))
        if ring and ring not in seen:
            seen.add(ring)
            yield "import cycle: " + ", ".join(sorted(member or PACKAGE for member in ring))


class _AtRunTime(ast.NodeTransformer):
    """Removes what `if TYPE_CHECKING:` guards."""

    def visit_If(self, node: ast.If) -> ast.AST | list[ast.stmt]:
        test = node.test
        name = test.attr if isinstance(test, ast.Attribute) else getattr(test, "id", "")
        self.generic_visit(node)
        return node.orelse if name == "TYPE_CHECKING" else node


def _reachable(graph: Mapping[str, set[str]], start: str) -> set[str]:
    found: set[str] = set()
    front = set(graph[start])
    while front:
        found |= front
        front = {after for name in front for after in graph.get(name, ())} - found
    return found


class _Names:
    """Resolves `jnp.sum` to `jax.numpy.sum` through the imports of one file."""

    def __init__(self, tree: ast.AST) -> None:
        self.table: dict[str, str] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    head = alias.name.split(".", 1)[0]
                    self.table[alias.asname or head] = alias.name if alias.asname else head
            elif isinstance(node, ast.ImportFrom):
                base = "." * node.level + (node.module or "")
                for alias in node.names:
                    self.table[alias.asname or alias.name] = f"{base}.{alias.name}"

    def resolve(self, node: ast.AST) -> str | None:
        """Dotted name of an imported thing; None for anything that is not one."""
        if isinstance(node, ast.Name):
            return self.table.get(node.id)
        if isinstance(node, ast.Attribute):
            base = self.resolve(node.value)
            return None if base is None else f"{base}.{node.attr}"
        return None


def bare_sums(module: Module) -> Iterator[str]:
    """Floating-point sums outside `numerics`.

    A sum is exempt when its text says that it counts: a `dtype=` or `preferred_element_type=` of
    an integer or boolean type, an operand written `x.astype(jnp.int32)`, a `lax.reduce` that
    starts from `jnp.int32(0)`, or `.at[i].add(1)`.
    """
    if entry_of(module.name) in SUMS_ALLOWED:
        return
    tree = ast.parse(module.text)
    names = _Names(tree)
    called = {id(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        what = _sum_name(node, names)
        call = called.get(id(node))
        if what is None or (call is not None and _counts(call, what, names)):
            continue
        yield (
            f"{module.path}:{node.lineno}: {what} outside numerics; call numerics, or mark a count "
            "with an integer dtype"
        )


def _sum_name(node: ast.AST, names: _Names) -> str | None:
    if isinstance(node, ast.BinOp | ast.AugAssign) and isinstance(node.op, ast.MatMult):
        return "@"
    if not isinstance(node, ast.Attribute | ast.Name) or not isinstance(node.ctx, ast.Load):
        return None
    resolved = names.resolve(node)
    if resolved is not None:
        return resolved if resolved in SUMS | REDUCERS else None
    if not isinstance(node, ast.Attribute):
        return None
    if node.attr in SUM_METHODS:
        return f".{node.attr}()"
    if node.attr in {"add", "subtract"} and _is_at(node.value):
        return f".at[].{node.attr}()"
    return None


def _is_at(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Subscript)
        and isinstance(node.value, ast.Attribute)
        and node.value.attr == "at"
    )


def _counts(call: ast.Call, what: str, names: _Names) -> bool:
    if what in REDUCERS:
        starts = len(call.args) > 1 and _is_integer_start(call.args[1])
        return starts or any(names.resolve(given) in EXACT for given in _arguments(call))
    for keyword in call.keywords:
        if keyword.arg in {"dtype", "preferred_element_type"}:
            return _is_integer_type(keyword.value)
    if not call.args:
        return False
    operand = call.args[0]
    if what.startswith(".at[]") and isinstance(operand, ast.Constant):
        return isinstance(operand.value, int)
    return _is_cast_to_integer(operand)


def _is_integer_start(node: ast.expr) -> bool:
    """`jnp.int32(0)`, a tuple of such, or one repeated; operands have the type of their start."""
    if isinstance(node, ast.Tuple):
        return all(_is_integer_start(each) for each in node.elts)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        return _is_integer_start(node.left)
    return isinstance(node, ast.Call) and _is_integer_type(node.func)


def _is_cast_to_integer(node: ast.expr) -> bool:
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "astype"
        and bool(node.args)
        and _is_integer_type(node.args[0])
    )


def _arguments(call: ast.Call) -> list[ast.expr]:
    return [*call.args, *(keyword.value for keyword in call.keywords)]


def _is_integer_type(node: ast.expr) -> bool:
    if isinstance(node, ast.Constant):
        return isinstance(node.value, str) and INTEGER.fullmatch(node.value) is not None
    name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
    return INTEGER.fullmatch(name) is not None


def environment_reads(module: Module) -> Iterator[str]:
    """Uses of environment variables below the command line."""
    if entry_of(module.name) in ENVIRONMENT_ALLOWED:
        return
    tree = ast.parse(module.text)
    names = _Names(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute | ast.Name):
            name = names.resolve(node)
            if name in {"os.environ", "os.environb", "os.getenv", "os.getenvb"}:
                yield f"{module.path}:{node.lineno}: {name} below the command line; pass a value"


def nameless(module: Module) -> Iterator[str]:
    """File and folder names that say nothing."""
    for part in Path(module.path).with_suffix("").parts:
        if part.lower() in NAMELESS:
            yield f"{module.path}: name the thing instead of {part!r}"


def oversized(module: Module) -> Iterator[str]:
    """Files and functions that do not fit."""
    lines = module.text.count("\n")
    if lines > FILE_LINES:
        yield f"{module.path}: {lines} lines, at most {FILE_LINES}"
    for node in ast.walk(ast.parse(module.text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > FUNCTION_LINES:
                yield (
                    f"{module.path}:{node.lineno}: {node.name} has {length} lines, "
                    f"at most {FUNCTION_LINES}"
                )


def read_texts(folder: Path, root: Path, pattern: str) -> list[Module]:
    """Files of `folder` that match the glob `pattern`, whatever is in them, as nameless modules."""
    paths = sorted(folder.glob(pattern))
    return [Module("", str(path.relative_to(root)), path.read_text("utf-8")) for path in paths]


def sections(page: str) -> frozenset[str]:
    """Numbers and titles of the headings of a Markdown page; a title also up to its colon."""
    found: set[str] = set()
    for heading in HEADING.finditer(page):
        number, title = heading.group("number", "title")
        found |= {number or "", title, title.partition(":")[0]}
    return frozenset(found - {""})


def lost_references(module: Module, pages: Mapping[str, frozenset[str]]) -> Iterator[str]:
    """References to documents that nobody has, and to pages or sections that do not exist.

    pages: file name below `docs` -> `sections` of it.
    """
    for found in NO_PAGE.finditer(module.text):
        quoted = " ".join(found.group().split())
        yield f"{_place(module, found)}: {quoted!r} names no page; say docs/<page>.md <section>"
    for found in REFERENCE.finditer(module.text):
        page, numbers, title = found.group("page", "numbers", "title")
        if page not in pages:
            yield f"{_place(module, found)}: there is no docs/{page}"
            continue
        wanted = re.findall(_NUMBER, numbers) if numbers else []
        wanted += [" ".join(title.replace("#", " ").split())] if title else []
        for name in wanted:
            if name not in pages[page]:
                yield f"{_place(module, found)}: docs/{page} has no section {name}"


def _place(module: Module, found: re.Match[str]) -> str:
    return f"{module.path}:{module.text.count(chr(10), 0, found.start()) + 1}"
