"""Rules for primitives that work element by element, and for conversions."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from ascend.executor import kinds
from ascend.executor.builder import Builder
from ascend.executor.kinds import torch
from ascend.executor.rules import RULES, aval, full, refuse, result, rule, whole
from ascend.executor.values import Value

_FLOATS_WIDE = (torch.float32, torch.float64)


def order(b: Builder, value: Value, dtype: Any) -> Value:
    """Integers that are ordered as the values of `dtype` are; the value itself where it is."""
    if not kinds.hidden(dtype):
        return value
    flip = b.const(
        torch.tensor(kinds.lowest_bit_pattern(dtype), dtype=value.meta.dtype, device=b.device)
    )
    return b(torch.bitwise_xor, value, flip)


def wide(b: Builder, value: Value, dtype: Any) -> Value:
    """The values of an unsigned `dtype` of at most 32 bits in int64; others as they are."""
    if not kinds.hidden(dtype):
        return value
    bits = 8 * jnp.dtype(dtype).itemsize
    if bits > 32:
        raise kinds.DtypeError("uint64 is kept for its bits alone: no quotient or conversion of it")
    return b(torch.bitwise_and, convert(b, value, torch.int64), b.scalar((1 << bits) - 1, "int64"))


def convert(b: Builder, value: Value, dtype: Any) -> Value:
    """A plain conversion between torch dtypes."""
    if value.meta.dtype == dtype:
        return value
    return b(torch.Tensor.to, value, dtype=dtype)


def _plain(fn: Any) -> Any:
    def apply(b: Builder, eqn: Any, *values: Value) -> Value:
        return b(fn, *values)

    return apply


def _wide_unsigned(fn: Any) -> Any:
    """An operation on the values: hidden dtypes are widened for it."""

    def apply(b: Builder, eqn: Any, *values: Value) -> Value:
        dtype = aval(eqn).dtype
        if not kinds.hidden(dtype):
            return b(fn, *values)
        return convert(b, b(fn, *(wide(b, v, dtype) for v in values)), kinds.kept(dtype))

    return apply


def _ordered(fn: Any) -> Any:
    """A comparison."""

    def apply(b: Builder, eqn: Any, x: Value, y: Value) -> Value:
        dtype = aval(eqn).dtype
        return b(fn, order(b, x, dtype), order(b, y, dtype))

    return apply


def _best(fn: Any) -> Any:
    def apply(b: Builder, eqn: Any, x: Value, y: Value) -> Value:
        dtype = aval(eqn).dtype
        return order(b, b(fn, order(b, x, dtype), order(b, y, dtype)), dtype)

    return apply


def _narrow_floats(fn: Any) -> Any:
    """A function that is evaluated in float32 for shorter floats, as XLA does."""

    def apply(b: Builder, eqn: Any, x: Value) -> Value:
        kept = x.meta.dtype
        if kept in _FLOATS_WIDE:
            return b(fn, x)
        return convert(b, b(fn, convert(b, x, torch.float32)), kept)

    return apply


for _name, _fn in {
    "add": torch.add, "add_any": torch.add, "sub": torch.sub, "neg": torch.neg, "mul": torch.mul,
    "and": torch.bitwise_and, "or": torch.bitwise_or, "xor": torch.bitwise_xor,
    "not": torch.bitwise_not, "eq": torch.eq, "ne": torch.ne,
    "floor": torch.floor, "ceil": torch.ceil, "abs": torch.abs, "square": torch.square,
}.items():  # fmt: skip
    RULES[_name] = _plain(_fn)
for _name, _fn in {"lt": torch.lt, "le": torch.le, "gt": torch.gt, "ge": torch.ge}.items():
    RULES[_name] = _ordered(_fn)
for _name, _fn in {"max": torch.maximum, "min": torch.minimum}.items():
    RULES[_name] = _best(_fn)
for _name, _fn in {
    "exp": torch.exp, "exp2": torch.exp2, "expm1": torch.expm1, "log": torch.log,
    "log1p": torch.log1p, "logistic": torch.sigmoid, "tanh": torch.tanh, "sin": torch.sin,
    "cos": torch.cos, "sqrt": torch.sqrt, "rsqrt": torch.rsqrt, "erf": torch.erf,
}.items():  # fmt: skip
    RULES[_name] = _narrow_floats(_fn)


def _same(b: Builder, eqn: Any, *values: Value) -> Any:
    return values


for _name in ("copy", "copy_p", "stop_gradient", "optimization_barrier", "pvary"):
    RULES[_name] = _same


@rule("is_finite")
def _is_finite(b: Builder, eqn: Any, x: Value) -> Value:
    """x - x is 0 of finite numbers alone, in fewer steps than torch's own test."""
    zero = b.const(torch.zeros((), dtype=x.meta.dtype, device=b.device))
    return b(torch.eq, b(torch.sub, x, x), zero)


