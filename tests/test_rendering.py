"""Images in prompts: where they stand, in what order, what is kept of them, what is refused."""

import base64
import dataclasses
import io
import json

import numpy as np
import pytest
from hypothesis import given
from PIL import Image

from deepinfer_jax import images
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.images.spans import span_length
from deepinfer_jax.images.spans_in_prompt import place_images, without_spans
from deepinfer_jax.prompts import make_request, make_requests
from deepinfer_jax.requests import Options
from deepinfer_jax.text import parts
from tests import sighted
from tests.images.files import VISION, encoded, pattern
from tests.sighted import TOKEN
from tests.test_text import TOKENIZER, TOOL, hostile_text

WIDE, SMALL = pattern(12, 36), pattern(8, 12)  # 3 x 9 and 2 x 3 patches: 1 x 3 and 1 x 1 cells
PLACES = {"wide": 6, "small": 4}


def request(prompt, cfg=None, **more):
    cfg = sighted.config() if cfg is None else cfg
    return make_request(prompt, 0, Options(max_tokens=7), TOKENIZER, cfg, 900, "here", **more)


def shown(made):
    """The prompt as text, one token for each image."""
    return TOKENIZER.decode(without_spans(made.tokens, made.images, VISION))


def cut_short():
    """An image of Pillow whose file ends too soon, which shows where it is decoded."""
    return Image.open(io.BytesIO(encoded(pattern(40, 60), "JPEG")[:-300]))


def picture(pixels):
    return images.picture_from_array(pixels, VISION)


def user(*content):
    return {"messages": [{"role": "user", "content": list(content)}]}


def text(written):
    return {"type": "text", "text": written}


# -- spans -----------------------------------------------------------------------------------------


def test_a_span_takes_the_places_of_its_cells_and_marks():
    features = images.Features(np.zeros((6, 5), np.float32), 2, 3, "f" * 64)
    tokens, spans = place_images(
        [4, TOKEN, 7, TOKEN, TOKEN], [picture(WIDE), features, picture(SMALL)], TOKEN, VISION
    )
    assert [span.start for span in spans] == [1, 8, 18]
    assert tokens == (4, *[TOKEN] * 6, 7, *[TOKEN] * 10, *[TOKEN] * 4)
    assert [span_length(*images.grid_of(span.picture, VISION)) for span in spans] == [6, 10, 4]
    assert spans[1].picture is features
    assert without_spans(tokens, spans, VISION) == [4, TOKEN, 7, TOKEN, TOKEN]


def test_every_place_of_a_request_carries_the_image_token():
    made = request({"tokens": [0, TOKEN, 5, TOKEN], "images": [WIDE, SMALL]})
    assert made.tokens == (0, *[TOKEN] * 6, 5, *[TOKEN] * 4)
    assert [(span.start, span.picture) for span in made.images] == [
        (1, picture(WIDE)),
        (8, picture(SMALL)),
    ]
    assert made.prompt == (0, TOKEN, 5, TOKEN)
    assert made.chat == {"images": [picture(WIDE).key, picture(SMALL).key]}


def test_a_prompt_without_images_is_what_it_was():
    blind = ModelConfig.from_json(sighted.SPARK)
    for prompt in ("What?", {"tokens": [0, 4, 5]}, user(text("What?")), user(text("a"), text("b"))):
        assert request(prompt) == request(prompt, blind)
        assert not request(prompt).images
    assert request({"tokens": [0, TOKEN]}, blind).tokens == (0, TOKEN)  # a token like others there
    assert request(user(text("a"), text("b"))).tokens == request("a\n\nb").tokens


def test_images_stand_before_the_text_of_a_prompt():
    made = request({"prompt": "What <｜image｜>?", "images": [WIDE, SMALL]})
    assert shown(made) == (
        "<｜begin▁of▁sentence｜><｜User｜><｜image｜>\n\n<｜image｜>\n\nWhat <｜image｜>?"
        "<｜Assistant｜></think>"
    )
    assert [span.picture for span in made.images] == [picture(WIDE), picture(SMALL)]
    assert sum(token == TOKEN for token in made.tokens) == 10  # of the images, none of the text
    assert made.prompt == "What <｜image｜>?"


