"""What the engine runs on the device.

The cache that a program changes is donated to it, as are the edits of `edit_program` and the
snapshots of `take_program`; `Running` is not.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from deepinfer_jax import edits as editing
from deepinfer_jax import rounds, snapshots, steps
from deepinfer_jax.cache import Cache
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.edits import Edits
from deepinfer_jax.engine.sizes import Sizes
from deepinfer_jax.grammar import expand
from deepinfer_jax.numerics import Numerics
from deepinfer_jax.rounds import Round, Running
from deepinfer_jax.rows import Rows, join_rows, text_rows
from deepinfer_jax.sampling import Sampling
from deepinfer_jax.tables import Tables

_STATIC = ("cfg", "numerics")


def fill(
    params: Any, tables: Tables, rows: Rows, complete: jax.Array, beside: jax.Array,
    running: Running, cache: Cache, sampling: Sampling, cfg: ModelConfig, numerics: Numerics,
    packed: jax.Array | None = None,
) -> tuple[Round, Running, Cache]:  # fmt: skip
    """Run prompt rows, and the newest tokens of active slots beside them.

    complete [B] bool: slots whose prompt ends in this call: they sample their first token and
    become active. beside [B] bool: slots that decode, as far as they are active; the others wait.
    packed [B, W]: what each slot may sample, in bits (`grammar.expand`).
    Returns (Round of [1, B, 1], running, cache), as `rounds.decode_many` of one round does.
    """
    b = cache.slots
    decoding = running.active & beside
    slot = jnp.where(decoding, jnp.arange(b, dtype=jnp.int32), -1)
    position = jnp.where(decoding, cache.lengths, 0)
    rows = join_rows(rows, text_rows(running.tokens, slot, position))
    mask = None if packed is None else expand(packed, cfg.vocab_size)
    sampled, loads, cache = steps.run_prompts(
        params, tables, rows, cache, sampling, cfg, numerics, mask=mask, edits=running.edits
    )
    sampled = jax.tree.map(lambda x: x[:, None], sampled)
    taking_part = dataclasses.replace(running, active=decoding | complete)
    nothing = jnp.zeros((b,), jnp.int32)
    emitted, after, _ = rounds.commit(taking_part, sampled.token, nothing)
    after = dataclasses.replace(
        after, active=jnp.where(taking_part.active, after.active, running.active)
    )
    made = Round(
        sampled=sampled,
        emitted=emitted,
        drafts=jnp.zeros((b, 0), jnp.int32),
        confidence=jnp.zeros((b, 0), jnp.float32),
        scheduled=nothing,
        accepted=nothing,
        loads=loads,
    )
    return jax.tree.map(lambda x: x[None], made), after, cache


def propose(
    params: Any, tables: Tables, running: Running, cache: Cache, sampling: Sampling,
    packed: jax.Array, cfg: ModelConfig, numerics: Numerics, *, size: int,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """Drafts and confidences [B, N] of active slots, the first one within `packed` [B, W].

    What the later ones may be depends on those before them, which the host does not know yet.
    """
    first = expand(packed, cfg.vocab_size)[:, None]
    rest = jnp.ones((first.shape[0], size - 1, first.shape[2]), bool)
    mask = jnp.concatenate([first, rest], axis=1)
    made = rounds.propose(
        params, tables, running, cache, sampling, cfg, numerics, size=size, mask=mask
    )
    return made.tokens, made.confidence


def settle(
    params: Any, tables: Tables, running: Running, drafts: jax.Array, confidence: jax.Array,
    legal: jax.Array, packed: jax.Array, cache: Cache, sampling: Sampling, cfg: ModelConfig,
    numerics: Numerics,
) -> tuple[Round, Running, Cache]:  # fmt: skip
    """Verify the `legal` [B] leading drafts [B, N] under masks packed [B, N + 1, W] and commit.

    Returns as `fill`.
    """
    n = drafts.shape[1]
    most = jnp.where(running.active, jnp.clip(running.left - 1, 0, n), -1)
    rows = drafts.shape[0] * (n + 1)
    made, running, cache = rounds.settle(
        params, tables, running, drafts, confidence, rounds.fitting(legal, most, rows), cache,
        sampling, cfg, numerics, rows=rows, mask=expand(packed, cfg.vocab_size),
    )  # fmt: skip
    return jax.tree.map(lambda x: x[None], made), running, cache


def seat(running: Running, fresh: jax.Array, left: jax.Array, stops: jax.Array) -> Running:
    """`running` with the slots of `fresh` [B] idle until their prompts are complete, then to emit
    at most `left` [B] tokens, up to one of `stops` [B, S].
    """
    return dataclasses.replace(
        running,
        active=running.active & ~fresh,
        left=jnp.where(fresh, left, running.left),
        stops=jnp.where(fresh[:, None], stops, running.stops),
    )


fill_program = jax.jit(fill, static_argnames=_STATIC, donate_argnames="cache")
decode_program = jax.jit(
    rounds.decode_many,
    static_argnames=(*_STATIC, "steps", "size", "rows", "mode"),
    donate_argnames="cache",
)
propose_program = jax.jit(propose, static_argnames=(*_STATIC, "size"))
settle_program = jax.jit(settle, static_argnames=_STATIC, donate_argnames="cache")
seat_program = jax.jit(seat)
edit_program = jax.jit(editing.place, donate_argnums=0)
take_program = jax.jit(snapshots.take, donate_argnums=0)
restore_program = jax.jit(snapshots.restore, donate_argnums=0)


def idle(slots: int, stop_ids: int) -> Running:
    """No slot takes part."""
    nothing = jnp.zeros((slots,), jnp.int32)
    return Running(
        nothing, jnp.zeros((slots,), bool), nothing, jnp.full((slots, stop_ids), -1, jnp.int32)
    )


def idle_edits(sizes: Sizes, vocab: int) -> Edits:
    """No slot changes its logits; room as `sizes` says."""
    return editing.idle(sizes.slots, vocab, sizes.stop_ids, sizes.forced)


def widened(running: Running, sizes: Sizes, vocab: int) -> Running:
    """`running` with room for the ends and edits of `sizes`, which are not fewer than it has."""
    more = sizes.stop_ids - running.stops.shape[1]
    stops = jnp.pad(running.stops, ((0, 0), (0, more)), constant_values=-1)
    edits = running.edits
    if sizes.edits:
        edits = idle_edits(sizes, vocab) if edits is None else (
            editing.widened(edits, sizes.stop_ids, sizes.forced)
        )  # fmt: skip
    return dataclasses.replace(running, stops=stops, edits=edits)


def make_rows(part: Sequence[tuple[int, int, int]], size: int) -> Rows:
    """Rows of (token, slot, position), padded to `size`."""
    return jax.device_put(host_rows(part, size))


def host_rows(part: Sequence[tuple[int, int, int]], size: int, local: int | None = None) -> Rows:
    """`make_rows` on the host. local: slots of a device, where slots are to be numbered on each."""
    table = np.full((size, 3), (0, -1, 0), np.int32)
    table[: len(part)] = np.array(part, np.int32).reshape(-1, 3)  # none at all, too
    if local is not None:
        table[:, 1] = np.where(table[:, 1] < 0, -1, table[:, 1] % local)
    columns: Any = [*map(np.ascontiguousarray, table.T), np.zeros(size, bool)]
    return Rows(*columns)
