"""The command `deepinfer-jax`: thin, parses arguments and prints.

Exit status: 0 done; 1 failed while running; 2 the input was refused before anything was compiled;
130 interrupted; 141 the reader of the output went away.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

import deepinfer_jax
from deepinfer_jax.cli import (
    checking,
    converting,
    evaluating,
    generating,
    information,
    kernels,
    plan,
    profiling,
    variables,
)
from deepinfer_jax.cli.refusal import Failed, Refused

FAILED, REFUSED, INTERRUPTED, BROKEN_PIPE = 1, 2, 130, 141
_LONGEST = 1000  # characters of a message: some quote what they were given


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with these arguments (default: of the process); returns the exit status."""
    _open_closed_streams()
    args = _parser().parse_args(argv)
    try:
        status = args.run(args)
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        # Nobody reads on: say nothing, and keep the interpreter from flushing into the pipe again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except KeyboardInterrupt as stop:
        return _say(args, str(stop) or "interrupted", INTERRUPTED)
    except Refused as error:
        return _say(args, str(error), REFUSED)
    except (OSError, FloatingPointError, Failed) as error:
        return _say(args, str(error), FAILED)


def _open_closed_streams() -> None:
    """A closed standard stream reads as empty and keeps nothing; Python has None for it.

    In this order each takes its own file descriptor, which otherwise the next file would get.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            stream = open(os.devnull, mode, encoding="utf-8")  # noqa: SIM115 - until the exit
            setattr(sys, name, stream)


def _say(args: argparse.Namespace, message: str, status: int) -> int:
    if len(message) > _LONGEST:
        message = f"{message[: _LONGEST // 2]} ... {message[-_LONGEST // 2 :]}"
    print(f"deepinfer-jax {args.command}: {message}", file=sys.stderr)
    return status


def _parser() -> argparse.ArgumentParser:
    about = (deepinfer_jax.__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(prog="deepinfer-jax", description=about)
    version = f"deepinfer-jax {deepinfer_jax.__version__}"
    parser.add_argument("--version", action="version", version=version)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    generating.add_command(commands)
    evaluating.add_command(commands)
    information.add_command(commands)
    plan.add_command(commands)
    converting.add_command(commands)
    checking.add_command(commands)
    profiling.add_command(commands)
    kernels.add_command(commands)
    variables.add_command(commands)
    return parser
