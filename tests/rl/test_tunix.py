"""The adapter for tunix, against the recorded surface of the package: every trap is a test.

The engine and tunix's formula are put in place of by functions that say what they were called with;
`test_tunix_package.py` has the real ones.
"""

from __future__ import annotations

import functools
import importlib
import sys
import types
from typing import Any

import jax
import numpy as np
import pytest

from deepinfer_jax import rl
from deepinfer_jax.rl.tunix import ChatTokenizer, prompts, read_config, weights
from deepinfer_jax.sampling import seed_words
from tests import tiny_model
from tests.rl import tunix_surface
from tests.training import small_training

CFG = small_training.CONFIG
EOS, PAD, WIDTH, NEW = 1, 2, 12, 5
ADAPTER = "deepinfer_jax.rl.tunix.adapter"
MODULE = "deepinfer_jax.rl.tunix.module"


class Policy:
    """Stands for the module of Flax."""

    cfg, numerics = CFG, "numerics"

    def tables(self) -> str:
        return "tables"


class Words:
    """A tokenizer of single letters: "c" is token 2, the pad token; ids begin with none."""

    def encode(self, text: str) -> list[int]:
        return [ord(letter) - ord("a") for letter in text]

    def decode(self, ids: list[int]) -> str:
        return "".join(chr(token + ord("a")) for token in ids)

    def bos_id(self) -> int:
        return 0

    def eos_id(self) -> int:
        return EOS

    def pad_id(self) -> int:
        return PAD


@functools.cache
def leaves() -> dict[str, np.ndarray]:
    return {name: np.zeros(leaf.shape, leaf.dtype) for name, leaf in weights.expected(CFG).items()}


@pytest.fixture
def surface(monkeypatch) -> types.SimpleNamespace:
    """The adapter over the recorded surface; `calls` of the engine, `scored` by tunix's formula."""
    seen = types.SimpleNamespace(calls=[], scored=[], replies=[[9, 8, EOS], [7] * NEW])

    def log_probs(graph, state, prompt_tokens, completion_tokens, **others):
        seen.scored.append(
            (state, np.asarray(prompt_tokens), np.asarray(completion_tokens), others)
        )
        return -np.asarray(completion_tokens).astype(np.float32)

    def engine(params, tables, tokens, lengths, sampling, stops, cfg, numerics, *, new, size):
        seen.calls.append((tokens, lengths, sampling, stops, new, size))
        count, width = tokens.shape
        whole, ends = np.zeros((count, width + new), np.int32), lengths.copy()
        for row in range(count):
            reply = seen.replies[row % len(seen.replies)]
            whole[row, : lengths[row]] = tokens[row, : lengths[row]]
            whole[row, lengths[row] : lengths[row] + len(reply)] = reply
            ends[row] += len(reply)
        return types.SimpleNamespace(tokens=whole, lengths=ends)

    module: Any = types.ModuleType(MODULE)
    module.Policy = Policy
    module.parts = lambda policy: ("graph", leaves(), "rest")
    module.whole = lambda trained, rest: (trained, rest)
    for name, stand in (tunix_surface.stand_in(log_probs) | {MODULE: module}).items():
        monkeypatch.setitem(sys.modules, name, stand)
    monkeypatch.delitem(sys.modules, ADAPTER, raising=False)
    adapter = importlib.import_module(ADAPTER)
    monkeypatch.setattr(adapter, "rollout_program", engine)
    seen.adapter, seen.base = adapter, sys.modules["tunix.rl.rollout.base_rollout"]
    yield seen
    sys.modules.pop(ADAPTER, None)


def config(surface, **changes):
    given = {"max_prompt_length": WIDTH, "max_tokens_to_generate": NEW} | changes
    return surface.base.RolloutConfig(**given)


def made(surface, **changes):
    return surface.adapter.TunixRollout(
        rollout_actor=Policy(), tokenizer=Words(), mesh=None,
        rollout_config=config(surface, **changes),
    )  # fmt: skip


