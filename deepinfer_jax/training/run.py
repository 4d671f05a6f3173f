"""Trains a preset from nothing and writes a model folder.

`python -m deepinfer_jax.training.run --preset spark-tiny --out DIR` runs both stages and exports;
with `--stage backbone` or `--stage draft` one of them, the second from `--resume DIR`: the masters
of a former run, or a model, of which every other tensor is then kept in every bit. Equal arguments
on equal machines give equal models, up to the accelerator's own order of sums.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import functools
import json
import pathlib
import tempfile
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from deepinfer_jax import checkpoint, loading, params, resources, tables
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.params import Params
from deepinfer_jax.tables import Tables
from deepinfer_jax.training import dataset, draft, export, masters, optimizer, pretrain
from deepinfer_jax.training.stream import Stream

WARM = 0.12  # share of stage 1 in which every entry is attended to
ROUND_FROM = 0.4  # share after which weights are rounded as the release stores them
BIAS_RATE = 2e-3
DRAFT_PEAK = 2e-3
ANCHORS = 32  # per sequence
BACKBONE_SHARE = 0.61  # of all tokens; the rest is for stage 2
_STARTED = time.perf_counter()


@dataclasses.dataclass(frozen=True)
class Plan:
    """Sizes of a run; `rows` sequences of `context` tokens make a batch."""

    tokens: int
    rows: int
    peak: float
    seed: int
    context: int = dataset.CONTEXT


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
    """Masters and moments; everything a run carries from step to step."""

    values: Params
    moments: optimizer.Moments


def backbone_step(
    state: State, table: Tables, tokens: jax.Array, weights: jax.Array, dial: jax.Array,
    cfg: ModelConfig,
) -> tuple[State, pretrain.Report]:  # fmt: skip
    """One step of stage 1. dial [3]: learning rate, rounding amount, rate of router biases."""
    numerics = pretrain.training_numerics(cfg)
    f = functools.partial(pretrain.batch_loss, cfg=cfg, numerics=numerics)
    grads, report = jax.grad(f, has_aux=True)(state.values, table, tokens, weights, dial[1])
    rules = optimizer.kinds(cfg, "backbone")
    values, moments = optimizer.update(
        state.values, grads, state.moments, dial[0], rules, optimizer.Settings()
    )
    gate = values["layers"]["ffn"]["gate"]
    gate["bias"] = pretrain.balanced_bias(gate["bias"], report.load, dial[2])
    return State(values, moments), report


def draft_step(
    state: State, backbone: Params, table: Tables, given: draft.Sequences, rate: jax.Array,
    objective: draft.Objective, anchors: int, cfg: ModelConfig,
) -> tuple[State, draft.Report]:  # fmt: skip
    """One step of stage 2; the state holds the draft branch alone, `backbone` all other weights."""
    numerics = pretrain.training_numerics(cfg)
    key = jax.random.fold_in(jax.random.key(1), state.moments.count)

    def loss(values):
        rounded = masters.released(values, cfg, part="draft")
        return draft.batch_loss(
            rounded, backbone, table, given, key, anchors, objective, cfg, numerics
        )

    grads, report = jax.grad(loss, has_aux=True)(state.values)
    rules = optimizer.kinds(cfg, "draft")["draft"]
    settings = optimizer.Settings(decay=0.0)
    values, moments = optimizer.update(state.values, grads, state.moments, rate, rules, settings)
    return State(values, moments), report


class Programs:
    """The programs of a run, compiled side by side in threads; asking for one waits for it."""

    def __init__(self) -> None:
        self._pool = concurrent.futures.ThreadPoolExecutor()
        self._futures: dict[str, concurrent.futures.Future] = {}

    def start(self, name: str, step: Any, *args: Any, static: tuple[int, ...]) -> None:
        """Begin to compile step(*args), its first argument donated."""

        def build() -> Any:
            begun = time.perf_counter()
            jitted = jax.jit(step, static_argnums=static, donate_argnums=0)
            program = jitted.lower(*args).compile()
            print(f"compiled {name} in {time.perf_counter() - begun:.0f} s", flush=True)
            return program

        self._futures[name] = self._pool.submit(build)

    def __getitem__(self, name: str) -> Any:
        return self._futures[name].result()


def start_programs(
    cfg: ModelConfig, table: Tables, plan: Plan, stages: str, objective: draft.Objective
) -> Programs:
    """Begin to compile all programs of the stages."""
    programs = Programs()
    tokens = jax.ShapeDtypeStruct((plan.rows, plan.context), jnp.int32)
    values = jax.eval_shape(lambda: masters.init(0, cfg))
    if stages != "draft":
        state = jax.eval_shape(lambda: first_state(masters.init(0, cfg), cfg))
        weights = jax.ShapeDtypeStruct((plan.rows, plan.context - 1), jnp.float32)
        dial = jax.ShapeDtypeStruct((3,), jnp.float32)
        warm = pretrain.all_entries(cfg, plan.context)
        for name, config in (("warm", warm), ("sparse", cfg)):
            args = (state, table, tokens, weights, dial, config)
            programs.start(name, backbone_step, *args, static=(5,))
    if stages != "backbone":
        state = jax.eval_shape(lambda: first_state(masters.init(0, cfg), cfg, "draft"))
        given = draft.Sequences(
            tokens=jax.ShapeDtypeStruct((plan.rows, plan.context), jnp.int32),
            lengths=jax.ShapeDtypeStruct((plan.rows,), jnp.int32),
            answer=jax.ShapeDtypeStruct((plan.rows, plan.context), jnp.bool_),
        )
        rest = {name: value for name, value in values.items() if name != "draft"}
        rate = jax.ShapeDtypeStruct((), jnp.float32)
        args = (state, rest, table, given, rate, objective, ANCHORS, cfg)
        programs.start("draft", draft_step, *args, static=(5, 6, 7))
    return programs


def first_state(values: Params, cfg: ModelConfig, part: str | None = None) -> State:
    """The state before the first step of stage 1, or of stage 2 (part="draft")."""
    if part is None:
        return State(values, optimizer.init(values, optimizer.kinds(cfg, "backbone")))
    rules = optimizer.kinds(cfg, "draft")[part]
    return State(values[part], optimizer.init(values[part], rules))


@dataclasses.dataclass
class Clock:
    """Progress of a stage in [0, 1]: by steps, or by time where `until` comes first.

    until: seconds since this process was started (`_STARTED`).
    """

    steps: int
    until: float
    begun: float = dataclasses.field(default_factory=time.perf_counter)
    step: int = 0

    def progress(self) -> float:
        """Share of the work done, 0 to 1: of the steps or of the time, whichever is farther."""
        now = time.perf_counter()
        share = (now - self.begun) / max(self.until - (self.begun - _STARTED), 1e-9)
        return min(1.0, max(self.step / max(self.steps, 1), share))


def run_backbone(
    values: Params, cfg: ModelConfig, stream: Stream, table: Tables, programs: Programs,
    plan: Plan, log: pathlib.Path, until: float,
) -> Params:  # fmt: skip
    """Stage 1: trained masters, from the masters `values` on (they are used up).

    A run that would outlast `until` (see `Clock`) goes by time instead of tokens, so that its
    learning rate reaches zero in any case.
    """
    state = first_state(values, cfg)
    program, first = programs["warm"], None
    steps = int(plan.tokens * BACKBONE_SHARE) // (plan.rows * plan.context)
    clock = Clock(steps, until)
    with log.open("w") as lines:
        while (progress := clock.progress()) < 1:
            tokens = stream.take(plan.rows)
            rate = optimizer.schedule(progress, plan.peak)
            rounding = 1.0 if progress >= ROUND_FROM else 0.0
            dial = np.array([rate, rounding, BIAS_RATE * rate / plan.peak], np.float32)
            if progress >= WARM and program is programs["warm"]:
                program = programs["sparse"]
            weights = pretrain.target_weights(tokens)
            state, report = program(state, table, tokens, weights, dial)
            clock.step += 1
            first = first or time.perf_counter()
            if clock.step % 20 == 0 or clock.progress() == 1:
                load = np.asarray(report.load)
                spread = float((load.max(axis=1) / load.mean(axis=1)).mean())
                facts = {"load": spread, "rate": rate, "progress": progress}
                _write(lines, clock, first, plan.rows * plan.context, report, facts)
    return state.values


def run_draft(
    values: Params, cfg: ModelConfig, stream: Stream, table: Tables, programs: Programs,
    plan: Plan, log: pathlib.Path, until: float,
) -> Params:  # fmt: skip
    """Stage 2: masters with trained draft heads; `until` as in `run_backbone`."""
    backbone = jax.jit(masters.released, static_argnums=1)(values, cfg)
    backbone = {name: value for name, value in backbone.items() if name != "draft"}
    state = first_state(values, cfg, "draft")
    tokens = int(plan.tokens * (1 - BACKBONE_SHARE))
    program, first = programs["draft"], None
    clock = Clock(tokens // (plan.rows * plan.context), until)
    with log.open("w") as lines:
        while (progress := clock.progress()) < 1:
            rate = np.float32(optimizer.schedule(progress, DRAFT_PEAK))
            state, report = program(state, backbone, table, sequences(stream.take(plan.rows)), rate)
            clock.step += 1
            first = first or time.perf_counter()
            if clock.step % 20 == 0 or clock.progress() == 1:
                facts = {"rate": float(rate), "progress": progress}
                _write(lines, clock, first, plan.rows * plan.context, report, facts)
    return {**values, "draft": state.values}


def sequences(rows: np.ndarray) -> draft.Sequences:
    """Rows of the corpus [B, S] with their lengths and marks."""
    lengths = np.count_nonzero(rows != dataset.PAD, axis=1).astype(np.int32)
    return draft.Sequences(rows, lengths, dataset.answer_mask(rows))


def _write(lines, clock: Clock, first: float, batch: int, report: Any, facts: dict) -> None:
    """One line of the log, and now and then one on the terminal."""
    entry: dict[str, Any] = {"step": clock.step}
    for field in dataclasses.fields(report):
        value = np.asarray(getattr(report, field.name), np.float64)
        if value.size < 16:
            entry[field.name] = np.round(value, 4).tolist()
    seconds = time.perf_counter() - first + 1e-9
    entry |= {name: round(value, 5) for name, value in facts.items()}
    entry["tokens_per_second"] = round((clock.step - 1) * batch / seconds)
    lines.write(json.dumps(entry) + "\n")
    lines.flush()
    if clock.step % 200 == 0 or clock.step == 20:
        print(entry, flush=True)


def load_preset(name: str) -> tuple[ModelConfig, Tables]:
    """Config and tables of a preset, `spark-tiny` or `tiny-s`, for rows of the training context."""
    folder = resources.model_folder("spark-tiny")
    cfg = ModelConfig.from_json(folder)
    if name == "tiny-s":  # the small sizes, with the vocabulary of the shipped tokenizer
        small = ModelConfig.from_json(resources.config_file(name))
        cfg = dataclasses.replace(
            small, vocab_size=cfg.vocab_size,
            engram_compressed_vocab_size=cfg.engram_compressed_vocab_size,
        )  # fmt: skip
    token_map = np.fromfile(folder / "engram_token_map.bin", "<i4")
    return cfg, tables.make_tables(cfg, token_map, dataset.CONTEXT)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", choices=("spark-tiny", "tiny-s"), default="spark-tiny")
    parser.add_argument("--out", type=pathlib.Path, required=True, help="folder to write")
    parser.add_argument(
        "--resume", help="folder with the masters of a former run, or a model (folder or shipped "
        "name); moments start anew",
    )  # fmt: skip
    parser.add_argument("--fresh", action="store_true", help="forget the drafter that is there")
    parser.add_argument("--stage", choices=("both", "backbone", "draft"), default="both")
    parser.add_argument("--tokens", type=int, default=257_000_000, help="of both stages")
    parser.add_argument("--rows", type=int, default=64, help="sequences a step")
    parser.add_argument("--peak", type=float, default=4e-3, help="learning rate of stage 1")
    parser.add_argument(
        "--objective", choices=tuple(draft.OBJECTIVES), default="distance", help="of the drafter"
    )
    parser.add_argument("--seed", type=int, default=1)
    for stage in ("backbone", "draft"):
        parser.add_argument(
            f"--{stage}-until", type=float, default=float("inf"), metavar="SECONDS",
            help="end this stage so many seconds after the start, its schedule squeezed to fit",
        )  # fmt: skip
    options = parser.parse_args()
    if options.stage == "draft" and options.resume is None:
        parser.error("--stage draft needs --resume FOLDER with the masters of stage 1, or a model")
    train(options)


def starting_values(
    options: argparse.Namespace, cfg: ModelConfig
) -> tuple[Params, pathlib.Path | None]:
    """Masters to begin with, and the folder of the model that they were read from, if any was."""
    if options.resume is None:
        return masters.init(options.seed, cfg), None
    folder = loading.find_folder(options.resume)
    if masters.saved(folder):
        values, model = masters.load(folder, cfg), None
    else:
        values, model = params.widen(checkpoint.load_params(folder, cfg)), folder
    if options.fresh:
        values = {**values, "draft": masters.init(options.seed, cfg)["draft"]}
    return values, model


def train(options: argparse.Namespace) -> None:
    """Run the stages that the options name and write masters, model folder and logs."""
    options.out.mkdir(parents=True, exist_ok=True)
    cfg, table = load_preset(options.preset)
    plan = Plan(options.tokens, options.rows, options.peak, options.seed)
    objective = draft.OBJECTIVES[options.objective]
    programs = start_programs(cfg, table, plan, options.stage, objective)
    values, model = starting_values(options, cfg)
    with tempfile.TemporaryDirectory() as scratch:
        stream = Stream(plan.seed, plan.tokens, plan.context, pathlib.Path(scratch))
        if options.stage != "draft":
            log = options.out / "backbone.jsonl"
            values = run_backbone(
                values, cfg, stream, table, programs, plan, log, options.backbone_until
            )
            masters.save(values, options.out)
        if options.stage != "backbone":
            log = options.out / "draft.jsonl"
            values = run_draft(values, cfg, stream, table, programs, plan, log, options.draft_until)
            masters.save(values, options.out)
    if options.stage == "draft" and model is not None:
        export.write_drafter(model, values["draft"], cfg, options.out, export.SHARD_BYTES)
    else:
        export.write(values, cfg, options.out)
    export.copy_text(options.out)
    print(f"wrote {options.out}", flush=True)


if __name__ == "__main__":
    main()
