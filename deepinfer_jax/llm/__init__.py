"""`LLM` and `SamplingParams`: the surface known from vLLM and the published engine.

A thin layer over `generation`: names and forms of there, requests and bits of here (docs/llm.md).
"""

from deepinfer_jax.llm.llm import LLM
from deepinfer_jax.llm.outputs import CompletionOutput, RequestOutput
from deepinfer_jax.llm.parameters import SamplingParams, sample_seed

__all__ = ["LLM", "CompletionOutput", "RequestOutput", "SamplingParams", "sample_seed"]
