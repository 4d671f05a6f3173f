"""`deepinfer-jax profile`: how long rounds take here, for the planner of speculative decoding."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepinfer_jax.cli.compiled import cache_folder, use_compilation_cache
from deepinfer_jax.cli.device import require_device
from deepinfer_jax.cli.refusal import Refused

if TYPE_CHECKING:
    from deepinfer_jax.loading import Model
    from deepinfer_jax.planning.policies import Policy

_DESCRIPTION = """\
Compile and time decoding with and without drafts, by the number of slots and of rows verified, and
keep the times for `generate --speculative planner`. A table belongs to one model, device and
numerics; another one is refused there. Times depend on nothing else running meanwhile.
"""
_SLOTS = (1, 8)


def add_command(commands: Any) -> None:
    """Declare the command and its arguments."""
    parser = commands.add_parser(
        "profile",
        help="measure step times, for --speculative planner",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    add = parser.add_argument
    add("--model", default="spark-tiny", metavar="NAME|DIR", help="default spark-tiny")
    add("--slots", type=int, nargs="+", default=list(_SLOTS), metavar="N", help="requests at once "
        "(`generate --batch-size`); default 1 8")  # fmt: skip
    add("--out", type=Path, metavar="FILE", help="default: a file in the user's cache folder")


def run(args: argparse.Namespace) -> int:
    """Measure; returns the exit status. Raises Refused for input that cannot be run."""
    from deepinfer_jax import loading, profiling
    from deepinfer_jax.planning import save_table

    require_device()
    use_compilation_cache()
    try:
        model = loading.load(args.model)
        path = args.out or _table_file(model)
        path.parent.mkdir(parents=True, exist_ok=True)
        table = profiling.measure(model, args.slots, lambda text: print(text, file=sys.stderr))
    except (ValueError, OSError) as error:
        raise Refused(str(error)) from None
    save_table(path, table)
    print(path)
    return 0


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


def policy_of(how: str, model: Model) -> Policy:
    """The policy that `--speculative` names. Raises Refused where it does not fit the model."""
    from deepinfer_jax import profiling
    from deepinfer_jax.planning import load_table, policies

    kind, _, rest = how.partition(":")
    if kind == "threshold":
        return policies.Threshold(float(rest), model.confidence_temperatures)
    if kind != "planner":
        return policies.OFF if kind == "off" else policies.Fixed(int(kind))
    path = Path(rest) if rest else _table_file(model)
    try:
        table = load_table(
            path,
            model=profiling.model_fingerprint(model.cfg),
            hardware=profiling.hardware(),
            numerics=model.numerics.fingerprint(),
        )
    except (ValueError, OSError) as error:
        raise Refused(str(error)) from None
    return policies.Planner(table, model.confidence_temperatures)


def _table_file(model: Model) -> Path:
    from deepinfer_jax import profiling

    name = f"{profiling.model_fingerprint(model.cfg)}-{model.numerics.fingerprint()}.json"
    return cache_folder() / "step-times" / name
