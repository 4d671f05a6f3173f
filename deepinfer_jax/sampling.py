"""From logits to tokens: temperature, truncation, keyed noise, choice, acceptance.

Everything here is a pure function of one row: its logits, its request's parameters and seed, and
the absolute index of the token to be produced. Batch, slot, padding and schedule are not inputs, so
they cannot change a token (docs/determinism.md). Sums run over integers, so they have no order.
Legend: T rows, V vocabulary, N drafts; any leading dimensions may stand for [T].
"""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from deepinfer_jax import numerics, summaries
from deepinfer_jax.noise import ID_BITS, gumbel

Array = jax.Array | np.ndarray

# Below this temperature a row takes the most probable token. The threshold is the published
# engine's, which samples at this temperature instead.
GREEDY_BELOW = 1e-5

_BLOCK = 128
_UNIT = np.float32(2.0**31)  # top-p counts probability in units of 2^-31


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters of T rows, one entry per row. Build and validate with `make_sampling`.

    Attributes:
      temperature: [T] float32, finite and >= 0; below `GREEDY_BELOW` the row is greedy.
      top_p: [T] float32 in (0, 1]; 1 keeps everything.
      top_k: [T] int32, -1 (all) or >= 1.
      min_p: [T] float32 in [0, 1]; 0 keeps everything.
      seed: [T, 2] uint32, the request's 64-bit seed as (low word, high word).

    All three limits are None (`untruncated`) where no row has one: equal bits, another program.
    """

    temperature: Array
    top_p: Array | None
    top_k: Array | None
    min_p: Array | None
    seed: Array

    __repr__ = summaries.of_fields


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class Sampled:
    """What `sample` returns for T rows.

    Attributes:
      token: [T] int32.
      logprob_raw: [T] float32, log-probability of `token` at temperature 1, without edits, mask or
        truncation: what a trainer recomputes.
      logprob_processed: [T] float32, log-probability of `token` in the distribution it was drawn
        from; 0.0 in greedy rows, whose distribution is a point mass.
      kept_mass: [T] float32 in [0, 1], probability of the surviving set under the
        temperature-scaled distribution, edits included, before mask and truncation; exactly 1.0
        where nothing was removed, and in greedy rows.
    """

    token: jax.Array
    logprob_raw: jax.Array
    logprob_processed: jax.Array
    kept_mass: jax.Array

    __repr__ = summaries.of_fields


def make_sampling(
    n: int,
    temperature: float | Sequence[float] = 1.0,
    top_p: float | Sequence[float] = 1.0,
    top_k: int | Sequence[int] = -1,
    min_p: float | Sequence[float] = 0.0,
    *,
    seeds: Sequence[int],
) -> Sampling:
    """Validated `Sampling` of `n` rows, as NumPy arrays (no device is touched).

    A scalar serves every row. `seeds` has no default and no broadcast: rows that share a seed share
    their noise, so every request and every member of a group needs its own (rows of *one* request,
    as in verification, repeat it on purpose).

    Raises:
      ValueError: a value outside the range documented in `Sampling`, or a wrong length.
      TypeError: a boolean, or a non-integer where an integer is needed.
    """
    heat = _per_row("temperature", temperature, n, np.float32)
    _check("temperature", heat, (heat >= 0) & (heat < np.inf), "finite and >= 0 (0 is greedy)")
    nucleus = _per_row("top_p", top_p, n, np.float32)
    _check("top_p", nucleus, (nucleus > 0) & (nucleus <= 1), "in (0, 1] (1 keeps all)")
    count = _per_row("top_k", top_k, n, np.int64)
    _check("top_k", count, (count == -1) | ((count >= 1) & (count < 2**31)), "-1 (all) or >= 1")
    floor = _per_row("min_p", min_p, n, np.float32)
    _check("min_p", floor, (floor >= 0) & (floor <= 1), "in [0, 1] (0 keeps all)")
    return Sampling(heat, nucleus, count.astype(np.int32), floor, seed_words(seeds, n))


def untruncated(sampling: Sampling) -> Sampling:
    """`sampling` of rows of which none truncates; what limits they have is not looked at."""
    return dataclasses.replace(sampling, top_p=None, top_k=None, min_p=None)


def seed_words(seeds: Sequence[int], n: int) -> np.ndarray:
    """The `n` 64-bit `seeds` as [n, 2] uint32 words (low, high); errors as `make_sampling`."""
    if len(seeds) != n:
        raise ValueError(f"seeds needs one entry per row: expected {n}, got {len(seeds)}")
    for row, seed in enumerate(seeds):
        if isinstance(seed, bool) or not isinstance(seed, int | np.integer):
            raise TypeError(f"seeds[{row}] must be an integer, got {seed!r}")
        if not 0 <= seed < 2**64:
            raise ValueError(
                f"seeds[{row}] must be in [0, 2**64), got {seed}; mask it with & (2**64 - 1)"
            )
    words = [(int(seed) & 0xFFFFFFFF, int(seed) >> 32) for seed in seeds]
    return np.array(words, np.uint32).reshape(n, 2)


def _per_row(name: str, value: object, n: int, dtype: type) -> np.ndarray:
    given = np.asarray(value)
    kinds = "iu" if np.issubdtype(dtype, np.integer) else "iuf"
    if given.dtype.kind not in kinds:
        wanted = "integers" if kinds == "iu" else "numbers"
        raise TypeError(f"{name} must be {wanted}, got {value!r} ({given.dtype})")
    if given.shape not in ((), (n,)):
        raise ValueError(f"{name} must be a scalar or have shape ({n},), got shape {given.shape}")
    if given.dtype == np.uint64:  # beyond int64 it would become another number
        given = np.minimum(given, np.uint64(2**63 - 1))
    with np.errstate(over="ignore"):  # a float64 beyond float32 becomes inf and is then refused
        return np.broadcast_to(given.astype(dtype), (n,))


def _check(name: str, values: np.ndarray, valid: np.ndarray, wanted: str) -> None:
    if not valid.all():
        row = int(np.argmin(valid))
        raise ValueError(f"{name} must be {wanted}, got {values[row]} in row {row}")


def logprob(logits: Array, token: Array, norm: Array | None = None) -> jax.Array:
    """Log-probability of `token` [...] under `logits` [..., V], in float32.

    Gather, cast, minus logsumexp: the three steps a trainer takes, in its order (log(softmax)
    changes the last bit of about 3 % of the entries). Every log-probability of a
    token that `sample`, `judge` and the scorer return comes from here; losses of `training` do not.
    `norm` [...] is the log-sum-exp where the caller has it already.
    """
    picked = jnp.take_along_axis(logits, token[..., None], axis=-1)[..., 0]
    whole = numerics.logsumexp(logits.astype(jnp.float32)) if norm is None else jnp.asarray(norm)
    return picked.astype(jnp.float32) - whole


def top_logprobs(logits: Array, count: int) -> tuple[jax.Array, jax.Array]:
    """(ids int32, log-probabilities float32) [..., K] of the K = `count` most probable tokens.

    `logprob` of each under `logits` [..., V], in every bit. The order is total: value descending,
    lower id among equals; so K tokens are the first K of any longer list.
    """
    if not 0 <= count <= logits.shape[-1]:
        raise ValueError(
            f"count (top tokens) must lie in 0..{logits.shape[-1]}, the vocabulary, got {count}"
        )
    if count == 0:
        nothing = (*logits.shape[:-1], 0)
        return jnp.zeros(nothing, jnp.int32), jnp.zeros(nothing, jnp.float32)
    logits = jnp.asarray(logits).astype(jnp.float32)
    norm = numerics.logsumexp(logits)
    _, ids = numerics.top_k(logits - norm[..., None], count)
    each = jax.vmap(logprob, in_axes=(None, -1, None), out_axes=-1)
    return ids.astype(jnp.int32), each(logits, ids, norm)


@jax.named_scope("transform")
def transform(logits: Array, sampling: Sampling, mask: Array | None = None) -> jax.Array:
    """Log-probabilities [T, V] float32 of what may be sampled, -inf outside.

    In this order: `mask`; temperature; then the intersection of min_p (probability at least
    min_p times the largest), top_p (mass strictly before the token, in descending order with ties
    by lower id, at most top_p) and top_k (first k of those); then log-softmax over the survivors.
    The most probable token always survives. Greedy rows are a point mass, 0.0 at the largest logit
    (lowest id among equals); -0.0 equals +0.0 throughout.

    Args:
      logits: [T, V], any float dtype; worked on in float32.
      sampling: parameters of the T rows.
      mask: [T, V] bool, True where a token is allowed; every row needs one allowed token.
    """
    _, survivors = _survivors(logits, sampling, mask)
    return survivors - numerics.logsumexp(survivors)[..., None]


@jax.named_scope("choose")
def choose(logp: Array, seed: Array, index: Array) -> jax.Array:
    """Sampled token [T] int32: the largest `logp` [T, V] + noise, lowest id among equals.

    `seed` is [T, 2] uint32 and `index` [T] int32, the absolute output index. The target and the
    draft of one index use the same noise (coupled speculation). Where every row has at most one
    candidate, as in greedy decoding, no noise is drawn: it could not decide anything. The branch
    also hands the noise over as a finished array, so that no compiler draws it twice.
    """
    if logp.shape[-1] > 1 << ID_BITS:
        raise ValueError(f"the noise contract counts 2**24 token ids, got V={logp.shape[-1]}")
    race = jnp.any(jnp.count_nonzero(logp > -jnp.inf, axis=-1) > 1)
    noise = lax.cond(
        race,
        lambda seed, index: gumbel(seed, index, jnp.arange(logp.shape[-1])),
        lambda seed, index: jnp.zeros(logp.shape, jnp.float32),
        seed,
        index,
    )
    return first_largest(logp + noise)


def first_largest(x: jax.Array) -> jax.Array:
    """Id [...] int32 of the largest of `x` [..., V], the lowest among equals; -0.0 equals +0.0.

    In two steps, block and place, because XLA:CPU vectorises a maximum and not an arg-max (3 to 10
    times faster at V = 129280).
    """
    padding = [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % _BLOCK)]
    blocks = jnp.pad(x, padding, constant_values=-jnp.inf)
    blocks = blocks.reshape(*x.shape[:-1], -1, _BLOCK)
    block = jnp.argmax(jnp.max(blocks, axis=-1), axis=-1)
    inside = jnp.take_along_axis(blocks, block[..., None, None], axis=-2)[..., 0, :]
    return (block * _BLOCK + jnp.argmax(inside, axis=-1)).astype(jnp.int32)


@jax.named_scope("sample")
def sample(
    logits: Array, sampling: Sampling, index: Array, mask: Array | None = None,
    edited: Array | None = None,
) -> Sampled:  # fmt: skip
    """One token per row from `logits` [T, V], with its log-probabilities.

    `transform` and `choose` in one pass; `index` [T] int32 is the absolute output index, `mask`
    [T, V] bool as in `transform`. `edited` [T, V] stands for the logits in everything but
    `logprob_raw` (module `edits`). At temperature 1 without these and truncation the two
    log-probabilities are the same bits.
    """
    odds = _odds(logits if edited is None else edited, sampling, mask)
    token = choose(odds.survivors - odds.norm[..., None], sampling.seed, index)
    return _judge(logits, token, odds, sampling)


@jax.named_scope("judge")
def judge(
    logits: Array, token: Array, sampling: Sampling, mask: Array | None = None,
    edited: Array | None = None,
) -> Sampled:  # fmt: skip
    """What `sample` says of `token` [T] had it drawn it from `logits` [T, V], in every bit.

    For trainers: the sampler's numbers of a given token. A token that truncation removed has
    `logprob_processed` -inf. Differentiable; which tokens survive carries no gradient.
    """
    odds = _odds(logits if edited is None else edited, sampling, mask)
    return _judge(logits, token, odds, sampling)


@dataclasses.dataclass(frozen=True)
class _Odds:
    """scaled [T, V]: logits over temperature; survivors: -inf where removed; norm and whole [T]:
    the log-sum-exp of the survivors and of everything.
    """

    scaled: jax.Array
    survivors: jax.Array
    norm: jax.Array
    whole: jax.Array


def _odds(logits: Array, sampling: Sampling, mask: Array | None) -> _Odds:
    scaled, survivors = _survivors(logits, sampling, mask)
    norm = numerics.logsumexp(survivors)
    limits = _limits(sampling)
    if limits is None and mask is None:
        return _Odds(scaled, survivors, norm, norm)
    whole = lax.cond(
        jnp.any(_truncates(limits, sampling)) if limits is not None and mask is None else True,
        lambda scaled, norm: numerics.logsumexp(scaled),
        lambda scaled, norm: norm,
        scaled,
        norm,
    )
    return _Odds(scaled, survivors, norm, whole)


def _judge(logits: Array, token: Array, odds: _Odds, sampling: Sampling) -> Sampled:
    kept = jnp.minimum(jnp.exp((odds.norm - odds.whole)[..., None])[..., 0], 1.0)
    return Sampled(
        token=jnp.asarray(token),
        logprob_raw=logprob(logits, token),
        logprob_processed=logprob(odds.survivors, token, odds.norm),
        kept_mass=jnp.where(_greedy(sampling), 1.0, kept),
    )


def _greedy(sampling: Sampling) -> Array:
    return sampling.temperature < np.float32(GREEDY_BELOW)


_Limits = tuple[Array, Array, Array]  # top_p, top_k, min_p


def _limits(sampling: Sampling) -> _Limits | None:
    if sampling.top_p is None or sampling.top_k is None or sampling.min_p is None:
        return None
    return sampling.top_p, sampling.top_k, sampling.min_p


def _truncates(limits: _Limits, sampling: Sampling) -> Array:
    top_p, top_k, min_p = limits
    return ((top_p < 1) | (top_k > 0) | (min_p > 0)) & ~_greedy(sampling)


def _survivors(
    logits: Array, sampling: Sampling, mask: Array | None
) -> tuple[jax.Array, jax.Array]:
    """Temperature-scaled logits [T, V], and the same with -inf where a token was removed.

    Multiplied by the reciprocal, not divided: the compiler makes that of a division by a broadcast
    temperature in some programs and not in others.
    """
    logits = logits.astype(jnp.float32)
    greedy = _greedy(sampling)
    inverse = 1 / jnp.where(greedy, 1.0, sampling.temperature)
    scaled = numerics.pin(logits * inverse[..., None])
    kept = scaled if mask is None else jnp.where(mask, scaled, -jnp.inf)
    limits = _limits(sampling)
    if limits is not None:
        truncates = jnp.any(_truncates(limits, sampling))
        kept = lax.cond(truncates, _truncated, lambda x, _: x, kept, limits)
    kept = lax.cond(jnp.any(greedy), _greedy_points, lambda x, _: x, kept, greedy)
    return scaled, kept


def _greedy_points(scaled: jax.Array, greedy: jax.Array) -> jax.Array:
    """`scaled` [T, V]; in the rows marked `greedy` [T] -inf outside the first largest entry."""
    best = first_largest(scaled)[..., None]
    return jnp.where(greedy[..., None] & (_ids(scaled) != best), -jnp.inf, scaled)


def _truncated(scaled: jax.Array, limits: _Limits) -> jax.Array:
    """`scaled` [T, V] with -inf outside the intersection of min_p, top_p and top_k.

    Each limit keeps a prefix of the order (value descending, id ascending). Its end is found
    without sorting, by bisection over the bits of the order; a step only counts tokens and adds
    integer units of mass, so the outcome does not depend on any order of summation.
    """
    top_p, top_k, min_p = limits
    weight = jnp.exp(scaled - numerics.finite_max(scaled, -1))
    share = weight * (1 / numerics.unit_sum(weight))[..., None]
    units = jnp.floor(share * _UNIT).astype(jnp.uint32)
    mass_limit = jnp.floor(top_p * _UNIT).astype(jnp.uint32)
    no_limit = jnp.uint32(0xFFFFFFFF)
    mass_limit = jnp.where(top_p < 1, mass_limit, no_limit)
    count_limit = jnp.where(top_k > 0, top_k.astype(jnp.uint32), no_limit)

    def spent(taken: jax.Array) -> jax.Array:
        """Whether no token may follow once the set `taken` [T, V] is kept."""
        ones, mine = taken.astype(jnp.uint32), jnp.where(taken, units, jnp.uint32(0))
        count, mass = numerics.integer_sums(ones, mine)
        return (count >= count_limit) | (mass > mass_limit)

    order, ids = _order(scaled), _ids(scaled).astype(jnp.uint32)
    rows = scaled.shape[:-1]
    edge = _last_true(lambda value: spent(order >= value[..., None]), 32, rows)[..., None]
    above, tied = order > edge, order == edge
    last = lax.cond(
        jnp.any(jnp.count_nonzero(tied, axis=-1) > 1),
        lambda: _last_true(
            lambda end: ~spent(above | (tied & (ids < end[..., None]))), ID_BITS, rows
        ),
        lambda: jnp.full(rows, no_limit),  # a lone token at the edge is kept
    )
    kept = above | (tied & (ids <= last[..., None]))
    return jnp.where(kept & (weight >= min_p[..., None]), scaled, -jnp.inf)


def _last_true(
    test: Callable[[jax.Array], jax.Array], bits: int, shape: tuple[int, ...]
) -> jax.Array:
    """Per row the largest number below 2**bits that passes `test`; 0 if none does.

    `test` maps [T] uint32 to [T] bool and must not turn true again after turning false.
    """

    def refine(step: jax.Array, found: jax.Array) -> jax.Array:
        candidate = found | (jnp.uint32(1) << (bits - 1 - step).astype(jnp.uint32))
        return jnp.where(test(candidate), candidate, found)

    return lax.fori_loop(0, bits, refine, jnp.zeros(shape, jnp.uint32))


def _order(x: jax.Array) -> jax.Array:
    """float32 -> uint32 with the same order; -0.0 and +0.0 map to one value."""
    bits = lax.bitcast_convert_type(jnp.where(x == 0, jnp.float32(0), x), jnp.uint32)
    sign = jnp.uint32(0x80000000)
    return jnp.where(bits >= sign, ~bits, bits | sign)


def _ids(x: Array) -> jax.Array:
    """Token ids, int32, in the shape of `x` [..., V]."""
    return lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 1)


def accepted(target: Array, draft: Array, length: Array | int) -> jax.Array:
    """Number of accepted drafts [...] int32: how many of `draft` [..., N] lead with the target's.

    Args:
      target: [..., N] or [..., N + 1] int32, the target's own choice at each drafted index (and
        at the fresh one, which judges nothing).
      draft: [..., N] int32, drawn with the same noise.
      length: [...] int32, drafts that were verified; later ones count as not accepted.
    """
    n = draft.shape[-1]
    if target.shape[-1] not in (n, n + 1):
        raise ValueError(
            f"target must have N={n} or N+1={n + 1} entries per row for {n} drafts, "
            f"got {target.shape[-1]}"
        )
    same = target[..., :n] == draft
    verified = _ids(draft) < jnp.asarray(length)[..., None]
    end = jnp.zeros((*draft.shape[:-1], 1), bool)
    return jnp.argmin(jnp.concatenate([same & verified, end], axis=-1), axis=-1).astype(jnp.int32)


def acceptance_probability(p: Array, q: Array) -> jax.Array:
    """Probability [...] that target `p` and draft `q` [..., V] choose one token on shared noise.

    sum_i 1 / sum_j max(p_j / p_i, q_j / q_i) over i with p_i, q_i > 0: between (1 - TV) / (1 + TV)
    and 1 - TV, with TV the total variation distance. The quantity the confidence head estimates. In
    ascending order of p / q the inner maximum is q_j / q_i before i and p_j / p_i from i on, which
    makes it O(V log V). Running sums count units of 2^-31, so the result is good to V * 2^-31; no
    term exceeds min(p_i, q_i).
    """
    ratio = jnp.where(q > 0, p / jnp.where(q > 0, q, 1.0), jnp.inf)
    by_ratio = jnp.argsort(ratio, axis=-1)
    p, q, ratio = (jnp.take_along_axis(x, by_ratio, axis=-1) for x in (p, q, ratio))
    p_units, q_units = (jnp.floor(x * _UNIT).astype(jnp.uint32) for x in (p, q))
    from_here = jnp.cumsum(p_units[..., ::-1], axis=-1, dtype=jnp.uint32)[..., ::-1]
    before = jnp.cumsum(q_units, axis=-1, dtype=jnp.uint32) - q_units
    from_here, before = (x.astype(jnp.float32) / _UNIT for x in (from_here, before))
    term = p / (from_here + numerics.pin(before * numerics.pin(ratio)))
    least = jnp.minimum(p, q)
    return numerics.unit_sum(jnp.where(least > 0, jnp.minimum(term, least), 0.0))
