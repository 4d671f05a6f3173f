"""How an operation of CANN is written down: its arguments in C order, and what each must be.

Shapes are words for axes: "b s h 512". A word is a number, a name that its first tensor binds and
all others must repeat, a sum of products of those ("b+1", "4*d"), or `_` for any size; names of
integer arguments count ("t k"). Forms are separated by `|`: "b s h d | t h d". All arguments with
several forms take the same one, chosen by an argument (`Operation.form_by`) or by the first rank.

Dtypes are columns, as definitions of operations have them: the i-th names of all arguments belong
together, and a single name goes with every column.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

from ascend.aclnn.tensors import Tensor

Kind = Literal[
    "tensor", "tensors", "integer", "real", "flag", "text", "integers", "scalar", "result"
]
REQUIRED = object()  # the default of an argument that has none


@dataclasses.dataclass(frozen=True)
class Bound:
    """The arguments of one call after they were read.

    tensors  name -> description; absent optional ones are not in it
    given    name -> value of every other argument
    axes     word -> size, of the shapes; integer arguments included
    """

    tensors: Mapping[str, Tensor]
    given: Mapping[str, Any]
    axes: Mapping[str, int]


@dataclasses.dataclass(frozen=True)
class Argument:
    """One argument of the first phase, in C order.

    name      what it is called here
    kind      how it is passed: an aclTensor ("tensor", and "result", one that the call makes), an
              aclTensorList, int64_t, double, bool, char*, an aclIntArray, an aclScalar
    dtypes    columns of a tensor's dtype, one or as many as the operation has; of a result a name,
              or a function of what is bound
    shape     forms of its shape; of a result also a function of what is bound; of a list, of each
    optional  whether a tensor may be left out (None): then a null pointer is passed
    hollow    whether an empty tensor stands for one that was left out, instead of a null pointer
    gaps      whether there may be gaps between entries of axis 0, as in a cache with padded pages
    inplace   whether the operation writes into it
    default   of an argument that is no tensor; REQUIRED: there is none
    choices   the values that it may have; empty: any of its kind
    derived   computed from the others and never given: (tensors) -> value
    """

    name: str
    kind: Kind
    dtypes: str | Callable[[Bound], str] = ""
    shape: str | Callable[[Bound], tuple[int, ...]] = ""
    optional: bool = False
    hollow: bool = False
    gaps: bool = False
    inplace: bool = False
    default: Any = REQUIRED
    choices: tuple[Any, ...] = ()
    derived: Callable[[Mapping[str, Tensor]], Any] | None = None

    @property
    def is_given(self) -> bool:
        """Whether callers give it: not a result, not derived."""
        return self.kind != "result" and self.derived is None

    @property
    def is_needed(self) -> bool:
        """Whether callers must give it."""
        return self.is_given and self.default is REQUIRED and not self.optional


def no_demands(bound: Bound) -> Iterator[str]:
    """For operations whose shapes and dtypes say all."""
    yield from ()


@dataclasses.dataclass(frozen=True)
class Operation:
    """An operation of CANN.

    name       what it is called here
    symbol     the C function of its second phase; the first is called symbol + "GetWorkspaceSize"
    what       one line for people
    arguments  of the first phase, in C order, before the size and the executor
    chips      that its definition has kernels for, as CANN names them
    source     where the order, the kinds and the dtypes are known from
    form_by    the text argument whose choices are the forms of the shapes; "": the rank chooses
    demands    what must hold beyond shapes and dtypes, as sentences of what does not
    """

    name: str
    symbol: str
    what: str
    arguments: tuple[Argument, ...]
    chips: tuple[str, ...]
    source: str
    form_by: str = ""
    demands: Callable[[Bound], Iterator[str]] = no_demands

    @property
    def results(self) -> tuple[Argument, ...]:
        """Arguments that a call makes and returns, in order."""
        return tuple(each for each in self.arguments if each.kind == "result")


def tensor(name: str, dtypes: str, shape: str, **more: Any) -> Argument:
    """An aclTensor that the caller gives."""
    return Argument(name, "tensor", dtypes, shape, **more)


def maybe(name: str, dtypes: str, shape: str, **more: Any) -> Argument:
    """An aclTensor that the caller may leave out."""
    return Argument(name, "tensor", dtypes, shape, optional=True, **more)


def result(
    name: str,
    dtypes: str | Callable[[Bound], str],
    shape: str | Callable[[Bound], tuple[int, ...]],
) -> Argument:
    """An aclTensor that the call makes and returns."""
    return Argument(name, "result", dtypes, shape)


def integer(name: str, default: Any = REQUIRED, choices: tuple[int, ...] = ()) -> Argument:
    """An int64_t."""
    return Argument(name, "integer", default=default, choices=choices)


def real(name: str, default: Any = REQUIRED) -> Argument:
    """A double."""
    return Argument(name, "real", default=default)


def flag(name: str, default: Any = REQUIRED, choices: tuple[bool, ...] = ()) -> Argument:
    """A bool."""
    return Argument(name, "flag", default=default, choices=choices)


def text(name: str, default: Any = REQUIRED, choices: tuple[str, ...] = ()) -> Argument:
    """A char*."""
    return Argument(name, "text", default=default, choices=choices)


def step_of(name: str, of: str) -> Argument:
    """An int64_t that the call derives: the step of axis 0 of a tensor, 0 where it is left out."""

    def derived(tensors: Mapping[str, Tensor]) -> int:
        return tensors[of].strides[0] if of in tensors else 0

    return Argument(name, "integer", derived=derived)


def like(name: str) -> Callable[[Bound], str]:
    """The dtype of a tensor, for a result."""
    return lambda bound: bound.tensors[name].dtype


def sized(axes: str, words: Mapping[str, int]) -> int | None:
    """The size that a word for an axis stands for; None for `_` and for names not yet bound.

    >>> sized("b+1", {"b": 3}), sized("4*d", {"d": 8}), sized("t", {})
    (4, 32, None)
    """
    total = 0
    for term in axes.split("+"):
        product = 1
        for factor in term.split("*"):
            size = int(factor) if factor.isdecimal() else words.get(factor)
            if size is None:
                return None
            product *= size
        total += product
    return total


def forms(shape: str) -> tuple[tuple[str, ...], ...]:
    """The words of every form of a shape.

    >>> forms("b s | t")
    (('b', 's'), ('t',))
    """
    return tuple(tuple(form.split()) for form in shape.split("|"))
