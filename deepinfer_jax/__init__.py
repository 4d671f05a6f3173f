"""Deterministic, pure-functional JAX inference for the DeepSeek-V4.1 model family."""

__version__ = "0.1.0"
