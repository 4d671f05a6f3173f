"""Sparse attention of queries over listed rows, with a sink, for the vector cores of Ascend 950.

A task is one query and a group of its heads. All scores of the group stay in the unified buffer, so
there is one maximum and no rescaling, and a list of keys is never split among cores: the order of
every sum is that of the list. Rows are gathered twice, for scores and for values.

Products are made by the vector cores: what the cube cores would make of them, and in which order
they would add, is not known here.
"""
# pyright: reportMissingImports=false, reportInvalidTypeForm=false, reportRedeclaration=false

import tilelang
import tilelang.ascend.language as T


@T.macro
def gather(ROWS, ids, key, first, keys, S, N, D):
    """Rows of ids first .. first + keys - 1 into key [keys, D]; zeros for nobody."""
    for j, d in T.Parallel(keys, D):
        if first + j < S:
            at = ids[first + j]
            if at >= 0 and at < N:
                key[j, d] = ROWS[at, d]
            else:
                key[j, d] = T.cast(0.0, T.bfloat16)


@T.macro
def scores(q, key, score, v, scale, first, group, keys, S, D):
    """Scaled products of queries and gathered rows, each in the order of the vectors."""
    for i, j in T.Parallel(group, keys):
        if first + j < S:
            v[0] = 0.0
            for d in T.serial(D):
                v[0] = v[0] + T.cast(q[i, d], T.float32) * T.cast(key[j, d], T.float32)
            score[i, first + j] = v[0] * scale


@T.macro
def weights(ids, score, top, mass, v, group, S, N):
    """Scores become exp(score - top), zero for nobody; their sum in the order of the list."""
    for i in T.Parallel(group):
        v[0] = -T.infinity(T.float32)
        for j in T.serial(S):
            if ids[j] >= 0 and ids[j] < N:
                v[0] = T.max(v[0], score[i, j])
        top[i] = T.if_then_else(v[0] == -T.infinity(T.float32), 0.0, v[0])
    for i, j in T.Parallel(group, S):
        if ids[j] >= 0 and ids[j] < N:
            score[i, j] = T.exp(score[i, j] - top[i])
        else:
            score[i, j] = 0.0
    for i in T.Parallel(group):
        v[0] = 0.0
        for j in T.serial(S):
            v[0] = v[0] + score[i, j]
        mass[i] = v[0]


@T.macro
def add_values(key, score, value, v, first, group, keys, S, D):
    """Adds weighted rows in the order of the list."""
    for i, d in T.Parallel(group, D):
        v[0] = value[i, d]
        for j in T.serial(T.min(keys, S - first)):
            v[0] = v[0] + score[i, first + j] * T.cast(key[j, d], T.float32)
        value[i, d] = v[0]


@T.macro
def finish(value, mass, top, sink, out, lse, group, D):
    """Quotients with the sink, logarithms without."""
    for i, d in T.Parallel(group, D):
        total = T.if_then_else(mass[i] > 0.0, mass[i] + T.exp(sink[i] - top[i]), 1.0)
        out[i, d] = T.cast(value[i, d] / total, T.bfloat16)
    for i in T.Parallel(group):
        lse[i] = T.if_then_else(mass[i] > 0.0, T.log(mass[i]) + top[i], -T.infinity(T.float32))


@tilelang.jit(target="ascend", compile_flags=["-ffp-contract=off"])
def attend_rows(Q, ROWS, IDS, SINK, scale: float, group: int, keys: int, threads: int, blocks: int):
    """Q [M, H, D] and ROWS [N, D] bfloat16, IDS [M, S] int32 into ROWS, SINK [H] float32 ->
    OUT [M, H, D] bfloat16, LSE [M, H] float32.

    An id outside of ROWS is nobody. group: heads of a task; keys: rows gathered at once.
    """
    M, N = T.dynamic("M"), T.dynamic("N")
    H, D, S = T.const("H, D, S")
    Q: T.Tensor((M, H, D), T.bfloat16)
    ROWS: T.Tensor((N, D), T.bfloat16)
    IDS: T.Tensor((M, S), T.int32)
    SINK: T.Tensor((H,), T.float32)
    OUT, LSE = T.empty((M, H, D), T.bfloat16), T.empty((M, H), T.float32)
    parts = H // group
    with T.Kernel(blocks) as core:
        q, ids = T.alloc_shared((group, D), T.bfloat16), T.alloc_shared((S,), T.int32)
        sink, top = T.alloc_shared((group,), T.float32), T.alloc_shared((group,), T.float32)
        mass, lse = T.alloc_shared((group,), T.float32), T.alloc_shared((group,), T.float32)
        key, score = T.alloc_shared((keys, D), T.bfloat16), T.alloc_shared((group, S), T.float32)
        value, out = T.alloc_shared((group, D), T.float32), T.alloc_shared((group, D), T.bfloat16)
        for turn in T.serial((M * parts + blocks - 1 - core) // blocks):
            row = (turn * blocks + core) // parts
            head = (turn * blocks + core) % parts * group
            T.copy(Q[row, head, 0], q)
            T.copy(IDS[row, 0], ids)
            T.copy(SINK[head], sink)
            with T.SimtVF(threads=threads):
                v = T.alloc_local((1,), T.float32)
                for b in T.serial(T.ceildiv(S, keys)):
                    gather(ROWS, ids, key, b * keys, keys, S, N, D)
                    scores(q, key, score, v, scale, b * keys, group, keys, S, D)
                weights(ids, score, top, mass, v, group, S, N)
                for i, d in T.Parallel(group, D):
                    value[i, d] = 0.0
                for b in T.serial(T.ceildiv(S, keys)):
                    gather(ROWS, ids, key, b * keys, keys, S, N, D)
                    add_values(key, score, value, v, b * keys, group, keys, S, D)
                finish(value, mass, top, sink, out, lse, group, D)
            T.copy(out, OUT[row, head, 0])
            T.copy(lse, LSE[row, head])
    return OUT, LSE
