"""The command: what it prints and writes, what it refuses, what survives when it stops."""

import dataclasses
import io
import json
import subprocess
import sys

import hypothesis.strategies as st
import jax
import pytest
from hypothesis import given

import deepinfer_jax as di
from deepinfer_jax import checkpoint, cli, engine, generation, loading
from deepinfer_jax.cli import compiled, inputs, records
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.grammar import Grammar
from deepinfer_jax.prompts import make_requests
from deepinfer_jax.requests import Options, Request, Result, Timing
from tests import tiny_model

PROMPTS = [
    {"prompt": "Add 2 and 3.", "id": "add", "max_tokens": 5},
    {"messages": [{"role": "user", "content": "Sort 3 1 2."}], "temperature": 0},
    {"tokens": [0, 4, 900, 5, 7], "seed": 9, "max_tokens": 3},
]


def run(*args):
    """Exit status of `deepinfer-jax generate` with the tiny model."""
    return cli.main(["generate", "--model", str(tiny_model.folder()), *map(str, args)])


def expected(**options):
    return di.generate(tiny_model.model(), PROMPTS, max_tokens=8, **options)


def lines_of(text):
    return [json.loads(line) for line in text.split("\n")[:-1]]


def untimed(lines):
    return [{key: value for key, value in line.items() if key != "timing"} for line in lines]


@pytest.fixture
def prompt_file(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(prompt) + "\n" for prompt in PROMPTS), "utf-8")
    return path


# -- what it prints and writes ---------------------------------------------------------------------


@pytest.mark.slow
def test_one_prompt_streams_to_the_terminal(capsys, tmp_path):
    out = tmp_path / "out.jsonl"
    assert run("Tell me a story.", "--max-tokens", 9, "--seed", 4, "--out", out) == 0
    (result,) = di.generate(tiny_model.model(), ["Tell me a story."], max_tokens=9, seed=4)
    printed = capsys.readouterr()
    assert printed.out == result.text + "\n"
    assert printed.err == ""
    (line,) = lines_of(out.read_text("utf-8"))
    assert tuple(line["tokens"]) == result.tokens


def test_options_reach_the_reply(capsys):
    options = ["--temperature", 0.7, "--top-p", 0.9, "--top-k", 50, "--min-p", 0.001, "--thinking"]
    assert run("a", "--max-tokens", 7, *options, "--stop", "q", "--stop-token-id", 3) == 0
    (result,) = di.generate(
        tiny_model.model(), ["a"], max_tokens=7, temperature=0.7, top_p=0.9, top_k=50, min_p=0.001,
        thinking=True, stop=["q"], stop_token_ids=[3],
    )  # fmt: skip
    assert capsys.readouterr().out == result.text + "\n"


def test_many_prompts_give_lines_that_hold_the_results(capsys, prompt_file):
    assert run("--prompts", prompt_file, "--max-tokens", 8, "--batch-size", 1) == 0
    found = lines_of(capsys.readouterr().out)
    for index, (line, result) in enumerate(zip(found, expected(batch_size=1), strict=True)):
        timing = Timing(**line.pop("timing"))
        assert timing.admitted_s <= timing.first_token_s <= timing.finished_s
        assert line.pop("index") == index
        assert line.pop("model") == str(tiny_model.folder())
        assert line.pop("weights") == checkpoint.digest(tiny_model.folder())
        given = {"max_tokens": 8, "temperature": 1.0, **PROMPTS[index]}
        options = line.pop("options")
        assert all(options[name] == given[name] for name in ("max_tokens", "temperature"))
        for key, value in line.items():
            given = getattr(result, key)
            assert value == (list(given) if isinstance(given, tuple) else given)
    assert [line["id"] for line in found] == ["add", 1, 2]


def test_prompts_come_from_standard_input(capsys, monkeypatch, prompt_file):
    monkeypatch.setattr(sys, "stdin", io.StringIO(prompt_file.read_text("utf-8")))
    assert run("--prompts", "-", "--max-tokens", 8, "--batch-size", 1) == 0
    assert len(lines_of(capsys.readouterr().out)) == len(PROMPTS)


