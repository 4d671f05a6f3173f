"""How grammars are compiled: limits of llguidance, workers, time-out, cache. Validated values."""

from __future__ import annotations

import dataclasses
import math
import numbers


@dataclasses.dataclass(frozen=True, slots=True)
class GrammarLimits:
    """What one grammar may cost; the defaults are llguidance's. All are positive integers.

    Attributes:
      max_grammar_size: symbols in the grammar's rules.
      max_items_in_row: parser items after one byte (how ambiguous a grammar may be).
      initial_lexer_fuel: work on regular expressions at compilation, about 50,000 a millisecond.
      step_lexer_fuel: work on them for one mask, about 14,000 a millisecond.
      step_max_items: parser items made for one mask, about 20,000 a millisecond.
      max_lexer_states: states of the expressions' automata, 1 to 2 kB each.
    """

    max_grammar_size: int = 500_000
    max_items_in_row: int = 2_000
    initial_lexer_fuel: int = 1_000_000
    step_lexer_fuel: int = 200_000
    step_max_items: int = 50_000
    max_lexer_states: int = 250_000

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            _at_least(field.name, getattr(self, field.name), 1)


@dataclasses.dataclass(frozen=True, slots=True)
class GrammarSettings:
    """How a `Compiler` works.

    Attributes:
      workers: compilations at once, each in a thread of its own.
      timeout_s: seconds from submission until a grammar that is not compiled has failed.
      cache_entries: compiled grammars that are kept for the next request, least recently used
        first out; 0 keeps none.
      limits: of every grammar.
    """

    workers: int = 4
    timeout_s: float = 20.0
    cache_entries: int = 256
    limits: GrammarLimits = dataclasses.field(default_factory=GrammarLimits)

    def __post_init__(self) -> None:
        _at_least("workers", self.workers, 1)
        _at_least("cache_entries", self.cache_entries, 0)
        if isinstance(self.timeout_s, bool) or not isinstance(self.timeout_s, numbers.Real):
            raise TypeError(f"timeout_s must be a number of seconds, got {self.timeout_s!r}")
        if not 0 < self.timeout_s < math.inf:
            raise ValueError(f"timeout_s must be positive and finite, got {self.timeout_s}")
        if not isinstance(self.limits, GrammarLimits):
            raise TypeError(f"limits must be a GrammarLimits, got {self.limits!r}")


def _at_least(name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an integer, got {value!r}")
    if not least <= value < 2**31:
        raise ValueError(f"{name} must be in [{least}, 2**31), got {value}")
