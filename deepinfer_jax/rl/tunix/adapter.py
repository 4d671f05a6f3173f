"""`TunixRollout`: this engine behind tunix's `BaseRollout`."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from deepinfer_jax import rl
from deepinfer_jax import sampling as samplers
from deepinfer_jax.rl.groups import padded
from deepinfer_jax.rl.tunix import prompts as layout
from deepinfer_jax.rl.tunix import weights
from deepinfer_jax.rl.tunix.asked import Asked, read_config

_base: Any = importlib.import_module("tunix.rl.rollout.base_rollout")
_common: Any = importlib.import_module("tunix.rl.common")
_module: Any = importlib.import_module("deepinfer_jax.rl.tunix.module")

rollout_program = jax.jit(rl.rollout, static_argnames=("cfg", "numerics", "new", "size"))


class TunixRollout(_base.BaseRollout):
    """Pass the class, or a `functools.partial` of it, as `ClusterConfig(rollout_engine=...)`.

    The actor must be a `Policy`: then sampler and trainer run one `forward`. Log-probs, in
    `RolloutOutput` and from `get_per_token_logps`, are made by tunix's own function of this
    forward's logits, with the temperature of the rollouts. Noise: `prompts.Noise`.
    """

    def __init__(
        self, rollout_actor: Any, tokenizer: Any, mesh: Any = None, rollout_config: Any = None, *,
        seed: int = 0, drafts: int = 0,
    ) -> None:  # fmt: skip
        """seed: of the noise where a `RolloutConfig` has none; drafts: of a round, for speed only.

        Raises TypeError for an actor that is no `Policy`, ValueError for a mesh of several devices
        or a config that cannot be honoured.
        """
        if not isinstance(rollout_actor, _module.Policy):
            raise TypeError(
                "the actor must be a deepinfer_jax.rl.tunix.Policy, which shares the sampler's "
                f"forward, got {type(rollout_actor).__name__}"
            )
        if mesh is not None and mesh.size != 1:
            raise ValueError(
                f"the rollout mesh has {mesh.size} devices, this adapter runs on one: give "
                "Role.ROLLOUT and Role.ACTOR a mesh of one device"
            )
        self._tokenizer, self._noise, self._drafts = tokenizer, layout.Noise(seed), drafts
        self._cfg, self._numerics = rollout_actor.cfg, rollout_actor.numerics
        self._graph, self._weights, self._constants = _module.parts(rollout_actor)
        self._tables = rollout_actor.tables()
        self._asked = None if rollout_config is None else read_config(rollout_config, self.eos_id())

    def generate(self, prompts: Sequence[str], rollout_config: Any, **unknown: Any) -> Any:
        """A reply to each prompt; prompts that come several times are the members of a group.

        Raises ValueError for a prompt that is too long or holds the pad token, and for what the
        config asks for and does not get.
        """
        if unknown:
            raise ValueError(f"generate takes no {', '.join(unknown)}: leave it out")
        asked = read_config(rollout_config, self.eos_id())
        prompted = layout.ids_of(prompts, self._tokenizer, asked)
        lengths = np.array([len(ids) for ids in prompted], np.int32)
        seeds = self._noise.seeds(prompts, asked.seed)
        sampling = samplers.make_sampling(
            len(seeds), asked.temperature, asked.top_p, asked.top_k, seeds=seeds
        )
        # A trainer masks pad tokens wherever they stand: a reply that says one ends there.
        stops = np.array([*asked.stops, self.pad_id()], np.int32)
        params = weights.as_tree(weights.from_state(self._weights, self._cfg), self._cfg)
        made = rollout_program(
            params, self._tables, padded(prompted, asked.width), lengths, sampling, stops,
            self._cfg, self._numerics, new=asked.new, size=self._drafts,
        )  # fmt: skip
        whole, ends = np.asarray(made.tokens), np.asarray(made.lengths)
        replies = [
            whole[row, first:end]
            for row, (first, end) in enumerate(zip(lengths, ends, strict=True))
        ]
        left = padded(prompted, asked.width, self.pad_id(), left=True)
        return _base.RolloutOutput(
            text=[self._text(reply, stops) for reply in replies],
            logits=None,
            tokens=replies,
            left_padded_prompt_tokens=left,
            logprobs=self._logprobs(left, replies, asked) if asked.logprobs else None,
        )

    def get_per_token_logps(self, prompt_tokens: Any, completion_tokens: Any) -> jax.Array:
        """tunix's own log-probs [B, T] of completions after left-padded prompts."""
        temperature = 1.0 if self._asked is None else self._asked.temperature
        return self._scored(prompt_tokens, completion_tokens, temperature)

    def update_params(self, params: Any, filter_types: Any = None) -> None:
        """New weights: an `nnx.State` of all parameters of a `Policy`, taken without a copy.

        Raises ValueError for weights that are missing, unknown or of another shape, by name.
        """
        weights.from_state(params, self._cfg)
        self._weights = params
        self._noise.renew()

    def pad_id(self) -> int:
        """The pad token."""
        return int(self._tokenizer.pad_id())

    def eos_id(self) -> int:
        """The end token."""
        return int(self._tokenizer.eos_id())

    def model(self) -> None:
        """None: a module here would be taken for the trainer's own, and never be updated."""

    def _text(self, reply: np.ndarray, stops: np.ndarray) -> str:
        """The text of a reply without the token that ended it."""
        ids = reply[:-1] if reply[-1] in stops else reply
        return self._tokenizer.decode(ids.tolist())

    def _logprobs(
        self, left: np.ndarray, replies: list[np.ndarray], asked: Asked
    ) -> list[np.ndarray]:
        """What the trainer will say of each reply's tokens."""
        right = padded(replies, asked.new, self.pad_id())
        scored = np.asarray(self._scored(left, right, asked.temperature))
        return [row[: len(reply)] for row, reply in zip(scored, replies, strict=True)]

    def _scored(self, prompts: Any, completions: Any, temperature: float) -> jax.Array:
        """tunix's function of our logits: the trainer's formula, operation by operation."""
        state = _module.whole(self._weights, self._constants)
        return _common.compute_per_token_logps(
            self._graph, state, prompt_tokens=jax.numpy.asarray(prompts),
            completion_tokens=jax.numpy.asarray(completions), pad_id=self.pad_id(),
            eos_id=self.eos_id(), stop_gradient=True, return_logits=False, temperature=temperature,
        )  # fmt: skip
