"""On-policy reinforcement learning: sample with the engine, learn on the very same numbers.

`rollout` samples a batch of replies on the device, `policy_gradient` differentiates the log-probs
that the sampler saw: both call the same forward, so the two agree in every bit.
"""

from deepinfer_jax.rl.policy import Agreement, policy_gradient
from deepinfer_jax.rl.rollout import Rollout, rollout

__all__ = ["Agreement", "Rollout", "policy_gradient", "rollout"]
