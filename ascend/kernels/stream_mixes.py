"""The mixes of hyper-connections from their raw sums, for the vector cores of Ascend 950.

A thread takes a whole row: a few dozen numbers that live in registers, read from and written to
global memory. Every sum is short and in index order, as `deepinfer_jax.numerics` has it, and a row
is divided by multiplying with the reciprocal, which is what XLA:CPU makes of the twin.
"""
# pyright: reportMissingImports=false, reportInvalidTypeForm=false, reportRedeclaration=false

import tilelang
import tilelang.ascend.language as T


@T.macro
def over_destinations(m, v, i, eps, C):
    """Row i of m [C, C] divided by its sum and eps."""
    v[0] = 0.0
    for j in T.serial(C):
        v[0] = v[0] + m[i, j]
    v[0] = 1.0 / (v[0] + eps)
    for j in T.serial(C):
        m[i, j] = m[i, j] * v[0]


@T.macro
def over_sources(m, v, i, eps, C):
    """Column i of m [C, C] divided by its sum and eps."""
    v[0] = 0.0
    for j in T.serial(C):
        v[0] = v[0] + m[j, i]
    v[0] = 1.0 / (v[0] + eps)
    for j in T.serial(C):
        m[j, i] = m[j, i] * v[0]


@T.macro
def softmax(RAW, SCALE, BASE, m, v, row, i, eps, C):
    """Row i of m [C, C]: exponentials of its mixes divided by their sum, plus eps."""
    v[1] = -T.infinity(T.float32)
    for j in T.serial(C):
        at = 2 * C + i * C + j
        m[i, j] = RAW[row, at] * SCALE[2] + BASE[at]
        v[1] = T.max(v[1], m[i, j])
    v[0] = 0.0
    for j in T.serial(C):
        m[i, j] = T.exp(m[i, j] - v[1])
        v[0] = v[0] + m[i, j]
    v[0] = 1.0 / v[0]
    for j in T.serial(C):
        m[i, j] = m[i, j] * v[0] + eps


@tilelang.jit(target="ascend", compile_flags=["-ffp-contract=off"])
def stream_mixes(
    RAW, SCALE, BASE, streams: int, iterations: int, eps: float, threads: int, blocks: int
):
    """RAW [M, C(2 + C)], SCALE [3], BASE [C(2 + C)] float32 -> PRE and POST [M, C], COMB [M, C*C].

    COMB is [source, destination] in rows.
    """
    M = T.dynamic("M")
    C = streams
    RAW: T.Tensor((M, C * (2 + C)), T.float32)
    SCALE: T.Tensor((3,), T.float32)
    BASE: T.Tensor((C * (2 + C),), T.float32)
    PRE, POST = T.empty((M, C), T.float32), T.empty((M, C), T.float32)
    COMB = T.empty((M, C * C), T.float32)
    step = threads * blocks
    with T.Kernel(blocks) as core:
        with T.SimtVF(threads=threads):
            me = T.get_thread_binding()
            m = T.alloc_local((C, C), T.float32)
            v = T.alloc_local((2,), T.float32)
            for turn in T.serial((M + step - 1) // step):
                row = turn * step + core * threads + me
                if row < M:
                    for i in T.serial(C):
                        v[0] = RAW[row, i] * SCALE[0] + BASE[i]
                        PRE[row, i] = 1.0 / (1.0 + T.exp(-v[0])) + eps
                        v[0] = RAW[row, C + i] * SCALE[1] + BASE[C + i]
                        POST[row, i] = 2.0 * (1.0 / (1.0 + T.exp(-v[0])))
                        softmax(RAW, SCALE, BASE, m, v, row, i, eps, C)
                    for half in T.serial(2 * iterations - 1):
                        for i in T.serial(C):
                            if half % 2 == 0:
                                over_sources(m, v, i, eps, C)
                            else:
                                over_destinations(m, v, i, eps, C)
                    for i, j in T.grid(C, C):
                        COMB[row, i * C + j] = m[i, j]
    return PRE, POST, COMB
