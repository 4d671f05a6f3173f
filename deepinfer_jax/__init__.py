"""Deterministic, pure-functional JAX inference for the DeepSeek-V4.1 model family.

The names below are imported when they are first used, so that importing the package costs little
and touches no device. Everything else is a module away: `from deepinfer_jax import sampling`, or
`deepinfer_jax.sampling`, which imports it as well.
"""

import importlib
import importlib.util
import pkgutil
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deepinfer_jax.cache import Cache, init_cache
    from deepinfer_jax.checkpoint import load_params, save_params
    from deepinfer_jax.config import ModelConfig
    from deepinfer_jax.generation import generate, stream
    from deepinfer_jax.grammar import Grammar
    from deepinfer_jax.llm import LLM, CompletionOutput, RequestOutput, SamplingParams
    from deepinfer_jax.loading import Model, load
    from deepinfer_jax.model.capture import Capture, Captured
    from deepinfer_jax.model.forward import forward, trace
    from deepinfer_jax.numerics import Numerics
    from deepinfer_jax.params import init as init_params
    from deepinfer_jax.prompts import request_seed
    from deepinfer_jax.requests import Result
    from deepinfer_jax.rounds import Round, Running, decode, decode_many, speculate, verify
    from deepinfer_jax.rows import Rows, batch_rows, text_rows
    from deepinfer_jax.sampling import Sampled, Sampling, make_sampling
    from deepinfer_jax.scoring import score_sequences
    from deepinfer_jax.steps import prefill, score
    from deepinfer_jax.tables import Tables, make_tables
    from deepinfer_jax.text import Tokenizer, load_tokenizer

__version__ = "0.1.0"

# Public name -> where it lives: a module, or "module:name" where it has another name there.
_HOMES = {
    "Cache": "cache",
    "Capture": "model.capture",
    "Captured": "model.capture",
    "CompletionOutput": "llm",
    "Grammar": "grammar",
    "LLM": "llm",
    "Model": "loading",
    "ModelConfig": "config",
    "Numerics": "numerics",
    "RequestOutput": "llm",
    "Result": "requests",
    "Rows": "rows",
    "Round": "rounds",
    "Running": "rounds",
    "Sampled": "sampling",
    "Sampling": "sampling",
    "SamplingParams": "llm",
    "Tables": "tables",
    "Tokenizer": "text",
    "batch_rows": "rows",
    "decode": "rounds",
    "decode_many": "rounds",
    "forward": "model.forward",
    "generate": "generation",
    "init_cache": "cache",
    "init_params": "params:init",
    "load": "loading",
    "load_params": "checkpoint",
    "load_tokenizer": "text",
    "make_sampling": "sampling",
    "make_tables": "tables",
    "prefill": "steps",
    "request_seed": "prompts",
    "save_params": "checkpoint",
    "score": "steps",
    "score_sequences": "scoring",
    "speculate": "rounds",
    "stream": "generation",
    "text_rows": "rows",
    "trace": "model.forward",
    "verify": "rounds",
}

__all__ = [
    "LLM",
    "Cache",
    "Capture",
    "Captured",
    "CompletionOutput",
    "Grammar",
    "Model",
    "ModelConfig",
    "Numerics",
    "RequestOutput",
    "Result",
    "Round",
    "Rows",
    "Running",
    "Sampled",
    "Sampling",
    "SamplingParams",
    "Tables",
    "Tokenizer",
    "__version__",
    "batch_rows",
    "decode",
    "decode_many",
    "forward",
    "generate",
    "init_cache",
    "init_params",
    "load",
    "load_params",
    "load_tokenizer",
    "make_sampling",
    "make_tables",
    "prefill",
    "request_seed",
    "save_params",
    "score",
    "score_sequences",
    "speculate",
    "stream",
    "text_rows",
    "trace",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        # A module of the package: importing it makes it an attribute here.
        if not name.startswith("_") and importlib.util.find_spec(f"{__name__}.{name}"):
            return importlib.import_module(f"{__name__}.{name}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, inner = _HOMES[name].partition(":")
    value = getattr(importlib.import_module(f"{__name__}.{module}"), inner or name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    modules = {found.name for found in pkgutil.iter_modules(__path__)} - {"__main__"}
    return sorted({*__all__, *globals(), *modules})
