"""Sampling: recorded vectors, bits that depend on the row only, survivors, log-probs, errors."""

import dataclasses

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from deepinfer_jax import noise as noises
from deepinfer_jax import numerics, sampling
from tests.compiled_sampling import (
    ACCEPTANCE,
    ACCEPTED,
    CHOOSE,
    FIRST_LARGEST,
    GUMBEL,
    LOGPROB,
    LOGSUMEXP,
    SAMPLE,
    TRANSFORM,
    WORDS,
    log_probabilities,
    survivors_by_sorting,
)

# Compiling is what these tests spend their time on: most of them share this shape.
ROWS, VOCABULARY = 40, 300


# -- recorded vectors -----------------------------------------------------------------------------


def stacked(rows, fill):
    """Ragged rows as one float32 array; padding must not matter, so it is part of the check."""
    width = max(len(row) for row in rows)
    return np.array([list(row) + [fill] * (width - len(row)) for row in rows], np.float32)


def test_recorded_noise(recorded):
    for case in recorded("engine_misc/counter_noise.json")["bits"]:
        seed = sampling.seed_words([int(case["seed"])], 1)
        names = seed, np.array([case["index"]], np.int32), np.array(case["token_ids"], np.int32)
        w0, w1 = WORDS(*names, case["stream"])
        np.testing.assert_array_equal(w0[0], np.array(case["word0"], np.uint32))
        np.testing.assert_array_equal(w1[0], np.array(case["word1"], np.uint32))
        noise = np.asarray(GUMBEL(*names, case["stream"])[0], np.float64)
        # float32 logs of a float32 uniform; the record is float64
        np.testing.assert_allclose(noise, case["gumbel"], rtol=1e-5)
        np.testing.assert_allclose(np.exp(-noise), case["exponential"], rtol=1e-5)


def test_recorded_samples(recorded):
    cases = recorded("engine_misc/counter_noise.json")["samples"]
    limits = {k: [c[k] for c in cases] for k in ("temperature", "top_p", "top_k")}
    seeds = [int(c["seed"]) for c in cases]
    params = sampling.make_sampling(len(cases), **limits, seeds=seeds)
    index = np.array([c["index"] for c in cases], np.int32)
    target = SAMPLE(stacked([c["target_logits"] for c in cases], -np.inf), params, index)
    draft = SAMPLE(stacked([c["draft_logits"] for c in cases], -np.inf), params, index)
    np.testing.assert_array_equal(target.token, [c["target_token"] for c in cases])
    np.testing.assert_array_equal(draft.token, [c["draft_token"] for c in cases])
    expected = [c["target_logprob"] for c in cases]
    np.testing.assert_allclose(target.logprob_processed, expected, rtol=1e-5, atol=1e-6)
    count = ACCEPTED(target.token[:, None], draft.token[:, None], np.ones(len(cases), np.int32))
    np.testing.assert_array_equal(count, [int(c["accepted"]) for c in cases])


def test_recorded_truncation(recorded):
    cases = recorded("engine_misc/truncation.json")["cases"]
    logits = stacked([c["logits"] for c in cases], -np.inf)
    limits = {k: [c[k] for c in cases] for k in ("top_p", "top_k")}
    for case, row in zip(cases, log_probabilities(logits, **limits), strict=True):
        np.testing.assert_array_equal(np.flatnonzero(np.isfinite(row)), case["kept"])
        kept = [x for x in case["logprobs"] if x is not None]
        np.testing.assert_allclose(row[case["kept"]], kept, rtol=1e-6)


def test_recorded_acceptance_probability(recorded):
    cases = recorded("engine_misc/coupled_acceptance.json")["cases"]
    p, q = (stacked([c[name] for c in cases], 0) for name in "pq")
    got = np.asarray(ACCEPTANCE(p, q))
    np.testing.assert_allclose(got, [c["coupled_acceptance"] for c in cases], atol=1e-6)
    # four standard deviations of 400,000 draws
    np.testing.assert_allclose(got, [c["monte_carlo_400k"] for c in cases], atol=3.2e-3)
    assert (got <= [c["rejection_acceptance"] + 1e-6 for c in cases]).all()
    assert (got >= [c["lower_bound"] - 1e-6 for c in cases]).all()


