"""Batches of corpus rows, written by other processes while training runs."""

from __future__ import annotations

import pathlib
import queue
import subprocess
import sys
import threading

import numpy as np

from deepinfer_jax.training import dataset

PART_TOKENS = 1 << 25  # tokens that one process run writes
AHEAD = 2  # parts that wait at most: training for a time asks for more than it will use
_PATIENCE = 600.0  # seconds to wait for the next part


class Stream:
    """Rows of `dataset.pack` in parts with seeds of their own, the first part a short one.

    Equal seeds and totals give equal rows in equal order.
    """

    def __init__(self, seed: int, tokens: int, context: int, folder: pathlib.Path) -> None:
        """Begin to write parts into `folder`, `tokens` tokens in all."""
        self._parts: queue.Queue[np.ndarray | Exception] = queue.Queue(AHEAD)
        self._rows = np.zeros((0, context), np.uint16)
        args = (seed, tokens, context, folder)
        threading.Thread(target=self._produce, args=args, daemon=True).start()

    def _produce(self, seed: int, tokens: int, context: int, folder: pathlib.Path) -> None:
        number = 0
        while tokens > 0:
            file = folder / f"rows-{number}.npy"
            size = min(tokens, PART_TOKENS if number else PART_TOKENS // 4)
            numbers = {"tokens": size, "seed": seed * 1000 + number, "context": context}
            command = [sys.executable, "-m", dataset.__name__, "--out", str(file)]
            for name, value in numbers.items():
                command += [f"--{name}", str(value)]
            try:
                subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
                self._parts.put(np.load(file))
                file.unlink()
            except (OSError, subprocess.CalledProcessError) as error:
                self._parts.put(error)
                return
            tokens, number = tokens - size, number + 1
        self._parts.put(EOFError("the stream's tokens are used up; ask for more with --tokens"))

    def take(self, count: int) -> np.ndarray:
        """The next rows [count, context], int32. Raises what kept the rows from being written."""
        while self._rows.shape[0] < count:
            part = self._parts.get(timeout=_PATIENCE)
            if isinstance(part, Exception):
                raise part
            self._rows = np.concatenate([self._rows, part])
        batch, self._rows = self._rows[:count], self._rows[count:]
        return batch.astype(np.int32)
