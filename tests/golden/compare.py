"""Comparisons of produced arrays with recorded ones: NumPy only, messages that say where.

Every check takes `got` and `want` of one recorded shape and returns None or a sentence naming the
array, how many elements are off and the first of them in the order of computation.
"""

from __future__ import annotations

import numpy as np

from tests.golden.reader import Arrays

# Names of the axes of recorded arrays, by the last part of the name that is not a number.
AXES = {
    "logits": ("batch", "position", "token"),
    "argmax": ("batch", "position"),
    "block0_in": ("batch", "position", "feature"),
    "after_engram": ("batch", "position", "copy", "feature"),
    "block_out": ("layer", "batch", "position", "copy", "feature"),
    "pre_mix": ("layer", "batch", "position", "copy"),
    "attn_out": ("layer", "batch", "position", "feature"),
    "ffn_out": ("layer", "batch", "position", "feature"),
    "final_norm": ("batch", "position", "feature"),
    "main_hidden": ("batch", "position", "feature"),
    "router_w": ("layer", "batch", "position", "rank"),
    "router_i": ("layer", "batch", "position", "rank"),
    "engram_hash": ("batch", "position", "engram", "column"),
    "index_topk": ("batch", "position", "rank"),
    "index_score": ("batch", "position", "group"),
    "candidate_blocks": ("batch", "position", "block"),
    "output_ids": ("draft", "batch", "step"),
}
# Recorded at `prefill.pos` and `decode.steps` only.
SPARSE = (
    "block0_in after_engram block_out pre_mix attn_out ffn_out final_norm main_hidden router_w"
).split()
# Recorded to judge near ties or to say what is recorded; nothing that a model produces.
NOTES = ("pos", "logits_pos", "steps", "router_gap", "index_gap", "block_gap")
# What a column means that lies past the recorded capacity.
EMPTY = {"candidate_blocks": 0, "index_score": -np.inf}
CHOICES = ("argmax", "router_i", "engram_hash", "index_topk", "candidate_blocks", "output_ids")


def kind(name: str) -> str:
    """`prefill.index_topk.3` -> `index_topk`: what an array holds, without stage and layer."""
    return name.split(".")[1]


def is_choice(name: str) -> bool:
    """True for recorded decisions, which must be equal; False for numbers, which may be close."""
    return kind(name) in CHOICES


def recorded(golden: Arrays, stage: str) -> list[str]:
    """Names of the arrays of one stage that a model must produce, in a stable order."""
    names = [n for n in golden if n.split(".")[0] == stage and kind(n) not in NOTES]
    return sorted(names)


def place(name: str, index: tuple[int, ...]) -> str:
    """An index in words, `layer 2, batch 0, position 17`."""
    labels = AXES.get(kind(name), ())
    if len(labels) != len(index):
        return f"index {index}"
    return ", ".join(f"{label} {i}" for label, i in zip(labels, index, strict=True))


def _report(name: str, bad: np.ndarray, got: np.ndarray, want: np.ndarray, rule: str) -> str:
    first = tuple(int(i) for i in np.argwhere(bad)[0])
    return (
        f"{name}: {int(bad.sum())} of {bad.size} {rule}; first at {place(name, first)}: "
        f"got {got[first]}, recorded {want[first]}"
    )


def shapes(name: str, got: np.ndarray, want: np.ndarray) -> str | None:
    """A sentence when the shapes differ."""
    if got.shape == want.shape:
        return None
    return f"{name}: shape {got.shape}, recorded {want.shape}"


def close(name: str, got: np.ndarray, want: np.ndarray, bound: float) -> str | None:
    """Within `bound` absolutely; infinities must be the same ones; a NaN is never close."""
    if problem := shapes(name, got, want):
        return problem
    with np.errstate(invalid="ignore"):
        bad = ~((np.abs(got - want) <= bound) | (got == want))
    if not bad.any():
        return None
    finite = np.isfinite(got) & np.isfinite(want)
    worst = np.abs(got[finite] - want[finite]).max(initial=0.0)
    return _report(name, bad, got, want, f"beyond {bound:g} (largest {worst:.3g})")


def equal(name: str, got: np.ndarray, want: np.ndarray) -> str | None:
    """Every decision the same."""
    if problem := shapes(name, got, want):
        return problem
    bad = got != want
    return _report(name, bad, got, want, "decisions differ") if bad.any() else None


def mostly_equal(
    name: str, got: np.ndarray, want: np.ndarray, share: float, largest: float
) -> str | None:
    """At least `share` of the elements equal, most rows entirely equal, none beyond `largest`.

    A row is the last axis. The median over rows of a row's largest difference must be zero.
    """
    if problem := shapes(name, got, want):
        return problem
    same = float((got == want).mean())
    rows = np.abs(got - want).reshape(-1, got.shape[-1]).max(axis=-1)
    worst, median = float(rows.max()), float(np.median(rows))
    if same >= share and median == 0.0 and worst <= largest:
        return None
    return (
        f"{name}: {100 * same:.2f} % equal (need {100 * share:g}), median row difference "
        f"{median:.3g} (need 0), largest {worst:.3g} (at most {largest:g})"
    )


