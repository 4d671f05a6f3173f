"""Every test of this folder that asks for `folder` and `mode` runs once per recorded pair."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.golden import reader

# Recorded twice in substance: the default run takes the richer folder of each mode. `forward` of
# recorded prompts is left to the exhaustive run: it is the trace, without what the trace keeps.
MORE = {
    ("micro-bf16", "fp32"), ("micro-bf16", "native"), ("micro-vl", "native"), ("mini", "fp32_kvq"),
    ("mini", "native"), ("mini", "fp32", "test_forward"), ("micro-vl", "fp32", "test_forward"),
    ("micro-fp8fp4", "fp32"),
}  # fmt: skip


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "folder" not in metafunc.fixturenames:
        return
    given = metafunc.config.getoption("--golden-dir")
    found = reader.folders(Path(given) if given else reader.HERE)
    wanted = getattr(metafunc.module, "MODE", None)
    pairs = [(f, m) for f in found for m in f.modes if wanted in (None, m)]
    ids = [f"{f.name}-{m}" for f, m in pairs]
    if not pairs:
        reason = f"no folder with a golden_{wanted or '*'}.safetensors under {given or reader.HERE}"
        pairs = [pytest.param(None, None, marks=pytest.mark.skip(reason=reason))]
        ids = ["none"]
    elif not given:
        test = metafunc.function.__name__
        pairs = [
            pytest.param(f, m, marks=[pytest.mark.exhaustive] if more else [])
            for f, m in pairs
            for more in [bool({(f.name, m), (f.name, m, test)} & MORE)]
        ]
    metafunc.parametrize(("folder", "mode"), pairs, ids=ids)


@pytest.fixture(scope="session")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where compressed checkpoints are unpacked, once per run."""
    return tmp_path_factory.mktemp("golden")