def test_images_stand_where_their_parts_are():
    url = "data:image/png;base64," + base64.b64encode(encoded(SMALL, "PNG")).decode()
    content = (
        text("<｜image｜>\ue000"),
        {"type": "image", "image": WIDE},
        {"type": "image"},
        text("and"),
        {"type": "image_url", "image_url": {"url": url, "detail": "high"}},
    )
    made = request({**user(*content), "images": Image.fromarray(WIDE)})
    assert (
        "<｜User｜><｜image｜>\ue000\n\n<｜image｜>\n\n<｜image｜>\n\nand\n\n<｜image｜><"
        in shown(made)
    )
    assert [s.picture for s in made.images] == [picture(WIDE), picture(WIDE), picture(SMALL)]
    assert len(made.chat["images"]) == 3
    empty = {"type": "image"}
    assert made.prompt == user(content[0], empty, empty, text("and"), empty)["messages"]
    assert json.dumps(made.prompt)
    again = request({"messages": made.prompt, "images": [WIDE, WIDE, SMALL]})
    assert again == made


def test_images_come_in_the_order_of_the_rendered_prompt():
    """The format sorts results of tools by their calls, and images with them."""
    calls = [{"id": name, "name": "look", "arguments": {}} for name in "xy"]
    results = [
        {"role": "tool", "tool_call_id": name, "content": [{"type": "image", "image": pixels}]}
        for name, pixels in (("y", SMALL), ("x", WIDE))
    ]
    asked = [{"role": "user", "content": "Look."}, {"role": "assistant", "tool_calls": calls}]
    made = request({"messages": [*asked, *results]})
    assert [span.picture for span in made.images] == [picture(WIDE), picture(SMALL)]
    assert made.chat["images"] == [picture(SMALL).key, picture(WIDE).key]


@given(hostile_text(), hostile_text())
def test_text_beside_images_is_rendered_as_without_them(first, second):
    """Piece by piece here, as a whole by deepseek-recipe: the same ids but for the images'."""
    messages = [{"role": "system", "content": second}, {"role": "user", "content": first}]
    whole = TOKENIZER.render_chat(messages, tools=[TOOL], schema={"type": "null"})
    flat = parts.Flat(messages, (), "")
    how = {"tools": [TOOL], "schema": {"type": "null"}}
    assert TOKENIZER.render_with_images(flat, TOKEN, **how) == (whole, [])
    content = [{"type": "image", "image": 0}, text(first), {"type": "image", "image": 1}]
    ids, order = TOKENIZER.render_with_images(
        parts.flatten([messages[0], {"role": "user", "content": content}]), TOKEN, **how
    )
    assert [token for token in ids if token == TOKEN] == [TOKEN] * 2
    assert order == [0, 1]


# -- what may be handed in -------------------------------------------------------------------------