def chosen_rows(rows: np.ndarray, width: int) -> np.ndarray:
    """Sets of positions in the recorded form: ascending, then -1, cut or filled to `width`.

    More valid entries than `width` stay visible as a wider array, which then fails the comparison.
    """
    high = np.iinfo(np.int64).max
    ordered = np.sort(np.where(rows < 0, high, rows.astype(np.int64)), axis=-1)
    keep = max(width, int((ordered != high).sum(axis=-1, dtype=np.int64).max(initial=0)))
    fill = np.full((*ordered.shape[:-1], max(0, keep - ordered.shape[-1])), high)
    wide = np.concatenate([ordered, fill], axis=-1)[..., :keep]
    return np.where(wide == high, -1, wide)


def block_mask(ids: np.ndarray, width: int) -> np.ndarray:
    """Block numbers [..., n] (-1: none) -> 0/1 over `width` blocks; a number past it raises."""
    mask = np.zeros((*ids.shape[:-1], width + 1), np.int64)
    np.put_along_axis(mask, np.where(ids < 0, width, ids).astype(np.int64), 1, axis=-1)
    return mask[..., :width]


def cut(value: np.ndarray, width: int, empty: float) -> np.ndarray:
    """Without trailing columns that a longer capacity adds; kept where one of them is not empty."""
    return value[..., :width] if (value[..., width:] == empty).all() else value


def comparable(name: str, got: np.ndarray, want: np.ndarray) -> np.ndarray:
    """`got` in the recorded form: sets ordered, columns of a longer capacity cut."""
    if kind(name) == "index_topk":
        return chosen_rows(got, want.shape[-1])
    return cut(got, want.shape[-1], EMPTY[kind(name)]) if kind(name) in EMPTY else got


def position_axis(name: str) -> int:
    """Which axis of a recorded array runs over positions."""
    return AXES[kind(name)].index("position")


def recorded_positions(golden: Arrays, name: str) -> np.ndarray | None:
    """Positions (prefill) or steps (decode) at which `name` is recorded; None: everywhere."""
    if name == "prefill.logits":
        return golden.wide("prefill.logits_pos")
    if name.startswith("prefill.") and kind(name) in SPARSE:
        return golden.wide("prefill.pos")
    if name.startswith("decode.") and kind(name) in SPARSE:
        return golden.wide("decode.steps")
    if kind(name) == "index_score":
        return golden.wide("prefill.pos")[-4:]
    return None


def check(golden: Arrays, produced: Arrays, name: str, bound: float) -> str | None:
    """The rule for one recorded array: decisions equal, numbers within `bound`.

    `produced` holds the same name at every position; the recorded ones are picked here.
    """
    if name not in produced:
        return f"{name}: recorded, but the model did not produce it"
    got, want = produced.wide(name), golden.wide(name)
    where = recorded_positions(golden, name)
    if where is not None:
        got = np.take(got, where, axis=position_axis(name))
    if name.startswith("dspark."):  # some arrays are recorded for the first two drafts only
        got = got[: len(want)]
    got = comparable(name, got, want)
    if is_choice(name):
        return equal(name, got, want)
    return close(name, got, want, bound)


def check_cache(
    golden: Arrays, produced: Arrays, name: str, length: int, bound: float
) -> str | None:
    """The rule for one recorded cache array; `length` tokens had been fed.

    Left out: pooling slots past the unfinished group (stale or initial), and in `cache_end` the
    draft ring's slot of the last position, whose draft would need one more token.
    """
    got, want = produced.wide(name), golden.wide(name)
    if name.startswith("cache_end_tail."):
        got = got[:, -want.shape[1] :]
    if kind(name) in ("comp_kv_state", "comp_score_state"):
        unfinished = length % want.shape[1]
        got, want = got[:, :unfinished], want[:, :unfinished]
    if name.startswith("cache_end.mtp_window_kv."):
        slots = np.arange(want.shape[1]) != (length - 1) % want.shape[1]
        got, want = got[:, slots], want[:, slots]
    return close(name, got, want, bound)


def error_per_position(got: np.ndarray, want: np.ndarray) -> np.ndarray:
    """Largest difference of the logits [B, n, V] of each position -> [B, n]."""
    return np.abs(got - want).max(axis=-1)


def first_flip(error: np.ndarray, bound: float, flipped: float) -> int:
    """How many positions precede the first flip: an error above `flipped`, or the rise to one.

    A position over `bound` belongs to the rise when the next one goes on into the flip; standing
    alone it is an error of the model, and stays in the stretch that must keep within `bound`.
    """
    over = np.flatnonzero(error > flipped)
    count = int(over[0]) if over.size else len(error)
    while over.size and count and error[count - 1] > bound:
        count -= 1
    return count
