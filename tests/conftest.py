"""Switches of the whole suite; they are set before any test touches a JAX device."""

import collections
import gc
import json
import os
import shutil
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis
import jax
import pytest

from deepinfer_jax.cli import meshes
from tests.golden import reader

# --- numerics switches -------------------------------------------------------------------------
# An unwanted float64 or a silently broadcast axis is an error, not a surprise three files later.
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
# --- end of numerics switches ------------------------------------------------------------------

# Sharded programs are tested on eight CPU devices; harmless where the default device is a GPU. They
# share cores with other workers, and may have to wait for each other; so may those of commands.
meshes.wait_longer(os.environ)
jax.config.update("jax_num_cpu_devices", 8)

# Tracing makes objects by the million, nearly none of them in cycles, and a collection walks over
# all that earlier tests left compiled: rarely is often enough.
gc.set_threshold(50_000, 20, 50)

# A compiling example has no meaningful deadline. The default profile draws the same examples in
# every run; `--hypothesis-profile=explore` draws new ones.
for _name, _fixed in (("fixed", True), ("explore", False)):
    hypothesis.settings.register_profile(
        _name,
        deadline=None,
        derandomize=_fixed,
        suppress_health_check=[hypothesis.HealthCheck.too_slow],
    )
hypothesis.settings.load_profile("fixed")

_CACHE = pytest.StashKey[str]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--golden-dir",
        metavar="DIR",
        help="run the recorded-vector checks on DIR instead of tests/golden; a check whose files "
        "DIR does not have is skipped",
    )


def pytest_configure(config: pytest.Config) -> None:
    """One compilation cache for this run, shared by all workers.

    $JAX_COMPILATION_CACHE_DIR if it is set; otherwise made here and removed at the end.
    """
    shared = jax.config.values["jax_compilation_cache_dir"]
    if shared is None:
        shared = getattr(config, "workerinput", {}).get("compilation_cache")
    if shared is None:
        shared = config.stash[_CACHE] = tempfile.mkdtemp(prefix="deepinfer-jax-tests-")
    jax.config.update("jax_compilation_cache_dir", shared)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node) -> None:
    """Tell a worker of pytest-xdist where the run's compilation cache is."""
    node.workerinput["compilation_cache"] = node.config.stash.get(_CACHE, None)


def pytest_unconfigure(config: pytest.Config) -> None:
    made = config.stash.get(_CACHE, None)
    if made is not None:
        shutil.rmtree(made, ignore_errors=True)


@pytest.hookimpl(trylast=True)  # after `-m` and `-k` have chosen
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with more slow tests first: a worker takes whole files, and none waits at the end."""
    slow = collections.Counter(item.path for item in items if item.get_closest_marker("slow"))
    items.sort(key=lambda item: -slow[item.path])


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and jax.default_backend() != "gpu":
        pytest.skip(f"needs a CUDA device, the default backend is {jax.default_backend()}")


@pytest.fixture(scope="session")
def recorded(golden_root: Path) -> Callable[[str], Any]:
    """Reads a JSON file of recorded vectors, "folder/name.json"."""

    def load(name: str) -> Any:
        path = golden_root / name
        if not path.is_file():
            reader.missing(golden_root, name)
        return json.loads(path.read_text("utf-8"))

    return load


@pytest.fixture(scope="session")
def golden_root(pytestconfig: pytest.Config) -> Path:
    """Folder of recorded vectors: tests/golden, or the folder given with --golden-dir."""
    given = pytestconfig.getoption("--golden-dir")
    if given is None:
        return reader.HERE
    folder = Path(given)
    if not folder.is_dir():
        raise pytest.UsageError(f"--golden-dir {given}: no such folder")
    return folder


@pytest.fixture
def usual_signal():
    """Ctrl-C as a terminal's process hears it: in the background it may be ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
