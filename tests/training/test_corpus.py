"""The corpus: checks that are exact, splits that do not leak, and the real chat format."""

import hashlib
import itertools
import json
import pathlib
import statistics

import deepseek_recipe
import pytest

from deepinfer_jax import text
from deepinfer_jax.text import chat as serving
from deepinfer_jax.training import corpus, dataset
from deepinfer_jax.training.corpus import (
    arithmetic,
    chat,
    example,
    extraction,
    library,
    programs,
    sequences,
    stories,
    tools,
)

TOKENIZER = text.load_tokenizer(pathlib.Path(dataset.TOKENIZER).parent)
EFFORT = {50: "low", 75: "high", 100: "max"}


def some(count, seed=5, **kwargs):
    return list(itertools.islice(corpus.examples(seed, **kwargs), count))


# --- the stream of examples --------------------------------------------------------------------


def test_the_corpus_is_the_recorded_one():
    """Bit for bit, on every Python version: the shipped model was trained on these texts."""
    digest = hashlib.sha256()
    for one in some(2000, seed=1):
        digest.update(chat.document_text(one).encode())
    assert digest.hexdigest() == "1bc191515e9bd00530405e0d58b917b64075b225516b7d976adde5c70237fff7"


@pytest.mark.parametrize("task", corpus.TASKS)
@pytest.mark.parametrize("split", ["train", "heldout"])
def test_every_answer_passes_its_own_check(task, split):
    for one in some(60, split=split, tasks=(task,)):
        assert one.task == task
        assert one.check(one.completion), one
        assert one.check(one.completion + chat.EOS), one
        assert one.check(one.answer), one