def test_threefry_known_answer():
    zero = np.zeros((1, 2), np.uint32), np.zeros(1, np.int32), np.zeros(1, np.int32)
    w0, w1 = WORDS(*zero)
    assert (int(w0[0, 0]), int(w1[0, 0])) == (0x6B200159, 0x99BA4EFE)


# -- the bits of a row depend on the row only -----------------------------------------------------


def assert_same_bits(got, expected):
    jax.tree.map(
        lambda a, b: np.testing.assert_array_equal(
            np.asarray(a).view(np.uint32), np.asarray(b).view(np.uint32)
        ),
        got,
        expected,
    )


def rows(tree, which):
    return jax.tree.map(lambda x: np.asarray(x)[which], tree)


def mixed_batch(n, v):
    """Rows of every kind side by side: plain, greedy, hot, cold, and every truncation."""
    rng = np.random.default_rng(v)
    logits = (4 * rng.standard_normal((n, v))).astype(np.float32)
    logits[1::3] = np.round(logits[1::3])  # ties
    params = sampling.make_sampling(
        n,
        temperature=np.resize([1.0, 0.7, 0.0, 1.3], n),
        top_p=np.resize([1.0, 0.9, 0.5], n),
        top_k=np.resize([-1, -1, 5, 20, -1], n),
        min_p=np.resize([0, 0, 0, 0, 0, 0, 0.05], n).astype(np.float32),
        seeds=[int(s) for s in rng.integers(0, 2**64, n, dtype=np.uint64)],
    )
    return logits, params, (7 * np.arange(n) + 3).astype(np.int32)


@pytest.fixture(scope="module")
def batch():
    args = mixed_batch(ROWS, VOCABULARY)
    return args, SAMPLE(*args)


@pytest.fixture(scope="module")
def wide():
    args = mixed_batch(5, 4099)  # more than one loop, tile or lane group holds
    return args, SAMPLE(*args)


@pytest.mark.parametrize("which", ["batch", "wide"])
def test_a_row_alone_has_the_same_bits(which, request):
    args, expected = request.getfixturevalue(which)
    for row in range(len(args[0])):
        assert_same_bits(SAMPLE(*rows(args, [row])), rows(expected, [row]))


def test_rows_that_never_truncate_have_the_same_bits(batch):
    """By a program that does not ask whether one does."""
    (logits, params, index), _ = batch
    ones = np.ones_like(params.top_p)
    plain = dataclasses.replace(params, top_p=ones, top_k=-ones.astype(np.int32), min_p=0 * ones)
    expected = SAMPLE(logits, plain, index)
    assert_same_bits(SAMPLE(logits, sampling.untruncated(params), index), expected)


def test_the_order_of_rows_does_not_matter(batch):
    args, expected = batch
    order = np.random.default_rng(1).permutation(ROWS)
    assert_same_bits(SAMPLE(*rows(args, order)), rows(expected, order))


def test_padding_the_vocabulary_does_not_matter(wide):
    (logits, *rest), expected = wide
    padded = np.pad(logits, ((0, 0), (0, 517)), constant_values=-np.inf)
    assert_same_bits(SAMPLE(padded, *rest), expected)


def test_vmap_does_not_matter(batch):
    args, expected = batch
    assert_same_bits(jax.jit(jax.vmap(sampling.sample))(*args), expected)


def test_scan_does_not_matter(batch):
    args, expected = batch
    mapped = jax.jit(lambda *args: lax.map(lambda row: sampling.sample(*row), args))
    assert_same_bits(mapped(*args), expected)


