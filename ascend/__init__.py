"""The model on Ascend NPUs: the same pure functions, run by torch (docs/ascend_executor.md).

`generate` and `placed` need torch, on an NPU with torch_npu, and import it when they are asked for;
the package itself imports without. CANN and torch_npu are installed by hand, never through an extra
of this project, because an environment with torch_npu but without CANN cannot import torch.

``deepinfer_jax`` does not import this package, except for its command line.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ascend.serving import TorchSite, generate, placed

__all__ = ["TorchSite", "generate", "placed"]


def __getattr__(name: str) -> Any:
    """`serving.NAME`; KernelRefusedError where torch is missing."""
    if name not in __all__:
        raise AttributeError(f"module 'ascend' has no attribute {name!r}")
    return getattr(importlib.import_module("ascend.serving"), name)