@pytest.mark.parametrize("task", corpus.TASKS)
def test_answers_of_other_questions_fail(task):
    asked = some(60, tasks=(task,))
    for one, other in itertools.pairwise(asked):
        right = other.answer == one.answer or (task == "story" and one.check(other.answer))
        assert one.check(other.answer) == right
        assert not one.check("")
        assert not one.check(one.answer[: len(one.answer) // 2])


def test_splits_share_no_combination():
    def asked(split):
        found = set()
        for task in corpus.TASKS.values():
            for one in some(150, seed=9, split=split, tasks=(task.name,)):
                last = one.prompt_messages[-1]
                if not task.memorised and last["role"] == "user" and last["content"] not in facts:
                    found.add((task.name, last["content"], one.answer))
        return found

    facts = {one.prompt_messages[-1]["content"] for one in some(2000, tasks=("fact",))}

    assert not asked("train") & asked("heldout")


def test_a_sum_and_its_mirror_are_held_out_together():
    pairs = set()
    for split in ("train", "heldout"):
        for one in some(1500, split=split, tasks=("addition",)):
            a, _, b, *_ = one.answer.split()
            pairs.add((split, frozenset((a, b))))
    assert not {p for s, p in pairs if s == "train"} & {p for s, p in pairs if s == "heldout"}


def test_tasks_are_mixed_by_weight():
    counts = dict.fromkeys(corpus.TASKS, 0)
    for one in some(4000):
        counts[one.task] += 1
    total = sum(task.weight for task in corpus.TASKS.values())
    for name, task in corpus.TASKS.items():
        assert abs(counts[name] / 4000 - task.weight / total) < 0.025


def test_heldout_gives_as_many_as_asked_for():
    assert len(corpus.heldout("sort", 7)) == 7
    twice = [[one.completion for one in corpus.heldout("copy", 3)] for _ in range(2)]
    assert twice[0] == twice[1]


@pytest.mark.parametrize(
    ("split", "tasks", "said"), [("test", (), "split must be"), ("train", ("poems",), "unknown")]
)
def test_unknown_names_are_refused(split, tasks, said):
    with pytest.raises(ValueError, match=said):
        next(corpus.examples(0, split, tasks))


# --- the chat format ---------------------------------------------------------------------------


def rendered(one, *, answered):
    """The recipe's text of an example, with or without its reply."""
    turns = list(one.prompt_messages)
    if answered:
        reply = {"role": "assistant", "content": one.answer, "prefix": True}
        turns.append(reply | {"reasoning_content": one.reasoning})
    conversation = serving.conversation(
        turns,
        thinking=one.reasoning is not None,
        effort=EFFORT[one.effort],
        tools=one.tools,
        tool_choice="auto",
        schema=one.schema,
    )
    return deepseek_recipe.DeepseekV41Encoding().render_conversation(conversation).prompt


@pytest.mark.parametrize("task", corpus.TASKS)
def test_documents_are_what_the_recipe_renders(task):
    for one in some(150, tasks=(task,)):
        assert chat.prompt_text(one) == rendered(one, answered=False)
        assert chat.document_text(one) == rendered(one, answered=True) + chat.EOS


def test_rendered_ids_are_those_of_serving():
    full = dataset.load_tokenizer()
    for one in some(150):
        prompt, answer = corpus.render(one, full)
        assert prompt == TOKENIZER.render_chat(
            one.prompt_messages,
            thinking=one.reasoning is not None,
            effort=EFFORT[one.effort],
            tools=one.tools,
            schema=one.schema,
        )
        assert answer[-1] == TOKENIZER.eos
        reply = TOKENIZER.parse_reply(answer, thinking=one.reasoning is not None)
        assert reply.reasoning == (one.reasoning or "")
        if not one.answer.lstrip().startswith("<｜DSML｜"):
            assert reply.content == one.answer


def test_calls_parse_back():
    for one in some(60, tasks=("tool",)):
        _, answer = corpus.render(one, dataset.load_tokenizer())
        reply = TOKENIZER.parse_reply(answer, thinking=one.reasoning is not None)
        calls = [{**c, "arguments": json.loads(c["arguments"])} for c in reply.tool_calls]
        assert one.check(chat.calls_text(calls) if calls else reply.content)


def test_documents_are_short():
    full = dataset.load_tokenizer()
    lengths = [len(full.encode(chat.document_text(one)).ids) for one in some(2000)]
    assert max(lengths) <= 480
    assert statistics.quantiles(lengths, n=10)[7] <= 200  # four in five


# --- the tasks ---------------------------------------------------------------------------------


def test_sums_carry_and_differences_borrow():
    assert arithmetic.addition_steps(47, 38) == "7+8=15, write 5, carry 1.\n4+3+1=8, write 8."
    assert arithmetic.addition_steps(95, 7) == "5+7=12, write 2, carry 1.\n9+0+1=10, write 10."
    assert arithmetic.subtraction_steps(52, 17) == "borrow 1, 12-7=5.\n5-1-1=3."
    assert (
        arithmetic.subtraction_steps(100, 1, brief=True)
        == "borrow 1, 10-1=9; borrow 1, 10-0-1=9; 1-0-1=0."
    )


@pytest.mark.parametrize("task", ["addition", "subtraction"])
def test_worked_steps_spell_the_result(task):
    """Last digits of the steps, read backwards, are the answer."""
    for one in some(100, tasks=(task,)):
        if one.reasoning is not None and one.effort == 75:
            steps = one.reasoning.splitlines()[:-1]
            results = [step.split("=")[1].split(",")[0].rstrip(".") for step in steps]
            digits = results[-1] + "".join(r[-1] for r in reversed(results[:-1]))
            assert int(digits) == int(one.answer.split()[-1])


def test_numbers_are_compared_as_numbers():
    assert arithmetic.ends_with_number(85, "7+8=15</think>It is 85.<｜end▁of▁sentence｜>")
    assert not arithmetic.ends_with_number(85, "47 + 38 = 8")
    assert not arithmetic.ends_with_number(85, "47 + 38 = 850")
    assert not arithmetic.ends_with_number(85, "85</think>")
    assert not arithmetic.ends_with_number(85, "85 + 0 =")


def test_sorting_selects_the_smallest_again_and_again():
    assert sequences.selection_steps([7, 3, 9]) == "7 3 9 -> 3\n7 9 -> 7\n9 -> 9"
    assert sequences.selection_steps([7, 3, 7], brief=True) == "3, 7, 7"


def test_json_is_compared_by_value_and_type():
    check = example.says_json
    assert check({"a": 1, "b": "x"}, '{"b": "x",\n "a": 1}')
    for wrong in ('{"a": 1}', '{"a": "1", "b": "x"}', '{"a": true, "b": "x"}', "a", '{"a": 1'):
        assert not check({"a": 1, "b": "x"}, wrong)


def test_schemas_describe_the_answers():
    assert extraction.json_schema(["age"])["properties"] == {"age": {"type": "integer"}}
    for one in some(100, tasks=("json",)):
        if one.schema is not None:
            value = json.loads(one.answer)
            kinds = {str: "string", int: "integer"}
            properties = one.schema["properties"]
            assert {k: {"type": kinds[type(v)]} for k, v in value.items()} == properties


def test_programs_are_compared_by_syntax_tree():
    code = "def double(x):\n    return x * 2"
    assert programs.says_program(code, "def double( x ):\n  return x*2  # twice")
    assert not programs.says_program(code, "def double(x):\n    return x * 3")
    assert not programs.says_program(code, "def double(x:\n")
    assert not programs.says_program(code, "\0")


def test_a_story_must_end_and_name_its_subjects():
    story = "A cat ran. It saw a kite. It hid. It came back. It slept. The end."
    check = stories.tells_about
    assert check(("cat", "kite"), story)
    assert not check(("dog",), story)
    assert not check(("cat",), story.removesuffix(" The end."))
    assert not check(("cat",), "A cat ran. A cat ran. A cat ran. A cat ran. The end.")


def test_stories_read_well():
    for one in some(300, tasks=("story",)):
        assert "{" not in one.answer
        assert " a a" not in one.answer.replace(" a apple", " a a")
        for sentence in one.answer.split(". "):
            assert sentence[0].isupper() or sentence[0] == '"'


def test_a_call_must_be_exact():
    call = {"name": "get_time", "arguments": {"city": "Rome"}}
    assert tools.says_call(call, "thought</think>" + chat.calls_text([call]))
    other = {"name": "get_time", "arguments": {"city": "Oslo"}}
    assert not tools.says_call(call, chat.calls_text([other]))
    assert not tools.says_call(call, "Rome")


def test_library_documents_are_plain_and_without_control_spellings():
    documents = library.documents()
    assert len(documents) > 3000
    assert len(set(documents)) == len(documents)
    for document in documents:
        body = document.removeprefix(chat.BOS).removesuffix(chat.EOS)
        assert body.isascii()
        assert "<think>" not in body
