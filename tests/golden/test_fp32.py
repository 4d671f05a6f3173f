"""Everything recorded in `fp32`: numbers to 1e-4, every decision the same.

In this mode the model is continuous except for its choices, so it is the strict comparison. Two
independent implementations were seen to stay within 2.5e-5 (logits) and 4.5e-5 (caches).
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.golden import adapter, compare
from tests.golden.reader import Arrays, Folder

MODE = "fp32"
BOUND = 1e-4
STAGES = ("prefill", "decode", "dspark_after_prefill", "dspark", "short1", "short2", "short3")
CACHES = ("cache_prefill", "cache_end", "cache_end_tail")


def _names(folder: Folder, mode: str, stage: str) -> list[str]:
    names = compare.recorded(folder.golden(mode), stage)
    if not names:
        pytest.skip(f"{folder.name} records no {stage} arrays in {mode}")
    return names


@pytest.mark.parametrize("stage", STAGES)
def test_outputs(folder: Folder, mode: str, stage: str, scratch: Path) -> None:
    names = _names(folder, mode, stage)
    produced = adapter.run(folder, mode, scratch).stage(stage)
    checked = (compare.check(folder.golden(mode), produced, n, BOUND) for n in names)
    problems = [p for p in checked if p]
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("stage", CACHES)
def test_caches(folder: Folder, mode: str, stage: str, scratch: Path) -> None:
    names = _names(folder, mode, stage)
    run = adapter.run(folder, mode, scratch)
    length = run.prompt if stage == "cache_prefill" else run.total
    checked = (
        compare.check_cache(folder.golden(mode), run.stage(stage), n, length, BOUND) for n in names
    )
    problems = [p for p in checked if p]
    assert not problems, "\n".join(problems)


def test_forward(folder: Folder, mode: str, scratch: Path) -> None:
    """The stages above run the trace, which keeps what every layer did; this is what is in use."""
    golden = folder.golden(mode)
    names = [n for n in ("logits", "argmax", "router_i") if f"prefill.{n}" in golden]
    if not names:
        pytest.skip(f"{folder.name} records no logits or experts of the prompt in {mode}")
    made = adapter.run(folder, mode, scratch).stage("forward")
    renamed = Arrays({k.replace("forward.", "prefill."): v for k, v in made.items()})
    checked = [compare.check(golden, renamed, f"prefill.{n}", BOUND) for n in names]
    assert not any(checked), "\n".join(c for c in checked if c)
