"""`deepinfer-jax generate`: one prompt to the terminal, many to JSON Lines.

What needs JAX is imported when a command runs, so that `--help` and `--version` answer at once.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from deepinfer_jax.cli.compiled import use_compilation_cache
from deepinfer_jax.cli.device import require_device
from deepinfer_jax.cli.progress import Progress
from deepinfer_jax.cli.records import KINDS
from deepinfer_jax.cli.refusal import Failed, Refused
from deepinfer_jax.cli.speculation import add_option, check_option, policy_of

if TYPE_CHECKING:
    from deepinfer_jax.cli.records import Lines
    from deepinfer_jax.grammar import Grammar
    from deepinfer_jax.loading import Model
    from deepinfer_jax.planning.policies import Policy
    from deepinfer_jax.requests import Options, Request

_REPLIES = textwrap.fill(
    "Generate replies. One PROMPT streams to the terminal. Several prompts, or a file of them, "
    f"give one JSON object per reply ({', '.join(KINDS)}), written as each reply finishes: to "
    "--out, or to the terminal.",
    width=99,
)
_PROMPTS = """\
A prompt file has one JSON object per line: {"prompt": TEXT}, {"messages": [...]} or
{"tokens": [...]}, and optionally "id", "tools", "schema" and any option of the reply below as
"max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids",
"thinking", "effort", "grammar", "min_tokens", "ignore_eos", "presence_penalty",
"frequency_penalty", "repetition_penalty", "logit_bias", "allowed_token_ids", "banned_token_ids",
"golden_token_ids". A reply depends on the model, its own prompt and options, --seed and its id
(default: its index), never on the other prompts or the batch size.
"""
_EPILOG = """\
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
    add("--prompts", metavar="FILE", help="JSON Lines file of prompts, - for standard input")
    add_options(parser)
    parser.add_argument("--out", type=Path, metavar="FILE", help="write JSON Lines to FILE")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare all that `answer` reads but the prompts and `--out`."""
    add = parser.add_argument
    add("--model", default="spark-tiny", metavar="NAME|DIR", help="default spark-tiny")
    add("--max-length", type=int, metavar="N", help="most tokens of prompt and reply together")
    _add_options(parser.add_argument_group("the reply").add_argument)
    add = parser.add_argument_group("the run").add_argument
    add(
        "--resume",
        action="store_true",
        help="keep the results in --out and run what is missing; model, prompt, options and seed "
        "of every result there must be those of this run",
    )
    add(
        "--in-order",
        action="store_true",
        help="write lines in the order of the prompts instead of as replies finish; lines that "
        "wait for an earlier one are written when the run ends, also by Ctrl-C",
    )
    add("--batch-size", type=int, metavar="N", help="most prompts in work at once, default 8")
    add_option(add)


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
    return answer(args, *_prompts(args))


def answer(args: argparse.Namespace, prompts: Sequence[Any], places: Sequence[str]) -> int:
    """Reply to prompts, each from its place, as the arguments say; returns the exit status.

    Raises Refused for input that cannot be run.
    """
    from deepinfer_jax import engine, loading
    from deepinfer_jax.cli import records
    from deepinfer_jax.grammar.vocabulary import require_llguidance

    check_option(args.speculative)
    try:
        requests = _requests(args, prompts, places)
        asked = [records.asked(request, args.model) for request in requests]
        records.check_asked(asked, places)
        engine.slots_for(len(requests), args.batch_size)
        if any(request.options.rule for request in requests):
            require_llguidance()
    except (TypeError, ValueError, OSError, ImportError) as error:
        raise Refused(str(error)) from None
    require_device()
    path: Path | None = args.out
    out = None if path is None else records.open_out(path, resume=args.resume)
    try:
        skip = records.finished(path, asked) if path and args.resume else {}
        use_compilation_cache()
        try:
            model = loading.load(args.model, max_length=args.max_length)
        except (ValueError, OSError) as error:
            raise Refused(str(error)) from None
        if path:
            records.check_numerics(path, skip, model.numerics.fingerprint())
        indices = [i for i, request in enumerate(requests) if str(request.id) not in skip]
        slots = engine.slots_for(max(len(indices), 1), args.batch_size)
        policy = policy_of(args.speculative, model, slots)
        if len(args.prompt) == 1 and not skip:
            lines = records.Lines(out, asked, in_order=False, indices=[0]) if out else None
            _stream(model, requests[0], lines, policy)
        else:
            lines = records.Lines(out or sys.stdout, asked, in_order=args.in_order, indices=indices)
            _many(args, model, requests, indices, lines, policy)
    finally:
        if out is not None:
            out.close()
    return 0


def check_files(args: argparse.Namespace) -> None:
    """Refuse files that do not go together, before anything is read or written."""
    if args.resume and args.out is None:
        raise Refused("--resume needs --out FILE, the file to go on with")
    if args.out is None or args.prompts is None or not args.out.is_file():
        return
    try:
        standard = args.prompts == "-"
        prompts = os.fstat(sys.stdin.fileno()) if standard else os.stat(args.prompts)
    except OSError:
        return  # no such file, said where it is read; or standard input in memory
    if os.path.samestat(prompts, args.out.stat()):
        raise Refused(f"--out {args.out} is the file of the prompts: results need one of their own")


def _prompts(args: argparse.Namespace) -> tuple[list[Any], list[str]]:
    """Prompts and the place of each for errors."""
    from deepinfer_jax.prompts import read_prompt_lines

    if bool(args.prompt) == (args.prompts is not None):
        raise Refused("give PROMPT arguments or --prompts FILE, one of the two")
    if args.prompt:
        return args.prompt, [f"PROMPT {i}" for i in range(1, len(args.prompt) + 1)]
    try:
        if args.prompts == "-":
            reconfigure(sys.stdin, encoding="utf-8-sig", errors="strict")
            return read_prompt_lines("standard input", sys.stdin)
        with open(args.prompts, encoding="utf-8-sig") as file:
            return read_prompt_lines(args.prompts, file)
    except UnicodeDecodeError as error:
        raise Refused(f"--prompts {args.prompts} is not UTF-8: {error}") from None
    except OSError as error:
        raise Refused(
            f"--prompts {args.prompts} cannot be read: {error.strerror or error}"
        ) from None
    except ValueError as error:
        raise Refused(str(error)) from None


def _requests(
    args: argparse.Namespace, prompts: Sequence[Any], places: Sequence[str]
) -> list[Request]:
    """Everything that can be refused is, before any weight is read."""
    from deepinfer_jax import loading
    from deepinfer_jax.config import ModelConfig
    from deepinfer_jax.prompts import make_requests

    options = _options(args)
    folder = loading.find_folder(args.model)
    cfg = ModelConfig.from_json(folder)
    length = loading.resolve_length(cfg, args.max_length)
    tokenizer = loading.open_tokenizer(folder, cfg)
    return make_requests(prompts, options, tokenizer, cfg, length, places)


def _options(args: argparse.Namespace) -> Options:
    from dataclasses import fields

    from deepinfer_jax.requests import Options

    given = {field.name: getattr(args, field.name, None) for field in fields(Options)}
    given["grammar"] = _grammar(args)
    return Options(**{name: value for name, value in given.items() if value is not None})


def _grammar(args: argparse.Namespace) -> Grammar | None:
    """Of --json-schema or --regex. Raises ValueError or OSError for one that cannot be read."""
    from deepinfer_jax.grammar import Grammar

    if args.json_schema is not None and args.regex is not None:
        raise ValueError("give --json-schema or --regex, one of the two")
    if args.json_schema is not None:
        return Grammar("json", args.json_schema.read_text(encoding="utf-8"))
    return None if args.regex is None else Grammar("regex", args.regex)


def _stream(model: Model, request: Request, lines: Lines | None, policy: Policy) -> None:
    """One reply to the terminal as it comes, and its line to `lines` if there are any."""
    from deepinfer_jax import generation

    # Characters that the terminal's encoding lacks are escaped.
    reconfigure(sys.stdout, errors="backslashreplace")
    for update in generation.updates(model, [request], eager=True, speculative=policy):
        sys.stdout.write(update.text)
        sys.stdout.flush()
        if update.error:
            sys.stdout.write("\n")
            raise Failed(str(update.error))
        if update.result and lines is not None:
            lines.write(update.result, 0)
    sys.stdout.write("\n")


def _many(
    args: argparse.Namespace,
    model: Model,
    requests: Sequence[Request],
    indices: Sequence[int],
    lines: Lines,
    policy: Policy,
) -> None:
    """A line for every request of these `indices`, with progress on a terminal."""
    from deepinfer_jax import generation

    if not indices:
        print("nothing is missing", file=sys.stderr)
        return
    progress = Progress(len(indices), sys.stderr)
    tokens: dict[int, int] = {}
    failed = done = 0
    due = [requests[i] for i in indices]
    progress.show(0, 0)
    try:
        made = generation.updates(model, due, batch_size=args.batch_size, speculative=policy)
        for update in made:
            tokens[update.index] = update.tokens
            if update.result:
                done += 1
                lines.write(update.result, indices[update.index])
            if update.error:
                failed += 1
                progress.close()
                print(_failure(due[update.index], update.error), file=sys.stderr)
            progress.show(done, sum(tokens.values()))
    except KeyboardInterrupt:
        raise KeyboardInterrupt(_interrupted(args, done, len(due))) from None
    finally:
        progress.close()
        lines.close()
    if failed:
        raise Failed(f"{failed} of {len(due)} requests failed, {done} results are written")


def _failure(request: Request, error: Exception) -> str:
    """One line about a request that ended without result; some errors name it themselves."""
    said, name = str(error), f"request {request.id!r}"
    return said if said.startswith(name) else f"{name}: {said}"


def _interrupted(args: argparse.Namespace, done: int, total: int) -> str:
    where = f" in {args.out}; the same command with --resume goes on" if args.out else ""
    return f"interrupted: {done} of {total} results are written{where}"


def reconfigure(stream: TextIO, *, errors: str, encoding: str | None = None) -> None:
    """Change how a stream of the process reads or writes text; one in memory has no encoding."""
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(encoding=encoding, errors=errors)
