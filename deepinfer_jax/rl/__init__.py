"""On-policy reinforcement learning: sample with the engine, learn on the very same numbers.

`rollout` samples a batch of replies on the device, `score` gives the log-probs of its tokens under
any weights, `policy_gradient` differentiates them: all call the same forward, so sampler and
trainer agree in every bit. `make_groups` makes the arguments of a rollout, with a seed for every
member of a group; `sample_tokens` is the batch engine for lists of tokens (docs/rl.md).
"""

from deepinfer_jax.rl.groups import Groups, group_advantages, make_groups, member_seed
from deepinfer_jax.rl.policy import Agreement, policy_gradient
from deepinfer_jax.rl.rollout import Rollout, rollout
from deepinfer_jax.rl.scores import Logprobs, score
from deepinfer_jax.rl.tokens import SampledTokens, sample_tokens, seed_of_key

__all__ = [
    "Agreement",
    "Groups",
    "Logprobs",
    "Rollout",
    "SampledTokens",
    "group_advantages",
    "make_groups",
    "member_seed",
    "policy_gradient",
    "rollout",
    "sample_tokens",
    "score",
    "seed_of_key",
]