def test_options_that_came_later_stand_on_lines_only_where_given():
    """Lines of earlier versions have none of them and are those of the same requests."""
    first = {"max_tokens", "temperature", "top_p", "top_k", "min_p", "stop", "stop_token_ids",
             "thinking", "effort", "grammar"}  # fmt: skip
    given = {"logit_bias": {"5": 1.5, "12": -2}, "min_tokens": 2, "allowed_token_ids": [3, 5]}
    for options, more in ({}, {}), (given, given):
        request = Request("r", "p", (5,), 0, Options(**options))
        line = json.loads(json.dumps(records.asked(request, "m", "w")))
        assert line["options"].keys() == first | more.keys()
        assert {name: line["options"][name] for name in more} == more
        assert Options(**line["options"]) == request.options


def test_a_run_is_taken_up_where_it_stopped(capsys, tmp_path, prompt_file):
    whole, torn = tmp_path / "whole.jsonl", tmp_path / "torn.jsonl"
    common = ["--prompts", prompt_file, "--max-tokens", 8, "--batch-size", 1]
    assert run(*common, "--out", whole) == 0
    first, second, _ = whole.read_text("utf-8").splitlines(keepends=True)
    torn.write_text(first + second[: len(second) // 2], "utf-8")
    assert run(*common, "--out", torn, "--resume") == 0
    ends = [untimed(lines_of(path.read_text("utf-8"))) for path in (whole, torn)]
    assert ends[0] == ends[1]
    before = torn.read_bytes()
    assert run(*common, "--out", torn, "--resume") == 0
    assert torn.read_bytes() == before
    assert "nothing is missing" in capsys.readouterr().err


def test_prompts_from_standard_input_are_utf8(capsys, monkeypatch):
    """Whatever the terminal's encoding: a wrong guess would change prompts in silence."""
    data = io.BytesIO("\ufeff{}\n".encode() + '{"prompt": "é"}\n'.encode())
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(data, encoding="latin-1"))
    args = cli._parser().parse_args(["generate", "--prompts", "-"])
    assert [each.value for each in inputs.read_prompts(args)] == [{}, {"prompt": "é"}]


def result(index):
    timing = Timing(0.0, 0.0, 0.0)
    return Result(
        index,
        "p",
        f"t\u2028{index}",
        (1,),
        (-1.0,),
        (-1.0,),
        (1.0,),
        ("",),
        "stop",
        1,
        0,
        "ab",
        timing,
    )


ASKED = [{"model": "m", "prompt": "é", "options": {}, "weights": "w"}] * 6


@pytest.mark.parametrize("encoding", ["utf-8", "latin-1", "ascii"])
def test_lines_can_be_written_in_any_encoding(encoding):
    data = io.BytesIO()
    stream = io.TextIOWrapper(data, encoding=encoding)
    records.Lines(stream, ASKED, in_order=False, indices=[0]).write(result(0), 0)
    (line,) = lines_of(data.getvalue().decode(encoding))
    assert (line["text"], line["prompt"]) == ("t\u20280", "é")
    assert ("é".encode() in data.getvalue()) == (encoding == "utf-8")


@given(order=st.permutations(range(6)), written=st.integers(0, 6))
def test_lines_in_order_wait_for_those_before_and_are_never_lost(order, written):
    stream = io.StringIO()
    lines = records.Lines(stream, ASKED, in_order=True, indices=range(6))
    for index in order[:written]:
        lines.write(result(index), index)
        found = [line["index"] for line in lines_of(stream.getvalue())]
        assert found == list(range(len(found)))
    lines.close()
    found = [line["index"] for line in lines_of(stream.getvalue())]
    assert found == sorted(order[:written])


# -- grammars --------------------------------------------------------------------------------------


def test_a_grammar_that_cannot_be_compiled_fails_its_request(capsys):
    assert run("a", "--regex", "(unclosed") == 1
    assert "deepinfer-jax generate: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--regex", "a", "--json-schema", "x"], "one of the two"),
        (["--json-schema", "nowhere.json"], "nowhere.json"),
    ],
)
def test_grammars_that_are_none_are_refused(capsys, flags, message):
    assert run("a", *flags) == 2
    assert message in capsys.readouterr().err


