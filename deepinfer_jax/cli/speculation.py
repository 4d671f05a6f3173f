"""The option `--speculative`: which policy of the drafter a command runs with."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepinfer_jax.cli.compiled import cache_folder
from deepinfer_jax.cli.refusal import Refused

if TYPE_CHECKING:
    from deepinfer_jax.loading import Model
    from deepinfer_jax.planning.policies import Policy


def add_option(add: Any) -> None:
    """Declare `--speculative`."""
    add(
        "--speculative",
        default="off",
        metavar="HOW",
        help="use the model's drafter: a number of drafts; threshold:P verifies drafts accepted "
        "with probability P or more; planner[:FILE] decides by times that `deepinfer-jax profile` "
        "measured; off (default). Changes the speed, no token and no bit",
    )


def check_option(how: str) -> None:
    """Raise Refused unless `how` is one of the forms, before anything is loaded."""
    kind, _, rest = how.partition(":")
    if kind in ("off", "planner") and (kind == "planner" or not rest):
        return
    if kind.isdecimal() and kind.isascii() and not rest:
        return
    try:
        if kind == "threshold" and 0 <= float(rest) <= 1:
            return
    except ValueError:
        pass
    raise Refused(
        "--speculative must be off, a number of drafts, threshold:P with P in [0, 1], or "
        f"planner[:FILE], got {how!r}"
    )


def policy_of(how: str, model: Model, slots: int) -> Policy:
    """The policy that `--speculative` names, for a run of `slots` slots.

    Raises Refused where it does not fit the model or the slots.
    """
    from deepinfer_jax.planning import load_table, policies

    kind, _, rest = how.partition(":")
    heat = model.confidence_temperatures
    try:
        if kind == "threshold":
            policy = policies.Threshold(float(rest), heat)
        elif kind == "planner":
            path = Path(rest) if rest else table_file(model)
            table = load_table(path, **measured_with(model))
            policy = policies.Planner(table, heat)
        else:
            policy = policies.OFF if kind == "off" else policies.Fixed(int(kind))
        policy.start(slots, model.cfg.most_drafts)
    except (ValueError, OSError) as error:
        said = str(error).replace("`deepinfer-jax profile", f"`{_profiling(rest, model)}")
        raise Refused(f"--speculative {how}: {said}") from None
    return policy


def _profiling(file: str, model: Model) -> str:
    """The command that measures what is missing here: bare, it measures `spark-tiny`."""
    import jax

    from deepinfer_jax.numerics import rows_for

    name = [] if model.name == "spark-tiny" else [model.name]
    form = model.numerics.rows
    rows = [] if form == rows_for(jax.default_backend()) else ["--rows", form]
    out = ["--out", file] if file else []
    return shlex.join(["deepinfer-jax", "profile", *name, *rows, *out])


def measured_with(model: Model) -> dict[str, str]:
    """What a table of step times must be of to be used here."""
    from deepinfer_jax import profiling

    return {
        "model": profiling.model_fingerprint(model),
        "hardware": profiling.hardware(),
        "numerics": model.numerics.fingerprint(),
    }


def table_file(model: Model) -> Path:
    """Where the step times of a model are kept unless a file is named."""
    from deepinfer_jax import profiling

    name = f"{profiling.model_fingerprint(model)}-{model.numerics.fingerprint()}.json"
    return cache_folder() / "step-times" / name
