"""`LLM`: a model with `generate` for texts and `chat` for conversations."""

from __future__ import annotations

import dataclasses
import numbers
import reprlib
import secrets
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from deepinfer_jax import generation, loading, prompts
from deepinfer_jax.config import VisionConfig
from deepinfer_jax.engine import slots_for
from deepinfer_jax.images.spans_in_prompt import without_spans
from deepinfer_jax.llm import replies
from deepinfer_jax.llm.outputs import RequestOutput
from deepinfer_jax.llm.parameters import SamplingParams, sample_seed
from deepinfer_jax.llm.replies import Asked
from deepinfer_jax.loading import Model
from deepinfer_jax.numerics import Form, Numerics
from deepinfer_jax.planning.policies import OFF, Policy, check_policy
from deepinfer_jax.requests import Options, Request, Result
from deepinfer_jax.text import Tokenizer
from deepinfer_jax.text.chat import Effort

Prompt = str | Mapping[str, Any] | Sequence[int]


class LLM:
    """A loaded model, and how it is run. It keeps nothing of what it was asked.

    What a reply is depends on the model, its prompt, its `SamplingParams` and its seed, bit for
    bit: not on the other prompts, their order, `batch_size` or `speculative`.
    """

    def __init__(
        self,
        model: str | Path | Model = "spark-tiny",
        *,
        max_length: int | None = None,
        batch_size: int | None = None,
        speculative: Policy = OFF,
        numerics: Numerics | None = None,
        weights: Literal["auto", "stored", "decoded"] = "auto",
        rows: Form | None = None,
    ) -> None:
        """Load `model`, a shipped name or a folder (see `load`), or take one that is loaded.

        max_length: most tokens of prompt and reply together. batch_size: most replies in work at
        once, default 8; speculative: use of the drafter (`planning`), default none: both decide
        speed and memory only. numerics, weights, rows: as in `load`.

        Raises FileNotFoundError, TypeError, ValueError or NoKernelsError as `load` does.
        """
        if isinstance(model, Model):
            if (max_length, numerics, weights, rows) != (None, None, "auto", None):
                raise ValueError(
                    "max_length, numerics, weights and rows are for a model that is still to be "
                    "loaded: give them to `load`, or give its name here"
                )
        else:
            model = loading.load(
                model, numerics=numerics, max_length=max_length, weights=weights, rows=rows
            )
        slots_for(1, batch_size)
        check_policy(speculative)
        self.model: Model = model
        self.batch_size = batch_size
        self.speculative = speculative

    @property
    def tokenizer(self) -> Tokenizer:
        """Ids of text and text of ids."""
        return self.model.tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        markup: bool = False,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Continue texts as they are: no roles, no template (`chat` has them).

        Args:
          prompts: one or many. A prompt is a text, read behind the begin token; a list of token
            ids, read as it is; or a mapping with one of them as `prompt` or `prompt_token_ids`, and
            optionally `multi_modal_data`, {"image": an image or a list of them}, where the prompt
            has one image token for each (docs/images.md 2).
          sampling_params: one for all, or one for each; default `SamplingParams()`. A seed in the
            one for all is that of every prompt: equal prompts then have equal replies.
          markup: control tokens spelled in texts are control tokens, as in what a chat template
            rendered; a leading begin token is not doubled. Never for text from outside: by default
            no text can name a control token.
          use_tqdm: show a bar on a terminal, where tqdm is installed.

        Returns an output for each prompt, in order. A reply that fails alone has the finish reason
        "error" and its error, and a RuntimeWarning counts such; the others are complete.

        Raises:
          TypeError, ValueError: the first prompt or parameter that cannot be run; nothing was
            compiled. ImportError: `so_args` without llguidance.
          RuntimeError: this device breaks the promise that scores are the sampler's bits.
        """
        many = [prompts] if _is_one(prompts) else list(prompts)
        given = [self._read(prompt, f"prompts[{i}]", markup) for i, prompt in enumerate(many)]
        texts = [text for text, _ in given]
        asked = [prompt for _, prompt in given]
        return self._run(asked, texts, sampling_params, "prompts", Options(), use_tqdm)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        schema: Mapping[str, Any] | None = None,
        thinking: bool = False,
        effort: Effort | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Reply to one conversation or to many, rendered in the model's chat format.

        Args:
          messages: a list of messages, or a list of such lists (`Tokenizer.render_chat`); their
            contents may have image parts (docs/images.md 2).
          tools, schema, thinking, effort: rendered with every conversation.
          sampling_params, use_tqdm: as in `generate`, and so are results and errors.
        """
        if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
            raise TypeError(
                "messages must be a conversation, a list of messages, or a list of conversations, "
                f"got {reprlib.repr(messages)}"
            )
        one = bool(messages) and isinstance(messages[0], Mapping)
        many: list[Any] = [messages] if one else list(messages)
        rendered: dict[str, Any] = {"tools": tools} if tools else {}
        rendered |= {} if schema is None else {"schema": schema}
        asked = [{"messages": conversation, **rendered} for conversation in many]
        chat = Options(thinking=thinking, effort=effort)
        return self._run(asked, [None] * len(many), sampling_params, "messages", chat, use_tqdm)

    def _read(self, prompt: Any, place: str, markup: bool) -> tuple[str | None, dict[str, Any]]:
        """(the text or None, what `make_requests` takes) of one prompt."""
        images: dict[str, Any] = {}
        if isinstance(prompt, Mapping):
            forms = [key for key in prompt if key in ("prompt", "prompt_token_ids")]
            if len(forms) != 1 or set(prompt) - {*forms, "multi_modal_data"}:
                raise ValueError(
                    f"{place} must have one key, 'prompt' or 'prompt_token_ids', and may have "
                    f"'multi_modal_data', got {reprlib.repr(sorted(map(str, prompt)))}"
                )
            images = _images(prompt.get("multi_modal_data"), place)
            prompt = prompt[forms[0]]
            if (forms[0] == "prompt") != isinstance(prompt, str):
                raise TypeError(
                    f"{place}: 'prompt' is a text and 'prompt_token_ids' a list of token ids, got "
                    f"{forms[0]!r} with {reprlib.repr(prompt)}"
                )
        if not isinstance(prompt, str):
            return None, {"tokens": prompt, **images}
        if not prompt:
            raise ValueError(
                f"{place} is an empty text; give [{self.tokenizer.bos}], the begin token, to start "
                "from nothing"
            )
        encode = self.tokenizer.encode_markup if markup else self.tokenizer.encode_user
        try:
            ids = encode(prompt)
        except UnicodeEncodeError as error:
            raise ValueError(f"{place}: {prompts.half(error)}") from None
        begun = markup and ids[0] == self.tokenizer.bos
        return prompt, {"tokens": ids if begun else [self.tokenizer.bos, *ids], **images}

    def _run(
        self, asked: Sequence[Mapping[str, Any]], texts: Sequence[str | None], given: Any,
        name: str, chat: Options, use_tqdm: bool,
    ) -> list[RequestOutput]:  # fmt: skip
        """Outputs of prompts as `make_requests` takes them; `chat` says how they are rendered."""
        every = self._parameters(given, len(asked))
        whole = [
            self._asked(prompt, text, params, str(i), f"{name}[{i}]", chat)
            for i, (prompt, text, params) in enumerate(zip(asked, texts, every, strict=True))
        ]
        results, failed = self._results([r for one in whole for r in one.samples], use_tqdm)
        outputs = replies.outputs(self.model, whole, results, failed)
        if failed:
            first = next(iter(failed.items()))
            warnings.warn(
                f"{len(failed)} of {len(results) + len(failed)} replies failed and have the finish "
                f"reason 'error'; the first is request {first[0]}: {first[1]}",
                RuntimeWarning,
                stacklevel=3,
            )
        return outputs

    def _parameters(self, given: Any, count: int) -> list[SamplingParams]:
        if given is None or isinstance(given, SamplingParams):
            return [given or SamplingParams()] * count
        if isinstance(given, str | Mapping) or not isinstance(given, Iterable):
            raise TypeError(
                "sampling_params must be a SamplingParams, or a list with one for each prompt, got "
                f"{reprlib.repr(given)}"
            )
        every = list(given)
        for i, params in enumerate(every):
            if not isinstance(params, SamplingParams):
                raise TypeError(
                    f"sampling_params[{i}] must be a SamplingParams, got {reprlib.repr(params)}"
                )
        if len(every) != count:
            raise ValueError(
                f"sampling_params must be one for all or one for each of {count} prompts, got "
                f"{len(every)}"
            )
        return every

    def _asked(
        self, prompt: Mapping[str, Any], text: str | None, params: SamplingParams, name: str,
        place: str, chat: Options,
    ) -> Asked:  # fmt: skip
        """One prompt with a request for each reply to it."""
        vocabulary = self.model.cfg.vocab_size
        if params.top_logprobs > vocabulary:
            raise ValueError(
                f"{place}: top_logprobs must be at most {vocabulary}, the vocabulary, got "
                f"{params.top_logprobs}"
            )
        room = 1
        if params.max_tokens is None:
            measured = self._request({**prompt, "max_tokens": 1}, chat, place)
            room = max(1, self.model.max_length - len(measured.tokens))
        try:
            own = params.options(room)
        except ValueError as error:  # max_tokens is None and the room too small for others
            raise ValueError(f"{place}: {error}") from None
        own = dataclasses.replace(own, thinking=chat.thinking, effort=chat.effort)
        seed = secrets.randbits(64) if params.seed is None else params.seed
        first = self._request({**prompt, "id": name, "seed": seed}, own, place)
        samples = tuple(
            first if k == 0 else
            dataclasses.replace(first, id=f"{name}/{k}", seed=sample_seed(seed, k))
            for k in range(params.n)
        )  # fmt: skip
        if "messages" in prompt:
            text = self.tokenizer.decode(_shown(first, self.model.cfg.vision))
        return Asked(text, params, samples)

    def _request(self, prompt: Mapping[str, Any], options: Options, place: str) -> Request:
        model = self.model
        return prompts.make_request(
            prompt, 0, options, model.tokenizer, model.cfg, model.max_length, place
        )

    def _results(
        self, requests: Sequence[Request], use_tqdm: bool
    ) -> tuple[dict[str | int, Result], dict[str | int, Exception]]:
        """Results and errors by the id of the request."""
        results: dict[str | int, Result] = {}
        failed: dict[str | int, Exception] = {}
        made = generation.updates(
            self.model, requests, batch_size=self.batch_size, speculative=self.speculative
        )
        for update in generation.watched(made, len(requests), use_tqdm):
            name = requests[update.index].id
            if update.result is not None:
                results[name] = update.result
            if update.error is not None:
                failed[name] = update.error
        return results, failed


def _images(given: Any, place: str) -> dict[str, Any]:
    """Of `multi_modal_data`, by the name that `make_requests` has for them."""
    if given is None:
        return {}
    if not isinstance(given, Mapping) or set(given) != {"image"}:
        raise ValueError(
            f"{place}: multi_modal_data must be {{'image': an image or a list of them}}, got "
            f"{reprlib.repr(given)}"
        )
    return {"images": given["image"]}


def _shown(request: Request, vision: VisionConfig | None) -> Sequence[int]:
    """Token ids of a prompt, one for each image."""
    return without_spans(request.tokens, request.images, vision) if vision else request.tokens


def _is_one(prompts: Any) -> bool:
    """Whether this is one prompt and not a list of them."""
    if isinstance(prompts, str | Mapping):
        return True
    if isinstance(prompts, bytes) or not isinstance(prompts, Sequence):
        raise TypeError(
            "prompts must be a text, a list of token ids, a mapping with 'prompt' or "
            f"'prompt_token_ids', or a list of such, got {type(prompts).__name__}"
        )
    return bool(prompts) and isinstance(prompts[0], numbers.Integral)
