"""Sizes of the engine: few, so that few programs are compiled. They decide time and memory only."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Sequence

import jax

from deepinfer_jax.cache import Paging
from deepinfer_jax.config import ModelConfig, VisionConfig
from deepinfer_jax.images.gallery import KEPT_BYTES
from deepinfer_jax.images.spans_in_prompt import places_of
from deepinfer_jax.requests import Request
from deepinfer_jax.rows import power_of_two

DEFAULT_SLOTS = 8
PREFILL_ROWS = (32, 256)  # rows of a call that runs prompts
MORE_ROWS = (*PREFILL_ROWS, 1024)  # where there are so many prompts that one more program pays
MANY_ROWS = 32 * MORE_ROWS[-1]
# What a call costs beside its prompt rows, counted in rows: of itself, and for every slot, which
# has a row of its own and is sampled for. Measured on a CPU.
CALL_ROWS, SLOT_ROWS = 32, 2
IMAGE_ROWS = MORE_ROWS  # of a call with images, which have 1,024 at most as released
SHORTEST_CAPACITY = 512  # tokens a slot can hold; longer ones double it
PAGE_TOKENS = 64
STOP_IDS = 4  # end tokens a slot can have; more double it
MOST_STEPS = 16  # rounds before the host looks again


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What an engine has room for.

    slots      requests at work at once
    capacity   most tokens of a sequence, prompt and reply
    pages      pages of global KV, `page_tokens` tokens each
    snapshots  states kept for prompts that begin alike; 0: every prompt is computed from its start
    stop_ids   most ids that end a reply
    edits      whether requests may change their logits (`Options.edits`)
    forced     tokens of a reply that they may force (`golden_token_ids`)
    truncates  whether they may leave improbable tokens out (`Options.truncates`)
    span       most tokens of an image's span; as many as `prefill` has there is always room for
    prefill    rows of the calls that run prompts, ascending
    picture_bytes  memory of the host for encoded pictures that may be shown again

    An engine that is given a request beyond stop_ids, edits, forced or truncates grows, and
    compiles its programs again.
    """

    slots: int
    capacity: int
    pages: int
    page_tokens: int = PAGE_TOKENS
    snapshots: int = 0
    stop_ids: int = STOP_IDS
    edits: bool = False
    forced: int = 0
    truncates: bool = True
    span: int = 0
    prefill: tuple[int, ...] = PREFILL_ROWS
    picture_bytes: int = KEPT_BYTES

    @property
    def step_rows(self) -> int:
        """Prompt rows of a step: those of the longest call."""
        return max(self.prefill[-1], image_rows(self.span))

    @property
    def paging(self) -> Paging:
        """Of the cache."""
        return Paging(self.page_tokens, self.pages)

    def of_part(self, parts: int) -> Sizes:
        """What each of `parts` devices has of it; ValueError where they cannot share evenly."""
        for name in ("slots", "pages", "snapshots"):
            if getattr(self, name) % parts:
                raise ValueError(
                    f"{name} must be a multiple of the {parts} devices of the mesh, got "
                    f"{getattr(self, name)}"
                )
        return dataclasses.replace(
            self, slots=self.slots // parts, pages=self.pages // parts,
            snapshots=self.snapshots // parts,
        )  # fmt: skip

    def of_all(self, parts: int) -> Sizes:
        """What `parts` devices with these sizes have together."""
        return dataclasses.replace(
            self, slots=self.slots * parts, pages=self.pages * parts,
            snapshots=self.snapshots * parts,
        )  # fmt: skip

    @property
    def table(self) -> int:
        """Entries of a slot's page table."""
        return -(-self.capacity // self.page_tokens)


def make_sizes(
    slots: int, capacity: int, cfg: ModelConfig, snapshots: int = 0, stop_ids: int = STOP_IDS,
    ranks: int = 1,
) -> Sizes:  # fmt: skip
    """Sizes with pages for every slot's whole capacity; ranks: devices that share each page."""
    page = capacity
    if capacity > PAGE_TOKENS:
        # So that no entry lies across a boundary, and a page has as many for every device.
        whole = math.lcm(*cfg.ratios) * ranks
        page = -(-PAGE_TOKENS // whole) * whole
    return Sizes(slots, capacity, slots * -(-capacity // page), page, snapshots, stop_ids)


def sizes_for(
    requests: Sequence[Request], cfg: ModelConfig, max_length: int, batch_size: int | None = None,
    parts: int = 1, ranks: int = 1,
) -> Sizes:  # fmt: skip
    """Sizes that hold every one of `requests` (at least one), at most `batch_size` at once.

    parts: devices, or groups of `ranks` devices, that share the requests; the sizes are those of
    one of them.
    """
    slots = slots_for(len(requests), batch_size, parts)
    snapshots = slots if len(requests) > 1 else 0
    capacity = capacity_for(requests, max_length)
    made = make_sizes(slots, capacity, cfg, snapshots, ranks=ranks)
    many = sum(len(request.tokens) for request in requests) >= MANY_ROWS * parts
    made = dataclasses.replace(
        made,
        span=max(span_lengths(requests, cfg.vision), default=0),
        prefill=MORE_ROWS if many else PREFILL_ROWS,
        truncates=not specialised(),
    )
    return grown(made, requests)


def grown(sizes: Sizes, requests: Sequence[Request]) -> Sizes:
    """`sizes` with room for the ends and the edits of these requests."""
    stop_ids, edits, forced = sizes.stop_ids, sizes.edits, sizes.forced
    truncates = sizes.truncates or any(request.options.truncates for request in requests)
    for request in requests:
        golden = len(request.options.golden_token_ids)
        stop_ids = max(stop_ids, power_of_two(_ends(request)))
        edits = edits or request.options.edits
        forced = max(forced, power_of_two(golden) if golden else 0)
    return dataclasses.replace(
        sizes, stop_ids=stop_ids, edits=edits, forced=forced, truncates=truncates
    )


def specialised() -> bool:
    """Whether programs that never truncate are programs of their own, as on a GPU: there the host
    waits for the device wherever a program has to ask. On a CPU asking costs nothing.
    """
    return jax.default_backend() != "cpu"


def slots_for(count: int, batch_size: int | None, parts: int = 1) -> int:
    """Slots for `count` requests, of one device where `parts` share them.

    One for one request, otherwise a power of two that holds them all, at most `batch_size`. Without
    `batch_size` there are DEFAULT_SLOTS whenever there are several, so that a session that asks for
    three replies and then for five compiles once. Idle slots are not free: on a CPU two replies
    among eight slots take 1.5 times as long as among two, which `batch_size=2` gives.
    """
    if batch_size is not None and (isinstance(batch_size, bool) or not isinstance(batch_size, int)):
        raise TypeError(f"batch_size must be an integer, got {batch_size!r}")
    if batch_size is not None and batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    needed = -(-count // parts)
    if batch_size is None:
        return 1 if needed == 1 else DEFAULT_SLOTS
    return min(power_of_two(needed), -(-batch_size // parts))


def capacity_for(requests: Sequence[Request], max_length: int) -> int:
    """Tokens a slot must hold: a doubling of SHORTEST_CAPACITY, at most `max_length`."""
    longest = max(len(r.tokens) + r.options.max_tokens for r in requests)
    return min(max(power_of_two(longest), SHORTEST_CAPACITY), max_length)


def prefill_rows(waiting: int, sizes: Sizes) -> int:
    """Rows of the next prefill call when `waiting` are to run: the first of the calls that together
    cost least.
    """
    return _cheapest(waiting, CALL_ROWS + SLOT_ROWS * sizes.slots, sizes.prefill)[1]


@functools.lru_cache(maxsize=1 << 14)
def _cheapest(waiting: int, beside: int, among: tuple[int, ...]) -> tuple[int, int]:
    """Calls of these sizes for `waiting` rows, each of which costs its rows and `beside`: (cost of
    all, rows of the first). Of two that cost the same, the larger comes first.
    """
    if waiting <= 0:
        return 0, 0
    costs = ((size + beside + _cheapest(waiting - size, beside, among)[0], -size) for size in among)
    cost, size = min(costs)
    return cost, -size


def enough_free(waiting: int, slots: int) -> int:
    """Slots that are to be free before a look ends early for those who wait; 0 for nobody.

    One in eight: the prompts of several fill a call, those of one would leave most of it empty. A
    look is short, so nobody waits for long.
    """
    return min(waiting, max(1, slots // 8))


def span_lengths(requests: Iterable[Request], vision: VisionConfig | None) -> list[int]:
    """Of all images of `requests`, for a model with this tower."""
    if vision is None:
        return []
    return [len(places_of(image, vision)) for each in requests for image in each.images]


def image_rows(length: int) -> int:
    """Rows of a call that holds an image's span of `length` tokens."""
    return next((size for size in IMAGE_ROWS if size >= length), power_of_two(length))


def _ends(request: Request) -> int:
    return 1 + len(request.options.stop_token_ids)
