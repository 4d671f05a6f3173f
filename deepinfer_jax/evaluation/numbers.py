"""The verifier of numbers: the last one in a reply counts."""

from __future__ import annotations

import dataclasses
import decimal
import re
from decimal import Decimal

from deepinfer_jax.evaluation.verdicts import RIGHT, Verdict, wrong

# A sign counts where nothing stands before it that it could be subtracted from.
_NUMBER = re.compile(
    r"(?P<sign>(?<![0-9A-Za-z)\]}.])[-+−])?"
    r"(?P<whole>[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+|(?<![0-9A-Za-z)])(?=\.[0-9]))"
    r"(?P<rest>(?:\.[0-9]+)?(?:[eE][-+]?[0-9]{1,6}(?![0-9]))?)"
)
# Wide enough for every number that _NUMBER finds; nothing is signalled as an error.
_ARITHMETIC = decimal.Context(prec=60, Emax=decimal.MAX_EMAX, Emin=decimal.MIN_EMIN, traps=[])


def last_number(text: str) -> Decimal | None:
    """The last decimal number in `text`; commas between thousands are allowed, fractions are not
    one number but two.
    """
    found = None
    for each in _NUMBER.finditer(text):
        found = each
    if found is None:
        return None
    sign = "-" if found["sign"] in ("-", "−") else ""
    return Decimal(f"{sign}{found['whole'].replace(',', '') or '0'}{found['rest']}")


@dataclasses.dataclass(frozen=True, slots=True)
class Number:
    """The last number of the reply is this one, to within the larger of two tolerances.

    answer: a number, or its decimal spelling. tolerance: absolute; relative: share of the answer.
    Both are 0 by default: then the values are equal, however long their decimals.
    """

    answer: int | float | str
    tolerance: float = 0.0
    relative: float = 0.0

    def __post_init__(self) -> None:
        _decimal("answer", self.answer)
        for name in ("tolerance", "relative"):
            if _decimal(name, getattr(self, name)) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)!r}")

    def __call__(self, reply: str) -> Verdict:
        """The verdict on a reply."""
        found = last_number(reply)
        if found is None:
            return wrong("no number in the reply")
        expected = _decimal("answer", self.answer)
        if found == expected:
            return RIGHT
        share = _ARITHMETIC.multiply(_decimal("relative", self.relative), expected.copy_abs())
        bound = max(_decimal("tolerance", self.tolerance), share)
        if bound and _ARITHMETIC.subtract(found, expected).copy_abs() <= bound:
            return RIGHT
        shown = str(found)
        shown = shown if len(shown) <= 30 else f"{shown[:13]}...{shown[-13:]}"
        return wrong(f"expected {self.answer}, got {shown}")


def _decimal(name: str, value: object) -> Decimal:
    """`value` as it is written: 0.1 is a tenth. Raises ValueError for what is no finite number."""
    if isinstance(value, int | float | str) and not isinstance(value, bool):
        text = str(value).strip()
        found = _NUMBER.fullmatch(text)
        if found is not None:
            number = last_number(text)
            assert number is not None
            return number
    raise ValueError(f"{name} must be a finite number, got {value!r}")
