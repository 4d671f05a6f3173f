"""Images on the command line and in prompt files: as they reach the engine, or are refused."""

import base64
import json
import re
from pathlib import Path

import pytest

from deepinfer_jax import cli, images, loading
from deepinfer_jax.cli import inputs, records
from deepinfer_jax.cli.refusal import Refused
from deepinfer_jax.requests import Request
from tests import sighted
from tests.images.files import VISION, encoded, pattern

WIDE, SMALL = pattern(12, 36), pattern(8, 12)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "pictures").mkdir()
    sighted.save(tmp_path / "model")
    (tmp_path / "pictures" / "wide.png").write_bytes(encoded(WIDE, "PNG"))
    (tmp_path / "small.webp").write_bytes(encoded(SMALL, "WEBP", lossless=True))
    return tmp_path


def made(folder, *args):
    """Requests, by index, of `deepinfer-jax generate` with these arguments."""
    parsed = cli._parser().parse_args(["generate", "--model", str(folder / "model"), *args])
    return inputs.make_requests(parsed, inputs.read_prompts(parsed), inputs.Shard())


def pictures(request):
    return [span.picture for span in request.images]


def wanted(*pixels):
    return [images.picture_from_array(each, VISION) for each in pixels]


def test_the_small_model_of_the_documentation(tmp_path, monkeypatch):
    """The block of docs/images.md writes a checkpoint that loads, and that the command shows to."""
    text = (Path(__file__).parents[1] / "docs" / "images.md").read_text("utf-8")
    (block,) = re.findall(r"<!-- tested: sighted -->\n```python\n(.*?)```", text, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    exec(compile(block, "docs/images.md", "exec"), {})
    (tmp_path / "table.png").write_bytes(encoded(pattern(84, 126), "PNG"))
    (tmp_path / "sighted").rename(tmp_path / "model")
    request = made(tmp_path, "What is on the table?", "--image", "table.png")[0]
    cfg = loading.load("model").cfg
    assert request.tokens.count(cfg.image_token_id) == 2 * (3 + 1) + 2


def test_images_of_prompts_on_the_command_line(folder, monkeypatch):
    monkeypatch.chdir(folder)
    both = ["--image", "pictures/wide.png", "--image", str(folder / "small.webp")]
    requests = made(folder, "What is it?", "Where is it?", *both)
    for index, text in enumerate(("What is it?", "Where is it?")):
        assert pictures(requests[index]) == wanted(WIDE, SMALL)
        assert requests[index].prompt == text


def test_paths_in_a_prompt_file_begin_at_the_file(folder):
    url = (
        "data:image/webp;base64," + base64.b64encode(encoded(SMALL, "WEBP", lossless=True)).decode()
    )
    part = {"type": "image_url", "image_url": {"url": "pictures/wide.png"}}
    lines = [
        {"prompt": "a", "images": ["pictures/wide.png", url]},
        {"messages": [{"role": "user", "content": [part, {"type": "image"}]}], "images": [url]},
        {"prompt": "a"},
        {"prompt": "a", "images": ["wide.png"]},
    ]
    file = folder / "prompts.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
    requests = made(folder, "--prompts", str(file))
    assert [pictures(requests[k]) for k in range(3)] == [wanted(WIDE, SMALL)] * 2 + [[]]
    assert isinstance(requests[3], inputs.Bad)
    assert requests[3].reason.startswith(f"{file}:4: images[0]: {folder}/wide.png cannot be read")


def test_a_line_names_the_contents_of_its_images(folder):
    """So that --resume sees another image under the same name."""
    (request,) = made(folder, "a", "--image", str(folder / "small.webp")).values()
    assert isinstance(request, Request)
    asked = records.asked(request, "model", "w")
    assert asked["options"]["images"] == [picture.key for picture in wanted(SMALL)]
    assert not records.unwritable(asked, "here")
    (folder / "small.webp").write_bytes(encoded(SMALL[::-1].copy(), "WEBP", lossless=True))
    (other,) = made(folder, "a", "--image", str(folder / "small.webp")).values()
    assert records.asked(other, "model", "w") != asked


def test_images_without_a_prompt_are_refused(folder):
    with pytest.raises(Refused, match="--image goes with PROMPT arguments"):
        made(folder, "--prompts", str(folder / "none.jsonl"), "--image", "small.webp")


def test_a_model_without_a_tower_says_so(capsys):
    given = ["What?", "--image", "no.png", "--model", "spark-tiny"]
    assert cli.main(["generate", *given]) == 2
    assert "PROMPT 1: images[0]: the model has no vision tower" in capsys.readouterr().err
