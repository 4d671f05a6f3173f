"""The k best columns of every row in our total order, for the vector cores of Ascend 950.

Value, then lower column; -0 equals +0; NaN on top. A core takes a row. Values are mapped to
unsigned keys of the same order; eight passes, four bits each, find the least key that is taken and
how many of its equals; a last pass writes the columns in ascending order. All of it is counting in
integers, so every machine has the same result: there is nothing to round.
"""
# pyright: reportMissingImports=false, reportInvalidTypeForm=false, reportRedeclaration=false

import tilelang
import tilelang.ascend.language as T

DIGITS, BITS = 16, 4


@T.macro
def ordered(bits, key):
    """The bits of a float32 -> an unsigned key that sorts as the value does, 1 or more."""
    if (bits & T.uint32(0x7FFFFFFF)) > T.uint32(0x7F800000):
        key[0] = T.uint32(0xFFFFFFFF)
    else:
        if (bits & T.uint32(0x7FFFFFFF)) == T.uint32(0):
            key[0] = T.uint32(0x80000000)
        else:
            if (bits >> T.uint32(31)) == T.uint32(1):
                key[0] = bits ^ T.uint32(0xFFFFFFFF)
            else:
                key[0] = bits ^ T.uint32(0x80000000)


@T.macro
def tallied(X, row, first, mine, least, counts, start, tally, key, me, turned):
    """counts[me]: how many of the thread's keys that start with `least` go on with each digit."""
    # Into registers: the loop over `mine` is of another length in other threads, and where it reads
    # what they share the compiler would put barriers into it.
    start[0] = least[0]
    for digit in T.serial(DIGITS):
        tally[digit] = 0
    for i in T.serial(mine):
        ordered(X[row, first + i], key)
        low = key[0] >> T.cast(28 - BITS * turned, T.uint32)
        if turned == 0 or (low >> T.uint32(BITS)) == start[0]:
            digit = T.cast(low & T.uint32(DIGITS - 1), T.int32)
            tally[digit] = tally[digit] + 1
    for digit in T.serial(DIGITS):
        counts[me, digit] = tally[digit]


@T.macro
def narrowed(counts, totals, least, need, v, me, threads):
    """The next digit of the least key that is taken, and what of `need` is left for it."""
    if me < DIGITS:
        v[0] = 0
        for i in T.serial(threads):
            v[0] = v[0] + counts[i, me]
        totals[me] = v[0]
    T.sync_threads()
    if me == 0:
        v[0] = need[0]
        v[1] = -1
        for i in T.serial(DIGITS):
            if v[1] < 0:
                if totals[DIGITS - 1 - i] >= v[0]:
                    v[1] = DIGITS - 1 - i
                else:
                    v[0] = v[0] - totals[DIGITS - 1 - i]
        need[0] = v[0]
        least[0] = (least[0] << T.uint32(BITS)) | T.cast(v[1], T.uint32)


@T.macro
def taken(X, row, first, mine, least, need, above, equal, start, v, key, me):
    """How many of the thread's keys are above the least (start) and equal to it; v[2] = need."""
    start[0] = least[0]
    v[0] = 0
    v[1] = 0
    v[2] = need[0]
    for i in T.serial(mine):
        ordered(X[row, first + i], key)
        if key[0] > start[0]:
            v[0] = v[0] + 1
        if key[0] == start[0]:
            v[1] = v[1] + 1
    above[me] = v[0]
    equal[me] = v[1]


@T.macro
def written(X, IDS, row, first, mine, above, equal, start, v, key, me):
    """The thread's columns behind those of all threads before it."""
    v[0] = 0
    v[1] = 0
    for i in T.serial(me):
        v[0] = v[0] + above[i]
        v[1] = v[1] + equal[i]
    for i in T.serial(mine):
        ordered(X[row, first + i], key)
        if key[0] > start[0]:
            IDS[row, v[0] + T.min(v[1], v[2])] = first + i
            v[0] = v[0] + 1
        if key[0] == start[0]:
            if v[1] < v[2]:
                IDS[row, v[0] + v[1]] = first + i
            v[1] = v[1] + 1


@tilelang.jit(target="ascend")
def select_best(X, END, k: int, threads: int, blocks: int):
    """X [M, N] bits of float32, END [M] int32: only columns below it count -> IDS [M, k] int32.

    Ascending columns, -1 behind them where a row has fewer than k. least: the digits found so far
    of the least key that is taken; need: columns still to take among keys that start so.
    """
    M, N = T.dynamic("M"), T.dynamic("N")
    X: T.Tensor((M, N), T.uint32)
    END: T.Tensor((M,), T.int32)
    IDS = T.empty((M, k), T.int32)
    with T.Kernel(blocks) as core:
        counts = T.alloc_shared((threads, DIGITS), T.int32)
        totals = T.alloc_shared((DIGITS,), T.int32)
        least, need = T.alloc_shared((1,), T.uint32), T.alloc_shared((1,), T.int32)
        above, equal = T.alloc_shared((threads,), T.int32), T.alloc_shared((threads,), T.int32)
        for turn in T.serial((M + blocks - 1 - core) // blocks):
            row = turn * blocks + core
            with T.SimtVF(threads=threads):
                me = T.get_thread_binding()
                key, start = T.alloc_local((1,), T.uint32), T.alloc_local((1,), T.uint32)
                tally, v = T.alloc_local((DIGITS,), T.int32), T.alloc_local((3,), T.int32)
                end = T.max(T.min(END[row], N), 0)
                # A thread owns columns `first` onwards, so that threads in order are columns so.
                own = T.ceildiv(end, threads)
                first = me * own
                mine = T.max(T.min(own, end - first), 0)
                if me == 0:
                    least[0] = T.uint32(0)
                    need[0] = T.min(k, end)
                T.sync_threads()
                for turned in T.serial(8):
                    tallied(X, row, first, mine, least, counts, start, tally, key, me, turned)
                    T.sync_threads()
                    narrowed(counts, totals, least, need, v, me, threads)
                    T.sync_threads()
                taken(X, row, first, mine, least, need, above, equal, start, v, key, me)
                T.sync_threads()
                written(X, IDS, row, first, mine, above, equal, start, v, key, me)
                for i in T.serial(T.ceildiv(k, threads)):
                    if i * threads + me < k and i * threads + me >= end:
                        IDS[row, i * threads + me] = -1
    return IDS