@rule("sign")
def _sign(b: Builder, eqn: Any, x: Value) -> Value:
    if kinds.hidden(aval(eqn).dtype):
        return convert(b, b(torch.ne, x, b.scalar(0, aval(eqn).dtype)), x.meta.dtype)
    return b(_sign_of_float if kinds.is_float(aval(eqn).dtype) else torch.sign, x)


def _sign_of_float(x: Any) -> Any:
    """Of NaN, 0 and -0 themselves."""
    return torch.where(x.abs() > 0, torch.sign(x), x)


@rule("div")
def _div(b: Builder, eqn: Any, x: Value, y: Value) -> Value:
    if kinds.is_float(aval(eqn).dtype):
        return b(torch.div, x, y)
    return _without_divisor(b, y, _whole_quotient(b, eqn, _truncated, x, y), None)


@rule("rem")
def _rem(b: Builder, eqn: Any, x: Value, y: Value) -> Value:
    if kinds.is_float(aval(eqn).dtype):
        return b(torch.fmod, x, y)
    return _without_divisor(b, y, _whole_quotient(b, eqn, torch.fmod, x, y), x)


def _whole_quotient(b: Builder, eqn: Any, fn: Any, x: Value, y: Value) -> Value:
    """A quotient or remainder of integers. Of unknown divisors it is taken in int64: the least
    number by -1 ends a process in its own dtype.
    """
    y, kept = _not_zero(b, y), x.meta.dtype
    if kinds.hidden(aval(eqn).dtype) or (y.const is not None and bool((y.const > 0).all())):
        return _wide_unsigned(fn)(b, eqn, x, y)
    return convert(b, b(fn, *(convert(b, v, torch.int64) for v in (x, y))), kept)


def _without_divisor(b: Builder, y: Value, made: Value, wanted: Value | None) -> Value:
    """By 0 a quotient has all bits set, and the remainder is what was divided."""
    if y.const is not None and bool((y.const != 0).all()):
        return made
    kept = y.meta.dtype
    zero = b.const(torch.zeros((), dtype=kept, device=b.device))
    ones = b.const(torch.full((), 255 if kept == torch.uint8 else -1, dtype=kept, device=b.device))
    return b(torch.where, b(torch.eq, y, zero), wanted or ones, made)


def _truncated(x: Any, y: Any) -> Any:
    return torch.div(x, y, rounding_mode="trunc")


def _not_zero(b: Builder, y: Value) -> Value:
    """A divisor that torch does not stop at."""
    if y.const is not None and bool((y.const != 0).all()):
        return y
    one = b.const(torch.ones((), dtype=y.meta.dtype, device=b.device))
    zero = b.const(torch.zeros((), dtype=y.meta.dtype, device=b.device))
    return b(torch.where, b(torch.eq, y, zero), one, y)


@rule("integer_pow")
def _integer_pow(b: Builder, eqn: Any, x: Value) -> Value:
    power = eqn.params["y"]
    if power == 0:
        return b.scalar(1, aval(eqn).dtype)
    made = x
    for _ in range(abs(power) - 1):
        made = b(torch.mul, made, x)
    return b(torch.reciprocal, made) if power < 0 else made


@rule("pow")
def _pow(b: Builder, eqn: Any, x: Value, y: Value) -> Value:
    return b(torch.pow, x, convert(b, y, x.meta.dtype))


@rule("round")
def _round(b: Builder, eqn: Any, x: Value) -> Value:
    if int(eqn.params["rounding_method"]) != 1:
        raise refuse(eqn, "it rounds halves away from zero")
    return b(torch.round, x)


@rule("clamp")
def _clamp(b: Builder, eqn: Any, low: Value, x: Value, high: Value) -> Value:
    dtype = aval(eqn, 1).dtype
    low, x, high = (order(b, v, dtype) for v in (low, x, high))
    return order(b, b(torch.minimum, b(torch.maximum, x, low), high), dtype)


@rule("select_n")
def _select(b: Builder, eqn: Any, which: Value, *cases: Value) -> Value:
    if kinds.is_bool(aval(eqn).dtype):
        if which.const is not None and which.const.numel() and _uniform(which.const):
            return cases[bool(which.const.reshape(-1)[0])]
        return b(torch.where, which, cases[1], cases[0])
    made = cases[0]
    for number, case in enumerate(cases[1:], 1):
        made = b(torch.where, b(torch.eq, which, b.scalar(number, aval(eqn).dtype)), case, made)
    return made


