"""Published benchmarks: their columns, and the task files that come of them."""

from __future__ import annotations

import collections
import csv
import json

import pytest

from deepinfer_jax.evaluation import layouts, tasks

AIME = [
    {"id": "60", "problem": "How many, with $n^{2}$?", "answer": "025", "url": "x"},
    {"id": "61", "problem": "And {now}?", "answer": "204", "url": "y"},
]
GPQA = [
    {"Record ID": f"rec{i}", "Question": f"Which {i}?", "Correct Answer": " right",
     "Incorrect Answer 1": "one", "Incorrect Answer 2": "two\n", "Incorrect Answer 3": "three"}
    for i in range(40)
]  # fmt: skip
HLE = [
    {"id": "h1", "question": "Name it.", "answer": "x^2", "answer_type": "exactMatch", "image": ""},
    {"id": "h2", "question": "Choose.\nA. a\nB. b", "answer": "B", "answer_type": "multipleChoice",
     "image": ""},
    {"id": "h3", "question": "See.", "answer": "B", "answer_type": "multipleChoice",
     "image": "data:" + "A" * 200_000},
]  # fmt: skip


def source(tmp_path, rows, form="csv"):
    path = tmp_path / f"in.{form}"
    with path.open("w", encoding="utf-8", newline="") as file:
        if form == "csv":
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
        else:
            file.writelines(json.dumps(row) + "\n" for row in rows)
    return path


def convert(tmp_path, name, rows, form="csv", seed=0):
    made = layouts.convert(name, source(tmp_path, rows, form), seed)
    path = tmp_path / "out.jsonl"
    path.write_text(tasks.task_text(made.head, made.items), "utf-8")
    return made, tasks.read_task(path)


@pytest.mark.parametrize("form", ["csv", "jsonl"])
def test_aime(tmp_path, form):
    made, task = convert(tmp_path, "aime", AIME, form)
    assert made.unused == ["url"]
    assert [item.id for item in task.items] == ["aime-60", "aime-61"]
    assert task.items[0].prompt.startswith("How many, with $n^{2}$?\n\n")
    assert task.items[1].prompt.startswith("And {now}?\n\n")
    assert task.items[0].verify("so \\boxed{25}.").right
    assert not task.items[1].verify("203").right


def test_aime_by_other_names_and_without_ids(tmp_path):
    rows = [{"Question": "How many?", "Answer": 7}, {"Question": "And now?", "Answer": 8}]
    _, task = convert(tmp_path, "aime", rows, "jsonl")
    assert [item.id for item in task.items] == ["aime-0", "aime-1"]
    _, task = convert(tmp_path, "aime", [{"problem_idx": 3, "problem": "?", "answer": 7}], "jsonl")
    assert task.items[0].id == "aime-3"


def test_gpqa_choices_stand_in_an_order_that_seed_and_id_fix(tmp_path):
    made, task = convert(tmp_path, "gpqa", GPQA)
    letters = collections.Counter(item["answer"] for item in made.items)
    assert set(letters) == set("ABCD")
    for given, item in zip(made.items, task.items, strict=True):
        choices = given["settings"]["choices"]
        assert sorted(choices) == ["one", "right", "three", "two"]
        assert choices["ABCD".index(given["answer"])] == "right"
        assert f"\n{given['answer']}. right\n" in item.prompt
        assert item.verify(f"Hm.\nAnswer: {given['answer']}").right
    alone, _ = convert(tmp_path, "gpqa", GPQA[7:8])
    assert alone.items == made.items[7:8]
    other, _ = convert(tmp_path, "gpqa", GPQA, seed=1)
    assert other.items != made.items


def test_hle_leaves_images_out(tmp_path):
    made, task = convert(tmp_path, "hle", HLE)
    assert made.left_out == {"with an image": 1}
    first, second = task.items
    assert first.verify("Well.\nAnswer: X^2.").right
    assert not first.verify("x^2").right
    assert second.verify("Answer: B").right
    assert not second.verify("Answer: A").right


@pytest.mark.parametrize(
    ("name", "rows", "message"),
    [
        ("aime", [{"text": "a", "answer": "1"}], "lacks a column 'problem' or 'question'; it has"),
        (
            "aime",
            [{**AIME[0], "question": "b"}],
            "has the columns 'problem' and 'question' for the",
        ),
        ("aime", [{**AIME[0], "answer": "\\boxed{5}"}], "in.csv:2: answer must be a whole number"),
        ("aime", [{**AIME[0], "answer": "1000"}], "from 0 to 999, got '1000'"),
        ("aime", [{**AIME[0], "answer": ""}], "from 0 to 999, got ''"),
        ("gpqa", AIME, "lacks a column 'question'"),
        ("hle", [{**HLE[0], "answer_type": "free"}], "answer_type must be exactMatch or multiple"),
        ("hle", HLE[2:], "has no row to keep: {'with an image': 1} left out"),
        ("hle", GPQA, "lacks a column 'id'"),
    ],
)
def test_rows_and_columns_that_do_not_fit(tmp_path, name, rows, message):
    with pytest.raises(ValueError, match=r"in\.csv") as said:
        layouts.convert(name, source(tmp_path, rows))
    assert message in str(said.value)


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("in.parquet", b"x", "in.parquet must end in .csv or .jsonl"),
        ("in.csv", b"", "has no rows below its first line"),
        ("in.csv", b"problem,answer\n", "has no rows below its first line"),
        ("in.csv", b"problem,answer\na\n", "in.csv:2: this row has not as many fields"),
        ("in.csv", b"problem,answer\na,1,2\n", "in.csv:2: this row has not as many fields"),
        ("in.csv", b'problem,answer\n"a"b,1\n', "broken CSV"),
        ("in.csv", b"problem,answer\n\xff,1\n", "is not UTF-8"),
        ("in.jsonl", b"[1]\n", "in.jsonl:1: expected an object"),
        (
            "in.jsonl",
            b'{"problem": [1], "answer": 1}\n',
            "problem must be a text or a whole number",
        ),
    ],
)
def test_files_that_cannot_be_read(tmp_path, file, text, message):
    limit = csv.field_size_limit()
    (tmp_path / file).write_bytes(text)
    with pytest.raises(ValueError, match="in") as said:
        layouts.convert("aime", tmp_path / file)
    assert message in str(said.value)
    assert csv.field_size_limit() == limit
