"""Lines as `deepinfer-jax generate` writes them, without a model."""

from __future__ import annotations

from typing import Any


def line(name: str, prompt: Any, text: str, **changes: Any) -> dict[str, Any]:
    """The line of a reply of three tokens."""
    options = {"max_tokens": 9, "temperature": 1.0, "thinking": False, **changes.pop("options", {})}
    return {
        "id": name,
        "index": 0,
        "model": "m",
        "prompt": prompt,
        "options": options,
        "text": text,
        "finish_reason": "stop",
        "prompt_tokens": 4,
        "tokens": [5, 6, 1],
        "logprobs": [-1.0, -1.0, -1.0],
        "logprobs_processed": [-1.0, -1.0, -1.0],
        "kept_mass": [1.0, 1.0, 1.0],
        "seed": 0,
        "numerics": "ab",
        "timing": {},
        **changes,
    }