def test_the_cluster_can_be_given_the_class_or_a_partial_of_it(surface):
    """tunix looks at `.func` of a partial, and constructs with four keywords."""
    kind = surface.adapter.TunixRollout
    assert issubclass(functools.partial(kind, drafts=3).func, surface.base.BaseRollout)
    assert functools.partial(kind, drafts=3)(rollout_actor=Policy(), tokenizer=Words())
    with pytest.raises(TypeError, match=r"must be a deepinfer_jax.rl.tunix.Policy.* got object"):
        kind(rollout_actor=object(), tokenizer=Words())
    with pytest.raises(ValueError, match="mesh has 2 devices"):
        kind(rollout_actor=Policy(), tokenizer=Words(), mesh=types.SimpleNamespace(size=2))


def test_no_model_is_handed_out(surface):
    """A learner that is given the actor concludes that weights are shared, and never updates."""
    assert made(surface).model() is None


def test_arrays_are_padded_as_trainers_want_them(surface):
    """Prompts on the left, to the config's length; replies not at all, in one dimension."""
    out = made(surface).generate([np.str_("def"), np.str_("dea")], config(surface))
    left = np.full((2, WIDTH), PAD)
    left[:, -4:] = [[0, 3, 4, 5], [0, 3, 4, 0]]
    np.testing.assert_array_equal(out.left_padded_prompt_tokens, left)
    assert [reply.tolist() for reply in out.tokens] == surface.replies
    assert all(reply.dtype == np.int32 for reply in (*out.tokens, out.left_padded_prompt_tokens))
    assert out.text == ["ji", "hhhhh"]
    assert out.logits is None
    tokens, lengths, _, stops, new, size = surface.calls[0]
    np.testing.assert_array_equal(tokens[:, :5], [[0, 3, 4, 5, 0], [0, 3, 4, 0, 0]])
    assert (lengths.tolist(), stops.tolist(), new, size) == ([4, 4], [EOS, PAD], NEW, 0)


def test_a_reply_that_says_the_pad_token_ends_there(surface):
    """A trainer masks it wherever it stands, and would see other tokens than the sampler did."""
    surface.replies = [[9, PAD]]
    out = made(surface).generate(["d"], config(surface, eos_tokens=[4]))
    assert surface.calls[0][3].tolist() == [4, PAD]
    assert out.text == ["j"]


@pytest.mark.parametrize(
    ("text", "message"),
    [("d" * WIDTH, r"prompts\[1\] has 13 tokens, more than max_prompt_length=12"),
     ("dcd", r"prompts\[1\] holds the pad token 2")],
)  # fmt: skip
def test_prompts_that_a_trainer_would_see_otherwise_are_refused(surface, text, message):
    with pytest.raises(ValueError, match=message):
        made(surface).generate(["d", text], config(surface))
    assert not surface.calls


def test_log_probs_are_the_trainers_formula_with_the_temperature(surface):
    """Both roads: with the replies (newer tunix), and asked for (0.1.7, which names none)."""
    rollout = made(surface, temperature=0.7)
    given = config(surface, return_logprobs=True, temperature=0.5)
    out = rollout.generate(["de", "d"], given)
    assert [each.tolist() for each in out.logprobs] == [[-9, -8, -EOS], [-7] * NEW]
    assert rollout.generate(["de"], config(surface)).logprobs is None
    rollout.get_per_token_logps(out.left_padded_prompt_tokens, np.full((2, NEW), 6, np.int32))
    (_, left, right, first), (_, _, _, second) = surface.scored
    assert (first["temperature"], second["temperature"]) == (0.5, 0.7)
    assert (first["pad_id"], first["eos_id"], first["stop_gradient"]) == (PAD, EOS, True)
    np.testing.assert_array_equal(left, out.left_padded_prompt_tokens)
    np.testing.assert_array_equal(right, [[9, 8, EOS, PAD, PAD], [7] * NEW])


def test_members_of_a_group_have_seeds_of_their_own(surface):
    """And no call repeats another, unless the config has a seed."""
    rollout, seeds = made(surface), []
    for given in (config(surface), config(surface), config(surface, seed=5)):
        rollout.generate(["d", "d", "e"], given)
        rollout.generate(["d"], given)
    for _, _, sampling, *_ in surface.calls:
        seeds.append([tuple(row) for row in sampling.seed.tolist()])
    free = [seed for call in seeds[:4] for seed in call]
    assert len(set(free)) == len(free) == 8
    assert seeds[5] == seeds[4][:1]  # the call is repeated: so is its noise
    rollout.update_params(leaves())
    rollout.generate(["d"], config(surface))
    assert tuple(surface.calls[-1][2].seed[0].tolist()) not in free