def test_a_schema_reaches_the_request(monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(generation, "updates", lambda model, due, **more: asked.extend(due) or [])
    schema = tmp_path / "schema.json"
    schema.write_text('{"type":  "integer"}', "utf-8")
    assert run("a", "--json-schema", schema) == 0
    assert asked[0].options.grammar == Grammar("json", {"type": "integer"})


def test_penalties_and_a_least_length_reach_the_request(monkeypatch):
    asked = []
    monkeypatch.setattr(generation, "updates", lambda model, due, **more: asked.extend(due) or [])
    flags = ["--min-tokens", 3, "--ignore-eos", "--presence-penalty", -0.5, "--frequency-penalty",
             0.25, "--repetition-penalty", 1.5]  # fmt: skip
    assert run("a", *flags) == 0
    assert run("a") == 0
    given, default = (request.options for request in asked)
    assert given == dataclasses.replace(
        default, min_tokens=3, ignore_eos=True, presence_penalty=-0.5, frequency_penalty=0.25,
        repetition_penalty=1.5,
    )  # fmt: skip


def test_a_request_that_fails_alone_is_named_and_the_others_are_written(
    capsys, monkeypatch, tmp_path, prompt_file
):
    whole = engine.Engine.updates

    def failing(running):
        for update in whole(running):
            if update.index != 1:
                yield update
        yield engine.Update(1, "", 0, error=FloatingPointError("no number"))

    monkeypatch.setattr(engine.Engine, "updates", failing)
    out = tmp_path / "out.jsonl"
    assert run("--prompts", prompt_file, "--max-tokens", 8, "--batch-size", 1, "--out", out) == 1
    assert [line["id"] for line in lines_of(out.read_text("utf-8"))] == ["add", 2]
    said = capsys.readouterr().err
    assert "request 1: no number" in said
    assert "1 of 3 requests failed, 2 results are written" in said


# -- when it stops ---------------------------------------------------------------------------------


@pytest.mark.parametrize("flags", [[], ["--in-order"]])
@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (KeyboardInterrupt(), 130, "interrupted: 2 of 3 results are written in"),
        (FloatingPointError("not a number"), 1, "not a number"),
    ],
)
def test_finished_results_survive(
    capsys, monkeypatch, tmp_path, prompt_file, flags, error, status, message
):
    whole = engine.Engine.updates

    def torn(running):
        results = 0
        for update in whole(running):
            yield update
            results += update.result is not None
            if results == 2:
                raise error

    monkeypatch.setattr(engine.Engine, "updates", torn)
    out = tmp_path / "out.jsonl"
    common = ["--max-tokens", 8, "--batch-size", 1, "--out", out, *flags]
    assert run("--prompts", prompt_file, *common) == status
    assert message in capsys.readouterr().err
    monkeypatch.undo()
    found = lines_of(out.read_text("utf-8"))
    assert [line["text"] for line in found] == [r.text for r in expected(batch_size=1)[:2]]


def test_a_full_disk_is_said_plainly(capsys, prompt_file):
    assert (
        run("--prompts", prompt_file, "--max-tokens", 8, "--batch-size", 1, "--out", "/dev/full")
        == 1
    )
    assert "No space left" in capsys.readouterr().err


