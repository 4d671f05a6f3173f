"""tunix (package `google-tunix`) with this engine: its trainer, our rollouts, one `forward`.

- `Policy`: the model as a `flax.nnx` module, for the trainer.
- `TunixRollout`: what `ClusterConfig(rollout_engine=...)` takes.
- `ChatTokenizer`: our tokenizer under the names that tunix calls.

The first two need the extra `tunix`, which is imported when they are first used. How to use them:
docs/rl.md "tunix".
"""

import importlib
from typing import TYPE_CHECKING, Any

from deepinfer_jax.rl.tunix.asked import Asked, read_config
from deepinfer_jax.rl.tunix.tokenizer import ChatTokenizer

if TYPE_CHECKING:
    from deepinfer_jax.rl.tunix.adapter import TunixRollout
    from deepinfer_jax.rl.tunix.module import Policy

__all__ = ["Asked", "ChatTokenizer", "Policy", "TunixRollout", "read_config"]

_HOMES = {"Policy": "module", "TunixRollout": "adapter"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = importlib.import_module(f"{__name__}.{_HOMES[name]}")
    except ModuleNotFoundError as error:
        raise ImportError(
            f"{name} needs the extra 'tunix': pip install 'deepinfer-jax[tunix]'"
        ) from error
    return getattr(module, name)
