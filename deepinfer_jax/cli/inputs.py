"""What a run is asked for: prompts from arguments or a file, options, and the requests of both."""

from __future__ import annotations

import argparse
import dataclasses
import io
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from deepinfer_jax.cli.refusal import Refused

if TYPE_CHECKING:
    from deepinfer_jax.grammar import Grammar
    from deepinfer_jax.requests import Options, Request


_DIGITS = re.compile("[0-9]{1,9}")


@dataclasses.dataclass(frozen=True, slots=True)
class Given:
    """A prompt as it was given: its place for errors, and its value, or why it has none.

    Of a line of a prompt file also its number and text: such a prompt may fail alone.
    """

    place: str
    value: Any = None
    reason: str = ""
    line: int | None = None
    raw: str | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Bad:
    """A prompt that cannot be run, and why; `name` is its id, as far as that can be told."""

    name: str | int | None
    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class Shard:
    """The prompts whose index leaves `number` when divided by `count`."""

    number: int = 0
    count: int = 1

    def indices(self, total: int) -> range:
        """Of the prompts, out of `total`."""
        return range(self.number, total, self.count)


def shard_of(text: str | None) -> Shard:
    """Of `--shard i/n`, default all. Raises Refused for what is none."""
    if text is None:
        return Shard()
    number, slash, count = text.partition("/")
    if slash and all(_DIGITS.fullmatch(part) for part in (number, count)):
        shard = Shard(int(number), int(count))
        if shard.number < shard.count:
            return shard
    raise Refused(
        f"--shard must be i/n with i from 0 to n - 1, as 0/4 to 3/4 for four machines, got {text!r}"
    )


def read_prompts(args: argparse.Namespace) -> list[Given]:
    """The prompts. Raises Refused for a file that cannot be read or has none."""
    if bool(args.prompt) == (args.prompts is not None):
        raise Refused("give PROMPT arguments or --prompts FILE, one of the two")
    if args.image and not args.prompt:
        raise Refused("--image goes with PROMPT arguments; a prompt file names its own `images`")
    if args.prompt:
        images = {"images": args.image} if args.image else {}
        given = [{"prompt": text, **images} if images else text for text in args.prompt]
        return [Given(f"PROMPT {i}", prompt) for i, prompt in enumerate(given, 1)]
    try:
        if args.prompts == "-":
            reconfigure(sys.stdin, encoding="utf-8-sig", errors="surrogateescape")
            return _lines("standard input", sys.stdin)
        with open(args.prompts, encoding="utf-8-sig", errors="surrogateescape") as file:
            return _lines(args.prompts, file)
    except OSError as error:
        raise Refused(
            f"--prompts {args.prompts} cannot be read: {error.strerror or error}"
        ) from None
    except ValueError as error:
        raise Refused(str(error)) from None


def _lines(name: str, lines: Iterable[str]) -> list[Given]:
    from deepinfer_jax.prompts import prompt_lines

    return [
        Given(f"{name}:{each.number}", each.value, each.reason, each.number, each.text)
        for each in prompt_lines(name, lines)
    ]


def make_requests(
    args: argparse.Namespace, given: Sequence[Given], shard: Shard
) -> dict[int, Request | Bad]:
    """By index, the requests of a shard; ids and seeds do not depend on how many shards there are.

    Everything that can be refused is, before any weight is read. Raises TypeError, ValueError or
    OSError for options and models that are none.
    """
    from deepinfer_jax import loading, prompts
    from deepinfer_jax.config import ModelConfig

    options = _options(args)
    folder = loading.find_folder(args.model)
    cfg = ModelConfig.from_json(folder)
    length = loading.resolve_length(cfg, args.max_length)
    tokenizer = loading.open_tokenizer(folder, cfg)
    made: dict[int, Request | Bad] = {}
    seen: dict[str, str] = {}
    chosen = shard.indices(len(given))
    folder = "." if args.prompts in (None, "-") else Path(args.prompts).parent
    for index, each in enumerate(given):
        name = None if each.reason else prompts.prompt_name(each.value, index)
        try:
            if each.reason:
                raise ValueError(each.reason)
            # Taken by a line that cannot be run, too: what a shard says follows from the file.
            prompts.check_name(name, each.place, seen)
            if index in chosen:
                made[index] = prompts.make_request(
                    each.value, index, options, tokenizer, cfg, length, each.place, folder
                )
        except (TypeError, ValueError) as error:
            if index in chosen:
                made[index] = Bad(name, str(error))
    return made


def _options(args: argparse.Namespace) -> Options:
    from deepinfer_jax.requests import Options

    given = {field.name: getattr(args, field.name, None) for field in dataclasses.fields(Options)}
    given["grammar"] = _grammar(args)
    return Options(**{name: value for name, value in given.items() if value is not None})


def _grammar(args: argparse.Namespace) -> Grammar | None:
    """Of --json-schema or --regex. Raises ValueError for one that is none or cannot be read."""
    from deepinfer_jax.grammar import Grammar

    if args.json_schema is not None and args.regex is not None:
        raise ValueError("give --json-schema or --regex, one of the two")
    if args.regex is not None:
        return Grammar("regex", args.regex)
    if args.json_schema is None:
        return None
    name = f"--json-schema {args.json_schema}"
    try:
        return Grammar("json", args.json_schema.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ValueError(f"{name} cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{name} is not UTF-8: write it anew") from None
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def reconfigure(stream: TextIO, *, errors: str, encoding: str | None = None) -> None:
    """Change how a stream of the process reads or writes text; one in memory has no encoding."""
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(encoding=encoding, errors=errors)
