"""`deepinfer-jax env`: the published engine's environment variables, and what they are here."""

from __future__ import annotations

import argparse
import os
import shutil
import textwrap
from collections.abc import Iterable
from typing import Any

from deepinfer_jax import published
from deepinfer_jax.cli.refusal import Refused
from deepinfer_jax.published import Setting

_DESCRIPTION = """\
Show the environment variables of the published engine, and what to write here instead: a field, an
argument, an option of this command, or why nothing is needed. This engine reads none of them.
"""
_WIDEST = 100  # columns


def add_command(commands: Any) -> None:
    """Declare the command and its arguments."""
    parser = commands.add_parser(
        "env",
        help="variables of the published engine, and what they are here",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    add = parser.add_argument
    add("name", nargs="*", metavar="NAME", help=f"a variable, with or without {published.PREFIX}; "
        "default all")  # fmt: skip
    add("--set", action="store_true", help="only those that are set in this environment")


def run(args: argparse.Namespace) -> int:
    """Print the table; returns the exit status. Raises Refused for a name that is none."""
    try:
        wanted = published.find(args.name)
    except ValueError as error:
        raise Refused(str(error)) from None
    if not args.set:
        print("\n\n".join(describe(setting) for setting in wanted))
        return 0
    found = list(published.are_set(os.environ))
    if args.name:
        found = [each for each in found if each[2] in wanted]
    if not found:
        which = "none of these" if args.name else f"no variable {published.PREFIX}..."
        print(f"{which} is set")
    parts = []
    for variable, value, setting in found:
        said = f"{variable}={value}"
        if setting is None:
            parts.append(f"{said}\n  unknown to the published engine as it is known here")
        else:
            parts.append("\n".join([said, *describe(setting).splitlines()[1:]]))
    if parts:
        print("\n\n".join(parts))
    return 0


def describe(setting: Setting) -> str:
    """One setting in a few lines: name and default, meaning, what it is here, the fields."""
    default = f" (default {setting.default})" if setting.default else ""
    lines = [f"{setting.variable}{default}", *_wrapped("there", setting.meaning)]
    answer = setting.here if setting.fields else f"{setting.answer}, {setting.here}"
    if setting.answer == "not yet":
        answer = f"not yet: {setting.here}"
    lines += _wrapped("here", answer)
    lines += [f"         {field}" for field in setting.fields]
    return "\n".join(lines)


def _wrapped(title: str, text: str) -> Iterable[str]:
    columns = min(shutil.get_terminal_size((_WIDEST, 0)).columns, _WIDEST)
    return textwrap.wrap(
        text, width=max(columns, 40), initial_indent=f"  {title:5}  ", subsequent_indent=" " * 9
    )
