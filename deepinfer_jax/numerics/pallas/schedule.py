"""In which order a product adds up, and how the work is cut for speed.

The order is fixed by the sizes of the weight alone (`parts`): K is walked from the first element to
the last, in equal parts whose sums are added one after the other; one part where N is wide enough
to keep the chip busy. A `Schedule` says how many rows and columns of the result one program makes
and in which steps it walks. It varies with the number of rows, since it changes no bit: the tensor
cores add every output in the order of K whatever the tile around it (tests/test_gpu.py).

That holds as long as K lies in its own order in the registers. Triton permutes K inside a tile that
it can trace back to a load of bytes, unless the tile is an operand of the instruction of a whole
group of four warps: the second one of products of 64 rows or more, which passes through shared
memory, or the first one of products of 64 columns or more, which stays in registers (`turned`). So
decoded weights are always one of the two. The second way is the faster one where few rows share a
weight: no row is filled up to 64, and nothing is written down that was just decoded.
"""

from __future__ import annotations

import dataclasses

_CORES = 132  # multiprocessors of an H200; the order of its sums must not follow the chip at hand


@dataclasses.dataclass(frozen=True)
class Schedule:
    """rows x columns of the result per program, K in steps of `depth`; warps and stages of it.

    turned: the program computes the transposed tile, with the weight as the first operand.
    """

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    turned: bool = False


def parts(k: int, n: int) -> int:
    """Parts of K that are summed apart and then added in order; a function of K and N alone."""
    tiles, count = -(-n // 16), 1
    if tiles > 64:
        return 1
    while 2 * count * tiles <= 2 * _CORES and k % (256 * count) == 0 and k // count >= 1024:
        count *= 2
    return min(count, 32)


def _fitting(how: Schedule, length: int) -> Schedule:
    """`how` with steps that divide the length of a part, where a power of two from 32 on does."""
    depth = how.depth
    while depth > 32 and length % depth:
        depth //= 2
    return dataclasses.replace(how, depth=depth)


def plain(m: int, k: int, n: int) -> Schedule:
    """For bfloat16 rows and weights."""
    count = parts(k, n)
    if m <= 16:
        how = Schedule(16, 64, 128, 4, 5, True) if n > 8192 else Schedule(16, 16, 256, 1, 4)
        how = how if count == 1 else Schedule(16, 64, 128, 4, 4)
    elif m <= 64:
        how = Schedule(64, 64, 128, 4, 4, True) if n >= 4096 else Schedule(64, 32, 128, 4, 5)
        how = how if count == 1 else Schedule(64, 64, 128, 4, 3)
    elif count > 1:
        how = Schedule(64, 128, 64, 4, 4)
    elif m <= 512:
        how = Schedule(64, 32, 128, 4, 4) if n < 2048 else Schedule(64, 64, 64, 4, 5)
        how = how if n < 4096 else Schedule(128, 128, 64, 4, 3 if n > 8192 else 4)
    else:
        wide = n >= 4096 and m * n >= 1 << 24
        how = Schedule(128, 256, 64, 8, 4) if wide else Schedule(128, 128, 64, 4, 4)
    return _fitting(how, k // count)


def decoded(m: int, k: int, n: int) -> Schedule:
    """For bfloat16 rows and weights in FP8 or FP4."""
    count = parts(k, n)
    if m <= 16 and 4096 <= n <= 8192:
        how = Schedule(16, 64, 256, 4, 3, True) if k >= 4096 else Schedule(16, 64, 128, 4, 4, True)
    elif m <= 64:
        how = Schedule(64, 64, 128, 4, 4) if n <= 8192 else Schedule(64, 128, 64, 4, 4)
        if n < 4096:
            how = Schedule(64, 16 if n < 2048 else 32, 256, 4, 3)
        how = how if count == 1 else Schedule(64, 32, 128, 4, 4)
    else:
        how = Schedule(128, 64, 64, 4, 4) if n <= 8192 else Schedule(128, 128, 64, 4, 3)
        if n < 4096:
            how = Schedule(128, 64, 128, 4, 3) if n >= 2048 else Schedule(64, 32, 128, 4, 4)
        how = how if count == 1 else Schedule(128, 64, 128, 4, 3)
    return _fitting(how, k // count)


def exact(m: int, k: int, n: int) -> Schedule:
    """For bfloat16 rows and float32 weights (`walk`)."""
    if m <= 64:
        how = Schedule(16, 32, 64, 4, 4)
    elif m <= 512:
        how = Schedule(64, 16, 128, 2, 4)
    else:
        how = Schedule(128, 32, 64, 4, 4)
    return _fitting(how, k // parts(k, n))


def float32() -> Schedule:
    """For float32 rows: multiply-adds outside the tensor cores, for parity runs only."""
    return Schedule(16, 32, 32, 4, 2)


def tile_rows(m: int, experts: int, packed: bool) -> int:
    """Rows of one expert per tile, for m rows spread over `experts`; packed: FP8 or FP4 weights."""
    if m < 24 * experts:
        return 16
    return 64 if packed or m < 48 * experts else 128


def grouped(rows: int, k: int, packed: bool) -> Schedule:
    """For tiles of `rows` rows of one expert; packed: FP8 or FP4 weights."""
    if packed:
        hows = {16: Schedule(16, 64, 128, 4, 4, True), 64: Schedule(64, 64, 128, 4, 3, True)}
    else:
        hows = {
            16: Schedule(16, 64, 128, 4, 4),
            64: Schedule(64, 64, 64, 4, 4),
            128: Schedule(128, 128, 64, 4, 3),
        }
    return _fitting(hows[rows], k)
