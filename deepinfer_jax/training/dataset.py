"""Packs the corpus into rows of token ids for training.

Rows are built in shards of 1024 with their own seeds, so the result depends on the arguments and
not on the number of worker processes. Documents are never split: each starts with the begin token,
ends with the end token and lies inside one row; what stays free at the end of a row is padding.

`python -m deepinfer_jax.training.dataset --tokens 60_000_000 --seed 1 --out train.npy`
"""

import argparse
import itertools
import multiprocessing
import pathlib
from collections.abc import Iterator

import numpy as np
import tokenizers

from deepinfer_jax.training import corpus
from deepinfer_jax.training.corpus import chat, library
from deepinfer_jax.training.corpus.draw import Draw
from deepinfer_jax.training.encoder import PieceEncoder

BOS, EOS, PAD, SYSTEM, USER, ASSISTANT = range(6)
CONTEXT = 512
SHARD_ROWS = 1024
TOKENIZER = pathlib.Path(__file__).parents[1] / "assets" / "spark-tiny" / "tokenizer.json"
_OPEN_ROWS = 24


def pack(
    seed: int,
    tokens_total: int,
    context: int = CONTEXT,
    split: corpus.Split = "train",
    workers: int = 1,
    library_share: float = 0.06,
) -> np.ndarray:
    """Packed training rows, uint16 [N, context] with N = ceil(tokens_total / context).

    `library_share` is the share of documents that come from Python's standard library (none in the
    held-out split). More than one worker starts processes by spawning: call it then from a module
    whose main part is guarded. Raises ValueError for impossible numbers.
    """
    if seed < 0 or tokens_total < 1 or workers < 1 or not 0 <= library_share < 1:
        raise ValueError(
            "pack needs seed >= 0, tokens_total >= 1, workers >= 1 and 0 <= library_share < 1, got "
            f"{seed}, {tokens_total}, {workers}, {library_share}"
        )
    rows = -(-tokens_total // context)
    out = np.empty((rows, context), np.uint16)
    prose = [] if split == "heldout" or not library_share else _prose(context)
    setup = (seed, context, split, library_share if prose else 0.0, prose)
    starts = range(0, rows, SHARD_ROWS)
    jobs = [(index, min(SHARD_ROWS, rows - start)) for index, start in enumerate(starts)]
    for start, shard in zip(starts, _shards(setup, jobs, workers), strict=True):
        out[start : start + len(shard)] = shard
    return out


def answer_mask(tokens: np.ndarray) -> np.ndarray:
    """Which tokens a model has to write itself, bool [N, T] for rows `tokens` [N, T].

    True for replies (reasoning, answer and end token; the tag that opens the reply belongs to the
    prompt) and for all of a plain document but its begin token; False for prompts and padding.
    """
    following = np.roll(tokens, -1, axis=1)
    following[:, -1] = SYSTEM
    begins = tokens == BOS
    plain = begins & (following != SYSTEM) & (following != USER)
    opens = plain | (tokens == ASSISTANT)
    events = begins | opens | (tokens == EOS)
    place = np.where(events, np.arange(tokens.shape[1], dtype=np.int32), -1)
    place = np.roll(np.maximum.accumulate(place, axis=1), 1, axis=1)
    place[:, 0] = -1  # now the latest event strictly before each position
    inside = np.take_along_axis(opens, np.maximum(place, 0), axis=1) & (place >= 0)
    tag = np.roll(tokens == ASSISTANT, 1, axis=1)
    tag[:, 0] = False
    return inside & ~tag & (tokens != PAD)


def _shards(setup: tuple, jobs: list[tuple[int, int]], workers: int) -> Iterator[np.ndarray]:
    """Every shard in order; a job is the number of a shard and of its rows."""
    if workers == 1 or len(jobs) == 1:
        _start(*setup)
        yield from map(_shard, jobs)
        return
    context = multiprocessing.get_context("spawn")
    with context.Pool(min(workers, len(jobs)), _start, setup) as pool:
        yield from pool.imap(_shard, jobs)


_setup: tuple  # of this process, set once by _start


def _start(*setup) -> None:
    global _setup
    _setup = (*setup, PieceEncoder(load_tokenizer()))


def _shard(job: tuple[int, int]) -> np.ndarray:
    """The first rows of one shard: uint16 [rows, context]."""
    index, rows = job
    seed, context, split, share, prose, encoder = _setup
    documents = _documents(seed << 24 | index, split, share, prose, encoder)
    out = np.full((rows, context), PAD, np.uint16)
    for row, parts in zip(out, _rows(documents, context), strict=False):
        ids = list(itertools.chain.from_iterable(parts))
        row[: len(ids)] = ids
    return out


def _documents(
    seed: int, split: corpus.Split, share: float, prose: list[list[int]], encoder: PieceEncoder
) -> Iterator[list[int]]:
    """Endless documents as lists of ids."""
    draw = Draw(seed ^ 0x5EED)
    for example in corpus.examples(seed, split):
        if share and draw.chance(share):
            yield draw.pick(prose)
        yield encoder.encode(chat.document_text(example))


def _rows(documents: Iterator[list[int]], context: int) -> Iterator[list[list[int]]]:
    """Documents of each full row: best fit into a few open rows, the fullest closes first."""
    open_rows: list[list[list[int]]] = [[]]
    free = [context]
    for document in documents:
        size = len(document)
        if size > context:
            continue
        fits = [space for space in free if space >= size]
        if not fits:
            if len(free) == _OPEN_ROWS:
                fullest = free.index(min(free))
                free.pop(fullest)
                yield open_rows.pop(fullest)
            free.append(context)
            open_rows.append([])
            fits = [context]
        row = free.index(min(fits))
        free[row] -= size
        open_rows[row].append(document)


def _prose(context: int) -> list[list[int]]:
    """The library's documents that fit into a row, as ids."""
    encoder = PieceEncoder(load_tokenizer())
    encoded = map(encoder.encode, library.documents())
    return [ids for ids in encoded if len(ids) <= context - 32]


def load_tokenizer() -> tokenizers.Tokenizer:
    """The tokenizer of spark-tiny."""
    return tokenizers.Tokenizer.from_file(str(TOKENIZER))


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, required=True, help="positions, padding included")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=pathlib.Path, required=True, help=".npy file, uint16")
    parser.add_argument("--context", type=int, default=CONTEXT)
    parser.add_argument("--split", choices=("train", "heldout"), default="train")
    parser.add_argument("--workers", type=int, default=multiprocessing.cpu_count())
    parser.add_argument("--library-share", type=float, default=0.06)
    options = parser.parse_args()
    tokens = pack(
        options.seed,
        options.tokens,
        options.context,
        options.split,
        options.workers,
        options.library_share,
    )
    np.save(options.out, tokens)
    filled = np.count_nonzero(tokens != PAD) / tokens.size
    print(f"{options.out}: {tokens.shape[0]} rows of {tokens.shape[1]}, {filled:.1%} filled")


if __name__ == "__main__":
    main()