def test_an_image_is_the_same_however_it_is_handed_in(tmp_path):
    data = encoded(WIDE, "PNG")
    (tmp_path / "a.png").write_bytes(data)
    url = "data:image/png;base64," + base64.b64encode(data).decode()
    forms = [
        WIDE, data, bytearray(data), url, "a.png", tmp_path / "a.png", str(tmp_path / "a.png"),
        Image.fromarray(WIDE), picture(WIDE),
    ]  # fmt: skip
    for form in forms:
        made = request({"prompt": "x", "images": [form]}, folder=tmp_path)
        assert made.images[0].picture == picture(WIDE)
    features = images.Features(np.zeros((3, 5), np.float32), 1, 3, picture(WIDE).key)
    made = request({"prompt": "x", "images": features})
    assert made.images[0].picture is features
    assert made.tokens == request({"prompt": "x", "images": WIDE}).tokens


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ({"tokens": [TOKEN, 5, TOKEN], "images": [WIDE]}, r"has 2 places .* and 1 images"),
        ({"tokens": [TOKEN, 5]}, r"has 1 places of images \(token 10\) and 0 images"),
        ({"tokens": [5], "images": WIDE}, r"has 0 places .* and 1 images"),
        ({**user({"type": "image"}), "images": [WIDE, WIDE]}, "1 image parts .* `images` has 2"),
        ({**user(text("a")), "images": [WIDE]}, "0 image parts .* `images` has 1"),
        (user({"type": "image"}), "1 image parts .* `images` has 0"),
        (user({"type": "video"}), r"content\[0\]\.type must be one of text, image, image_url"),
        (user({"type": "text"}), r"content\[0\]\.text must be a string, got None"),
        (user({"type": "image", "url": "x"}), "unknown key 'url'"),
        (user({"type": "image_url", "image_url": {}}), r"image_url\.url must be a string"),
        (user({"type": "image_url", "image_url": {"url": "a", "detail": "low"}}), "detail must be"),
        ({"messages": [{"role": "assistant", "content": [{"type": "image", "image": WIDE}]}]},
         r"messages\[0\]\.content\[0\] is an image, which only .* got 'assistant'"),
        ({"prompt": "x", "images": ["no.png"]}, r"images\[0\]: no\.png cannot be read: No such"),
        ({"prompt": "x", "images": ["iVBO" * 999]}, "is no path; base64 begins with data:image"),
        ({"prompt": "x", "images": ["https://a.b/c"]}, "images are not fetched"),
        ({"prompt": "x", "images": [WIDE, "data:image/png;base64,?"]}, r"images\[1\]: .* not base"),
        ({"prompt": "x", "images": ["data:image/png,abc"]}, "begins as data:image/png;base64"),
        ({"prompt": "x", "images": [b"GIF89a"]}, "expected a PNG, JPEG or WebP file, got a GIF"),
        (user({"type": "image", "image": b"none"}), r"messages\[0\]\.content\[0\]: expected a PNG"),
        ({"prompt": "x", "images": [images.Picture(np.zeros((1, 3, 2, 2), np.float32), 1, 1)]},
         "patches of 2 pixels a side, this model takes 4"),
        ({"prompt": "x", "images": [sighted.picture(30, 30, 0)]}, "112 tokens, .* allows 64"),
        ({"prompt": "x", "images": ["a\0b"]}, r"images\[0\]: a path has no NUL in it"),
        ({"prompt": "x", "images": [Image.new("RGB", (0, 0))]}, "at least one pixel, got 0 x 0"),
        ({"prompt": "x", "images": [cut_short()]}, r"images\[0\]: .* cannot be decoded: .*; get"),
        ({"prompt": "x", "images": [images.Features(np.zeros((1, 5), np.float32), 9, 9, "")]},
         r"\[height \* width, D\] of a grid .*, got \[1, 5\] for 9 x 9"),
        ({"prompt": "\ud800", "images": [WIDE]}, r"half a character, '\\ud800', stands in a text"),
        ({"prompt": "x", "golden_token_ids": [5, TOKEN]}, "must not hold 10, the image token"),
        ({"prompt": "x", "allowed_token_ids": [TOKEN]}, "nothing could be said .an image token ne"),
    ],
)  # fmt: skip
def test_images_that_do_not_fit_their_prompt_are_refused(prompt, said):
    with pytest.raises(ValueError, match=f"^here: .*{said}"):
        request(prompt)


def test_what_is_no_image_is_refused():
    with pytest.raises(TypeError, match=r"images\[0\]: an image is a path, .*; got 5"):
        request({"prompt": "x", "images": [5]})
    rows = np.zeros((1, 5), np.float32)
    for features, said in (((rows, 1.0, 1), "integers"), ((rows > 0, 1, 1), "floating")):
        with pytest.raises(TypeError, match=rf"images\[0\]: .* of features must be .*{said}"):
            request({"prompt": "x", "images": [images.Features(*features, "")]})
    with pytest.raises(TypeError, match=r"images\[0\]: pixels must be .*uint8, got float64"):
        request({"prompt": "x", "images": [WIDE / 255]})


@pytest.mark.parametrize("missing", ["vision", "image_token_id"])
@pytest.mark.parametrize("prompt", [{"prompt": "x"}, {"tokens": [5]}, user({"type": "image"})])
def test_a_model_that_reads_no_images_refuses_them(missing, prompt):
    cfg = dataclasses.replace(sighted.config(), **{missing: None})
    with pytest.raises(ValueError, match=r"^here: .*the model has no .*and reads no images"):
        request({**prompt, "images": [WIDE]}, cfg)
    assert request("x", cfg).tokens == request("x").tokens


def test_images_count_towards_the_length():
    cfg, options = sighted.config(), Options(max_tokens=3)
    short = request({"prompt": "x", "images": [WIDE]})
    with pytest.raises(ValueError, match=f"has {len(short.tokens)} tokens and max_tokens is 3"):
        make_requests([{"prompt": "x", "images": [WIDE]}], options, TOKENIZER, cfg, 10)
