"""Pictures of what a forward captured (`model.capture`), by layer and token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from deepinfer_jax.plots.style import COLOURS, new_axes, pyplot

_LABEL = 12  # characters of a token below its column


def attended(
    windows: Any, selected: Any = None, ratio: int = 1, axes: Any = None, *, legend: bool = True
) -> Any:
    """Which positions each row of one sequence may attend to, in one layer.

    windows [T, 2] and selected [T, S] of `Captured`, of rows at positions 0 .. T - 1; ratio: tokens
    of an entry. In a row: light what its window holds, dark what was selected, both where both do.
    """
    windows, count = np.asarray(windows), len(windows)
    place = np.arange(count)
    inside = (place >= windows[:, :1]) & (place <= windows[:, 1:])
    chosen = np.zeros((count, count), bool)
    if selected is not None:
        for row, entries in enumerate(np.asarray(selected)):
            entries = entries[entries >= 0]
            tokens = (entries[:, None] * ratio + np.arange(ratio)).ravel()
            chosen[row, tokens[tokens < count]] = True
    if axes is None:
        axes = new_axes("plots.attended", size=(4.4, 4.2))
    colours = pyplot("plots.attended").matplotlib.colors
    kinds = colours.ListedColormap(["white", "#b9d6ea", COLOURS[1], COLOURS[6]])
    axes.imshow(inside + 2 * chosen, cmap=kinds, vmin=-0.5, vmax=3.5)
    axes.set(xlabel="position attended to", ylabel="row (position)")
    axes.grid(False)
    if legend:
        named = {"window": 1, "selected": 2, "both": 3}
        for label, kind in named.items():
            axes.plot([], [], "s", color=kinds(kind), label=label)
        axes.legend(loc="upper right")
    return axes


def expert_load(load: Any, layers: Sequence[int], axes: Any = None) -> Any:
    """Share of a layer's choices that each expert got, as a multiple of an even share.

    load [n, E]: `Captured.router_load`; layers: their numbers.
    """
    load = np.asarray(load, np.float64)
    total = np.sum(load, axis=1, keepdims=True)
    share = load / np.where(total > 0, total, 1) * load.shape[1]
    if axes is None:
        axes = new_axes("plots.expert_load", size=(7, 0.6 + 0.35 * len(load)))
    image = axes.imshow(share, aspect="auto", vmin=0, vmax=max(2.0, float(share.max())))
    axes.set(xlabel="expert", ylabel="layer", yticks=range(len(load)), yticklabels=list(layers))
    axes.set_xticks(range(load.shape[1]))
    axes.grid(False)
    axes.figure.colorbar(image, ax=axes, label="times an even share")
    return axes


def mixes(comb: Any, layers: Sequence[int], axes: Any = None) -> Any:
    """How the streams are mixed: the mean of `comb` [n, ..., C source, C destination] by layer.

    axes: n of them; new ones, side by side, if None.
    """
    comb = np.asarray(comb, np.float64)
    mean = np.mean(comb.reshape(len(comb), -1, *comb.shape[-2:]), axis=1)
    if axes is None:
        size = (1.6 * len(comb) + 0.6, 2.1)
        axes = new_axes("plots.mixes", 1, len(comb), size, squeeze=False, sharey=True)[0]
    for place, (one, layer) in enumerate(zip(axes, layers, strict=True)):
        one.imshow(mean[place], vmin=0, vmax=1)
        for source, destination in np.ndindex(mean.shape[1:]):
            value = mean[place, source, destination]
            colour = "black" if value > 0.6 else "white"
            label = f"{value:.2f}"[1:] if value < 0.995 else "1"
            one.text(destination, source, label, ha="center", va="center", color=colour, size=7)
        one.set(title=f"layer {layer}", xlabel="to", xticks=range(mean.shape[2]))
        one.set_yticks(range(mean.shape[1]))
        one.grid(False)
    axes[0].set_ylabel("from stream")
    return axes


def over_tokens(
    values: Any, pieces: Sequence[str], names: Sequence[Any], label: str, axes: Any = None,
    **shown: Any,
) -> Any:  # fmt: skip
    """Values [K, T] as colours, a row for each of `names`, a column for each token.

    pieces: the texts of the T tokens, below their columns. label: of the colour bar. Other
    arguments are those of `imshow`, such as `vmin` and `cmap`.
    """
    values = np.asarray(values, np.float64)
    if values.shape != (len(names), len(pieces)):
        raise ValueError(
            f"values must have shape [{len(names)}, {len(pieces)}], a row for each name and a "
            f"column for each token, got {list(values.shape)}"
        )
    if axes is None:
        size = (min(12.0, 1.8 + 0.2 * len(pieces)), 1.1 + 0.25 * len(names))
        axes = new_axes("plots.over_tokens", size=size)
    image = axes.imshow(values, aspect="auto", **shown)
    name_tokens(axes, pieces)
    axes.set_yticks(range(len(names)), list(names))
    axes.grid(False)
    axes.figure.colorbar(image, ax=axes, label=label)
    return axes


def name_tokens(axes: Any, pieces: Sequence[str]) -> Any:
    """Write the texts of tokens below the places 0, 1, ... of an axis."""
    labels = [_label(piece) for piece in pieces]
    axes.set_xticks(range(len(pieces)), labels, rotation=90, fontsize=7, family="monospace")
    return axes


def _label(piece: str) -> str:
    """A token's text in twelve characters that every font has."""
    plain = repr(piece.replace("｜", "|").replace("▁", "_"))[1:-1]
    return plain if len(plain) <= _LABEL else plain[: _LABEL - 3] + "..."
