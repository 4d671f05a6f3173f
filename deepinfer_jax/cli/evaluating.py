"""`deepinfer-jax eval`: replies to the items of a task; apart from that, which are right.

What needs JAX is imported when a command runs, as in `generating`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepinfer_jax import resources
from deepinfer_jax.cli import generating, inputs, records, running
from deepinfer_jax.cli.refusal import Failed, Refused
from deepinfer_jax.whole_files import replacing

if TYPE_CHECKING:
    from deepinfer_jax.evaluation import Report, Task

_DESCRIPTION = """\
Evaluate a model in two stages. `generate` writes its replies to a file, as `deepinfer-jax generate`
does; `score` reads the file and judges them, as often as you like. Nothing is downloaded: `convert`
makes tasks of benchmarks that you have.
"""
_GENERATE = """\
Reply to every item of a task, --samples times. The lines of --out are those of `deepinfer-jax
generate`. Sample k of an item has the id ITEM#k, and its seed follows from that id and --seed. So
samples can be added later, by the same command with --resume and a larger --samples.

Options of the reply that are not given are the task's, where it has some; those of a single item
hold always.
"""
_SCORE = """\
Judge the replies in FILE and print pass@1 (the mean share of right replies), pass@k (unbiased),
their standard errors over items, the mean length, the share cut by max_tokens, and a row for every
item.

