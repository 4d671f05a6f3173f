"""`deepinfer-jax profile`: how long rounds take here, for the planner of speculative decoding."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepinfer_jax.cli.compiled import use_compilation_cache
from deepinfer_jax.cli.device import add_rows, require_device
from deepinfer_jax.cli.refusal import Refused
from deepinfer_jax.cli.speculation import measured_with, table_file

if TYPE_CHECKING:
    from deepinfer_jax.loading import Model
    from deepinfer_jax.planning import CostTable

_DESCRIPTION = """\
Compile and time decoding with and without drafts, by the number of slots and of rows verified, and
keep the times for `generate --speculative planner`. A table belongs to one model, device and
numerics; another one is refused there. Times depend on nothing else running meanwhile.
"""
_SLOTS = (1, 2, 4, 8)  # what `generate` uses without --batch-size


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
    add("named", nargs="?", metavar="MODEL", help="name or folder; default spark-tiny")
    add("--model", metavar="NAME|DIR", help="the same, as of `generate`")
    add_rows(parser)
    add("--slots", type=int, nargs="+", default=list(_SLOTS), metavar="N", help="requests at once "
        "(`generate --batch-size`); default 1 2 4 8")  # fmt: skip
    add("--out", type=Path, metavar="FILE", help="default: a file in the user's cache folder; "
        "other numbers of slots that it holds are kept")  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Measure; returns the exit status. Raises Refused for input that cannot be run."""
    from deepinfer_jax import loading, profiling
    from deepinfer_jax.planning import merged, save_table

    if args.named is not None and args.model is not None:
        raise Refused(f"give the model once, got {args.named!r} and --model {args.model!r}")
    name = args.named or args.model or "spark-tiny"
    require_device()
    use_compilation_cache()
    try:
        model = loading.load(name, rows=args.rows)
        path = args.out or table_file(model)
        path.parent.mkdir(parents=True, exist_ok=True)
        known = _known(path, model)
        table = profiling.measure(model, args.slots, lambda text: print(text, file=sys.stderr))
        save_table(path, table if known is None else merged(table, known))
    except (ValueError, OSError) as error:
        raise Refused(str(error)) from None
    print(path)
    return 0


def _known(path: Path, model: Model) -> CostTable | None:
    """The table that is there already, to which this one is added; that of another is refused."""
    from deepinfer_jax.planning import load_table

    if path.exists():
        return load_table(path, **measured_with(model))
    path.touch()  # what cannot be written is found out before measuring
    path.unlink()
    return None
