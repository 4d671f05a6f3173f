"""Programs that come from the compiler, and the same ones read back from its persistent cache."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator

import jax
import numpy as np
from jax.experimental.compilation_cache import compilation_cache

from deepinfer_jax.determinism import feeding
from deepinfer_jax.determinism.reference import ROW, Setup
from deepinfer_jax.determinism.schedules import Pair

SETTINGS = {
    "jax_enable_compilation_cache": True,
    "jax_persistent_cache_min_compile_time_secs": 0,
    "jax_persistent_cache_min_entry_size_bytes": -1,
}
ROWS = 1


@contextlib.contextmanager
def own_cache() -> Iterator[str]:
    """Compile into a folder of our own inside the context; then everything is as it was."""
    names = ("jax_compilation_cache_dir", *SETTINGS)
    before = {name: jax.config.values[name] for name in names}
    with tempfile.TemporaryDirectory(prefix="deepinfer-jax-compiled-") as folder:
        try:
            for name, value in {**SETTINGS, "jax_compilation_cache_dir": folder}.items():
                jax.config.update(name, value)
            compilation_cache.reset_cache()
            yield folder
        finally:
            for name, value in before.items():
                jax.config.update(name, value)
            compilation_cache.reset_cache()


def compiled(setup: Setup) -> Iterator[Pair]:
    """One program compiled into an empty persistent cache, and again, which reads it from there."""
    model, reference = setup.model, setup.references[0]
    with own_cache():
        for source in ("compiled", "read back"):
            cache = feeding.garbage(model, 1, setup.capacity)
            program, rows = feeding.compiled(), []
            for position in range(len(reference.text)):
                part = [feeding.piece(0, reference.text, position, position + 1)]
                fed, cache = feeding.feed(
                    model, cache, part, ROWS, program=program, names=ROW,
                    sampling=setup.sampling({0: 0}, 1),
                )  # fmt: skip
                rows.append(fed.seen)
            for name in ROW:
                got = [row[name][0] for row in rows[: reference.scored_end(name)]]
                want = reference.row(name, 0, len(reference.text))
                yield Pair(f"{source}, {name}", {name: np.stack(got)}, {name: want})
            state = feeding.visible(model, cache, 0, len(reference.text))
            yield Pair(f"{source}, cache", state, reference.state)
