"""One step of GRPO: questions, replies, rewards, and an update along the policy gradient."""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import optax

from deepinfer_jax import loading, rl
from deepinfer_jax import params as parameters
from deepinfer_jax.loading import Model
from deepinfer_jax.numerics import Form, Numerics
from deepinfer_jax.rl.examples.questions import KINDS, Question, question

WIDTH, NEW = 40, 24  # tokens of a question and of a reply at most
LONGEST = 256  # what the model is loaded for
ADAM = optax.scale_by_adam()

rollout_program = jax.jit(rl.rollout, static_argnames=("cfg", "numerics", "new", "size"))
gradient_program = jax.jit(rl.policy_gradient, static_argnames=("cfg", "numerics"))


@dataclasses.dataclass(frozen=True)
class Settings:
    """What a run is a function of.

    steps: updates. groups: questions of a step. members: replies to each. rate: of Adam in the
    first step; it falls to nothing in a straight line. temperature: of training. seed: names
    questions and noise. rows: form of the trainer's numerics and, unless `sampler_rows` names
    another, of the sampler's. drafts: made in a round of sampling, which changes its speed only.
    """

    steps: int = 32
    groups: int = 8
    members: int = 6
    rate: float = 1.5e-4
    temperature: float = 1.0
    seed: int = 0
    rows: Form = "ffi"
    sampler_rows: Form | None = None
    drafts: int = 0

    def __post_init__(self) -> None:
        for name, least in (("steps", 1), ("groups", 1), ("members", 2), ("drafts", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")
        if not 1e-5 <= self.temperature < 10:  # the members of a greedy group are all the same
            raise ValueError(f"temperature must lie in [1e-5, 10), got {self.temperature}")
        if not 0 < self.rate < 1:
            raise ValueError(f"rate (of Adam) must lie between 0 and 1, got {self.rate}")


@dataclasses.dataclass(frozen=True)
class Task:
    """A model with the numerics of its two sides: `model.numerics` trains, `sampler` samples."""

    model: Model
    sampler: Numerics
    settings: Settings


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
    """params: float32 weights; moments: Adam's."""

    params: Any
    moments: Any


@dataclasses.dataclass(frozen=True)
class Replies:
    """To questions in groups: the rollout, its arguments, and rewards and verdicts, both [B]."""

    rollout: rl.Rollout
    groups: rl.Groups
    rewards: np.ndarray
    right: np.ndarray


@dataclasses.dataclass(frozen=True)
class Step:
    """What one step saw: means over its replies, `Agreement` as floats, seconds of its parts.

    spread: share of the groups that have replies of different rewards. The others teach nothing.
    """

    step: int
    reward: float
    right: float
    spread: float
    tokens: int
    raw_difference: float
    processed_difference: float
    kl: float
    sample_s: float
    learn_s: float


def make_task(settings: Settings, name: str = "spark-tiny") -> Task:
    """The model as it is stored, and the numerics of both sides."""
    model = loading.load(name, rows=settings.rows, weights="stored", max_length=LONGEST)
    rows = settings.sampler_rows or settings.rows
    return Task(model, dataclasses.replace(model.numerics, rows=rows), settings)


def start(task: Task) -> State:
    """The released weights as floats, and moments of zero."""
    params = parameters.widen(task.model.params)
    return State(params, jax.jit(ADAM.init)(params))


@functools.partial(jax.jit, donate_argnums=0)
def _moved(state: State, slope: Any, rate: jax.Array) -> State:
    """One step of Adam; `rate` is an argument, so that another compiles nothing."""
    updates, moments = ADAM.update(slope, state.moments, state.params)
    updates = jax.tree.map(lambda update: -rate * update, updates)
    return State(optax.apply_updates(state.params, updates), moments)


def questions_of(
    kind: str, part: int, count: int, settings: Settings
) -> tuple[list[str], list[Question]]:
    """(names, questions) of part number `part`, `count` of them, of those that "train" or are
    "held-out"; the kinds of tasks take turns over all parts.
    """
    kinds, numbers = list(KINDS), range(part * count, (part + 1) * count)
    names = [f"{kind}-{number}" for number in numbers]
    asked = [
        question(settings.seed, name, kinds[number % len(kinds)])
        for number, name in zip(numbers, names, strict=True)
    ]
    return names, asked


def answer(
    task: Task, params: Any, names: Sequence[str], asked: Sequence[Question], members: int,
    temperature: float,
) -> Replies:  # fmt: skip
    """`members` replies to each question, judged."""
    tokenizer, cfg = task.model.tokenizer, task.model.cfg
    prompts = [
        tokenizer.render_chat([{"role": "user", "content": each.text}], thinking=False)
        for each in asked
    ]
    groups = rl.make_groups(
        prompts, members, seed=task.settings.seed, names=names, width=WIDTH,
        temperature=temperature,
    )  # fmt: skip
    made = rollout_program(
        params, task.model.tables, groups.tokens, groups.lengths, groups.sampling,
        np.array([cfg.eos_token_id], np.int32), cfg, task.sampler, new=NEW,
        size=task.settings.drafts,
    )  # fmt: skip
    tokens, ends = np.asarray(made.tokens), np.asarray(made.lengths)
    rewards, right = [], []
    for row, (first, end) in enumerate(zip(groups.lengths, ends, strict=True)):
        ids = tokens[row, first:end].tolist()
        text = tokenizer.decode(ids[:-1] if ids[-1] == cfg.eos_token_id else ids)
        rewards.append(asked[row // members].reward(text))
        right.append(asked[row // members].verify(text).right)
    return Replies(made, groups, np.array(rewards), np.array(right))


def train_step(task: Task, state: State, step: int) -> tuple[State, Step]:
    """Update number `step`. Gives up `state`, whose arrays are donated."""
    settings = task.settings
    names, asked = questions_of("train", step, settings.groups, settings)
    begin = time.perf_counter()
    replies = answer(task, state.params, names, asked, settings.members, settings.temperature)
    sampled = time.perf_counter()
    advantages = rl.group_advantages(replies.rewards, settings.members)
    slope, seen = gradient_program(
        state.params, task.model.tables, replies.rollout, advantages, replies.groups.sampling,
        task.model.cfg, task.model.numerics,
    )  # fmt: skip
    rate = settings.rate * (1 - step / settings.steps)
    state = jax.block_until_ready(_moved(state, slope, np.float32(rate)))
    record = Step(
        step=step,
        reward=share(replies.rewards),
        right=share(replies.right),
        spread=share(np.any(advantages.reshape(-1, settings.members), axis=1, keepdims=False)),
        tokens=int(seen.tokens),
        raw_difference=float(seen.raw),
        processed_difference=float(seen.processed),
        kl=float(seen.kl),
        sample_s=round(sampled - begin, 3),
        learn_s=round(time.perf_counter() - sampled, 3),
    )
    return state, record


def evaluate(task: Task, params: Any, calls: int = 6) -> dict[str, float]:
    """Share of right replies at temperature 1 to questions that no step asks, by kind; one reply to
    each question, in `calls` calls of the size that training runs.
    """
    settings, kinds = task.settings, list(KINDS)
    size = settings.groups * settings.members
    right: dict[str, list[bool]] = {kind: [] for kind in kinds}
    for call in range(calls):
        names, asked = questions_of("held-out", call, size, settings)
        verdicts = answer(task, params, names, asked, 1, 1.0).right.tolist()
        for each, verdict in zip(asked, verdicts, strict=True):
            right[each.kind].append(verdict)
    return {kind: share(right[kind]) for kind in kinds if right[kind]}


def share(values: Sequence[float] | np.ndarray) -> float:
    """The mean of some numbers, exact before its last rounding."""
    return math.fsum(values) / len(values)