def test_a_reader_that_goes_away_is_no_error():
    """The pipe's other end is closed before the first line is written."""
    command = [sys.executable, "-m", "deepinfer_jax", "info", "tiny-s"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(timeout=120) == 141


@pytest.mark.parametrize(
    ("command", "status", "said"),
    [
        ("info tiny-s >&-", 0, ""),
        ("generate --prompts - <&-", 2, "standard input holds no prompts"),
        ("generate a --top-p 0 2>&-", 2, ""),
        ("generate --prompts - <&- >&- 2>&-", 2, ""),
    ],
)
def test_a_stream_may_be_closed(command, status, said):
    """Nothing but a message, and that where messages go."""
    shell = ["sh", "-c", f'"$0" -m deepinfer_jax {command}', sys.executable]
    done = subprocess.run(shell, check=False, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (status, "")
    assert said in done.stderr
    assert done.stderr.count("\n") == bool(said)


# -- what it refuses -------------------------------------------------------------------------------


@pytest.fixture
def refused(capsys, monkeypatch):
    """Runs the command, which must refuse with status 2 before loading; returns its message."""

    def never(*args, **options):
        raise AssertionError("weights were loaded before the input was checked")

    def check(*args):
        monkeypatch.setattr(loading, "load", never)
        assert run(*args) == 2
        printed = capsys.readouterr()
        assert printed.out == ""
        assert printed.err.count("\n") == 1
        return printed.err

    return check


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "give PROMPT arguments or --prompts FILE"),
        (["a", "--prompts", "b"], "one of the two"),
        (["a", ""], "PROMPT 2: prompt must be a non-empty string"),
        (["a", "--temperature", "nan"], "temperature must be finite"),
        (["a", "--temperature", "-1"], "temperature must be finite"),
        (["a", "--top-p", "0"], "top_p must be in (0, 1]"),
        (["a", "--seed", "-1"], "seed must be in"),
        (["a", "--effort", "much"], "effort must be one of"),
        (["a", "--max-tokens", "1100"], "together 1105, the model is loaded for max_length=1024"),
        (["a", "--max-length", "9000"], "max_length must be in 1.."),
        (["a", "--model", "spark-huge"], "unknown model 'spark-huge': give one of the shipped"),
        (["a", "--batch-size", "0"], "batch_size must be at least 1"),
        (["a", "--prompts", ""], "one of the two"),
        (["--prompts", "missing.jsonl"], "missing.jsonl cannot be read: No such file"),
        (["--prompts", "/"], "cannot be read: Is a directory"),
        (["a", "--out", "missing/out.jsonl"], "the folder missing does not exist"),
        (["a", "--out", "/"], "cannot be written: Is a directory"),
        (["a", "--resume"], "--resume needs --out"),
    ],
)
def test_bad_arguments(refused, args, message):
    assert message in refused(*args)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "holds no prompts"),
        (b'{"prompt": "a"}\n{"prompt": \n', ":2: broken JSON"),
        (b'{"prompt": "a"}\n\n{"prompt": "a", "colour": 1}\n', ":3: unknown key 'colour'"),
        (b'{"prompt": "a", "temperature": NaN}\n', ":1: temperature must be finite"),
        (b'{"prompt": "a", "max_tokens": 5000}\n', ":1: the prompt has 5 tokens"),
        (b'{"prompt": "a", "id": 1}\n{"prompt": "a", "id": "1"}\n', ":2: id '1' is also that of"),
        (b'{"prompt": "a", "tools": "abc"}\n', ":1: tools must be a list of mappings, got 'abc'"),
        (b'{"prompt": "a", "schema": [1]}\n', ":1: schema must be a mapping, got [1]"),
        (
            b'{"messages": [{"role": "assistant", "tool_calls": ["x"]}]}\n',
            ":1: messages[0].tool_calls[0] must be a mapping, got 'x'",
        ),
        (b'{"prompt": "a", "temperature": [0.5]}\n', ":1: temperature must be a number"),
        (b'{"prompt": "\xff"}\n', "is not UTF-8"),
    ],
)
def test_bad_prompt_files(refused, tmp_path, text, message):
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(text)
    said = refused("--prompts", path)
    assert message in said
    assert "prompts.jsonl" in said


def test_results_are_not_written_over(refused, tmp_path):
    out = tmp_path / "out.jsonl"
    out.write_text(a_line())
    assert "holds results already: add --resume" in refused("a", "--out", out)
    out.write_text(a_line(id=1))
    assert "out.jsonl:1: id '1' is not of this run" in refused("a", "--out", out, "--resume")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("notes\n", "out.jsonl:1 is not a result"),
        ("notes", "out.jsonl:1 is not a result"),
        ('{"name": "x"}', "out.jsonl:1 is not a result"),
        ('{"id": "0", "prompt": "x', "out.jsonl:1 is not a result"),
        ('notes\n{"id": 0', "out.jsonl:1 is not a result"),
        ('{"id": 0, "index": 0} and a note', "out.jsonl:1 is not a result"),
        ("12", "out.jsonl:1 is not a result"),
        ("[" * 100_000 + "\n", "out.jsonl:1 is not a result"),
    ],
)
def test_another_file_is_left_alone(refused, tmp_path, text, message):
    out = tmp_path / "out.jsonl"
    out.write_text(text)
    assert message in refused("a", "--out", out, "--resume")
    assert out.read_text() == text


