"""Limits of Ascend 950 and of the published engine's kernels there, checked before anything runs.

Each function returns what is not met, with the mend; an empty list: all is. Where the numbers are
from: docs/ascend.md 2; the buffer: what SIMT functions leave of its 248 KiB.
"""

from __future__ import annotations

from typing import Any

BUFFER = 216 * 1024
HEADS = 64
SELECTED = 4096
PLANNER = 32 * 1024
LANE = 16  # numbers of two bytes in the 32 bytes that copies are aligned to


def heads(count: int) -> list[str]:
    """Sparse attention of the published kernels: one head count, keys never split."""
    if count == HEADS:
        return []
    return [f"it takes {HEADS} heads, not {count}: pad with heads of zeros, or split the call"]


def selected(k: int) -> list[str]:
    """Selection of the published kernels."""
    if k <= SELECTED:
        return []
    return [f"it takes k up to {SELECTED}, not {k}: select in parts and again among their best"]


def planner(requests: int, drafts: int) -> list[str]:
    """Planning on the device: a table of float32 for all requests in one buffer."""
    need = requests * drafts * 4
    if need <= PLANNER:
        return []
    most = PLANNER // (4 * max(drafts, 1))
    return [
        f"it plans {PLANNER} bytes of requests x drafts x 4, not {need}: plan for at most {most} "
        "requests at once, or on the host"
    ]


def scales(scale: Any) -> list[str]:
    """FP8 scales there are e8m0, two to an int16 (four to an int32 on NVIDIA), rows not padded."""
    said = []
    if str(scale.dtype) != "uint8":
        said.append(
            f"it takes e8m0 scales (uint8, two packed to an int16), not {scale.dtype}: store "
            "exponents, as the release does"
        )
    if scale.shape[-1] % 2:
        said.append(f"it takes scales in pairs, not {scale.shape[-1]} to a row: pad K")
    return said


def index_vectors(dtype: str) -> list[str]:
    """The index cache there is FP4 or MXFP8."""
    if dtype == "uint8":
        return []
    return [
        f"the index cache there has no {dtype} vectors with a float32 scale: use "
        "index_logits_packed, vectors of FP4"
    ]


def buffer(need: int) -> list[str]:
    """Bytes of the unified buffer that a kernel of our own asks for."""
    if need <= BUFFER:
        return []
    return [
        f"it needs {need} bytes of the unified buffer, which has {BUFFER}: shorten the lists of "
        "ids or lower it with fewer heads in a group"
    ]


def whole(what: str, size: int, step: int = LANE) -> list[str]:
    """A size in whole steps."""
    if size and size % step == 0:
        return []
    return [f"it takes {what} in multiples of {step}, not {size}: pad"]


def rows(count: int) -> list[str]:
    """A launch without tasks has no grid."""
    return [] if count else ["it takes no empty arrays: skip the call"]
