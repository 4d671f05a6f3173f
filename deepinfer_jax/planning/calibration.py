"""Sequential temperature scaling of the confidence head (docs/speculation.md "Calibration").

On the host. A planner multiplies confidences, so the product has to be right, not each factor:
temperatures are fitted from left to right, each to the survival that it ends. Legend: N rounds, D
drafts.
"""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import numpy as np

from deepinfer_jax import strict_json
from deepinfer_jax.planning.confidence import LOGIT_LIMIT

BINS = 15
TEMPERATURES = np.logspace(-1, 1, 41).astype(np.float32)  # 1.0 is among them
TEMPERATURES_FILE = "dspark_temperatures.json"  # in the folder of a model
_EDGE = 1e-8


@dataclasses.dataclass(frozen=True, slots=True)
class Calibration:
    """What `fit_temperatures` found.

    temperatures  [D] float32, for `probabilities`
    before        [D] float64, expected calibration error of each draft's survival, temperatures 1
    after         [D] float64, the same with `temperatures`
    """

    temperatures: np.ndarray
    before: np.ndarray
    after: np.ndarray


@dataclasses.dataclass(frozen=True, slots=True)
class Reliability:
    """Predictions in BINS bins of equal width on [0, 1].

    count        [BINS] int64
    probability  [BINS] float64, mean prediction; 0 in an empty bin
    frequency    [BINS] float64, share of the predicted events that came true; 0 in an empty bin
    """

    count: np.ndarray
    probability: np.ndarray
    frequency: np.ndarray


def reliability(probability: np.ndarray, label: np.ndarray) -> Reliability:
    """How often events predicted with `probability` [N] in [0, 1] came true, `label` [N] 0 or 1."""
    p, y = np.asarray(probability, np.float64), np.asarray(label, np.float64)
    if p.ndim != 1 or p.shape != y.shape or not p.size:
        raise ValueError(
            f"probability and label must have one shape [N], N at least 1, got {p.shape} and "
            f"{y.shape}"
        )
    if not ((p >= 0) & (p <= 1)).all():
        raise ValueError("probability must lie in [0, 1]; pass probabilities, not logits")
    if not ((y == 0) | (y == 1)).all():
        raise ValueError("label must be 0 or 1")
    p = np.clip(p, _EDGE, 1 - _EDGE)
    bins = np.minimum((p * BINS).astype(np.int64), BINS - 1)
    count = np.bincount(bins, minlength=BINS)
    of = np.maximum(count, 1)
    return Reliability(
        count,
        np.bincount(bins, weights=p, minlength=BINS) / of,
        np.bincount(bins, weights=y, minlength=BINS) / of,
    )


def expected_calibration_error(probability: np.ndarray, label: np.ndarray) -> float:
    """Distance of frequency from prediction, averaged over predictions; see `reliability`."""
    bins = reliability(probability, label)
    share = bins.count / np.sum(bins.count)
    return float(np.sum(share * np.abs(bins.probability - bins.frequency)))


def fit_temperatures(logits: np.ndarray, accepted: np.ndarray) -> Calibration:
    """Temperatures for the confidence head from rounds in which every draft was verified.

    Draft by draft, with the earlier temperatures fixed: the temperature of TEMPERATURES whose
    survival has the least expected calibration error; the lowest such temperature wins a tie. A
    draft that was not verified has no label, so rounds that a planner cut short do not belong here.

    Args:
        logits: [N, D] of the confidence head, finite.
        accepted: [N] integer in [0, D], leading drafts accepted.
    """
    z, count = np.asarray(logits, np.float64), np.asarray(accepted)
    _check_rounds(z, count)
    drafts = z.shape[1]
    raw, fitted = np.ones(len(z)), np.ones(len(z))
    chosen, before, after = np.zeros(drafts, np.float32), np.zeros(drafts), np.zeros(drafts)
    for draft in range(drafts):
        label = count > draft
        raw = raw * _sigmoid(z[:, draft])
        before[draft] = expected_calibration_error(raw, label)
        tried = [fitted * _sigmoid(z[:, draft] / np.float64(t)) for t in TEMPERATURES]
        errors = [expected_calibration_error(s, label) for s in tried]
        best = int(np.argmin(errors))  # the first minimum
        chosen[draft], after[draft], fitted = TEMPERATURES[best], errors[best], tried[best]
    return Calibration(chosen, before, after)


def save_temperatures(path: str | Path, calibration: Calibration) -> None:
    """Write `calibration` as JSON, for `load_temperatures`."""
    value = {
        field.name: [float(each) for each in getattr(calibration, field.name)]
        for field in dataclasses.fields(calibration)
    }
    Path(path).write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


def load_temperatures(path: str | Path, drafts: int) -> tuple[float, ...]:
    """The temperatures in the file at `path`, one for each of `drafts` drafts.

    Raises ValueError where the file holds something else; its name is in the message.
    """
    try:
        found = strict_json.read_object(Path(path))["temperatures"]
        values = tuple(float(each) for each in found)
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path} holds no temperatures ({error!r}); fit them again") from None
    if len(values) != drafts or not all(0 < each < math.inf for each in values):
        raise ValueError(
            f"{path} must hold {drafts} positive temperatures, one for each draft of the block, "
            f"got {list(values)}"
        )
    return values


def _sigmoid(z: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-np.clip(z, -LOGIT_LIMIT, LOGIT_LIMIT)))


def _check_rounds(logits: np.ndarray, accepted: np.ndarray) -> None:
    if logits.ndim != 2 or accepted.shape != logits.shape[:1] or not logits.size:
        raise ValueError(
            "logits must have shape [N, D] and accepted [N], N and D at least 1, got "
            f"{logits.shape} and {accepted.shape}"
        )
    if not np.isfinite(logits).all():
        raise ValueError("logits must be finite; leave out rounds whose confidence is not")
    if accepted.dtype.kind not in "iu":
        raise ValueError(f"accepted must count accepted drafts (integers), got {accepted.dtype}")
    drafts = logits.shape[1]
    if accepted.min() < 0 or accepted.max() > drafts:
        raise ValueError(
            f"accepted must lie in [0, {drafts}] for {drafts} drafts, got values from "
            f"{accepted.min()} to {accepted.max()}"
        )