def test_only_a_file_can_be_taken_up_again(refused):
    assert "/dev/null is none" in refused("a", "--out", "/dev/null", "--resume")


def a_line(**changes):
    """The line of an earlier run of `generate a`."""
    model = tiny_model.folder()
    cfg = ModelConfig.from_json(model)
    (request,) = make_requests(["a"], Options(), tiny_model.tokenizer(), cfg, 1000)
    asked = records.asked(request, str(model), checkpoint.digest(model))
    return json.dumps({**records.record(result(0), 0, asked), **asked, **changes}) + "\n"


def test_a_line_of_an_earlier_version_names_no_weights(tmp_path):
    out, line = tmp_path / "out.jsonl", json.loads(a_line())
    del line["weights"]
    out.write_text(json.dumps(line) + "\n")
    assert records.finished(out, [json.loads(a_line())]) == {"0": "ab"}


@pytest.mark.parametrize(
    "torn", [b"", b"{", b'{"id": 0, "inde', b'{"id": 0, "index": 0, "mo', b"\0\0"]
)
def test_a_torn_end_is_cut_off_behind_a_result(tmp_path, torn):
    out = tmp_path / "out.jsonl"
    out.write_bytes(a_line().encode() + torn)
    assert records.finished(out, [json.loads(a_line())]) == {"0": "ab"}
    assert out.read_text() == a_line()


@pytest.mark.parametrize(
    "note",
    ["important note without newline", '{"id": 0, "prompt": "x', '{"id": 7, "index": 0', "7"],
)
def test_an_end_that_is_no_torn_line_is_left_alone(refused, tmp_path, note):
    out = tmp_path / "out.jsonl"
    out.write_text(a_line() + note)
    assert "out.jsonl:2 is not a result" in refused("a", "--out", out, "--resume")
    assert out.read_text() == a_line() + note


def test_a_result_that_lacks_only_its_newline_is_kept(tmp_path):
    out = tmp_path / "out.jsonl"
    out.write_text(a_line().rstrip("\n"))
    assert records.finished(out, [json.loads(a_line())]) == {"0": "ab"}
    assert out.read_text() == a_line()


@pytest.mark.parametrize("key", sorted(records.KINDS.keys() - records.OPTIONAL))
def test_a_line_without_all_of_a_result_is_none(refused, tmp_path, key):
    out = tmp_path / "out.jsonl"
    for lacking in (json.loads(a_line()), json.loads(a_line(**{key: None}))):
        if lacking[key] is not None:
            del lacking[key]
        out.write_text(json.dumps(lacking) + "\n")
        assert "out.jsonl:1 is not a result" in refused("a", "--out", out, "--resume")


def test_results_of_other_numerics_are_not_kept_in_silence(capsys, tmp_path):
    out = tmp_path / "out.jsonl"
    out.write_text(a_line())
    assert run("a", "--out", out, "--resume") == 2
    assert "the result of id '0' was made with other numerics: 'ab'" in capsys.readouterr().err
    out.write_text(a_line(numerics=tiny_model.model().numerics.fingerprint()))
    assert run("a", "--out", out, "--resume") == 0
    assert "nothing is missing" in capsys.readouterr().err


@pytest.mark.parametrize("flags", [[], ["--resume"]])
def test_prompts_are_never_written_over(refused, monkeypatch, tmp_path, flags):
    prompts, link = tmp_path / "prompts.jsonl", tmp_path / "link.jsonl"
    prompts.write_text('{"id": "a", "prompt": "x"}')
    link.symlink_to(prompts)
    for out in (prompts, link):
        assert "is the file of the prompts" in refused("--prompts", prompts, "--out", out, *flags)
    with prompts.open() as stream:
        monkeypatch.setattr(sys, "stdin", stream)
        assert "is the file of the prompts" in refused("--prompts", "-", "--out", prompts, *flags)
    assert prompts.read_text() == '{"id": "a", "prompt": "x"}'


