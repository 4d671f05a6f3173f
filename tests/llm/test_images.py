"""`LLM` with images: what is asked of the engine, and what is refused before it."""

import dataclasses
import functools

import numpy as np
import pytest

from deepinfer_jax import images
from deepinfer_jax.engine import Update
from deepinfer_jax.llm import LLM, SamplingParams, llm
from tests import sighted, tiny_model
from tests.images.files import VISION, pattern
from tests.sighted import TOKEN

WIDE, SMALL = pattern(12, 36), pattern(8, 12)  # 6 and 4 places
PARAMS = SamplingParams(max_tokens=5, seed=1)


@functools.cache
def model():
    blind = tiny_model.model()
    return LLM(dataclasses.replace(blind, cfg=sighted.seeing(blind.cfg)))


@pytest.fixture
def asked(monkeypatch):
    """Requests that reach the engine; none is answered."""
    seen = []

    def updates(model, requests, **options):
        seen.extend(requests)
        for index in range(len(requests)):
            yield Update(index, "", 0, error=RuntimeError("none"))

    monkeypatch.setattr(llm.generation, "updates", updates)
    return seen


def pictures(request):
    return [span.picture for span in request.images]


def test_texts_and_token_ids_with_images(asked):
    wide, small = (images.picture_from_array(pixels, VISION) for pixels in (WIDE, SMALL))
    prompts = [
        {"prompt_token_ids": [0, TOKEN, 7], "multi_modal_data": {"image": WIDE}},
        {"prompt_token_ids": [TOKEN, TOKEN], "multi_modal_data": {"image": [SMALL, wide]}},
        {"prompt_token_ids": [5], "multi_modal_data": None},
    ]
    with pytest.warns(RuntimeWarning, match="3 of 3 replies failed"):
        model().generate(prompts, PARAMS)
    assert [pictures(request) for request in asked] == [[wide], [small, wide], []]
    assert [len(request.tokens) for request in asked] == [8, 10, 1]
    asked.clear()
    marked = {"prompt": "a<｜image｜>b", "multi_modal_data": {"image": WIDE}}
    with pytest.warns(RuntimeWarning):
        (output,) = model().generate(marked, dataclasses.replace(PARAMS, n=2), markup=True)
    assert output.prompt == "a<｜image｜>b"
    assert [pictures(request) for request in asked] == [[wide]] * 2
    assert output.prompt_token_ids == asked[0].tokens


def test_chats_with_images(asked):
    content = [{"type": "image", "image": SMALL}, {"type": "text", "text": "What <｜image｜>?"}]
    with pytest.warns(RuntimeWarning):
        (output,) = model().chat([{"role": "user", "content": content}], PARAMS)
    assert pictures(asked[0]) == [images.picture_from_array(SMALL, VISION)]
    assert sum(token == TOKEN for token in output.prompt_token_ids) == 4
    assert output.prompt.endswith(
        "<｜User｜><｜image｜>\n\nWhat <｜image｜>?<｜Assistant｜></think>"
    )


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ({"prompt": "a<｜image｜>b", "multi_modal_data": {"image": WIDE}}, "has 0 places .* and 1"),
        ({"prompt_token_ids": [TOKEN], "multi_modal_data": {"image": []}}, "1 places .* and 0"),
        ({"prompt": "a", "multi_modal_data": {"video": WIDE}}, "multi_modal_data must be"),
        ({"prompt": "a", "multi_modal_data": WIDE}, "multi_modal_data must be"),
        (
            {"multi_modal_data": {"image": WIDE}},
            "must have one key, 'prompt' or 'prompt_token_ids'",
        ),
        ({"prompt": "a", "images": WIDE}, "and may have 'multi_modal_data', got"),
    ],
)
def test_prompts_that_do_not_fit_their_images_are_refused(prompt, said, asked):
    with pytest.raises(ValueError, match=rf"prompts\[0\].*{said}"):
        model().generate(prompt, PARAMS)
    assert not asked


@pytest.mark.exhaustive
@pytest.mark.slow
def test_scores_of_prompts_with_images_are_the_samplers():
    """`outputs` compares the bits; of a prompt whose image fails there is nothing to score."""
    seeing = sighted.glance()
    picture = sighted.picture(6, 9, 0)
    (made,) = images.encode_images(seeing.params, [picture], seeing.cfg, seeing.numerics)
    broken = dataclasses.replace(made, rows=np.full_like(made.rows, np.nan))
    wanted = dataclasses.replace(PARAMS, max_tokens=2, prompt_logprobs=True, top_logprobs=3)
    prompts = [
        {"prompt_token_ids": [5, TOKEN, 7, 8], "multi_modal_data": {"image": image}}
        for image in (picture, made, broken)
    ]
    with pytest.warns(RuntimeWarning, match="1 of 3 replies failed"):
        one, same, failed = LLM(seeing).generate(prompts, wanted, use_tqdm=False)
    assert one.outputs[0].logprobs == same.outputs[0].logprobs
    assert one.prompt_logprobs == same.prompt_logprobs
    assert len(one.prompt_logprobs) == len(one.prompt_token_ids) - 1 == 12
    assert failed.prompt_logprobs is None
    assert "image 0 could not be encoded" in str(failed.outputs[0].error)