def test_op_by_op_evaluation_does_not_matter(batch):
    # 13 rows: a length of vectors whose log and exp have other bits on XLA:CPU
    (logits, params, index), expected = rows(batch, slice(13))
    logits, token = jnp.asarray(logits), jnp.asarray(expected.token)
    assert_same_bits(sampling.logprob(logits, token), expected.logprob_raw)
    assert_same_bits(sampling.transform(logits, params), TRANSFORM(logits, params))
    ids = np.arange(7)
    assert_same_bits(noises.gumbel(params.seed, index, ids), GUMBEL(params.seed, index, ids))


def test_neighbouring_outputs_and_constants_do_not_matter(batch):
    (logits, params, index), expected = batch

    def everything(logits, index):  # params are constants of this program
        noise = noises.gumbel(params.seed, index, jnp.arange(logits.shape[-1]))
        logp = sampling.transform(logits, params)
        return sampling.sample(logits, params, index), logp, jnp.exp(logp), noise

    got, logp, _, _ = jax.jit(everything)(logits, index)
    assert_same_bits(got, expected)
    assert_same_bits(CHOOSE(logp, params.seed, index), expected.token)
    picked = np.take_along_axis(np.asarray(logp), np.asarray(got.token)[:, None], axis=1)[:, 0]
    assert_same_bits(picked, expected.logprob_processed)


def test_vocabulary_shards_do_not_matter(batch):
    (logits, *rest), expected = batch
    mesh = Mesh(np.array(jax.devices()[:4]), ("model",))
    shards = jax.device_put(logits, NamedSharding(mesh, PartitionSpec(None, "model")))
    assert_same_bits(SAMPLE(shards, *rest), expected)


def test_any_subset_of_ids_draws_the_same_noise():
    seed, index = sampling.seed_words([5, 2**40 + 1, 2**64 - 1], 3), np.array([0, 9, 77], np.int32)
    whole = np.asarray(GUMBEL(seed, index, np.arange(300)))
    some = np.array([299, 0, 17, 130, 18])
    assert_same_bits(GUMBEL(seed, index, some), whole[:, some])
    per_row = np.stack([some, some[::-1], some + 0])
    assert_same_bits(GUMBEL(seed, index, per_row), np.take_along_axis(whole, per_row, axis=1))
    assert len({float(GUMBEL(seed, index, some, stream)[0, 0]) for stream in range(4)}) == 4


def test_logsumexp_has_no_order_of_summation():
    rng = np.random.default_rng(0)
    x = (6 * rng.standard_normal((3, 5003))).astype(np.float32)
    expected = np.log(np.sum(np.exp(x.astype(np.float64)), axis=-1))
    got = LOGSUMEXP(x)
    np.testing.assert_allclose(got, expected, rtol=2e-7)  # one or two float32 roundings
    for _ in range(3):
        assert_same_bits(LOGSUMEXP(x[:, rng.permutation(5003)]), got)
    assert LOGSUMEXP(np.full((1, 7), -np.inf, np.float32))[0] == -np.inf


# -- what survives --------------------------------------------------------------------------------


LIMITS = st.tuples(
    st.sampled_from([0.5, 0.8, 1.0, 1.7]),
    st.sampled_from([1e-6, 0.2, 0.55, 0.9, 0.99, 1.0]),
    st.sampled_from([-1, 1, 2, 5, 11, 2**31 - 1]),
    st.sampled_from([0.0, 0.03, 0.3, 1.0]),
)
COARSE = st.lists(st.integers(-8, 8).map(lambda i: i / 2 or -0.0), min_size=11, max_size=11)


@hypothesis.given(logits=st.lists(COARSE, min_size=3, max_size=3), limits=LIMITS)
def test_survivors_are_those_of_a_sort(logits, limits):
    temperature, top_p, top_k, min_p = limits
    logp = log_probabilities(logits, temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p)
    for row, got in zip(logits, logp, strict=True):
        expected = survivors_by_sorting(row, *limits)
        if expected is not None:
            kept, share = expected
            np.testing.assert_array_equal(np.flatnonzero(np.isfinite(got)), kept)
            np.testing.assert_allclose(np.exp(got[kept]), share[kept] / share[kept].sum(), 1e-5)
        assert np.isfinite(got[np.argmax(row)])  # the most probable token always survives


