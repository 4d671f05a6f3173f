"""The training corpus of spark-tiny: seeded, synthetic, verifiable.

`examples(seed, split)` is an endless stream of chat documents of ten tasks; every one carries an
exact check of any answer. Splits differ by whole combinations (a hash of the operands, the pair of
hero and thing, the list to sort), so that a held-out question was never trained on.
"""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from deepinfer_jax.training.corpus import chat
from deepinfer_jax.training.corpus.arithmetic import ADDITION, SUBTRACTION
from deepinfer_jax.training.corpus.draw import Draw
from deepinfer_jax.training.corpus.example import Example, Task, is_held_out
from deepinfer_jax.training.corpus.extraction import EXTRACTION
from deepinfer_jax.training.corpus.facts import FACT
from deepinfer_jax.training.corpus.programs import PROGRAM
from deepinfer_jax.training.corpus.sequences import COPY, SORT
from deepinfer_jax.training.corpus.stories import STORY
from deepinfer_jax.training.corpus.tools import TOOL

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ["TASKS", "Example", "Split", "Task", "examples", "heldout", "render"]

Split = Literal["train", "heldout"]
TASKS = {
    task.name: task
    for task in (STORY, ADDITION, SUBTRACTION, SORT, COPY, EXTRACTION, PROGRAM, TOOL, FACT)
}
_SHORT_TASKS = ("addition", "copy", "fact")
_HELPFUL = {"role": "system", "content": "You are a helpful assistant."}


def examples(seed: int, split: Split = "train", tasks: tuple[str, ...] = ()) -> Iterator[Example]:
    """Endless examples of a split, tasks mixed by weight (all of them unless `tasks` names some).

    Equal arguments give equal examples. Raises ValueError for an unknown split or task.
    """
    if split not in ("train", "heldout"):
        raise ValueError(f"split must be 'train' or 'heldout', got {split!r}")
    for name in tasks:
        if name not in TASKS:
            raise ValueError(f"unknown task {name!r}; the tasks are {', '.join(TASKS)}")
    draw = Draw(seed)
    chosen = [TASKS[name] for name in tasks or TASKS]
    bounds = list(itertools.accumulate(task.weight for task in chosen))
    while True:
        point = draw.below(1 << 30) / (1 << 30) * bounds[-1]
        task = next(t for t, bound in zip(chosen, bounds, strict=True) if point < bound)
        yield _in_context(draw, _one(draw, task, split), split)


def heldout(task: str, n: int, seed: int = 0) -> list[Example]:
    """`n` held-out examples of one task, for evaluation and for rewards."""
    return list(itertools.islice(examples(seed, "heldout", (task,)), n))


def render(example: Example, tokenizer: "Tokenizer") -> tuple[list[int], list[int]]:
    """Token ids of the prompt and of the completion with its end token.

    `tokenizer` is the full one of the `tokenizers` package: every control spelling in the text is
    ours, so reading them as control tokens is right here (and would not be for user text).
    """
    prompt = tokenizer.encode(chat.prompt_text(example), add_special_tokens=False).ids
    answer = example.completion + chat.EOS
    return prompt, tokenizer.encode(answer, add_special_tokens=False).ids


def _one(draw: Draw, task: Task, split: Split) -> Example:
    """An example whose combination belongs to the split."""
    while True:
        combination = task.draw(draw)
        if task.memorised or is_held_out(task.name, combination) == (split == "heldout"):
            return task.build(draw, combination)


def _in_context(draw: Draw, example: Example, split: Split) -> Example:
    """The example as it is, or now and then after a system message or an earlier exchange."""
    if example.tools or example.schema is not None or not draw.chance(0.08):
        return example
    if draw.chance(0.4):
        return dataclasses.replace(example, prompt_messages=(_HELPFUL, *example.prompt_messages))
    earlier = _one(draw, TASKS[draw.pick(_SHORT_TASKS)], split)
    reply = {"role": "assistant", "content": earlier.answer}
    messages = (*earlier.prompt_messages, reply, *example.prompt_messages)
    return dataclasses.replace(example, prompt_messages=messages)
