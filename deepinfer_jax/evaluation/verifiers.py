"""Verifiers by name: pure functions from the text of a reply to a verdict.

Whatever the text, a verifier returns a verdict, in time linear in the text's length; nothing in a
reply is ever executed.
"""

from __future__ import annotations

import dataclasses
import reprlib
from collections.abc import Callable, Mapping
from typing import Any

from deepinfer_jax.evaluation.lists import SortedList
from deepinfer_jax.evaluation.numbers import Number
from deepinfer_jax.evaluation.texts import Choice, Exact
from deepinfer_jax.evaluation.values import Json, JsonSchema
from deepinfer_jax.evaluation.verdicts import Verdict

Verifier = Callable[[str], Verdict]
VERIFIERS: Mapping[str, type] = {
    "exact": Exact,
    "number": Number,
    "sorted": SortedList,
    "json": Json,
    "json-schema": JsonSchema,
    "choice": Choice,
}


def make(name: Any, answer: Any, settings: Mapping[str, Any]) -> Verifier:
    """The verifier called `name` for this answer.

    Raises ValueError for an unknown name or setting, or an answer that the verifier cannot have.
    """
    if not isinstance(name, str) or name not in VERIFIERS:
        raise ValueError(
            f"verifier must be one of {', '.join(VERIFIERS)}, got {reprlib.repr(name)}"
        )
    fields = [field.name for field in dataclasses.fields(VERIFIERS[name])][1:]
    for key in settings:
        if key not in fields:
            known = f"known are {', '.join(fields)}" if fields else "it has none"
            raise ValueError(f"verifier {name} has no setting {reprlib.repr(key)}; {known}")
    return VERIFIERS[name](answer, **settings)
