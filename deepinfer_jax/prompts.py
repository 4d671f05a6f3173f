"""From prompts in any of their forms to requests: rendered, checked and seeded before compiling.

A prompt is a string (one user message), a sequence of message mappings, a sequence of token ids, or
a mapping, which is also what a line of a prompt file holds: exactly one of `prompt`, `messages`,
`tokens`, and optionally `id`, `tools`, `schema`, `images` and any field of `Options`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import reprlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from deepinfer_jax import rendering, strict_json
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.images import sources
from deepinfer_jax.requests import FREE, Options, Request
from deepinfer_jax.text import Tokenizer

_FORMS = ("prompt", "messages", "tokens")
_CHAT = ("tools", "schema")
_OPTIONS = tuple(field.name for field in dataclasses.fields(Options))


def request_seed(seed: int, id: str | int) -> int:
    """The noise seed of the request called `id` in a run with `seed`: 64 bits of a SHA-256.

    A function of names: neither the batch nor the other requests of a run are inputs.
    """
    digest = hashlib.sha256(f"{seed}:{id}".encode()).digest()
    return int.from_bytes(digest[:8], "little")


def make_requests(
    prompts: Sequence[Any],
    options: Options,
    tokenizer: Tokenizer,
    cfg: ModelConfig,
    max_length: int,
    places: Sequence[str] | None = None,
) -> list[Request]:
    """Requests of `prompts`, in order. A prompt without an `id` is called by its index.

    `places` says where each prompt came from, for errors; default `prompts[i]`. Every prompt is
    checked: options, messages, token ids, and its length against `max_length`.

    Raises:
      TypeError, ValueError: the first prompt that cannot be run, its place and the reason; or two
        prompts with one id.
    """
    if isinstance(prompts, str | bytes | Mapping) or not isinstance(prompts, Iterable):
        raise TypeError(
            f"prompts must be a list of prompts, got {type(prompts).__name__}; write [prompt]"
        )
    prompts = list(prompts)
    places = [f"prompts[{i}]" for i in range(len(prompts))] if places is None else places
    requests = []
    seen: dict[str, str] = {}
    for index, (prompt, place) in enumerate(zip(prompts, places, strict=True)):
        made = make_request(prompt, index, options, tokenizer, cfg, max_length, place)
        check_name(prompt_name(prompt, index), place, seen)
        requests.append(made)
    return requests


def make_request(
    prompt: Any, index: int, options: Options, tokenizer: Tokenizer, cfg: ModelConfig,
    max_length: int, place: str, folder: str | os.PathLike[str] = ".",
) -> Request:  # fmt: skip
    """The request of prompt number `index`; see `make_requests`, which raises the same.

    folder: where paths of images begin.
    """
    try:
        request = _request(prompt, index, options, tokenizer, cfg, folder)
        _check_tokens(request, cfg, max_length)
    except UnicodeEncodeError as error:
        raise ValueError(f"{place}: {half(error)}") from None
    except (TypeError, ValueError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(f"{place}: {error}") from None
    except RecursionError:
        raise ValueError(f"{place} is nested too deep to be rendered; flatten it") from None
    return request


def half(error: UnicodeEncodeError) -> str:
    """Of a text that cannot be encoded: what is wrong with it."""
    return (
        f"half a character, {error.object[error.start]!r}, stands in a text or a name; correct it"
    )


def prompt_name(prompt: Any, index: int) -> str | int | None:
    """The id of prompt number `index`; None where it has one that is no name."""
    name = prompt.get("id", index) if isinstance(prompt, Mapping) else index
    return name if isinstance(name, str | int) and not isinstance(name, bool) else None


def check_name(name: str | int | None, place: str, seen: dict[str, str]) -> None:
    """Note in `seen` where a name was given. Raises ValueError where it was given before."""
    if name is None:
        return
    if str(name) in seen:
        raise ValueError(
            f"{place}: id {reprlib.repr(str(name))} is also that of {seen[str(name)]}; "
            "ids are names"
        )
    seen[str(name)] = place


def _request(
    prompt: Any, index: int, options: Options, tokenizer: Tokenizer, cfg: ModelConfig,
    folder: str | os.PathLike[str],
) -> Request:  # fmt: skip
    given = prompt if isinstance(prompt, Mapping) else {_form(prompt): prompt}
    known = (*_FORMS, "id", *_CHAT, "images", *_OPTIONS)
    unknown = [key for key in given if key not in known]
    if unknown:
        raise ValueError(f"unknown key {reprlib.repr(unknown[0])}; known are {', '.join(known)}")
    forms = [form for form in _FORMS if form in given]
    if len(forms) != 1:
        found = f"both {forms[0]!r} and {forms[1]!r}" if forms else "none of them"
        raise ValueError(f"give exactly one of 'prompt', 'messages' and 'tokens', got {found}")
    name = prompt_name(prompt, index)
    if name is None:
        raise TypeError(f"id must be a string or an integer, got {reprlib.repr(given['id'])}")
    overrides = {key: given[key] for key in _OPTIONS if key in given}
    own = dataclasses.replace(options, **overrides)
    seed = own.seed if "seed" in given else request_seed(own.seed, name)
    form = forms[0]
    chat = {key: given[key] for key in _CHAT if key in given}
    images = sources.listed(given.get("images"))
    made = rendering.render(form, given[form], images, chat, own, tokenizer, cfg, folder)
    if made.keys:
        chat["images"] = list(made.keys)
    return Request(name, made.prompt, made.tokens, seed, own, chat, made.spans)


def _form(prompt: Any) -> str:
    if isinstance(prompt, str):
        return "prompt"
    if isinstance(prompt, Sequence) and prompt and isinstance(prompt[0], Mapping):
        return "messages"
    if isinstance(prompt, Sequence | np.ndarray) and not isinstance(prompt, bytes):
        return "tokens"
    raise TypeError(
        "a prompt is a string, a list of messages, a list of token ids, or a mapping with one of "
        f"these as 'prompt', 'messages' or 'tokens'; got {type(prompt).__name__}"
    )


def _check_tokens(request: Request, cfg: ModelConfig, max_length: int) -> None:
    options = request.options
    _check_ids("tokens", request.tokens, cfg)
    for name in ("stop_token_ids", "allowed_token_ids", "banned_token_ids"):
        _check_ids(name, getattr(options, name) or (), cfg)
    _check_ids("logit_bias", (token for token, _ in options.biases), cfg)
    _check_ids("golden_token_ids", (i for i in options.golden_token_ids if i != FREE), cfg)
    _check_choice(options, cfg)
    if options.rule is not None:
        options.rule.check_token_ids(cfg.vocab_size, cfg.eos_token_id)
    length, reply = len(request.tokens), request.options.max_tokens
    if length + reply > max_length:
        room = max_length - length
        mend = f"lower max_tokens to {room}" if room > 0 else f"shorten it by {1 - room} or more"
        raise ValueError(
            f"the prompt has {length} tokens and max_tokens is {reply}: together {length + reply}, "
            f"the model is loaded for max_length={max_length}; {mend}"
        )


def _check_ids(name: str, ids: Iterable[int], cfg: ModelConfig) -> None:
    for token in ids:
        if not 0 <= token < cfg.vocab_size:
            raise ValueError(f"{name} must lie in 0..{cfg.vocab_size - 1}, got {token}")


def _check_choice(options: Options, cfg: ModelConfig) -> None:
    """Raise ValueError where no token could be said at all, or none before `min_tokens`."""
    if cfg.image_token_id is not None and cfg.image_token_id in options.golden_token_ids:
        raise ValueError(
            f"golden_token_ids must not hold {cfg.image_token_id}, the image token, which is never "
            "said: leave it out"
        )
    allowed, banned = options.allowed_token_ids, {*options.banned_token_ids, cfg.image_token_id}
    ends = set(options.ends(cfg.eos_token_id))
    if allowed is None and len(banned) + len(ends) < cfg.vocab_size:
        return
    left = set(range(cfg.vocab_size) if allowed is None else allowed) - banned
    if not left:
        raise ValueError(
            "allowed_token_ids without banned_token_ids must not be empty, or nothing could be "
            "said (an image token never is): allow another token or ban fewer"
        )
    if options.min_tokens and left <= ends:
        raise ValueError(
            f"min_tokens={options.min_tokens} needs a token that may be said and does not end the "
            f"reply, got only {sorted(left)}: allow another token, ban fewer or give min_tokens=0"
        )


# -- prompt files ----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class PromptLine:
    """A line of a prompt file: its number from 1, its text, and its value or why it has none."""

    number: int
    text: str
    value: Mapping[str, Any] | None
    reason: str = ""


def read_prompt_lines(name: str, lines: Iterable[str]) -> tuple[list[Mapping[str, Any]], list[str]]:
    """The prompts of a JSON Lines file and the place `NAME:LINE` of each; blank lines are skipped.

    Raises ValueError for a line that is not one JSON object, or when there is none at all.
    """
    prompts, places = [], []
    for line in prompt_lines(name, lines):
        if line.value is None:
            raise ValueError(line.reason)
        prompts.append(line.value)
        places.append(f"{name}:{line.number}")
    return prompts, places


def prompt_lines(name: str, lines: Iterable[str]) -> Iterator[PromptLine]:
    """The lines of a prompt file that are not blank, also those that cannot be read.

    Bytes that are not UTF-8 must have come as the surrogates of `errors="surrogateescape"`.
    Raises ValueError, at its end, for a file without lines.
    """
    found = False
    for number, line in enumerate(lines, 1):
        if line.strip():
            found = True
            yield _prompt_line(name, number, line.rstrip("\n"))
    if not found:
        raise ValueError(f'{name} holds no prompts: write one object a line, {{"prompt": "..."}}')


def _prompt_line(name: str, number: int, text: str) -> PromptLine:
    place, value, reason = f"{name}:{number}", None, ""
    try:
        text.encode("utf-8")
        value = json.loads(text, object_pairs_hook=strict_json.once)
    except UnicodeEncodeError:
        reason = f"{place} is not UTF-8"
    except ValueError as error:
        reason = f"{place}: broken JSON: {error}"
    except RecursionError:
        reason = f"{place} is nested too deep; flatten it"
    if not reason and not isinstance(value, Mapping):
        reason = (
            f'{place}: expected an object such as {{"prompt": "..."}}, got {type(value).__name__}'
        )
    return PromptLine(number, text, None if reason else value, reason)
