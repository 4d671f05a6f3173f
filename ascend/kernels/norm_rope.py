"""RMSNorm of rows and the rotation of their last features, for the vector cores of Ascend 950.

A row is a task: copied into the unified buffer, normalised and rotated there, copied back. Its sum
of squares has the order of `deepinfer_jax.numerics`: lane l adds columns l, l + LANES, ..., then
the lanes are added from the first to the last. So the kernel and the twin differ in no bit as long
as nobody contracts a product into a sum.
"""
# pyright: reportMissingImports=false, reportInvalidTypeForm=false, reportRedeclaration=false

import tilelang
import tilelang.ascend.language as T

LANES = 16


@T.macro
def normalise(x, weight, lane, v, me, eps, threads, N):
    """x [N] in place, by all threads."""
    if me < LANES:
        v[0] = 0.0
        for i in T.serial(N // LANES):
            v[1] = T.cast(x[i * LANES + me], T.float32)
            v[0] = v[0] + v[1] * v[1]
        lane[me] = v[0]
    T.sync_threads()
    v[0] = 0.0
    for i in T.serial(LANES):
        v[0] = v[0] + lane[i]
    v[0] = T.rsqrt(v[0] / N + eps)
    for i in T.serial(T.ceildiv(N, threads)):
        if i * threads + me < N:
            v[1] = T.cast(x[i * threads + me], T.float32) * v[0]
            x[i * threads + me] = T.cast(weight[i * threads + me] * v[1], T.bfloat16)


@T.macro
def rotate(x, cos, sin, v, me, first, threads, R):
    """The R pairs from column `first` on, in place."""
    for i in T.serial(T.ceildiv(R, threads)):
        if i * threads + me < R:
            pair = i * threads + me
            v[1] = T.cast(x[first + 2 * pair], T.float32)
            v[2] = T.cast(x[first + 2 * pair + 1], T.float32)
            x[first + 2 * pair] = T.cast(v[1] * cos[pair] - v[2] * sin[pair], T.bfloat16)
            x[first + 2 * pair + 1] = T.cast(v[1] * sin[pair] + v[2] * cos[pair], T.bfloat16)


@tilelang.jit(target="ascend", compile_flags=["-ffp-contract=off"])
def norm_rope(X, WEIGHT, COS, SIN, eps: float, threads: int, blocks: int):
    """X [M, N] bfloat16, WEIGHT [N], COS and SIN [M, R] float32 -> [M, N] bfloat16."""
    M = T.dynamic("M")
    N, R = T.const("N, R")
    X: T.Tensor((M, N), T.bfloat16)
    WEIGHT: T.Tensor((N,), T.float32)
    COS: T.Tensor((M, R), T.float32)
    SIN: T.Tensor((M, R), T.float32)
    OUT = T.empty((M, N), T.bfloat16)
    with T.Kernel(blocks) as core:
        weight = T.alloc_shared((N,), T.float32)
        x = T.alloc_shared((N,), T.bfloat16)
        cos = T.alloc_shared((R,), T.float32)
        sin = T.alloc_shared((R,), T.float32)
        lane = T.alloc_shared((LANES,), T.float32)
        T.copy(WEIGHT, weight)
        for turn in T.serial((M + blocks - 1 - core) // blocks):
            row = turn * blocks + core
            T.copy(X[row, 0], x)
            T.copy(COS[row, 0], cos)
            T.copy(SIN[row, 0], sin)
            with T.SimtVF(threads=threads):
                me = T.get_thread_binding()
                v = T.alloc_local((3,), T.float32)
                normalise(x, weight, lane, v, me, eps, threads, N)
                T.sync_threads()
                rotate(x, cos, sin, v, me, N - 2 * R, threads, R)
            T.copy(x, OUT[row, 0])
    return OUT