def test_the_size_of_a_call_does_not_enter(surface):
    """A rollout in micro-batches has the noise of one call."""
    texts = ["d", "d", "e", "d", "e"]
    whole = prompts.Noise(3).seeds(texts, None)
    parts = prompts.Noise(3)
    assert parts.seeds(texts[:2], None) + parts.seeds(texts[2:], None) == whole
    assert whole[3] == rl.member_seed(3, "0:d", 2)
    assert seed_words(whole, 5).shape == (5, 2)


def test_weights_are_taken_as_they_are_and_unmatched_ones_are_named(surface):
    rollout = made(surface)
    fresh = {name: leaf.copy() for name, leaf in leaves().items()}
    rollout.update_params(fresh, filter_types=(object,))
    rollout.get_per_token_logps(np.zeros((1, 2), np.int32), np.zeros((1, 1), np.int32))
    assert surface.scored[0][0][0] is fresh
    wrong = dict(fresh)
    wrong["layers.attn.lora_a"] = wrong.pop("head")
    wrong["norm"] = np.zeros(3, np.float32)
    with pytest.raises(ValueError, match="does not fit") as error:
        rollout.update_params(wrong)
    for part in ("missing head", "unexpected layers.attn.lora_a", "norm is ((3,), 'float32')"):
        assert part in str(error.value)


def test_weights_become_our_tree_by_name():
    marked = {name: number for number, name in enumerate(weights.expected(CFG))}
    tree = weights.as_tree(marked, CFG)
    assert tree["layers"]["attn"]["wq_a"] == marked["layers.attn.wq_a"]
    assert jax.tree.leaves(tree) == list(range(len(marked)))


def test_what_would_change_results_is_refused_by_name(surface):
    """Sizes of other engines change nothing here; None stands for what it means."""
    asked = read_config(config(surface, top_p=None, top_k=None, kv_cache_size=7), EOS)
    assert (asked.top_p, asked.top_k, asked.stops, asked.seed) == (1.0, -1, (EOS,), None)
    assert asked.temperature == 0.9  # tunix's default
    keyed = read_config(config(surface, seed=jax.random.PRNGKey(6)), EOS)
    assert keyed.seed == rl.seed_of_key(np.array([0, 6], np.uint32))
    for name, value in (
        ("rollout_vllm_logprobs_mode", "raw_logprobs"),
        ("data_type", np.float16),
        ("rollout_sglang_jax_kwargs", {"a": 1}),
        ("rollout_vllm_lora_config", {}),
    ):
        with pytest.raises(ValueError, match=rf"RolloutConfig.{name}=.* is not honoured"):
            read_config(config(surface, **{name: value}), EOS)
    with pytest.raises(ValueError, match="generate takes no images"):
        made(surface).generate(["d"], config(surface), images=[])


def test_the_tokenizer_has_the_names_that_tunix_calls():
    own = tiny_model.tokenizer()
    tokenizer = ChatTokenizer(own)
    message = [{"role": "user", "content": "Sort <think> these"}]
    ids = own.render_chat(message, thinking=False)
    assert tokenizer.apply_chat_template(message, tokenize=True) == ids
    text = tokenizer.apply_chat_template(message)
    assert tokenizer.encode(tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}])) == (
        own.render_chat([{"role": "user", "content": "Hi"}], thinking=False)
    )
    assert text.endswith("</think>")
    assert (tokenizer.bos_id(), tokenizer.eos_id(), tokenizer.pad_id()) == (
        own.bos,
        own.eos,
        own.pad,
    )
    assert tokenizer.decode(np.array(ids, np.int64)) == text
    with pytest.raises(ValueError, match="add_generation_prompt must be True"):
        tokenizer.apply_chat_template(message, add_generation_prompt=False)


def test_without_the_package_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "tunix", None)
    monkeypatch.setitem(sys.modules, "flax", None)
    monkeypatch.setitem(sys.modules, "flax.nnx", None)
    monkeypatch.delitem(sys.modules, ADAPTER, raising=False)
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    from deepinfer_jax.rl import tunix

    for name in ("Policy", "TunixRollout"):
        with pytest.raises(ImportError, match="extra 'tunix'"):
            getattr(tunix, name)
