"""The example's questions: repeatable, right answers right, half-right ones worth less."""

from __future__ import annotations

import json

import pytest

from deepinfer_jax.resources import model_folder
from deepinfer_jax.rl.examples.policy import WIDTH, Settings, questions_of
from deepinfer_jax.rl.examples.questions import CREDIT, KINDS, question
from deepinfer_jax.text import load_tokenizer


def test_a_question_is_a_function_of_its_names():
    for kind in KINDS:
        assert question(3, "a", kind).text == question(3, "a", kind).text
        assert len({question(3, f"q{number}", kind).text for number in range(50)}) > 45
    with pytest.raises(ValueError, match="kind must be one of"):
        question(0, "a", "poetry")


def answer(asked) -> str:
    """What a right reply says, from the verifier."""
    wanted = asked.verify.answer
    if asked.kind == "sorting":
        return " ".join(map(str, wanted))
    if asked.kind == "extraction":
        return json.dumps(wanted)
    return f"It is {wanted}"


@pytest.mark.parametrize("kind", KINDS)
def test_right_replies_earn_all_and_others_at_most_the_credit(kind):
    for number in range(20):
        asked = question(1, f"n{number}", kind)
        assert asked.reward(answer(asked)) == 1.0
        for wrong in ("", "nothing", "{", "[1]", "12 13"):
            assert 0 <= asked.reward(wrong) <= CREDIT * 0.5


def test_what_is_right_of_a_wrong_reply_counts():
    asked = question(5, "x", "sorting")
    items = answer(asked).split()
    kept = [asked.reward(" ".join([*items[:count], "0"])) for count in range(len(items))]
    assert kept == [CREDIT * count / len(items) for count in range(len(items))]
    asked = question(5, "x", "extraction")
    one, two = (json.dumps({key: value})[1:-1] for key, value in asked.verify.answer.items())
    assert asked.reward(f"{{{one}}}") == CREDIT * 2 / 3
    assert asked.reward(f"{{{one}, {one}}}") == CREDIT * 2 / 4  # a key twice is no JSON here
    assert asked.reward(f'{{{one}, {two}, "a": 1}}') == CREDIT * 4 / 5


def test_questions_of_a_run_take_turns_and_fit_the_program():
    settings = Settings(groups=4, seed=2)
    names, kinds = [], []
    for step in range(6):
        own, asked = questions_of("train", step, settings.groups, settings)
        names += own
        kinds += [each.kind for each in asked]
    assert len(set(names)) == 24
    assert kinds == list(KINDS) * 8
    tokenizer = load_tokenizer(model_folder("spark-tiny"))
    for kind in KINDS:
        for number in range(60):
            text = question(0, f"train-{number}", kind).text
            ids = tokenizer.render_chat([{"role": "user", "content": text}], thinking=False)
            assert len(ids) <= WIDTH
