"""Find golden folders and run the oracle over their inputs once per session."""

import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from . import vision
from .basics import Params
from .model import Oracle
from .state import Draft, Record, State
from .weights import read_folder, read_values

REPOSITORY_GOLDENS = Path(__file__).resolve().parent.parent / "golden"


def golden_folder(name: str, file: str) -> Path:
    """The folder of golden data that has `file` (or `file`.xz).

    What neither this repository nor $GOLDEN_DIR has skips a test; without $GOLDEN_DIR it fails, so
    that nothing vanishes unnoticed.
    """
    places = [REPOSITORY_GOLDENS]
    if "GOLDEN_DIR" in os.environ:
        places.append(Path(os.environ["GOLDEN_DIR"]))
    for place in places:
        folder = place / name
        if (folder / file).exists() or (folder / f"{file}.xz").exists():
            return folder
    reason = f"{name}/{file} is not in {', '.join(map(str, places))}"
    if len(places) == 1:
        pytest.fail(f"{reason}; put it back, or set GOLDEN_DIR")
    pytest.skip(reason)


@dataclass(frozen=True)
class Run:
    """The oracle's answers for one batch row: one record per position, drafts by position."""

    records: list[Record]
    drafts: dict[int, Draft]
    at_prompt_end: State
    at_end: State


@dataclass(frozen=True)
class Case:
    """A golden folder in one numeric mode, and the oracle's run of each batch row."""

    oracle: Oracle
    golden: dict[str, np.ndarray]
    prompt: int
    runs: list[Run]

    def records(self, positions: np.ndarray) -> list[list[Record]]:
        """[batch][position] records."""
        return [[run.records[p] for p in positions] for run in self.runs]


@cache
def case(folder: str, mode: str, stop: int | None = None) -> Case:
    """Run `folder` in `mode` ("fp32" or "fp32_kvq"), up to position `stop`."""
    file = f"golden_{mode}.safetensors"
    path = golden_folder(folder, file)
    config, weights = read_folder(path)
    inputs, golden = read_values(path / "inputs.safetensors"), read_values(path / file)
    oracle = Oracle(config, weights, inputs["engram_token_map"], quantize_kv=mode == "fp32_kvq")
    prompt = golden["prefill.argmax"].shape[1]
    images = image_rows(config, inputs, weights)
    drafted = {prompt - 1, *(int(p) for p in golden["dspark.pos"])}
    runs = [run(oracle, row[:stop], prompt, images, drafted) for row in inputs["tokens"]]
    return Case(oracle, golden, prompt, runs)


def run(oracle: Oracle, tokens: np.ndarray, prompt: int, images: dict, drafted: set[int]) -> Run:
    """Feed `tokens` one by one; draft after the positions in `drafted`, anchored on the next."""
    state, drafts, halfway = oracle.new_state(), {}, None
    records = []
    for position, token in enumerate(tokens):
        records.append(oracle.step(state, int(token), images.get(position)))
        if position in drafted and position + 1 < len(tokens):
            drafts[position] = oracle.draft(state, int(tokens[position + 1]))
        if position == prompt - 1:
            halfway = state.copy()
    return Run(records, drafts, halfway or state, state)


def pictures(config: dict, inputs: dict, weights: dict) -> list[tuple[np.ndarray, np.ndarray]]:
    """(rows of the tower, image rows) of every recorded picture."""
    wide, made = Params({name: np.float64(value) for name, value in weights.items()}), []
    while f"image.{len(made)}.patches" in inputs:
        name = f"image.{len(made)}"
        _, height, width = (int(n) for n in inputs[f"{name}.start_h_w"])
        patches = np.float64(inputs[f"{name}.patches"])
        made.append(vision.image_rows(config["vision_config"], wide, patches, height, width))
    return made


def image_rows(config: dict, inputs: dict, weights: dict) -> dict[int, np.ndarray]:
    """Embedding of every position inside an image span."""
    names = {0: "image_start", 2: "image_newline", 3: "image_end"}
    found = pictures(config, inputs, weights)
    if not found:
        return {}
    rows = iter(np.concatenate([aligned for _, aligned in found]))
    types = enumerate(inputs["token_types"][0])
    return {p: next(rows) if t == 1 else weights[names[t]] for p, t in types if t >= 0}
