"""Where the table's lines are known from, and for which chips.

Nothing here was run on an NPU by this project. The lines are read from what is published: the
definition of an operation (`op_host/*_def.cpp`: names, dtypes, attributes, chips), its C header
where it has one, and the call that an engine makes of it.
"""

from __future__ import annotations

from typing import Literal

A2, A3, A5 = "ascend910b", "ascend910_93", "ascend950"

_PUBLISHED = "vllm-project/vllm-ascend at 182b75e (August 2026)"
_CANN = "the CANN 8 and 9 reference of the operators that come with CANN"


def adapter(folder: str, by: Literal["definition", "header", "call"], but: str = "") -> str:
    """An operation that vllm-ascend defines and calls.

    by: what its argument order is taken from: the definition and the call agree; the C header;
    or the call alone, because the definition has another order.
    """
    order = {
        "definition": "its definition, and the call agrees",
        "header": "its C header",
        "call": "its call; the definition lists attributes in another order",
    }[by]
    more = f"; {but}" if but else ""
    return f"{_PUBLISHED}, csrc/{folder}: order from {order}{more}; never run by this project"


def stock(symbol: str) -> str:
    """An operation that comes with CANN."""
    return f"{_CANN}, {symbol}; never run by this project"
