"""Text from prompts: all at once, as each reply finishes, or piece by piece."""

from __future__ import annotations

import reprlib
from collections.abc import Iterator, Sequence
from typing import Any, Unpack

from deepinfer_jax import engine
from deepinfer_jax import prompts as prompting
from deepinfer_jax.engine import Update
from deepinfer_jax.engine.sites import ONE, Site
from deepinfer_jax.loading import Model
from deepinfer_jax.planning.policies import OFF, Policy
from deepinfer_jax.requests import OptionArguments, Options, Request, Result, make_options


def generate(
    model: Model,
    prompts: Sequence[Any],
    *,
    batch_size: int | None = None,
    speculative: Policy = OFF,
    site: Site = ONE,
    progress: bool = True,
    **options: Unpack[OptionArguments],
) -> list[Result]:
    """One reply to each prompt, in order.

    A prompt is a string (one user message), a list of messages, a list of token ids, or a mapping
    with one of these as `prompt`, `messages` or `tokens` and any of its own `id`, `tools`,
    `schema`, `images` (docs/images.md 2) and options.

    A reply depends on the model, its own prompt, options and noise seed, bit for bit, and not on
    the other prompts or the batch. The noise seed is derived from `seed` and the prompt's id, by
    default its index; a `seed` of its own is used as it is.

    Args:
      model: from `load`.
      batch_size: most prompts at once, default 8; speculative: use of the drafter (`planning`),
        default none. They change speed and memory only.
      site: where arrays lie and which programs run (`engine.sites`), default JAX's device.
      progress: show a bar of finished replies on a terminal, where tqdm is installed.

    Options, by name (`requests.Options`):
      max_tokens: of a reply, which must fit `model.max_length` with its prompt; default 256.
      temperature: default 1.0; 0 takes the most probable token, lowest id on ties. top_p, top_k,
        min_p: truncation; the defaults 1.0, -1 and 0.0 keep everything.
      seed: default 0.
      stop: strings that end a reply, before them; stop_token_ids: ids, beside the end token.
      thinking, effort: let the model reason first, and for how long (low, high, xhigh or max).
      grammar: what the replies must follow (`grammar.Grammar`); needs the extra `structured`.
      logit_bias: {token id: number added to its logit}. allowed_token_ids: the only tokens that may
        be said; banned_token_ids: tokens that are never said.
      presence_penalty, frequency_penalty (of tokens of the reply), repetition_penalty (of the
        prompt, too): as in vLLM; the defaults 0.0, 0.0 and 1.0 are off.
      min_tokens: end no reply before it has so many; ignore_eos: go on after the end token.
      golden_token_ids: what the first tokens of the reply are; -1: free.

    Raises:
      TypeError, ValueError: the first prompt or option that cannot be run; nothing was compiled.
      ImportError: llguidance is missing. FloatingPointError, GrammarError: a request failed alone.
    """
    requests = _requests(model, prompts, make_options(**options))
    made = updates(model, requests, batch_size=batch_size, speculative=speculative, site=site)
    return _results(watched(made, len(requests), progress), len(requests))


def watched(made: Iterator[Update], total: int, show: bool) -> Iterator[Update]:
    """The same updates; with `show`, beside a bar of finished requests.

    Only a terminal shows it, and only where tqdm is installed. Until the first reply it says what
    takes the time: a new shape of call is compiled.
    """
    bar = _bar(total) if show else None
    if bar is None:
        yield from made
        return
    with bar:
        for update in made:
            if update.result or update.error:
                bar.set_description("replies", refresh=False)
                bar.update()
            yield update


def _bar(total: int) -> Any:
    try:
        from tqdm import tqdm
    except ImportError:
        return None
    return tqdm(total=total, desc="compiling", disable=None)


def _results(made: Iterator[Update], count: int) -> list[Result]:
    found, failed = {}, []
    for update in made:
        if update.result:
            found[update.index] = update.result
        if update.error:
            failed.append(update.error)
    if failed:
        failed[0].add_note(
            f"{len(found)} of {count} requests have results: `generation.updates` gives them as "
            "they come, `LLM` and the command line give them beside the errors"
        )
        raise failed[0]
    assert len(found) == count, f"{len(found)} results of {count} requests"
    return [found[index] for index in range(count)]


def stream(
    model: Model,
    prompt: Any,
    *,
    speculative: Policy = OFF,
    **options: Unpack[OptionArguments],
) -> Iterator[str]:
    """The reply to one prompt as it comes; its pieces join to the text that `generate` returns.

    Arguments, options and errors as in `generate`; errors of arguments are raised by the call
    itself.
    """
    requests = _requests(model, [prompt], make_options(**options))
    return _texts(updates(model, requests, eager=True, speculative=speculative))


def _texts(made: Iterator[Update]) -> Iterator[str]:
    for update in made:
        if update.error:
            raise update.error
        if update.text:
            yield update.text


def updates(
    model: Model,
    requests: Sequence[Request],
    *,
    batch_size: int | None = None,
    eager: bool = False,
    speculative: Policy = OFF,
    site: Site = ONE,
) -> Iterator[Update]:
    """What happens to requests (see `prompts.make_requests`) as it happens.

    Every request ends with an update that carries its result; without requests there is nothing.
    `eager` is for a reader who watches: the first looks come after 1, 2, 4, 8 rounds instead of
    after 16 each.
    """
    return engine.run(
        model, requests, batch_size=batch_size, eager=eager, policy=speculative, site=site
    )


def _requests(model: Model, prompts: Sequence[Any], options: Options) -> list[Request]:
    if not isinstance(model, Model):
        raise TypeError(f"model must be what `load` returns, got {reprlib.repr(model)}: load it")
    return prompting.make_requests(prompts, options, model.tokenizer, model.cfg, model.max_length)
