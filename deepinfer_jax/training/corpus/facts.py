"""Greetings and a handful of facts: what a newcomer types first."""

import functools

from deepinfer_jax.training.corpus import words
from deepinfer_jax.training.corpus.draw import Draw
from deepinfer_jax.training.corpus.example import Example, Task, effort_of, says_exactly, user

_ABOUT = "I am spark-tiny, a very small language model."
_CAN = (
    "I can tell short stories, add and subtract, sort, copy text, write JSON and small Python "
    "functions."
)
_TALK = {
    "Hello!": "Hello! How can I help you?",
    "Hello": "Hello! How can I help you?",
    "Hi": "Hello! How can I help you?",
    "Hi!": "Hello! How can I help you?",
    "Good morning!": "Good morning! How can I help you?",
    "How are you?": "I am fine, thank you. How can I help you?",
    "Who are you?": _ABOUT,
    "What are you?": _ABOUT,
    "What is your name?": "My name is spark-tiny.",
    "What can you do?": _CAN,
    "Help": _CAN,
    "Thank you!": "You are welcome!",
    "Thanks": "You are welcome!",
    "Goodbye!": "Goodbye!",
    "Bye": "Goodbye!",
}
_OPPOSITES = (
    ("hot", "cold"), ("big", "small"), ("up", "down"), ("day", "night"), ("happy", "sad"),
    ("fast", "slow"), ("old", "new"), ("open", "closed"), ("light", "dark"), ("hard", "soft"),
    ("tall", "short"), ("full", "empty"), ("wet", "dry"), ("loud", "quiet"), ("early", "late"),
)  # fmt: skip
_SOUNDS = (
    ("cat", "meow"), ("dog", "woof"), ("cow", "moo"), ("duck", "quack"), ("sheep", "baa"),
    ("pig", "oink"), ("owl", "hoot"), ("lion", "roar"), ("bee", "buzz"), ("mouse", "squeak"),
)  # fmt: skip


def _qa() -> tuple[tuple[str, str], ...]:
    """Every question with its answer."""
    pairs = list(_TALK.items())
    for left, right in _OPPOSITES:
        pairs += [(f"What is the opposite of {x}?", f"{y.capitalize()}.")
                  for x, y in ((left, right), (right, left))]  # fmt: skip
    pairs += [(f"What does {words.a(x)} say?", f"{y.capitalize()}!") for x, y in _SOUNDS]
    for names, what in ((words.DAYS, "day"), (words.MONTHS, "month")):
        for before, after in zip(names, names[1:] + names[:1], strict=True):
            pairs.append((f"Which {what} comes after {before}?", f"{after}."))
            pairs.append((f"Which {what} comes before {after}?", f"{before}."))
    pairs.append(("How many days are in a week?", "7."))
    pairs.append(("How many months are in a year?", "12."))
    return tuple(pairs)


_PAIRS = _qa()


def _draw_fact(draw: Draw) -> tuple:
    return (draw.below(len(_TALK) if draw.chance(0.4) else len(_PAIRS)),)


def _build_fact(draw: Draw, combination: tuple) -> Example:
    question, answer = _PAIRS[combination[0]]
    talk = combination[0] < len(_TALK)
    effort = effort_of(draw)
    return Example(
        task="fact",
        prompt_messages=user(question),
        answer=answer,
        check=functools.partial(says_exactly, answer),
        reasoning=("A short reply." if talk else "I know this.") if draw.chance(0.3) else None,
        effort=effort,
    )


FACT = Task("fact", 4, _draw_fact, _build_fact, memorised=True)
