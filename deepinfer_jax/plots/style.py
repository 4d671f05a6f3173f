"""How all pictures look: colours that most eyes tell apart, thin frames, quiet grids."""

from __future__ import annotations

from typing import Any

# Told apart with any of the common colour deficiencies, and by lightness when printed in grey.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#444444")
_PARAMETERS = {
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlesize": "medium",
    "figure.constrained_layout.use": True,
    "figure.dpi": 90,
    "grid.alpha": 0.3,
    "image.cmap": "cividis",
    "image.interpolation": "nearest",
    "legend.frameon": False,
    "legend.fontsize": "small",
}


def pyplot(drawer: str) -> Any:
    """matplotlib's, for the function called `drawer`. Raises ImportError where it is missing."""
    try:
        from matplotlib import pyplot as found  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ImportError(
            f"{drawer} draws with matplotlib, which is not installed; "
            'install it with pip install "deepinfer-jax[notebooks]"'
        ) from error
    return found


def parameters(found: Any) -> dict[str, Any]:
    """matplotlib's parameters of the style; `found`: its `pyplot`."""
    return {**_PARAMETERS, "axes.prop_cycle": found.cycler(color=COLOURS)}


def use_style() -> None:
    """Draw everything from now on in the style of these pictures. Raises ImportError without
    matplotlib.
    """
    found = pyplot("use_style")
    found.rcParams.update(parameters(found))


def new_axes(
    drawer: str, rows: int = 1, columns: int = 1, size: tuple[float, float] = (6, 3.6), **more: Any
) -> Any:
    """New axes in the style: one, or an array where there are several."""
    found = pyplot(drawer)
    with found.rc_context(parameters(found)):
        return found.subplots(rows, columns, figsize=size, **more)[1]
