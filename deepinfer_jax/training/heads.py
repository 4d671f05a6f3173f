"""Trains the drafter of a checkpoint on replies that the model writes itself.

    python -m deepinfer_jax.training.heads MODEL --prompts prompts.jsonl --out FOLDER

The backbone stays as it is, so replies stay the same in every bit; drafts are right more often.
Replies are drawn at the temperature that the drafter will be used with. FOLDER becomes a copy of
the checkpoint with the new drafter; confidences want to be calibrated afterwards
(`deepinfer_jax.training.calibrate`).
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
import pathlib
import shutil
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from deepinfer_jax import generation, loading, params, prompts
from deepinfer_jax.loading import Model
from deepinfer_jax.params import Params
from deepinfer_jax.planning.calibration import TEMPERATURES_FILE
from deepinfer_jax.requests import Options, Request
from deepinfer_jax.training import draft, export, masters, optimizer, run

LOG_EVERY = 20  # steps


@dataclasses.dataclass(frozen=True)
class Settings:
    """Sizes of a run: `rows` sequences a step, `anchors` of each; `peak` is the learning rate."""

    steps: int = 1000
    rows: int = 16
    anchors: int = 16
    peak: float = 1e-3
    seed: int = 0
    objective: draft.Objective = draft.OBJECTIVES["coupled"]


@dataclasses.dataclass(frozen=True)
class Lesson:
    """Token ids of a prompt and of the reply that the model gave."""

    prompt: tuple[int, ...]
    reply: tuple[int, ...]


def lessons(model: Model, requests: Sequence[Request], batch_size: int) -> list[Lesson]:
    """The model's replies to requests, in the order of these, whatever the batch.

    Raises what ended a request without a reply.
    """
    replies: dict[int, tuple[int, ...]] = {}
    for update in generation.updates(model, requests, batch_size=batch_size):
        if update.error:
            raise update.error
        if update.result:
            replies[update.index] = update.result.tokens
    return [Lesson(request.tokens, replies[i]) for i, request in enumerate(requests)]


def padded(found: Sequence[Lesson], multiple: int = 1) -> draft.Sequences:
    """All lessons as arrays, padded to the longest, rounded up to a `multiple` of tokens."""
    lengths = np.array([len(each.prompt) + len(each.reply) for each in found], np.int32)
    tokens = np.zeros((len(found), -(-lengths.max() // multiple) * multiple), np.int32)
    answer = np.zeros(tokens.shape, bool)
    for row, each in enumerate(found):
        tokens[row, : lengths[row]] = each.prompt + each.reply
        answer[row, len(each.prompt) : lengths[row]] = True
    return draft.Sequences(tokens, lengths, answer)


def batches(taught: draft.Sequences, settings: Settings) -> Iterator[draft.Sequences]:
    """Random rows without end: every row once before any comes again."""
    rng = np.random.default_rng(settings.seed)
    waiting = np.zeros(0, np.int64)
    while True:
        while len(waiting) < settings.rows:
            waiting = np.concatenate([waiting, rng.permutation(len(taught.lengths))])
        picked, waiting = waiting[: settings.rows], waiting[settings.rows :]
        yield jax.tree.map(lambda x, picked=picked: x[picked], taught)


def train(model: Model, taught: draft.Sequences, values: Params, settings: Settings) -> Params:
    """Masters of the drafter, trained from the masters `values` (which are used up)."""
    rules = optimizer.kinds(model.cfg, "draft")["draft"]
    state = run.State(values, optimizer.init(values, rules))
    backbone = {name: value for name, value in model.params.items() if name != "draft"}
    step = jax.jit(
        functools.partial(
            run.draft_step, objective=settings.objective, anchors=settings.anchors, cfg=model.cfg
        ),
        donate_argnums=0,
    )
    for number, given in zip(range(settings.steps), batches(taught, settings), strict=False):
        rate = np.float32(optimizer.schedule(number / settings.steps, settings.peak))
        state, report = step(state, backbone, model.tables, given, rate)
        if number % LOG_EVERY == 0 or number + 1 == settings.steps:
            accepted = " ".join(f"{share:.3f}" for share in np.asarray(report.acceptance))
            print(f"step {number}: loss {float(report.loss):.4f}, accepted {accepted}", flush=True)
    return state.values


def write(folder: pathlib.Path, model: Model, drafter: Params, out: pathlib.Path) -> None:
    """The checkpoint of `folder` with the drafter's masters `drafter`, and its text files.

    Temperatures fitted to the former drafter's confidences stay behind.
    """
    export.write_drafter(folder, drafter, model.cfg, out)
    left = {path.name for path in out.iterdir()} | {TEMPERATURES_FILE}
    for path in sorted(folder.iterdir()):
        weights = path.name.startswith("model") and ".safetensors" in path.name
        if path.is_file() and not weights and path.name not in left:
            shutil.copyfile(path, out / path.name)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", help="folder of a checkpoint, or a shipped name")
    parser.add_argument("--prompts", type=pathlib.Path, required=True, help="JSON lines, as of "
                        "`deepinfer-jax generate`")  # fmt: skip
    parser.add_argument("--out", type=pathlib.Path, required=True, help="folder to write")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--max-tokens", type=int, default=256, help="of a reply")
    parser.add_argument("--batch-size", type=int, default=8, help="replies written at once")
    parser.add_argument("--objective", choices=tuple(draft.OBJECTIVES), default="coupled")
    parser.add_argument("--fresh", action="store_true", help="forget the drafter that is there")
    for name in ("steps", "rows", "anchors", "seed"):
        parser.add_argument(f"--{name}", type=int, default=getattr(Settings, name))
    parser.add_argument("--peak", type=float, default=Settings.peak, help="learning rate")
    options = parser.parse_args()
    settings = Settings(
        options.steps, options.rows, options.anchors, options.peak, options.seed,
        draft.OBJECTIVES[options.objective],
    )  # fmt: skip
    if options.out.exists() and any(options.out.iterdir()):
        parser.error(f"--out {options.out} is not empty")
    retrain(options, settings)


def retrain(options: argparse.Namespace, settings: Settings) -> None:
    """Replies, training, writing, as the options of the command line say."""
    folder, model = loading.find_folder(options.model), loading.load(options.model)
    if not model.cfg.most_drafts:
        raise SystemExit(f"{options.model} has no drafter")
    with options.prompts.open(encoding="utf-8") as lines:
        asked, places = prompts.read_prompt_lines(str(options.prompts), lines)
    wanted = Options(
        max_tokens=options.max_tokens, temperature=options.temperature, seed=options.seed
    )
    requests = prompts.make_requests(
        asked, wanted, model.tokenizer, model.cfg, model.max_length, places
    )
    found = lessons(model, requests, options.batch_size)
    # Training works on whole windows and whole compressed entries.
    taught = padded(found, math.lcm(model.cfg.sliding_window, *model.cfg.ratios))
    print(f"{len(taught.lengths)} replies, {int(taught.answer.sum())} tokens", flush=True)
    if options.fresh:
        values = masters.init(options.seed, model.cfg)["draft"]
    else:
        values = params.widen(model.params["draft"], jnp.float32)
    write(folder, model, train(model, taught, values, settings), options.out)
    print(f"wrote {options.out}")


if __name__ == "__main__":
    main()
