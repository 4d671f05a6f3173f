"""`deepinfer-jax generate`: one prompt to the terminal, many to JSON Lines.

What needs JAX is imported when a command runs, so that `--help` and `--version` answer at once.
"""

from __future__ import annotations

import argparse
import os
import sys
import textwrap
from pathlib import Path
from typing import Any

from deepinfer_jax.cli import cluster, failures, inputs, meshes, running
from deepinfer_jax.cli.appending import check_apart
from deepinfer_jax.cli.device import add_rows
from deepinfer_jax.cli.records import KINDS
from deepinfer_jax.cli.refusal import Refused
from deepinfer_jax.cli.speculation import add_option

_REPLIES = textwrap.fill(
    "Generate replies. One PROMPT streams to the terminal. Several prompts, or a file of them, "
    f"give one JSON object per reply ({', '.join(KINDS)}), written as each reply finishes: to "
    "--out, or to the terminal.",
    width=99,
)
_PROMPTS = """\
A prompt file has one JSON object per line: {"prompt": TEXT}, {"messages": [...]} or
{"tokens": [...]}, and optionally "id", "tools", "schema", "images" (a list of paths, relative to
the file, or of data:image/png;base64,...) and any option of the reply below as
"max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids",
"thinking", "effort", "grammar", "min_tokens", "ignore_eos", "presence_penalty",
"frequency_penalty", "repetition_penalty", "logit_bias", "allowed_token_ids", "banned_token_ids",
"golden_token_ids". A reply depends on the model, its own prompt and options, --seed and its id
(default: its index), never on the other prompts or the batch size.
"""
_EPILOG = """\
The first Ctrl-C lets the requests in work end and begins no other, the second stops at once. Every
line is written whole; --resume goes on after either, and after a crash. When replies are missing
because a prompt or a request failed, the exit status is 1.

Compiled programs are kept in $JAX_COMPILATION_CACHE_DIR, by default in
$XDG_CACHE_HOME/deepinfer-jax (~/.cache/deepinfer-jax), so that the next start is quick.
"""


def add_command(commands: Any) -> None:
    """Declare the command and its arguments."""
    parser = commands.add_parser(
        "generate",
        help="replies to prompts",
        description=f"{_REPLIES}\n\n{_PROMPTS}",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    add = parser.add_argument
    add("prompt", nargs="*", metavar="PROMPT", help="text of a user message")
    add("--image", action="append", metavar="FILE", help="PNG, JPEG or WebP file that every PROMPT "
        "is about; may be repeated")  # fmt: skip
    add("--prompts", metavar="FILE", help="JSON Lines file of prompts, - for standard input")
    add_options(parser)
    parser.add_argument("--out", type=Path, metavar="FILE", help="write JSON Lines to FILE")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare all that `answer` reads but the prompts and `--out`."""
    add = parser.add_argument
    add("--model", default="spark-tiny", metavar="NAME|DIR", help="default spark-tiny")
    add("--max-length", type=int, metavar="N", help="most tokens of prompt and reply together")
    add_rows(parser)
    _add_options(parser.add_argument_group("the reply").add_argument)
    add = parser.add_argument_group("the run").add_argument
    add(
        "--resume",
        action="store_true",
        help="keep the results in --out and run what is missing, what failed included; model, "
        "prompt, options and seed of every result there must be those of this run",
    )
    add(
        "--in-order",
        action="store_true",
        help="write lines in the order of the prompts instead of as replies finish; lines that "
        "wait for an earlier one are written when the run ends, also by Ctrl-C, and --resume "
        "sorts them in the end",
    )
    add("--no-timing", action="store_true", help="leave out `timing`: then the files of two runs "
        "with --in-order are equal in every byte")  # fmt: skip
    add("--shard", metavar="I/N", help="only the prompts whose index leaves I when divided by N, "
        "for machine I of N; the replies are those of one run of all")  # fmt: skip
    add("--errors", type=Path, metavar="FILE", help="write a line for every prompt of a file that "
        "cannot be run, and every request that fails; default OUT.errors.jsonl beside --out. "
        "Without both a prompt that cannot be run is refused with all others")  # fmt: skip
    add("--metrics", type=Path, metavar="FILE", help="write a line for every step of the engine")
    add("--batch-size", type=int, metavar="N", help="most prompts in work at once, default 8")
    add_option(add)
    meshes.add_options(parser)
    cluster.add_options(parser)


def _add_options(add: Any) -> None:
    """The fields of `Options`; a default of None leaves the value to it."""
    add("--max-tokens", type=int, metavar="N", help="most tokens of a reply, default 256")
    add("--temperature", type=float, metavar="T", help="default 1.0; 0 is greedy")
    add("--top-p", type=float, metavar="P", help="default 1.0: keep everything")
    add("--top-k", type=int, metavar="K", help="default -1: keep everything")
    add("--min-p", type=float, metavar="P", help="default 0.0: keep everything")
    add("--seed", type=int, metavar="N", help="default 0")
    add("--stop", action="append", metavar="TEXT", help="end before this text; may be repeated")
    add(
        "--stop-token-id",
        action="append",
        type=int,
        dest="stop_token_ids",
        metavar="ID",
        help="end with this token; may be repeated",
    )
    add("--min-tokens", type=int, metavar="N", help="end no reply before it has N tokens")
    add("--ignore-eos", action="store_true", default=None, help="go on after the end token")
    add("--presence-penalty", type=float, metavar="X", help="default 0.0; of tokens in the reply")
    add("--frequency-penalty", type=float, metavar="X", help="default 0.0; each time that they are")
    add("--repetition-penalty", type=float, metavar="X", help="default 1.0; of the prompt's, too")
    add("--thinking", action="store_true", default=None, help="let the model reason first")
    add("--effort", metavar="LEVEL", help="low, high, xhigh or max: how long to reason")
    add("--json-schema", type=Path, metavar="FILE", help="replies are JSON values of this schema")
    add("--regex", metavar="EXPRESSION", help="replies match this as a whole")


def run(args: argparse.Namespace) -> int:
    """Generate; returns the exit status. Raises Refused for input that cannot be run."""
    check_files(args)
    return running.answer(args, inputs.read_prompts(args))


def check_files(args: argparse.Namespace) -> None:
    """Refuse files that do not go together, before anything is read or written."""
    if args.resume and args.out is None:
        raise Refused("--resume needs --out FILE, the file to go on with")
    for name in ("out", "errors", "metrics"):
        _check_path(f"--{name}", getattr(args, name))
    errors = args.errors or failures.default_path(args.out)
    prompts = None if args.prompts in (None, "-") else Path(args.prompts)
    beside = [("--errors", errors), ("--metrics", args.metrics)]
    check_apart([("--prompts", prompts), *beside])
    check_apart([("--out", args.out), *beside])
    if args.out is None or args.prompts is None or not args.out.is_file():
        return
    try:
        standard = args.prompts == "-"
        source = os.fstat(sys.stdin.fileno()) if standard else os.stat(args.prompts)
    except OSError:
        return  # no such file, said where it is read; or standard input in memory
    if os.path.samestat(source, args.out.stat()):
        raise Refused(f"--out {args.out} is the file of the prompts: results need one of their own")


def _check_path(name: str, path: Path | None) -> None:
    """Refuse what can be the path of no file here: too long, behind a file, in a closed folder."""
    if path is None:
        return
    try:
        path.stat()
    except FileNotFoundError:
        return  # made later, in a folder that is looked for then
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise Refused(f"{name} {path} cannot be written: {why}; give another file") from None