def test_equal_values_survive_by_lowest_id():
    limits = np.arange(1, 5)
    logp = log_probabilities([[0.0, -0.0, 0.0, -0.0, -1.0]] * 4, top_k=limits)
    np.testing.assert_array_equal(np.isfinite(logp), np.arange(5) < limits[:, None])


def test_mask_comes_before_truncation():
    logits = [[5.0, 4.0, 3.0, 2.0, 1.0]]
    mask = np.array([[False, True, False, True, True]])
    kept = np.isfinite(log_probabilities(logits, mask, top_k=2))
    np.testing.assert_array_equal(kept, [[False, True, False, True, False]])


# -- log-probabilities ----------------------------------------------------------------------------


def test_raw_and_processed_are_the_same_bits_without_limits(batch):
    (logits, _, index), _ = batch
    params = sampling.make_sampling(ROWS, seeds=range(ROWS))
    out = SAMPLE(logits, params, index)
    assert_same_bits(out.logprob_processed, out.logprob_raw)
    assert_same_bits(LOGPROB(logits, out.token), out.logprob_raw)
    assert (np.asarray(out.kept_mass) == 1).all()


def test_processed_and_kept_mass_are_those_of_finished_arrays(batch):
    """Step by step through memory, where the compiler cannot merge a step into the next."""
    (logits, params, _), out = rows(batch, slice(13))
    one = np.float32(1)
    z = logits * (one / np.where(params.temperature > 0, params.temperature, one))[:, None]
    kept = np.where(np.isfinite(TRANSFORM(logits, params)), z, np.float32(-np.inf))
    norm, whole = np.asarray(LOGSUMEXP(kept)), np.asarray(LOGSUMEXP(z))
    assert_same_bits(out.logprob_processed, z[np.arange(13), out.token] - norm)
    mass = np.minimum(jnp.exp((norm - whole)[:, None])[:, 0], one)
    assert_same_bits(out.kept_mass, np.where(params.temperature > 0, mass, one))


def test_gradient_of_logprob_is_one_hot_minus_softmax():
    logits = np.array([[0.5, -1.0, 2.0, -np.inf, 0.0]], np.float32)
    token = np.array([2], np.int32)
    gradient = jax.grad(lambda x: sampling.logprob(x, token)[0])(logits)
    softmax = np.exp(logits) / np.exp(logits).sum()
    np.testing.assert_allclose(gradient, np.eye(5)[token] - softmax, rtol=1e-6, atol=1e-7)


def test_logprob_takes_bfloat16():
    logits = jnp.asarray([[0.5, -1.0, 2.0]], jnp.bfloat16)
    token = np.array([0], np.int32)
    assert_same_bits(LOGPROB(logits, token), LOGPROB(logits.astype(jnp.float32), token))


def masked_batch(rows_of_logits):
    logits = np.full((4, VOCABULARY), -9.0, np.float32)
    for row, values in enumerate(rows_of_logits):
        for token, value in values.items():
            logits[row, token] = value
    mask = np.ones((4, VOCABULARY), bool)
    mask[3, 130] = False
    return logits, mask


def test_greedy_is_the_first_largest_whatever_the_seed():
    logits, mask = masked_batch(
        [{7: 3.5, 201: 3.5}, {0: -0.0, 1: 0.0}, {299: -8.9999}, {130: 9.0, 140: 8.0}]
    )
    index = np.arange(4, dtype=np.int32)
    for seed in (0, 2**63):
        seeds = range(seed, seed + 4)
        params = sampling.make_sampling(4, temperature=0, top_p=0.1, top_k=9, seeds=seeds)
        out = SAMPLE(logits, params, index, mask)
        np.testing.assert_array_equal(out.token, [7, 0, 299, 140])
        np.testing.assert_array_equal(out.logprob_processed, np.zeros(4))
        np.testing.assert_array_equal(out.kept_mass, np.ones(4))
        assert_same_bits(out.logprob_raw, LOGPROB(logits, out.token))


