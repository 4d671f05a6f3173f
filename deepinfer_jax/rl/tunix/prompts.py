"""Prompts as tunix gives them: text to tokens, arrays padded as trainers want them, seeds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from deepinfer_jax import rl
from deepinfer_jax.rl.tunix.asked import Asked


def ids_of(texts: Sequence[str], tokenizer: Any, asked: Asked) -> list[list[int]]:
    """The tokens of each prompt, which begin with the model's first token.

    Raises ValueError for a prompt that is too long, or holds the pad token.
    """
    first, pad = int(tokenizer.bos_id()), int(tokenizer.pad_id())
    found = []
    for number, text in enumerate(texts):
        ids = [int(token) for token in tokenizer.encode(str(text))]
        ids = ids if ids[:1] == [first] else [first, *ids]
        if len(ids) > asked.width:
            raise ValueError(
                f"prompts[{number}] has {len(ids)} tokens, more than max_prompt_length="
                f"{asked.width}: cut it or raise the limit"
            )
        if pad in ids:
            raise ValueError(
                f"prompts[{number}] holds the pad token {pad}, which the trainer would mask: take "
                "it out"
            )
        found.append(ids)
    return found


class Noise:
    """Seeds of prompts that are asked again and again.

    A seed is a function of the prompt's text, of how often it has come, and of the weights' number:
    neither other prompts nor the size of a call enter, and no two calls share noise. Where the
    config has a seed, counting begins anew in every call, so that the call can be repeated.
    """

    def __init__(self, seed: int) -> None:
        self._seed, self._weights = seed, 0
        self._come: Counter[str] = Counter()

    def renew(self) -> None:
        """There are new weights."""
        self._weights += 1
        self._come = Counter()

    def seeds(self, texts: Sequence[str], given: int | None) -> list[int]:
        """One for each of `texts`, in order; `given`: the seed of the config."""
        come = self._come if given is None else Counter()
        base, number = (self._seed, self._weights) if given is None else (given, 0)
        made = []
        for text in map(str, texts):
            made.append(rl.member_seed(base, f"{number}:{text}", come[text]))
            come[text] += 1
        return made