@pytest.mark.parametrize("torn", ["", "{", '{"id"', '{"id": 0, "index": 0, "mod'])
def test_a_file_may_hold_nothing_but_a_torn_line(tmp_path, torn):
    out = tmp_path / "out.jsonl"
    out.write_text(torn)
    assert records.finished(out, [json.loads(a_line())]) == {}
    assert out.read_text() == ""


KEYS = (  # of a line; whoever reads one relies on them
    "id index model prompt options text finish_reason prompt_tokens tokens logprobs "
    "logprobs_processed kept_mass seed numerics weights timing"
).split()


@given(length=st.integers(0, 200), name=st.text(st.characters(codec="utf-8")) | st.integers())
def test_every_beginning_of_a_line_is_recognised_as_torn(length, name):
    line = records.record(dataclasses.replace(result(0), id=name), 0, ASKED[0])
    assert list(line) == KEYS
    assert all(isinstance(value, (records.KINDS[k], tuple)) for k, value in line.items())
    data = records._json(line).encode()
    assert records._is_torn(data[:length], [{"id": name}])
    assert records._is_torn(data[:length] + b"\0" * 9, [{"id": name}])


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["b"], 'another prompt: "a" there, "b" now'),
        (["a", "--temperature", "0.5"], "another temperature: 1.0 there, 0.5 now"),
        (["a", "--max-tokens", "9"], "another max_tokens: 256 there, 9 now"),
        (["a", "--stop", "x"], 'another stop: [] there, ["x"] now'),
        (["a", "--thinking"], "another thinking: false there, true now"),
        (["a", "--seed", "3"], "another seed: "),
    ],
)
def test_results_of_another_request_are_not_kept_in_silence(refused, tmp_path, args, message):
    out = tmp_path / "out.jsonl"
    out.write_text(a_line())
    assert f"out.jsonl:1: the result of id '0' was made with {message}" in refused(
        *args, "--out", out, "--resume"
    )
    assert out.read_text() == a_line()


def test_another_model_or_other_tools_are_noticed_too(refused, tmp_path):
    out, prompts = tmp_path / "out.jsonl", tmp_path / "prompts.jsonl"
    out.write_text(a_line(model="other"))
    assert 'another model: "other" there' in refused("a", "--out", out, "--resume")
    out.write_text(a_line(weights="other"))  # trained on, in the same folder
    assert 'another set of weights: "other" there' in refused("a", "--out", out, "--resume")
    out.write_text(a_line())
    prompts.write_text('{"prompt": "a", "tools": [{"name": "f"}]}')
    said = refused("--prompts", prompts, "--out", out, "--resume")
    assert 'another tools: null there, [{"name": "f"}] now' in said


def test_what_could_not_be_written_is_refused(refused, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    for value in ("NaN", '"\\ud800"'):
        turn = f'{{"role": "user", "content": "a", "note": {value}}}'
        prompts.write_text(f'{{"messages": [{turn}]}}')
        assert "prompts.jsonl:1 cannot be written as JSON" in refused("--prompts", prompts)


@pytest.mark.parametrize(
    "prompt",
    [
        '{"prompt": "a", "schema": DEEP}',
        '{"prompt": "a", "tools": [{"name": "f", "parameters": DEEP}]}',
        '{"messages": [{"role": "user", "content": DEEP}]}',
        '{"messages": DEEP}',
        '{"prompt": "a", "id": DEEP}',
    ],
)
@pytest.mark.parametrize("depth", [900, 100_000])
def test_deep_values_are_refused_with_their_line(refused, tmp_path, prompt, depth):
    path = tmp_path / "prompts.jsonl"
    path.write_text(prompt.replace("DEEP", '{"a":' * depth + "1" + "}" * depth))
    said = refused("--prompts", path)
    assert "prompts.jsonl:1" in said
    assert len(said) < 1500


def test_long_values_are_quoted_short(refused, tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"prompt": "a", "schema": ["x" * 100_000]}))
    assert len(refused("--prompts", path)) < 1500
    path.write_text(json.dumps({"prompt": "a", "id": ["x" * 100_000]}))
    assert len(refused("--prompts", path)) < 500


