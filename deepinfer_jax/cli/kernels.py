"""`deepinfer-jax kernels`: what runs on this machine or another, and why nothing else does."""

from __future__ import annotations

import argparse
from typing import Any

from deepinfer_jax.cli.device import require_device
from deepinfer_jax.cli.refusal import Refused

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
    for name in args.operation or known:
        print(f"\n{registry.explain(known[name], here, policy)}")
    return 0
