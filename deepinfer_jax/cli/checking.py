"""`deepinfer-jax check-determinism`: the contract of determinism on the user's device."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from deepinfer_jax.cli.compiled import use_compilation_cache
from deepinfer_jax.cli.device import add_rows, require_device
from deepinfer_jax.cli.refusal import Refused

if TYPE_CHECKING:
    from deepinfer_jax.determinism import Check, Finding
    from deepinfer_jax.loading import Model
    from deepinfer_jax.numerics import Numerics

_DESCRIPTION = """\
Run requests alone, one token at a time; then run them in every other way the engine and a trainer
have, and compare tokens, log-probabilities, kept mass, routed experts and caches as unsigned
integers. Prints a table: values compared and values that differ, one line per check.

Exit status: 0 every bit that was compared is equal; 1 a bit differs; 2 the input was refused.
"""
_EPILOG = """\
The first run compiles about a dozen programs; they are kept as those of `generate` are. What is
promised, and why it holds, is written in docs/determinism.md of the source repository.
"""
DIFFERENT = 1
_INTERRUPTED = 130  # as of every command
_NUMERICS = ("native", "fp32", "fp32-kvq")
_HEAD = ("check", "varied", "compared", "differing", "seconds")


def add_command(commands: Any) -> None:
    """Declare the command and its arguments."""
    parser = commands.add_parser(
        "check-determinism",
        help="are the bits the same in every batch, chunk and schedule here?",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    add = parser.add_argument
    add("model", nargs="?", default="spark-tiny", metavar="MODEL", help="name or folder; default "
        "spark-tiny")  # fmt: skip
    add("--tokens", type=int, metavar="N", help="tokens of each reply; default: past the window")
    add("--seed", type=int, default=0, metavar="N", help="of prompts and schedules, default 0")
    add("--only", nargs="+", metavar="NAME", help="these checks; --list names them")
    add("--list", action="store_true", help="name the checks and stop")
    add("--max-length", type=int, metavar="N", help="most tokens of prompt and reply together")
    add_rows(parser)
    add(
        "--numerics",
        choices=_NUMERICS,
        default="native",
        help="native (default): as the checkpoint is stored; fp32: float32 throughout, which hides "
        "nothing behind roundings; fp32-kvq: the same with quantized caches",
    )


def run(args: argparse.Namespace) -> int:
    """Check; returns the exit status. Raises Refused for input that cannot be run."""
    from deepinfer_jax import determinism

    try:
        chosen = determinism.select(args.only)
        if args.list:
            for each in chosen:
                print(f"{each.name:<14}{each.varied}")
            return 0
        tokens = _tokens(args)
        require_device()
        use_compilation_cache()
        model = _load(args)
    except (TypeError, ValueError, OSError) as error:
        raise Refused(str(error)) from None
    try:
        findings = _watch(model, chosen, tokens, args.seed)
    except KeyboardInterrupt:
        # Checks in work are threads; the interpreter would wait for them, minutes of compiling.
        print("deepinfer-jax check-determinism: interrupted", file=sys.stderr, flush=True)
        os._exit(_INTERRUPTED)
    print("\n".join([*table(findings), "", *facts(model, tokens, args.seed)]))
    return DIFFERENT if any(finding.differing for finding in findings) else 0


def _tokens(args: argparse.Namespace) -> int:
    """Tokens of a reply; what can be refused without reading a weight is refused here."""
    from deepinfer_jax import determinism, loading
    from deepinfer_jax.config import ModelConfig

    cfg = ModelConfig.from_json(loading.find_folder(args.model))
    length = loading.resolve_length(cfg, args.max_length)
    tokens = determinism.default_tokens(cfg, length) if args.tokens is None else args.tokens
    determinism.check_arguments(length, tokens, args.seed)
    return tokens


def _load(args: argparse.Namespace) -> Model:
    from deepinfer_jax import loading

    return loading.load(
        args.model,
        numerics=_numerics(args.numerics),
        max_length=args.max_length,
        rows=args.rows,
    )


def _numerics(name: str) -> Numerics | None:
    import jax

    from deepinfer_jax.numerics import Numerics, rows_for

    if name == "native":
        return None  # what `load` chooses
    form = rows_for(jax.default_backend())
    return Numerics.fp32(form) if name == "fp32" else Numerics.fp32_kvq(form)


def _watch(model: Model, chosen: Sequence[Check], tokens: int, seed: int) -> list[Finding]:
    """The findings, with a line on standard error for each as it is made."""
    from deepinfer_jax import determinism

    def say(text: str, end: str = "\n") -> None:
        print(text, end=end, file=sys.stderr, flush=True)

    names = [check.name for check in chosen]
    say(f"reference: every request alone, one token at a time; then {len(names)} checks")
    say("(the first run compiles for some minutes)")
    found = []
    for finding in determinism.check(model, tokens=tokens, seed=seed, names=names):
        found.append(finding)
        outcome = _skipped(finding)
        if outcome is None:
            outcome = f"{finding.differing:,} DIFFER" if finding.differing else "equal"
        say(f"[{len(found)}/{len(names)}] {finding.name}: {outcome}, {finding.seconds:.1f} s")
        if finding.first:
            say(f"    first: {finding.first}")
    return found


def _skipped(finding: Finding) -> str | None:
    """What is said of a check that compared nothing, which proves nothing; None for another."""
    return None if finding.compared else f"skipped: {finding.skipped or 'nothing to compare'}"


def table(findings: Sequence[Finding]) -> list[str]:
    """Lines of a table with one row per finding."""
    body = [
        (
            f.name,
            f.varied,
            f"{f.compared:,}",
            _skipped(f) or f"{f.differing:,}",
            f"{f.seconds:.1f}",
        )
        for f in findings
    ]
    widths = [max(len(row[i]) for row in [_HEAD, *body]) for i in range(len(_HEAD))]
    lines = [
        "  ".join(
            cell.ljust(width) if i < 2 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in [_HEAD, *body]
    ]
    return [lines[0], "-" * len(lines[0]), *lines[1:]]


def facts(model: Model, tokens: int, seed: int) -> list[str]:
    """What the bits depend on: the table holds for these and for nothing else."""
    from importlib import metadata

    import jax

    import deepinfer_jax

    device = jax.devices()[0]
    return [
        f"model     {model.name}, replies of {tokens} tokens, seed {seed}",
        f"numerics  {model.numerics.fingerprint()}  {model.numerics}",
        f"versions  deepinfer-jax {deepinfer_jax.__version__}, jax {jax.__version__}, "
        f"jaxlib {metadata.version('jaxlib')}",
        f"device    {device.platform}, {device.device_kind}",
    ]