def test_kept_mass_counts_what_the_mask_removed():
    logits, mask = masked_batch([{}, {}, {}, {130: 5.0}])
    params = sampling.make_sampling(4, temperature=2.0, seeds=range(4))
    out = SAMPLE(logits, params, np.arange(4, dtype=np.int32), mask)
    share = np.exp(logits[3].astype(np.float64) / 2)
    kept = share[mask[3]].sum() / share.sum()
    np.testing.assert_allclose(out.kept_mass, [1, 1, 1, kept], rtol=2e-6)
    assert out.token[3] != 130


def test_first_largest_is_argmax():
    rng = np.random.default_rng(2)
    x = rng.choice(np.array([-np.inf, -1.0, -0.0, 0.0], np.float32), (200, VOCABULARY))
    x[::3] = np.where(rng.random((67, VOCABULARY)) < 0.99, -np.inf, x[::3])
    np.testing.assert_array_equal(FIRST_LARGEST(x), np.argmax(x, axis=-1))


# -- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("params", "error", "words"),
    [
        ({"temperature": float("nan")}, ValueError, "temperature must be finite"),
        ({"temperature": float("inf")}, ValueError, "temperature must be finite"),
        ({"temperature": 1e300}, ValueError, "temperature must be finite"),
        ({"temperature": [1.0, -0.5]}, ValueError, "in row 1"),
        ({"temperature": True}, TypeError, "temperature must be numbers"),
        ({"temperature": [1.0, 1.0, 1.0]}, ValueError, r"shape \(2,\), got shape \(3,\)"),
        ({"top_p": 0.0}, ValueError, r"top_p must be in \(0, 1\]"),
        ({"top_p": 1.01}, ValueError, "top_p"),
        ({"top_k": 0}, ValueError, "top_k must be -1"),
        ({"top_k": -2}, ValueError, "top_k"),
        ({"top_k": 2**31}, ValueError, "top_k"),
        ({"top_k": 4.0}, TypeError, "top_k must be integers"),
        ({"min_p": -0.1}, ValueError, "min_p"),
        ({"min_p": 1.5}, ValueError, "min_p"),
        ({"seeds": [1]}, ValueError, "expected 2, got 1"),
        ({"seeds": [1, 2**64]}, ValueError, r"seeds\[1\] must be in"),
        ({"seeds": [-1, 0]}, ValueError, r"seeds\[0\]"),
        ({"seeds": [0, True]}, TypeError, r"seeds\[1\] must be an integer"),
        ({"seeds": [0, 1.0]}, TypeError, r"seeds\[1\] must be an integer"),
    ],
)
def test_bad_parameters_are_named(params, error, words):
    with pytest.raises(error, match=words):
        sampling.make_sampling(2, **{"seeds": [3, 4], **params})


def test_shape_errors_are_named():
    with pytest.raises(ValueError, match=r"N=3 or N\+1=4"):
        sampling.accepted(np.zeros((2, 5), np.int32), np.zeros((2, 3), np.int32), 1)
    with pytest.raises(ValueError, match="V must be below 262144"):
        jax.eval_shape(numerics.logsumexp, jax.ShapeDtypeStruct((1, 2**18), jnp.float32))
    with pytest.raises(ValueError, match="2\\*\\*24 token ids"):
        jax.eval_shape(
            sampling.choose,
            jax.ShapeDtypeStruct((1, 2**24 + 1), jnp.float32),
            jax.ShapeDtypeStruct((1, 2), jnp.uint32),
            jax.ShapeDtypeStruct((1,), jnp.int32),
        )