def test_an_unknown_platform_is_refused(refused, monkeypatch):
    def nothing():
        raise RuntimeError("Unable to initialize backend 'bogus'")

    monkeypatch.setattr(jax, "devices", nothing)
    assert "JAX finds no device: Unable to initialize backend 'bogus'" in refused("a")


def test_a_damaged_model_is_refused(capsys, tmp_path):
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((tiny_model.folder() / name).read_bytes())
    assert cli.main(["generate", "--model", str(tmp_path), "a"]) == 2
    assert "no model.safetensors" in capsys.readouterr().err


@pytest.mark.parametrize("args", [[], ["generate", "a", "--top-k", "1.5"], ["paint"]])
def test_bad_usage(capsys, args):
    with pytest.raises(SystemExit, match="2"):
        cli.main(args)
    assert "usage: deepinfer-jax" in capsys.readouterr().err


# -- around it -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("deepseek-v4.1-flash", ["96,085 tensors", "510,286,023,000", "890"]),
        ("spark-tiny", ["full+candidates", "DSpark draft"]),
        ("a folder", ["full", "DSpark draft", "tensors"]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_info_describes_a_model(capsys, model, words):
    model = str(tiny_model.folder()) if model == "a folder" else model
    assert cli.main(["info", model]) == 0
    printed = capsys.readouterr().out
    assert all(word in printed for word in words)


def test_info_refuses_what_it_does_not_know(capsys, tmp_path):
    assert cli.main(["info", "spark-huge"]) == 2
    assert "give one of spark-tiny, deepseek-v4.1-flash" in capsys.readouterr().err
    (tmp_path / "config.json").write_text("{}")
    assert cli.main(["info", str(tmp_path)]) == 2
    assert "missing field" in capsys.readouterr().err


def test_version_and_help_need_no_jax():
    program = (
        "import sys, deepinfer_jax.cli as cli\n"
        "try: cli.main(sys.argv[1:])\n"
        "except SystemExit as end: sys.exit(end.code or 'jax' in sys.modules)"
    )
    for args in (["--version"], ["generate", "--help"]):
        command = [sys.executable, "-c", program, *args]
        done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
        assert "deepinfer-jax" in done.stdout


def test_compiled_programs_are_kept_in_the_users_cache(capsys, monkeypatch, tmp_path):
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs",
             "jax_persistent_cache_min_entry_size_bytes")  # fmt: skip
    before = {name: jax.config.values[name] for name in names}
    compiled.use_compilation_cache()
    assert {name: jax.config.values[name] for name in names} == before
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    try:
        jax.config.update("jax_compilation_cache_dir", None)
        compiled.use_compilation_cache()
        chosen = jax.config.values["jax_compilation_cache_dir"]
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
    assert chosen.startswith(str(tmp_path / "deepinfer-jax"))
    assert "compiling for the first time" in capsys.readouterr().err


def test_a_cache_that_cannot_be_made_costs_nothing_else(capsys, monkeypatch, tmp_path):
    (tmp_path / "deepinfer-jax").write_text("in the way")
    before = jax.config.values["jax_compilation_cache_dir"]
    monkeypatch.setattr(compiled.Path, "home", homeless)
    for base, said in ((str(tmp_path), str(tmp_path)), ("", "set XDG_CACHE_HOME to a folder")):
        monkeypatch.setenv("XDG_CACHE_HOME", base)
        try:
            jax.config.update("jax_compilation_cache_dir", None)
            compiled.use_compilation_cache()
            assert jax.config.values["jax_compilation_cache_dir"] is None
        finally:
            jax.config.update("jax_compilation_cache_dir", before)
        found = capsys.readouterr().err
        assert "compiled programs are not kept: " in found
        assert said in found


def homeless():
    raise RuntimeError("Could not determine home directory.")
