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
from deepinfer_jax.cli import checking, generating, information
from deepinfer_jax.cli.refusal import Refused

FAILED, REFUSED, INTERRUPTED, BROKEN_PIPE = 1, 2, 130, 141


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with these arguments (default: of the process); returns the exit status."""
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
    except (OSError, FloatingPointError) as error:
        return _say(args, str(error), FAILED)


def _say(args: argparse.Namespace, message: str, status: int) -> int:
    print(f"deepinfer-jax {args.command}: {message}", file=sys.stderr)
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="deepinfer-jax", description=deepinfer_jax.__doc__)
    version = f"deepinfer-jax {deepinfer_jax.__version__}"
    parser.add_argument("--version", action="version", version=version)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    generating.add_command(commands)
    information.add_command(commands)
    checking.add_command(commands)
    return parser