Exit status: 0 every reply that is due was judged; 1 some are missing, come twice, do not belong or
cannot be read, or were made with different models or options: they are named, and the report is of
the others; 2 the input was refused.
"""
_CONVERT = """\
Make a task file of a published benchmark that you have as .csv or .jsonl with its usual columns
(docs/evaluation.md of the source repository names them). Choices are put in an order that --seed
and the item's id fix.
"""
INCOMPLETE = 1
_FORMATS = ("aime", "gpqa", "hle")


def add_command(commands: Any) -> None:
    """Declare the command, its three parts and their arguments."""
    parser = commands.add_parser(
        "eval", help="evaluate a model on a task", description=_DESCRIPTION
    )
    parts = parser.add_subparsers(dest="part", required=True, metavar="PART")
    names = ", ".join(resources.task_names())

    generate = _part(parts, "generate", _generate, "write replies to a task's items", _GENERATE)
    generate.add_argument("task", metavar="TASK", help=f"a task file, or one of {names}")
    add = generate.add_argument
    add("--out", type=Path, required=True, metavar="FILE.jsonl", help="write JSON Lines to FILE")
    add("--samples", type=int, default=1, metavar="N", help="replies to each item, default 1")
    add("--limit", type=int, metavar="N", help="the first N items only")
    generating.add_options(generate)

    score = _part(parts, "score", _score, "judge replies on disk", _SCORE)
    add = score.add_argument
    add("file", type=Path, metavar="FILE.jsonl", help="written by `eval generate`")
    add("--task", metavar="TASK", help=f"what FILE answers; default: whichever of {names} it is")
    add("--samples", type=int, metavar="N", help="replies due to each item; default: as FILE has")
    add("--limit", type=int, metavar="N", help="only the first N items were asked")
    add("--out", type=Path, metavar="REPORT.json", help="write the report as JSON as well")

    convert = _part(parts, "convert", _convert, "make a task file of a benchmark", _CONVERT)
    add = convert.add_argument
    add("source", type=Path, metavar="IN", help="a .csv or .jsonl file")
    add("out", type=Path, metavar="OUT", help="the task file to write")
    add("--from", dest="layout", required=True, choices=_FORMATS, help="what IN is")
    add("--seed", type=int, default=0, metavar="N", help="of the order of choices, default 0")


def _part(parts: Any, name: str, run: Any, about: str, description: str) -> Any:
    form = argparse.RawDescriptionHelpFormatter
    parser = parts.add_parser(name, help=about, description=description, formatter_class=form)
    parser.set_defaults(run=run, command=f"eval {name}")
    return parser


def _generate(args: argparse.Namespace) -> int:
    """Run the first stage; returns the exit status. Raises Refused for what cannot be run."""
    from deepinfer_jax.evaluation import tasks

    _check_counts(args)
    task = _read(args.task, args.limit)
    # The task's file is that of the prompts: `generating` keeps it from being written over.
    args.prompt, args.prompts = [], str(task.path)
    generating.check_files(args)
    try:
        prompts, places = tasks.prompts(task, args.samples, _given(args))
    except ValueError as error:
        raise Refused(str(error)) from None
    if args.samples > 1:
        _check_noise(args, prompts, places)
    given = [inputs.Given(place, each) for each, place in zip(prompts, places, strict=True)]
    return running.answer(args, given)


def _check_counts(args: argparse.Namespace) -> None:
    for name in ("samples", "limit"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise Refused(f"--{name} must be at least 1, got {value}")


def _read(name: str, limit: int | None) -> Task:
    from deepinfer_jax import evaluation

    try:
        return evaluation.read_task(evaluation.find_task(name)).first(limit)
    except ValueError as error:
        raise Refused(str(error)) from None
    except OSError as error:
        raise Refused(f"task {name} cannot be read: {error.strerror}") from None


def _given(args: argparse.Namespace) -> list[str]:
    """Options of the reply that were given as arguments."""
    from deepinfer_jax.requests import Options

    names = [field.name for field in dataclasses.fields(Options)]
    given = [name for name in names if getattr(args, name, None) is not None]
    grammar = args.json_schema is not None or args.regex is not None
    return [*given, "grammar"] if grammar else given


def _check_noise(
    args: argparse.Namespace, prompts: Sequence[Mapping[str, Any]], places: Sequence[str]
) -> None:
    """Refuse many samples of one reply."""
    for prompt, place in zip(prompts, places, strict=True):
        heat = prompt.get("temperature", args.temperature)
        if isinstance(heat, int | float) and 0 <= heat < 1e-5:
            raise Refused(
                f"--samples {args.samples} at temperature {heat:g} ({place}) are the same reply "
                f"{args.samples} times: raise the temperature, or leave --samples out"
            )


# -- the second stage ------------------------------------------------------------------------------


def _score(args: argparse.Namespace) -> int:
    """Run the second stage; returns the exit status. Raises Refused for what cannot be read."""
    from deepinfer_jax import evaluation
    from deepinfer_jax.evaluation import reporting

    _check_counts(args)
    if not args.file.is_file():
        raise Refused(f"{args.file}: no such file; write it with `deepinfer-jax eval generate`")
    task = _read(args.task or _task_of(args.file), args.limit)
    _check_report(args, task)
    try:
        report = evaluation.score(task, _lines(args.file), args.samples)
    except ValueError as error:
        raise Refused(f"{args.file}: {error}") from None
    if args.out is not None:
        _write("--out", args.out, json.dumps(reporting.as_json(report), indent=1) + "\n")
    # Parts of replies are quoted; characters that the terminal's encoding lacks are escaped.
    inputs.reconfigure(sys.stdout, errors="backslashreplace")
    print("\n".join(reporting.as_text(report)))
    return _outcome(args.file, report)


def _outcome(path: Path, report: Report) -> int:
    from deepinfer_jax.evaluation import reporting

    for line in reporting.problem_lines(report):
        print(f"deepinfer-jax eval score: {path}: {line}", file=sys.stderr)
    asked, items = [score.id for score in report.scores], report.task.items
    if len(asked) < len(items) and asked == [item.id for item in items[: len(asked)]]:
        said = f"only the first {len(asked)} items have replies; --limit {len(asked)} judges those"
        print(f"deepinfer-jax eval score: {said}", file=sys.stderr)
    return INCOMPLETE if report.problems else 0


def _lines(path: Path) -> Iterator[tuple[str, Mapping[str, Any] | None]]:
    """Every line that is not empty with its place; None for one that is no result."""
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield f"{path}:{number}", records.result_of(line)


def _task_of(path: Path) -> str:
    from deepinfer_jax.evaluation import tasks

    names = (line["id"] for _, line in _lines(path) if line is not None)
    found = tasks.shipped_task_of(names)
    if found is None:
        raise Refused(
            f"{path} has no reply to an item of {', '.join(resources.task_names())}: name the task "
            "file that it was generated from with --task"
        )
    return found


def _check_report(args: argparse.Namespace, task: Task) -> None:
    """Refuse a report that could not be written, or would be written over what it is made of."""
    if args.out is None:
        return
    if not args.out.parent.is_dir():
        raise Refused(f"--out {args.out}: the folder {args.out.parent} does not exist")
    if args.out.exists() and not args.out.is_file():
        raise Refused(f"--out {args.out} is no file that could be written")
    for source, what in ((args.file, "the replies"), (task.path, "the task")):
        if args.out.is_file() and os.path.samefile(args.out, source):
            raise Refused(f"--out {args.out} is the file of {what}: a report needs one of its own")
    if args.out.is_file() and args.out.stat().st_size and not _is_report(args.out):
        raise Refused(f"--out {args.out} holds something that is no report: give another file")


def _is_report(path: Path) -> bool:
    """Whether it is an earlier report, which a new one replaces."""
    from deepinfer_jax import strict_json

    try:
        return {"task", "pass_at", "scores"} <= strict_json.read_object(path).keys()
    except ValueError:
        return False


def _write(name: str, path: Path, text: str) -> None:
    """Write a whole file in one step of the system: what was there stays where it has no room.

    Raises Failed, with the argument's name.
    """
    try:
        with replacing(path, text=True) as file:
            file.write(text)
    except OSError as error:
        raise Failed(f"{name} {path} cannot be written: {error.strerror or error}") from None


# -- tasks of others -------------------------------------------------------------------------------


def _convert(args: argparse.Namespace) -> int:
    """Write a task file; returns the exit status. Raises Refused for what is no such benchmark."""
    from deepinfer_jax.evaluation import layouts, tasks

    if args.out.exists():
        raise Refused(f"{args.out} exists: give another file, or remove it first")
    if not args.out.parent.is_dir():
        raise Refused(f"{args.out}: the folder {args.out.parent} does not exist; make it first")
    try:
        made = layouts.convert(args.layout, args.source, args.seed)
        tasks.make_task([made.head, *made.items], [str(args.source), *made.places], args.out)
    except ValueError as error:
        raise Refused(str(error)) from None
    except OSError as error:
        raise Refused(f"{args.source} cannot be read: {error.strerror}") from None
    _write("OUT", args.out, tasks.task_text(made.head, made.items))
    for reason, count in made.left_out.items():
        print(f"{count} rows left out: {reason}", file=sys.stderr)
    if made.unused:
        print(f"columns not used: {', '.join(made.unused)}", file=sys.stderr)
    print(f"{args.out}: {len(made.items)} items")
    return 0
