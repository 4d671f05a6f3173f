"""`deepinfer-jax kernels`: what runs on this machine or another, and why nothing else does."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from deepinfer_jax.cli.device import require_device
from deepinfer_jax.cli.refusal import Refused

if TYPE_CHECKING:
    from kernels_bridge.registry import Explanation

_DESCRIPTION = """\
Print, for every operation, which implementation runs here, and of each other one why it will not.
The engine's own operations come first: their names are those of --rows. The others are asked for
by name from Python (docs/kernels.md).
"""


def add_command(commands: Any) -> None:
    """Declare the command and its arguments."""
    parser = commands.add_parser(
        "kernels",
        help="which kernels run here, and why others do not",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    add = parser.add_argument
    add("operation", nargs="*", metavar="OPERATION", help="default: all of them")
    add("--platform", metavar="NAME", help="of another machine with the libraries of this one: "
        "cpu, gpu, tpu, h100, h200, b200, ascend950, or the architecture of an NVIDIA GPU, as sm_90"
    )  # fmt: skip
    add("--any-bits", action="store_true", help="also what makes a row's bits depend on others")


def run(args: argparse.Namespace) -> int:
    """Print the table; returns the exit status. Raises Refused for a name that is none."""
    from ascend import implementations
    from deepinfer_jax.numerics import forms
    from kernels_bridge import catalogue, machine, registry

    ops = registry.joined((*forms.OPS, *catalogue.OPS), implementations.IMPLS)
    known = {op.name: op for op in ops}
    strange = [name for name in args.operation if name not in known]
    if strange:
        raise Refused(f"no operation is called {strange[0]!r}: give some of {', '.join(known)}")
    try:
        if args.platform is None:
            require_device()
            here = machine.probe()
        else:
            here = machine.named(args.platform, machine.installed())
    except ValueError as error:
        raise Refused(f"--platform: {error}") from None
    policy = registry.Policy(batch_invariant=not args.any_bits)
    print(f"{here}; with {', '.join(map(str, here.found)) or 'no library that has kernels'}")
    told = [registry.explain(known[name], here, policy) for name in args.operation or known]
    for each in told:
        print(f"\n{each}")
    if len(told) > 1:
        print(f"\n{_summary(told)}")
        if not args.any_bits and any(not (each.chosen or each.able) for each in told):
            print("--any-bits tells what could run without the promise about bits")
    return 0


def _summary(told: Sequence[Explanation]) -> str:
    """How many operations run, how many would if they were asked for, and how many cannot."""
    runs = sum(each.chosen is not None for each in told)
    by_name = sum(each.chosen is None and bool(each.able) for each in told)
    none = len(told) - runs - by_name
    return f"of {len(told)} operations {runs} run, {by_name} if asked for by name, {none} do not"
