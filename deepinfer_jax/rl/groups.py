"""Groups of replies to one prompt: a seed for each member, arrays for `rollout`, advantages."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from deepinfer_jax import sampling as samplers
from deepinfer_jax import summaries
from deepinfer_jax.prompts import request_seed
from deepinfer_jax.sampling import Sampling

_LEAST_SPREAD = 1e-6  # added to a group's standard deviation before dividing


def member_seed(seed: int, prompt: str | int, member: int) -> int:
    """The noise seed of reply `member` to the prompt called `prompt` in a run with `seed`.

    A function of these three names: neither the batch nor the place in it is an input. It is the
    seed of the request `prompt#member` in `generate` and in an evaluation.
    """
    return request_seed(seed, f"{prompt}#{member}")


@dataclasses.dataclass(frozen=True)
class Groups:
    """Arguments of `rollout`: tokens [B, P] int32, right-padded, lengths [B] int32, sampling of B.

    B = prompts * members, the members of a prompt side by side. Arrays of NumPy.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    sampling: Sampling
    members: int

    __repr__ = summaries.of_fields


def make_groups(
    prompts: Sequence[Sequence[int]], members: int, *, seed: int,
    names: Sequence[str | int] | None = None, width: int | None = None, temperature: float = 1.0,
    top_p: float = 1.0, top_k: int = -1, min_p: float = 0.0,
) -> Groups:  # fmt: skip
    """Every prompt (token ids) `members` times, each with a seed of its own (`member_seed`).

    names: what the prompts are called, default their index; two of one name are refused, since
    their replies would share noise. A training loop puts the step into `seed` or the names.
    width: P, default the longest prompt; a fixed one lets every step run one program.

    Raises ValueError for what does not fit; the rest as `make_sampling`.
    """
    names = list(range(len(prompts)) if names is None else names)
    _check(prompts, members, names)
    longest = max(len(tokens) for tokens in prompts)
    width = longest if width is None else width
    if longest > width:
        number = next(i for i, tokens in enumerate(prompts) if len(tokens) > width)
        raise ValueError(
            f"prompts[{number}] has {len(prompts[number])} tokens, more than width={width}: cut it "
            "or raise width"
        )
    tokens = padded(prompts, width)
    lengths = np.array([len(ids) for ids in prompts], np.int32)
    seeds = [member_seed(seed, name, member) for name in names for member in range(members)]
    sampling = samplers.make_sampling(
        len(seeds), temperature, top_p, top_k, min_p, seeds=seeds
    )  # fmt: skip
    return Groups(tokens.repeat(members, axis=0), lengths.repeat(members), sampling, members)


def padded(
    sequences: Sequence[Sequence[int] | np.ndarray], width: int, pad: int = 0, *, left: bool = False
) -> np.ndarray:
    """The sequences as [B, width] int32, filled up with `pad` behind them, or before them."""
    made = np.full((len(sequences), width), pad, np.int32)
    for row, ids in zip(made, sequences, strict=True):
        start = width - len(ids) if left else 0
        row[start : start + len(ids)] = ids
    return made


def _check(prompts: Sequence[Sequence[int]], members: int, names: Sequence[str | int]) -> None:
    if members < 1:
        raise ValueError(f"members (replies to a prompt) must be at least 1, got {members}")
    if len(names) != len(prompts):
        raise ValueError(f"names must be one for each of {len(prompts)} prompts, got {len(names)}")
    if len({str(name) for name in names}) != len(names):
        raise ValueError("names must differ: prompts of one name would share their noise")
    empty = [number for number, tokens in enumerate(prompts) if not len(tokens)]
    if empty or not prompts:
        what = f"prompts[{empty[0]}] is empty" if empty else "there are no prompts"
        raise ValueError(f"{what}: give at least one token id")


def group_advantages(rewards: np.ndarray, members: int, *, scaled: bool = True) -> np.ndarray:
    """[B] float32: each reward less its group's mean, over the group's deviation if `scaled`.

    rewards: [B], the members of a group side by side, finite. Sums are exact (`math.fsum`), so that
    the order of members does not enter; a group of equal rewards has advantages of zero.

    Raises ValueError where `members` does not divide B, or a reward is not finite.
    """
    rewards = np.asarray(rewards, np.float64)
    if rewards.ndim != 1 or members < 1 or rewards.size % members:
        raise ValueError(
            f"rewards must be [B] with B a multiple of members={members}, got {rewards.shape}"
        )
    if not np.isfinite(rewards).all():
        row = int(np.argmin(np.isfinite(rewards)))
        raise ValueError(f"rewards[{row}] must be finite, got {rewards[row]}")
    return np.concatenate(
        [_of_group(group, scaled) for group in rewards.reshape(-1, members).tolist()]
    ).astype(np.float32)


def _of_group(rewards: list[float], scaled: bool) -> np.ndarray:
    if min(rewards) == max(rewards):
        return np.zeros(len(rewards))
    middle = math.fsum(rewards) / len(rewards)
    apart = np.array([reward - middle for reward in rewards])
    if not scaled:
        return apart
    spread = math.sqrt(math.fsum((apart * apart).tolist()) / len(rewards))
    return apart / (spread + _LEAST_SPREAD)
