"""The engine's own programs: continuous batching, and decoding that stays on the device."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from deepinfer_jax import engine as engines
from deepinfer_jax import layout, rounds
from deepinfer_jax.cache import Cache
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.determinism import feeding, speculation
from deepinfer_jax.determinism.reference import Reference, Setup
from deepinfer_jax.determinism.schedules import Pair
from deepinfer_jax.determinism.serving import MANY, SLOTS
from deepinfer_jax.engine.sites import ONE, Site
from deepinfer_jax.numerics import Numerics
from deepinfer_jax.planning import OFF, Fill
from deepinfer_jax.planning.policies import Memory, Move, Policy
from deepinfer_jax.requests import Request, Result
from deepinfer_jax.sampling import Sampled, Sampling
from deepinfer_jax.tables import Tables

BATCH = 5  # slots of the engine; more requests than that take turns


@functools.partial(jax.jit, static_argnames=("cfg", "numerics", "count"))
def in_scan(
    params: Any, tables: Tables, tokens: jax.Array, active: jax.Array, cache: Cache,
    sampling: Sampling, cfg: ModelConfig, numerics: Numerics, count: int,
) -> tuple[Sampled, Cache]:  # fmt: skip
    """`count` decode steps of the active slots [B] from their newest tokens [B]: [count, B]."""

    def step(carry, _):
        tokens, cache = carry
        sampled, cache = rounds.decode(
            params, tables, tokens, active, cache, sampling, cfg, numerics
        )
        return (sampled.token, cache), sampled

    (_, cache), sampled = lax.scan(step, (tokens, cache), length=count)
    return sampled, cache


@dataclasses.dataclass(frozen=True)
class _Filled(Policy):
    """A policy that verifies two drafts for every slot, the best ones of all."""

    block: int

    def move(self, memory: Memory, running: int) -> Move:
        fill = Fill(np.ones(self.block, np.float32))
        return Move(self.block, (1 + min(2, self.block)) * memory.slots, fill)


def engine(setup: Setup) -> Iterator[Pair]:
    """`generate` with five slots for many requests that end at different times, in two orders.

    The second order is drafted for, where the model has a drafter: calls with room for some drafts,
    which go to whichever requests are most sure of theirs.
    """
    rng = setup.rng("engine")
    for policy, eager in ((OFF, False), (_drafting(setup.model.cfg), True)):
        yield from _replies(setup, rng, policy, eager, ONE)


def mesh(setup: Setup) -> Iterator[Pair]:
    """The same, drafted for, over the largest power of two of devices, at most eight: two share
    global KV, two have the experts of two more, and requests are spread over what is left.

    One device alone: nothing to compare.
    """
    count = speculation.devices_to_use()
    if count == 1:
        return
    cfg, expert = setup.model.cfg, min(count // 2, 2)
    over = layout.device_mesh(count // 2 // expert, expert, jax.devices()[:count], context=2)
    site = Site(over, layout.initial_placements(cfg, expert, least=1))
    yield from _replies(setup, setup.rng("mesh"), _drafting(cfg), False, site)


def _drafting(cfg: ModelConfig) -> Policy:
    return _Filled(cfg.most_drafts) if cfg.most_drafts else OFF


def _replies(
    setup: Setup, rng: np.random.Generator, policy: Policy, eager: bool, site: Site
) -> Iterator[Pair]:
    """Of every request twice, cut short anywhere, in an order drawn at random."""
    numbers = rng.permutation(np.tile(np.arange(len(setup.references)), 2)).tolist()
    requests = [_shortened(setup.references[n].request, rng) for n in numbers]
    running = engines.start(
        setup.model, requests, batch_size=BATCH * site.parts, eager=eager, policy=policy, site=site
    )
    for update in running.updates():
        if update.result is not None:
            reference = setup.references[numbers[update.index]]
            yield _reply(reference, update.result, setup.model.cfg.eos_token_id)


def _shortened(request: Request, rng: np.random.Generator) -> Request:
    most = int(rng.integers(1, request.options.max_tokens + 1))
    return dataclasses.replace(
        request, options=dataclasses.replace(request.options, max_tokens=most)
    )


def _reply(reference: Reference, result: Result, eos: int) -> Pair:
    """A reply against the reference's, which goes on where the reply has ended."""
    request, start = reference.request, reference.prompt
    count = len(result.tokens)
    tokens = reference.text.tokens[start : start + count]
    ended = np.flatnonzero(tokens == eos)
    if ended.size:  # the reply must have ended there, if not before
        tokens = tokens[: ended[0] + 1]
    want = {"token": tokens, "ends": np.array([len(tokens)])}
    got = {"token": np.array(result.tokens[: len(tokens)], np.int32), "ends": np.array([count])}
    for name, values in (
        ("raw", result.logprobs),
        ("processed", result.logprobs_processed),
        ("kept", result.kept_mass),
    ):
        want[name] = reference.rows[name][start - 1 : start - 1 + len(tokens)]
        got[name] = np.array(values[: len(tokens)], np.float32)
    return Pair(f"request {request.id}, reply of {count} tokens", got, want)


def scan(setup: Setup) -> Iterator[Pair]:
    """The whole reply inside one `lax.scan`, all requests together."""
    model, references = setup.model, setup.references
    chosen = np.arange(SLOTS)[:: SLOTS // len(references)][: len(references)]
    seated = dict(zip(chosen.tolist(), range(len(references)), strict=True))
    cache = feeding.garbage(model, SLOTS, min(2 * setup.capacity, model.max_length))
    for slot, reference in zip(chosen.tolist(), references, strict=True):
        if reference.prompt > 1:
            prompt = [feeding.piece(slot, reference.text, 0, reference.prompt - 1)]
            _, cache = feeding.feed(model, cache, prompt, MANY, names=())
    count = references[0].request.options.max_tokens + 1  # the same for all
    lengths, tokens = np.zeros((2, SLOTS), np.int32)
    active = np.isin(np.arange(SLOTS), chosen)
    for slot, reference in zip(chosen.tolist(), references, strict=True):
        lengths[slot] = reference.prompt - 1
        tokens[slot] = reference.text.tokens[reference.prompt - 1]
    cache = dataclasses.replace(cache, lengths=jnp.asarray(lengths))
    sampled, cache = in_scan(
        model.params, model.tables, tokens, active, cache, setup.sampling(seated, SLOTS),
        model.cfg, model.numerics, count,
    )  # fmt: skip
    columns = {
        "token": sampled.token,
        "raw": sampled.logprob_raw,
        "processed": sampled.logprob_processed,
        "kept": sampled.kept_mass,
    }
    for slot, number in seated.items():
        reference, first = references[number], references[number].prompt - 1
        want = {name: reference.rows[name][first:] for name in columns}
        got = {name: np.asarray(columns[name])[:, slot] for name in columns}
        yield Pair(f"request {number}, reply", got, want)
        state = feeding.visible(model, cache, slot, len(reference.text))
        yield Pair(f"request {number}, cache of slot {slot}", state, reference.state)
