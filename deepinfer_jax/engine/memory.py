"""How much of the device an engine takes, planned before anything is allocated."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import jax

from deepinfer_jax import cache as caches
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.engine.programs import idle_edits
from deepinfer_jax.engine.sizes import Sizes
from deepinfer_jax.numerics import Numerics

SHARE = 0.8  # of the free memory; the rest is for the intermediate values of a step


def free_bytes() -> int | None:
    """Free memory of the default device; None where it cannot be told."""
    device = jax.local_devices()[0]
    stats: Any = device.memory_stats() or {}
    if "bytes_limit" in stats:
        return stats["bytes_limit"] - stats["bytes_in_use"]
    return _available() if device.platform == "cpu" else None


def _available() -> int | None:
    """What Linux could hand out, files that it keeps in memory included; None elsewhere."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    found = [line.split() for line in lines if line.startswith("MemAvailable:")]
    return 1024 * int(found[0][1]) if found else None


@dataclasses.dataclass(frozen=True)
class Need:
    """Bytes: of one page of global KV, of the state of one slot or snapshot beside it, and of what
    one slot changes of its logits.
    """

    page: int
    slot: int
    edits: int = 0


def need(cfg: ModelConfig, numerics: Numerics, sizes: Sizes, ranks: int = 1) -> Need:
    """What `sizes` are made of, from the shapes of the cache; of a page what each of the `ranks`
    devices has that share it.
    """
    paging = caches.Paging(sizes.page_tokens, 1)
    one = caches.cache_shapes(cfg, numerics, 1, sizes.capacity, paging=paging, ranks=ranks)

    def nbytes(tree: Any) -> int:
        return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))

    page = nbytes((one.kv, one.keys))
    single = dataclasses.replace(sizes, slots=1)
    own = jax.eval_shape(lambda: idle_edits(single, cfg.vocab_size)) if sizes.edits else None
    return Need(page // ranks, nbytes(one) - page, nbytes(own))


def fitted(
    sizes: Sizes, cfg: ModelConfig, numerics: Numerics, free: int | None, ranks: int = 1
) -> Sizes:
    """`sizes` with no more pages than fit into SHARE of `free` bytes beside the slots' state, on
    each of `ranks` devices that share them.

    With fewer pages than every slot could fill, requests share what there is, and the last to come
    are computed again when it runs short.

    Raises ValueError, with the arithmetic, where not even one sequence of `sizes.capacity` fits.
    """
    if free is None:
        return sizes
    each = need(cfg, numerics, sizes, ranks)
    state = (sizes.slots + sizes.snapshots) * each.slot + sizes.slots * each.edits
    room = int(SHARE * free) - state
    pages = min(sizes.pages, max(room, 0) // each.page) if each.page else sizes.pages
    if pages < sizes.table:
        raise ValueError(
            f"one sequence of {sizes.capacity} tokens needs {sizes.table} pages of {each.page:,} "
            f"bytes beside {sizes.slots} slots and {sizes.snapshots} snapshots of {each.slot:,} "
            f"bytes{_edits(each)}, {state + sizes.table * each.page:,} in all; {SHARE:.0%} of the "
            f"device's free {free:,} bytes are not enough: lower batch_size or max_tokens"
        )
    return dataclasses.replace(sizes, pages=pages)


def _edits(each: Need) -> str:
    """In the arithmetic, where requests change their logits."""
    return f" and edits of {each.edits:,} bytes a slot" if each.edits else ""
