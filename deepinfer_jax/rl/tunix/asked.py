"""What a `RolloutConfig` asks for: fields that are honoured, and those that are refused by name."""

from __future__ import annotations

import dataclasses
from typing import Any

from deepinfer_jax.rl.tokens import seed_of_key

_READ = frozenset(
    "max_tokens_to_generate temperature top_p top_k seed max_prompt_length eos_tokens "
    "return_logprobs".split()
)
# Sizes and settings of engines that this one is not: they change no result here.
_WITHOUT_EFFECT = frozenset(
    "kv_cache_size tensor_parallel_size data_parallel_size expert_parallel_size "
    "rollout_vllm_server_mode rollout_vllm_hbm_utilization rollout_vllm_max_num_batched_tokens "
    "rollout_vllm_max_num_seqs rollout_vllm_reshard_chunk_size rollout_vllm_async_scheduling "
    "rollout_sglang_jax_mem_fraction_static rollout_sglang_jax_page_size "
    "rollout_sglang_jax_max_running_requests rollout_sglang_jax_log_level".split()
)


@dataclasses.dataclass(frozen=True)
class Asked:
    """The replies that a `RolloutConfig` asks for.

    new: most tokens of a reply. width: tokens that prompts are padded to. seed: None where none was
    given. stops: end tokens, the tokenizer's own where the config names none. logprobs: whether
    they are to be returned.
    """

    new: int
    width: int
    temperature: float
    top_p: float
    top_k: int
    seed: int | None
    stops: tuple[int, ...]
    logprobs: bool


def read_config(config: Any, eos: int) -> Asked:
    """What `config`, a `RolloutConfig` of any version of tunix, asks for.

    Raises ValueError for a field that would change results, is not honoured and is not at its
    default: its name, what it holds and what to do.
    """
    for field in dataclasses.fields(config):
        if field.name not in _READ | _WITHOUT_EFFECT:
            _check_default(field, getattr(config, field.name))
    stops = [eos] if config.eos_tokens is None else config.eos_tokens
    return Asked(
        new=int(config.max_tokens_to_generate),
        width=int(config.max_prompt_length),
        temperature=float(config.temperature),
        top_p=1.0 if config.top_p is None else float(config.top_p),
        top_k=-1 if config.top_k is None else int(config.top_k),
        seed=_seed(config.seed),
        stops=tuple(int(token) for token in stops),
        logprobs=bool(config.return_logprobs),
    )


def _check_default(field: dataclasses.Field, value: Any) -> None:
    default = field.default
    if field.default_factory is not dataclasses.MISSING:
        default = field.default_factory()
    if default is dataclasses.MISSING or value == default:
        return
    raise ValueError(
        f"RolloutConfig.{field.name}={value!r} is not honoured by this engine and would change "
        f"results: leave it at {default!r}"
    )


def _seed(given: Any) -> int | None:
    """The number that `given` stands for: None, an integer, or a JAX key."""
    if given is None:
        return None
    if getattr(given, "ndim", 0) == 0 and not hasattr(given, "dtype"):
        return int(given)
    if getattr(given, "shape", None) == () and getattr(given.dtype, "kind", "") in "iu":
        return int(given)
    return seed_of_key(given)