def _uniform(tensor: Any) -> bool:
    return bool(tensor.all()) or not bool(tensor.any())


# -- shifts ----------------------------------------------------------------------------------------


@rule("shift_left")
def _shift_left(b: Builder, eqn: Any, x: Value, count: Value) -> Value:
    return _in_range(b, eqn, b(torch.bitwise_left_shift, x, _count(b, eqn, count)), count)


@rule("shift_right_arithmetic")
def _shift_right(b: Builder, eqn: Any, x: Value, count: Value) -> Value:
    """The top bit comes in, of unsigned integers too; beyond, nothing but it is left."""
    bits = 8 * jnp.dtype(aval(eqn).dtype).itemsize
    last = b.const(torch.full((), bits - 1, dtype=count.meta.dtype, device=b.device))
    safe = _in_range(b, eqn, count, count, last)
    if x.meta.dtype != torch.uint8:
        return b(torch.bitwise_right_shift, x, safe)
    moved = b(torch.bitwise_right_shift, *(b(torch.Tensor.view, v, dtype=torch.int8)
                                           for v in (x, safe)))  # fmt: skip
    return b(torch.Tensor.view, moved, dtype=torch.uint8)


@rule("shift_right_logical")
def _shift_right_logical(b: Builder, eqn: Any, x: Value, count: Value) -> Value:
    dtype = aval(eqn).dtype
    safe = _count(b, eqn, count)
    moved = b(torch.bitwise_right_shift, x, safe)
    if jnp.dtype(dtype) == jnp.uint8:
        return _in_range(b, eqn, moved, count)
    # Copies of the sign came in at the top: keep what lies below them.
    bits = 8 * jnp.dtype(dtype).itemsize
    ones = b.const(torch.full((), -1, dtype=x.meta.dtype, device=b.device))
    last = b.const(torch.full((), bits - 1, dtype=x.meta.dtype, device=b.device))
    two = b.const(torch.full((), 1, dtype=x.meta.dtype, device=b.device))
    room = b(torch.bitwise_left_shift, b(torch.bitwise_left_shift, ones, b(
        torch.sub, last, safe)), two)  # fmt: skip
    return _in_range(b, eqn, b(torch.bitwise_and, moved, b(torch.bitwise_not, room)), count)


def _count(b: Builder, eqn: Any, count: Value) -> Value:
    """A shift by fewer places than there are bits; XLA shifts everything out beyond."""
    bits = 8 * jnp.dtype(aval(eqn).dtype).itemsize
    if count.const is not None:
        return b.const(count.const.clamp(0, bits - 1))
    last = b.const(torch.full((), bits - 1, dtype=count.meta.dtype, device=b.device))
    zero = b.const(torch.full((), 0, dtype=count.meta.dtype, device=b.device))
    return b(torch.minimum, b(torch.maximum, count, zero), last)


def _in_range(
    b: Builder, eqn: Any, made: Value, count: Value, beyond: Value | None = None
) -> Value:
    """`made` where `count` is less than there are bits; else `beyond`, by itself 0."""
    bits = 8 * jnp.dtype(aval(eqn).dtype).itemsize
    if count.const is not None and bool(((count.const >= 0) & (count.const < bits)).all()):
        return made
    last = b.const(torch.full((), bits - 1, dtype=count.meta.dtype, device=b.device))
    zero = b.const(torch.full((), 0, dtype=count.meta.dtype, device=b.device))
    outside = b(torch.bitwise_or, b(torch.gt, count, last), b(torch.lt, count, zero))
    return b(torch.where, outside, beyond or b.const(zero.const.to(made.meta.dtype)), made)


# -- conversions -----------------------------------------------------------------------------------


@rule("convert_element_type")
def _convert(b: Builder, eqn: Any, x: Value) -> Value:
    return converted(b, x, aval(eqn).dtype, eqn.params["new_dtype"])


def converted(b: Builder, x: Value, old: Any, new: Any) -> Value:
    """x of a JAX dtype in another one, with XLA's meaning of what does not fit."""
    old, new = jnp.dtype(old), jnp.dtype(new)
    if old == new:
        return x
    if kinds.is_bool(new):
        return b(torch.ne, x, b.const(torch.zeros((), dtype=x.meta.dtype, device=b.device)))
    kinds.kept(new)  # of complex numbers and such there are none
    if kinds.is_float(old) and not kinds.is_float(new):
        return _to_integer(b, x, new)
    if kinds.hidden(old) and (kinds.is_float(new) or new.itemsize > old.itemsize):
        x = wide(b, x, old)
    if kinds.is_float(old) and kinds.is_float(new) and new.itemsize == 1:
        x = convert(b, x, torch.float32)
        if new.name == "float8_e4m3fn":
            x = b(_no_infinities, x)
    return convert(b, x, kinds.kept(new))


