"""Fits the temperatures of a drafter's confidence head on the model's own replies.

A block is drafted after every token of replies to held-out prompts, as if a round began there.
Every second reply fits the temperatures (`planning.fit_temperatures`), the others say how well
they hold; where they hold no better than none, that is said, and nothing is written. `python -m
deepinfer_jax.training.calibrate FOLDER [--count N] [--temperature T]` writes them into the folder
of the model, where `load` finds them.
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
from collections.abc import Sequence

import numpy as np

from deepinfer_jax import loading, planning
from deepinfer_jax.loading import Model
from deepinfer_jax.planning.calibration import TEMPERATURES_FILE
from deepinfer_jax.training import corpus
from deepinfer_jax.training.evaluate import SEED, Reply, drafted, replies

REPORT_SEED = 1  # offset of the evaluation's: examples of their own


def rounds_of(
    model: Model, made: Sequence[Reply], temperature: float
) -> tuple[np.ndarray, np.ndarray]:
    """Raw confidences [N, D] and accepted drafts [N] of a round after every token of the replies.

    Rounds that the end of a reply would cut short are left out: their last drafts have no label.
    """
    size = model.cfg.dspark_block_size
    confidence, right = [], []
    for row, drafts, logits in drafted(model, made, temperature):
        tokens = np.array(row.prompt + row.reply)
        anchors = np.arange(len(row.prompt), len(tokens) - size)
        following = tokens[anchors[:, None] + 1 + np.arange(size)]
        right.append(drafts[anchors] == following)
        confidence.append(logits[anchors])
    accepted = np.cumprod(np.concatenate(right), axis=1, dtype=np.int64)
    return np.concatenate(confidence), np.count_nonzero(accepted, axis=1)


def errors(confidence: np.ndarray, accepted: np.ndarray, heat: np.ndarray) -> list[float]:
    """Expected calibration error of each draft's survival under the temperatures `heat` [D]."""
    alive = np.asarray(planning.survival(planning.probabilities(confidence, heat)))
    return [
        planning.expected_calibration_error(alive[:, k], accepted > k) for k in range(len(heat))
    ]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=pathlib.Path, help="folder of the model")
    parser.add_argument("--count", type=int, default=40, help="replies to each task")
    parser.add_argument("--temperature", type=float, default=1.0, help="of the replies")
    given = parser.parse_args()
    model = loading.load(given.folder)
    examples = [
        example
        for task in corpus.TASKS
        for example in corpus.heldout(task, given.count, SEED + REPORT_SEED)
    ]
    made = replies(model, examples, given.temperature)
    fit, check = (rounds_of(model, made[part::2], given.temperature) for part in (0, 1))
    found = planning.fit_temperatures(*fit)
    before = errors(*check, np.ones_like(found.temperatures))
    after = errors(*check, found.temperatures)
    print(f"{len(fit[1])} rounds to fit, {len(check[1])} to check")
    print("temperatures", found.temperatures.round(3).tolist())
    print("error of the others' survivals before", np.round(before, 4).tolist())
    print("                               after ", np.round(after, 4).tolist())
    if max(after) < max(before):
        kept = dataclasses.replace(found, before=np.array(before), after=np.array(after))
        planning.save_temperatures(given.folder / TEMPERATURES_FILE, kept)
    else:
        print("the head is as well calibrated without temperatures; nothing was written")


if __name__ == "__main__":
    main()
