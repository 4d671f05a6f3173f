"""Why a grammar cannot be used, or a reply cannot go on under it."""

from __future__ import annotations

import json
import re
from typing import Literal

Reason = Literal["invalid", "unsupported", "unsatisfiable", "limit", "timeout", "rejected"]


class GrammarError(ValueError):
    """One request's grammar failed. It is handed about as a value; raise it where that helps.

    Attributes:
      reason: "invalid" (a mistake in the grammar's text), "unsupported" (correct, but beyond the
        compiler), "unsatisfiable" (no text follows it), "limit" (a `GrammarLimits` was reached),
        "timeout" (not compiled in time), "rejected" (a token was emitted that its mask forbids).
    """

    def __init__(self, reason: Reason, message: str):
        super().__init__(message)
        self.reason: Reason = reason


# Sentences of the library's messages, what they mean, and what to do about it. First match wins.
_MEANINGS: tuple[tuple[str, Reason, str], ...] = (
    (
        r"Unimplemented keys",
        "unsupported",
        "leave out what is not and check it in the finished text instead; "
        "docs/structured-output.md lists what is supported",
    ),
    (r"Unsatisfiable", "unsatisfiable", "loosen the constraints that contradict each other"),
    (r"NoExtension", "unsatisfiable", "loosen it"),
    (
        r"oneOf constraints",
        "unsupported",
        "make its branches differ in a constant or a type, or use `anyOf`; with "
        '"x-guidance": {"coerce_one_of": true} a value may satisfy several of them',
    ),
    (
        r"only supported|not disjoint|Failed to generate regex|too many digits|unrecognized escape",
        "unsupported",
        "write it in another way, or leave it out and check it in the finished text instead",
    ),
    (
        r"look-?around",
        "unsupported",
        r"write the expression without look-ahead, look-behind, \b, ^ and $ inside",
    ),
    (r"Unknown format", "unsupported", "use a `pattern`, or leave `format` out"),
    (r"not present in a registry", "unsupported", "put the schema under $defs and refer to that"),
    (
        r"too many|too big|too large|Too many|fuel|max is|resource limit|compiled size",
        "limit",
        "make the grammar simpler, or raise the limit in GrammarSettings.limits (step_lexer_fuel, "
        "step_max_items, max_items_in_row, max_lexer_states, initial_lexer_fuel, max_grammar_size)",
    ),
    (
        r"unknown special token",
        "unsupported",
        "control tokens cannot be part of a grammar; wait for one with trigger_token_ids",
    ),
    (r"::=", "invalid", "write rules as Lark does, `start: ...`, not `root ::= ...`"),
    (r"", "invalid", "correct it"),
)
_NAMES = {"json": "JSON schema", "regex": "regular expression", "ebnf": "Lark grammar"}


def explain(kind: str, text: str) -> GrammarError:
    """The error that llguidance reported as `text` about a grammar of this kind."""
    said = text.split("<state>")[0].split("<non-verbose/>")[0].strip()
    if kind == "ebnf":
        said = re.sub(r"\n\s+\d+ \| %llguidance \{\"no_forcing\".*", "", said)
    else:  # the place and the listing are of a grammar that was made for the library
        said = re.sub(r"\A(at \d+\(\d+\): )?(failed to compile JSON schema: )?", "", said)
        said = re.sub(r"\n\s+\d+ \| .*\Z", "", said, flags=re.DOTALL)
    said = re.sub(r"; following special tokens are available.*", "", said, flags=re.DOTALL)
    for cue, reason, mend in _MEANINGS:
        if re.search(cue, said):
            return GrammarError(reason, f"schema ({_NAMES[kind]}): {_plainly(said)}; {mend}")
    raise AssertionError("the last cue matches everything")


def _plainly(said: str) -> str:
    """`said` with the library's own terms made sentences."""
    if "NoExtension" in said:
        return "no text satisfies it"
    found = re.fullmatch(r"Unimplemented keys: (\[.*\])", said, flags=re.DOTALL)
    if found is None:
        return said.rstrip(".")
    names = json.loads(found[1])
    verb = "keyword {} is" if len(names) == 1 else "keywords {} are"
    return verb.format(", ".join(map(repr, names))) + " not supported"
