"""Every check fails where the promise is broken.

Two kinds of defect. The plain XLA form (`Numerics(rows="batched")`) in float32: its bits depend on
the number of rows, so a check whose calls have another number of rows than the reference must see
it, without being told what to look for. Some perturbations change nothing on a CPU even for plain
XLA (the same program twice, the persistent cache; donation neither, the check of that name fails
for its calls of eight rows), and plain forms of the largest programs would only repeat what the
smaller ones show: that those checks compare what they say is shown with one flipped bit.
"""

from __future__ import annotations

import pytest

from deepinfer_jax import determinism
from tests.invariance import setups

CHECKS = {check.name: check for check in determinism.CHECKS}
SEEN_IN_PLAIN_FORM = ("batch", "padding", "chunks", "drafts", "neighbours", "preemption",
                      "donation", "scan", "score")  # fmt: skip
SERVING = ("token", "raw", "processed", "kept", "scored", "routed", "output", "encoder", "decoder",
           "draft", "kv1", "kv2", "keys1", "keys2", "pending", "history")  # fmt: skip
FLIPPED = ("repetition", "donation")
OTHER_PROGRAMS = (
    ("compilation", "raw"),
    ("engine", "kept"),
    ("scan", "processed"),
    ("scan", "kv2"),
    ("score", "routed"),
    ("gradient", "scored"),
    ("remat", "scored"),
    ("speculation", "raw"),
    ("devices", "routed"),
    ("mesh", "raw"),
)


def test_no_check_is_left_out():
    planted = {*SEEN_IN_PLAIN_FORM, *FLIPPED, *(name for name, _ in OTHER_PROGRAMS)}
    assert planted == set(determinism.NAMES)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.exhaustive) for name in SEEN_IN_PLAIN_FORM],
)
def test_the_plain_form_is_caught(name):
    finding = determinism.run_check(CHECKS[name], setups.batched())
    assert finding.differing
    assert finding.first is not None


@pytest.mark.parametrize(
    "name",
    [FLIPPED[0], *(pytest.param(name, marks=pytest.mark.exhaustive) for name in FLIPPED[1:])],
)
@pytest.mark.parametrize("value", SERVING)
def test_one_flipped_bit_is_caught(name, value):
    finding = determinism.run_check(CHECKS[name], setups.flipped(setups.setup("bfloat16"), value))
    assert finding.differing == 1
    assert f" {value}[" in finding.first or "cache" in finding.first


@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "value"), OTHER_PROGRAMS)
def test_one_flipped_bit_is_caught_in_other_programs(name, value):
    first = 0 if name == "compilation" else 1  # it runs the first request alone
    whole = setups.flipped(setups.setup("float32"), value, first)
    assert determinism.run_check(CHECKS[name], whole).differing