def _no_infinities(x: Any) -> Any:
    """NaN for what rounds beyond the largest number, 448: torch would make that of it."""
    return torch.where(x.abs() <= 464, x, torch.nan)


def _to_integer(b: Builder, x: Value, new: Any) -> Value:
    """Towards zero; what is too large becomes the largest, NaN 0, as in XLA."""
    info = jnp.iinfo(new)
    x = convert(b, x, torch.float64 if new.itemsize > 2 else torch.float32)
    if info.bits == 64:
        raise kinds.DtypeError(f"floats cannot be converted to {new} in the executor")
    safe = b(torch.nan_to_num, x, nan=0.0)
    safe = b(torch.clamp, safe, min=float(info.min), max=float(info.max))
    kept = kinds.kept(new)
    if kinds.hidden(new):
        return convert(b, convert(b, safe, torch.int64), kept)
    return convert(b, safe, kept)


@rule("reduce_precision")
def _reduce_precision(b: Builder, eqn: Any, x: Value) -> Value:
    wanted = eqn.params["exponent_bits"], eqn.params["mantissa_bits"]
    through = {(8, 7): torch.bfloat16, (5, 10): torch.float16, (8, 23): torch.float32}.get(wanted)
    if through is not None:
        return convert(b, convert(b, x, through), x.meta.dtype)
    if wanted[0] != 8 or x.meta.dtype not in (torch.float32, torch.bfloat16):
        raise refuse(eqn, f"no torch dtype has {wanted[0]} exponent and {wanted[1]} mantissa bits")
    return convert(b, b(_shortened, convert(b, x, torch.float32), bits=wanted[1]), x.meta.dtype)


def _shortened(x: Any, bits: int) -> Any:
    """float32 with fewer bits behind the point, to the nearest, ties to even; NaN stays."""
    gone = 23 - bits
    whole = x.view(torch.int32)
    odd = (whole >> gone) & 1
    near = (whole + ((1 << (gone - 1)) - 1) + odd) & -(1 << gone)
    return torch.where(torch.isnan(x), x, near.view(torch.float32))


@rule("bitcast_convert_type")
def _bitcast(b: Builder, eqn: Any, x: Value) -> Value:
    old, new = jnp.dtype(aval(eqn).dtype), jnp.dtype(eqn.params["new_dtype"])
    kept = kinds.kept(new)
    if old.itemsize == new.itemsize:
        return x if x.meta.dtype == kept else b(torch.Tensor.view, x, dtype=kept)
    x = whole(b, x, aval(eqn).shape)
    if old.itemsize < new.itemsize:  # the last axis is the parts of one element
        return b(_joined, x, dtype=kept)
    return b(_parted, x, dtype=kept, count=old.itemsize // new.itemsize)


def _joined(x: Any, dtype: Any) -> Any:
    return x.view(dtype).squeeze(-1)


def _parted(x: Any, dtype: Any, count: int) -> Any:
    return x.unsqueeze(-1).view(dtype).reshape(*x.shape, count)


# -- the total order of floats ---------------------------------------------------------------------


def total_key(b: Builder, x: Value, dtype: Any) -> Value:
    """Integers in the total order: -NaN, numbers with -0 before +0, NaN."""
    if not kinds.is_float(dtype):
        return order(b, x, dtype)
    bits = {2: torch.int16, 4: torch.int32}[jnp.dtype(dtype).itemsize]
    bare = b(torch.Tensor.view, x, dtype=bits)
    width = 8 * jnp.dtype(dtype).itemsize
    last = b.const(torch.tensor(width - 1, dtype=bits, device=b.device))
    below = b.const(torch.tensor((1 << (width - 1)) - 1, dtype=bits, device=b.device))
    flip = b(torch.bitwise_and, b(torch.bitwise_right_shift, bare, last), below)
    return b(torch.bitwise_xor, bare, flip)


@rule("lt_to", "le_to")
def _total_comparison(b: Builder, eqn: Any, x: Value, y: Value) -> Value:
    dtype = aval(eqn).dtype
    fn = torch.lt if eqn.primitive.name == "lt_to" else torch.le
    return b(fn, total_key(b, x, dtype), total_key(b, y, dtype))


@rule("nextafter")
def _nextafter(b: Builder, eqn: Any, x: Value, y: Value) -> Value:
    return b(torch.nextafter, full(b, x, result(eqn).shape), y)
