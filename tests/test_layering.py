"""The house rules that a program can check, and planted violations of each."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests import layering
from tests.layering import Module

ROOT = Path(__file__).parents[1]
PACKAGE = layering.read_modules(ROOT / "deepinfer_jax", ROOT)
BRIDGE = layering.read_modules(ROOT / "kernels_bridge", ROOT, inside=ROOT)
SHIPPED = PACKAGE + [
    module
    for folder in ("kernels_bridge", "ascend")
    for module in layering.read_modules(ROOT / folder, ROOT)
]

PAGES = {
    Path(page.path).name: layering.sections(page.text)
    for page in layering.read_texts(ROOT / "docs", ROOT, "*.md")
}
RULES = {"tests/layering.py", "tests/test_layering.py"}  # they quote what they look for


def report(findings):
    listed = list(findings)
    assert not listed, "\n" + "\n".join(listed)


def per_module(rule, modules):
    return (finding for module in modules for finding in rule(module))


def test_imports_follow_the_data_flow():
    report(layering.wrong_imports(PACKAGE + BRIDGE))


def test_imports_form_no_cycle():
    report(layering.import_cycles(PACKAGE + BRIDGE))


def test_floating_point_sums_live_in_numerics():
    report(per_module(layering.bare_sums, PACKAGE))


def test_no_environment_variable_below_the_command_line():
    report(per_module(layering.environment_reads, PACKAGE + BRIDGE))


def test_modules_are_named_after_what_they_hold():
    report(per_module(layering.nameless, SHIPPED))


def test_files_and_functions_fit():
    report(per_module(layering.oversized, SHIPPED))


def test_references_name_sections_that_exist():
    texts = list(SHIPPED)
    for folder in ("bench", "configs", "docs", "notebooks", "tests"):
        texts += layering.read_modules(ROOT / folder, ROOT)
        texts += layering.read_texts(ROOT / folder, ROOT, "**/*.md")
    texts += layering.read_texts(ROOT, ROOT, "*.md")
    texts += layering.read_texts(ROOT, ROOT, "*.toml")
    texts = [text for text in texts if text.path not in RULES]
    report(found for text in texts for found in layering.lost_references(text, PAGES))


def test_importing_the_package_touches_no_device():
    """Setting the number of CPU devices is refused once a backend exists."""
    program = "import deepinfer_jax, jax; jax.config.update('jax_num_cpu_devices', 3)"
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT, timeout=120)


def test_importing_the_package_loads_nothing_optional():
    optional = ["optax", "orbax", "fastapi", "llguidance", "torch", "matplotlib", "tokenizers"]
    program = (
        "import sys, deepinfer_jax\n"
        f"loaded = [name for name in {optional} if name in sys.modules]\n"
        "sys.exit(', '.join(loaded) or 0)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT, timeout=120)


# --- planted violations ------------------------------------------------------------------------


def planted(text, name="steps"):
    return Module(name, f"deepinfer_jax/{name.replace('.', '/')}.py", text)


IMPORTS = "import jax\nimport jax.numpy as jnp\nimport numpy as np\nfrom jax import lax\n"


@pytest.mark.parametrize(
    "line",
    [
        "y = jnp.sum(x)",
        "y = jnp.sum(x, dtype=jnp.float32)",
        "y = jax.numpy.mean(x, axis=-1)",
        "y = jnp.einsum('td,dk->tk', x, w)",
        "y = x @ w",
        "x @= w",
        "y = x.sum(axis=0)",
        "y = (x * x).mean(-1, keepdims=True)",
        "y = x.dot(w)",
        "y = lax.dot_general(x, w, dims)",
        "y = lax.dot_general(x, w, dims, preferred_element_type=jnp.float32)",
        "y = lax.psum(x, 'data')",
        "y = lax.psum(x.astype(jnp.float32), 'data')",
        "y = lax.reduce(x, 0.0, lax.add, (0,))",
        "y = lax.reduce(xs, (jnp.uint32(0), jnp.float32(0)), both, (0,))",
        "y = jnp.add.reduce(x)",
        "y = jax.nn.softmax(x)",
        "y = jax.scipy.special.logsumexp(x)",
        "y = jnp.linalg.norm(x)",
        "y = x.at[i].add(v)",
        "y = jax.ops.segment_sum(x, i)",
        "y = jax.tree.map(jnp.sum, tree)",
        "from jax.numpy import matmul as mm; y = mm(x, w)",
        "import jax.lax as l; y = l.cumsum(x)",
    ],
)
def test_a_floating_point_sum_is_found(line):
    findings = list(layering.bare_sums(planted(IMPORTS + line)))
    assert len(findings) == 1
    assert "deepinfer_jax/steps.py:5: " in findings[0]


@pytest.mark.parametrize(
    "line",
    [
        "y = jnp.sum(x, dtype=jnp.int32)",
        "y = mask.sum(axis=0, dtype=np.int64)",
        "y = x.sum(dtype='uint32')",
        "y = jnp.count_nonzero(mask)",
        "y = lax.psum(mask.astype(jnp.int32), 'data')",
        "y = lax.dot_general(x, w, dims, preferred_element_type=jnp.int32)",
        "y = lax.reduce(x, -1.0, lax.max, (0,))",
        "y = lax.reduce(xs, (jnp.uint32(0), jnp.int32(0)), both, (0,))",
        "y = lax.reduce(xs, (jnp.uint32(0),) * 2, both, (0,))",
        "y = lax.associative_scan(jnp.maximum, x)",
        "y = x.at[i].add(1)",
        "y = x.at[i].set(v)",
        "y = jnp.max(x)",
        "y = np.sum(sizes)",
        "y = sum(sizes)",
        "from deepinfer_jax import numerics; y = numerics.dot(x, w)",
        "x.sum = 3",
    ],
)
def test_a_count_or_an_exact_reduction_passes(line):
    assert list(layering.bare_sums(planted(IMPORTS + line))) == []


@pytest.mark.parametrize("name", ["numerics", "numerics.sums", "training.pretrain"])
def test_sums_have_a_home(name):
    assert list(layering.bare_sums(planted(IMPORTS + "y = jnp.sum(x)", name))) == []


@pytest.mark.parametrize(
    "line",
    [
        "import deepinfer_jax.cli",
        "from deepinfer_jax import cli",
        "from deepinfer_jax.cli import main",
        "from . import cli",
        "from .cli import main",
        "def late():\n    from deepinfer_jax import cli",
        "from deepinfer_jax import load",
    ],
)
def test_an_import_against_the_data_flow_is_found(line):
    modules = [planted(line), planted("", "cli"), Module("", "deepinfer_jax/__init__.py", "")]
    (finding,) = layering.wrong_imports(modules)
    assert finding.startswith("deepinfer_jax/steps.py:")
    assert "later in the data flow" in finding


def test_relative_imports_are_resolved_from_packages_too():
    package = Module("model", "deepinfer_jax/model/__init__.py", "from . import rope\n")
    inner = planted("from .. import cli\nfrom ..quant import dequantize", "model.rope")
    modules = [package, inner, planted("", "cli"), planted("", "quant")]
    (finding,) = layering.wrong_imports(modules)
    assert finding.startswith("deepinfer_jax/model/rope.py:1: imports cli")


def test_an_import_with_the_data_flow_passes():
    text = "import os\nfrom deepinfer_jax.config import ModelConfig"
    modules = [planted(text), planted("", "config")]
    assert list(layering.wrong_imports(modules)) == []


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("numerics.forms", "from kernels_bridge import catalogue"),
        ("model.moe", "from kernels_bridge.ops.gemm import fp8_gemm"),
        ("kernels_bridge.registry", "from kernels_bridge.adapters import flash_mla"),
        ("kernels_bridge.ffi", "from deepinfer_jax import numerics"),
    ],
)
def test_the_bridge_has_its_place_in_the_data_flow(name, line):
    bridge = ("catalogue", "ops.gemm", "adapters.flash_mla")
    others = [planted("", "numerics"), *(planted("", f"kernels_bridge.{each}") for each in bridge)]
    modules = [planted(line, name), *others]
    (finding,) = layering.wrong_imports(modules)
    assert "later in the data flow" in finding
    allowed = planted("from kernels_bridge import ffi", "numerics.products")
    assert list(layering.wrong_imports([allowed, planted("", "kernels_bridge.ffi")])) == []


def test_a_module_without_a_place_is_found():
    (finding,) = layering.wrong_imports([planted("", "surprise")])
    assert "surprise has no place" in finding


def test_a_cycle_inside_one_entry_is_found():
    modules = [
        planted("from deepinfer_jax.model import moe", "model.block"),
        planted("from deepinfer_jax.model import block", "model.moe"),
        planted("from deepinfer_jax.model import block", "model.forward"),
    ]
    assert list(layering.import_cycles(modules)) == ["import cycle: model.block, model.moe"]
    assert list(layering.wrong_imports(modules)) == []


def test_an_import_for_annotations_only_makes_no_cycle():
    guarded = (
        "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    from deepinfer_jax.model import block"
    )
    modules = [
        planted("from deepinfer_jax.model import moe", "model.block"),
        planted(guarded, "model.moe"),
    ]
    assert list(layering.import_cycles(modules)) == []
    against = planted(guarded, "rows")
    assert any(layering.wrong_imports([*modules, against]))


@pytest.mark.parametrize(
    "text",
    [
        "import os\nx = os.environ['A']",
        "import os\nx = os.getenv('A')",
        "from os import environ as e\ne",
    ],
)
def test_an_environment_read_is_found(text):
    assert any(layering.environment_reads(planted(text)))
    assert any(layering.environment_reads(planted(text, "kernels_bridge.ffi")))
    for allowed in ("cli", "kernels_bridge.building"):
        assert not any(layering.environment_reads(planted(text, allowed)))


@pytest.mark.parametrize("name", ["utils", "model.common", "misc.sorting"])
def test_a_nameless_module_is_found(name):
    assert any(layering.nameless(planted("", name)))


def test_an_oversized_file_and_function_are_found():
    long_function = "def f():\n" + "    x = 1\n" * layering.FUNCTION_LINES
    (finding,) = layering.oversized(planted(long_function))
    assert "f has 51 lines" in finding
    (finding,) = layering.oversized(planted("x = 1\n" * (layering.FILE_LINES + 1)))
    assert "501 lines" in finding


PAGE = "# A page\n\n## 1. First\n\n### 1.2 Inner part\n\n## Without number: why\n"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("# the rule of model spec 8.4", "'spec 8.4' names no page"),
        ("# the rule of the engine spec\n# 2, plainly", "'spec # 2' names no page"),
        ("# as in Specification section 3", "'Specification section 3' names no page"),
        ("# docs/other.md 1", "there is no docs/other.md"),
        ("# docs/page.md 2", "docs/page.md has no section 2"),
        ("# docs/page.md 1, 1.2 and 1.3", "docs/page.md has no section 1.3"),
        ("# it is docs/page.md\n# 1.2.1", "docs/page.md has no section 1.2.1"),
        ('# docs/page.md "Without\n# name"', "docs/page.md has no section Without name"),
    ],
)
def test_a_lost_reference_is_found(text, complaint):
    pages = {"page.md": layering.sections(PAGE)}
    (finding,) = layering.lost_references(planted("import os\n" + text), pages)
    assert finding.startswith(f"deepinfer_jax/steps.py:2: {complaint}")


@pytest.mark.parametrize(
    "text",
    [
        "see docs/page.md, 3 lines",
        "docs/page.md 1, 1.2.",
        "docs/page.md 1.2: 528 bytes",
        'docs/page.md "Inner part" and "Outer part"',
        'docs/page.md "Without\n    number"',
        "# docs/page.md\n# 1",
        "for spec in specs: 1",
        "spec = 3",
    ],
)
def test_a_reference_that_leads_somewhere_passes(text):
    pages = {"page.md": layering.sections(PAGE)}
    assert list(layering.lost_references(planted(text), pages)) == []
