"""Task files: what they may hold, what is refused, and the requests that come of them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer_jax import resources
from deepinfer_jax.evaluation import shipped, tasks

HEAD = {
    "task": "sums",
    "verifier": "number",
    "settings": {"tolerance": 0.5},
    "options": {"top_k": 5},
}
ITEM = {"id": "a", "prompt": "What is 2 + 3?", "answer": 5}


def read(tmp_path, *lines):
    path = tmp_path / "task.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
    return tasks.read_task(path)


def test_items_have_what_the_task_has_and_what_they_change(tmp_path):
    messages = [{"role": "user", "content": "Sort 3 1 2."}]
    other = {"id": "b", "messages": messages, "verifier": "sorted", "answer": [1, 2, 3]}
    third = {**ITEM, "id": "c", "settings": {"tolerance": 0}, "options": {"max_tokens": 7}}
    task = read(tmp_path, HEAD, ITEM, other, third)
    assert (task.name, task.about, task.options) == ("sums", "", {"top_k": 5})
    first, second, last = task.items
    assert (first.prompt, second.prompt, last.options) == (
        ITEM["prompt"],
        messages,
        {"max_tokens": 7},
    )
    assert first.verify("5.5").right
    assert not last.verify("5.5").right
    assert second.verify("1 2 3").right
    assert last.place == f"{tmp_path / 'task.jsonl'}:4"
    assert [item.id for item in task.first(2).items] == ["a", "b"]
    assert task.first(None) == task


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "task.jsonl holds no prompts"),
        ([ITEM], ":1: the first line must describe the task"),
        ([HEAD], "task.jsonl has no items"),
        ([HEAD, [1]], ":2: expected an object"),
        ([{**HEAD, "name": 1}, ITEM], ":1: unknown key 'name'; known are task, about, verifier"),
        ([{**HEAD, "task": ""}, ITEM], ":1: task must be a text, got ''"),
        ([{**HEAD, "about": 3}, ITEM], ":1: about must be a text, got 3"),
        ([{**HEAD, "options": []}, ITEM], ":1: options must be an object, got []"),
        ([{**HEAD, "options": {"seed": 1}}, ITEM], ":1: options cannot have 'seed'"),
        ([HEAD, {**ITEM, "options": {"tokens": [1]}}], ":2: options cannot have 'tokens'"),
        ([HEAD, {**ITEM, "seed": 1}], ":2: unknown key 'seed'; known are id, prompt, messages"),
        ([HEAD, {**ITEM, "id": 3}], ":2: id must be a text that is not empty, got 3"),
        ([HEAD, {"prompt": "a", "answer": 1}], ":2: id must be a text that is not empty, got None"),
        ([HEAD, {"id": "a", "answer": 1}], ":2: give 'prompt' or 'messages', one of the two"),
        ([HEAD, {**ITEM, "messages": []}], ":2: give 'prompt' or 'messages', one of the two"),
        ([HEAD, {"id": "a", "prompt": "b"}], ":2: 'answer' is missing"),
        ([HEAD, {**ITEM, "prompt": ""}], ":2: prompt must be a text and messages a list"),
        ([HEAD, {**ITEM, "prompt": [1]}], ":2: prompt must be a text and messages a list"),
        ([HEAD, {**ITEM, "answer": "x"}], ":2: answer must be a finite number, got 'x'"),
        ([HEAD, {**ITEM, "verifier": "sorted"}], ":2: answer must be a list"),
        ([HEAD, {**ITEM, "settings": {"strict": True}}], ":2: verifier number has no setting"),
        ([{"task": "a"}, ITEM], ":2: verifier must be one of exact, number, sorted"),
        ([HEAD, ITEM, {**ITEM, "answer": 6}], ":3: id 'a' is also that of"),
    ],
)
def test_what_is_no_task(tmp_path, lines, message):
    with pytest.raises(ValueError, match=re.escape(message)) as said:
        read(tmp_path, *lines)
    assert "task.jsonl" in str(said.value)


def test_files_that_are_not_text(tmp_path):
    path = tmp_path / "task.jsonl"
    path.write_bytes(b'{"task": "\xff"}')
    with pytest.raises(ValueError, match="is not UTF-8"):
        tasks.read_task(path)


def test_a_task_is_found_by_name_or_path(tmp_path):
    assert tasks.find_task("sorting") == resources.task_file("sorting")
    path = tmp_path / "mine.jsonl"
    path.touch()
    assert tasks.find_task(str(path)) == path
    with pytest.raises(ValueError, match="unknown task 'mine': give one of arithmetic, choice"):
        tasks.find_task("mine")
    with pytest.raises(ValueError, match="unknown task 'mine'; shipped: arithmetic"):
        resources.task_file("mine")


@given(item=st.text(min_size=1), sample=st.integers(0, 10**9 - 1))
def test_ids_of_samples_are_read_back(item, sample):
    assert tasks.split_id(tasks.request_id(item, sample)) == (item, sample)


@pytest.mark.parametrize(
    "name", ["a", "a#", "a#01", "a#-1", "a#x", "a#٣", "a#1 ", "#", 7, "a#1" * 99]
)
def test_ids_that_are_of_no_sample(name):
    split = tasks.split_id(name)
    assert split is None or tasks.request_id(*split) == name


def test_requests_of_samples(tmp_path):
    own = {**ITEM, "id": "b", "options": {"max_tokens": 7, "top_k": 3}}
    task = read(tmp_path, {**HEAD, "options": {"top_k": 5, "thinking": True}}, ITEM, own)
    found, places = tasks.prompts(task, 2, given=["thinking", "max_tokens"])
    text = ITEM["prompt"]
    assert found == [
        {"id": "a#0", "prompt": text, "top_k": 5},
        {"id": "a#1", "prompt": text, "top_k": 5},
        {"id": "b#0", "prompt": text, "top_k": 3, "max_tokens": 7},
        {"id": "b#1", "prompt": text, "top_k": 3, "max_tokens": 7},
    ]
    assert [place[-2:] for place in places] == [":2", ":2", ":3", ":3"]


# -- the shipped ones ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", shipped.NAMES)
def test_a_shipped_task_is_made_again_byte_by_byte(name):
    assert shipped.task_text(name).encode() == resources.task_file(name).read_bytes()


def test_shipped_tasks_are_small_and_their_ids_tell_them_apart():
    assert resources.task_names() == tuple(sorted(shipped.NAMES))
    ids = []
    for name in shipped.NAMES:
        path = resources.task_file(name)
        task = tasks.read_task(path)
        assert path.stat().st_size < 8192
        assert (task.name, len(task.items)) == (name, shipped.ITEMS)
        assert len({item.prompt for item in task.items}) == shipped.ITEMS
        ids += [item.id for item in task.items]
        assert tasks.shipped_task_of([f"{task.items[7].id}#3", "other#1"]) == name
    assert len(set(ids)) == len(ids)
    assert tasks.shipped_task_of(["other#1", "sorting-00", 7]) is None


def test_shipped_verifiers_take_the_right_answers_and_no_others():
    for name in shipped.NAMES:
        _, *lines = resources.task_file(name).read_text("utf-8").splitlines()
        task = tasks.read_task(Path(resources.task_file(name)))
        answers = [json.loads(line)["answer"] for line in lines]
        texts = [a if isinstance(a, str) else json.dumps(a) for a in answers]
        for i, item in enumerate(task.items):
            assert item.verify(texts[i]).right
            assert [item.verify(t).right for t in texts] == [a == answers[i] for a in answers]
