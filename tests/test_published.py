"""The table of the published engine's variables: whole, and without a name that does not exist."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import inspect
import os
import re

import jax
import pytest

from deepinfer_jax import cli, published
from deepinfer_jax.cli import variables
from deepinfer_jax.published import PREFIX, SETTINGS, Setting

FIELDS = sorted({field for setting in SETTINGS for field in setting.fields})
SPOKEN = [setting.here for setting in SETTINGS] + [setting.meaning for setting in SETTINGS]


def attribute(path: str):
    """What deepinfer_jax.`path` is; a dataclass field counts as an attribute of its class."""
    parts, found = path.split("."), importlib.import_module("deepinfer_jax")
    for place, part in enumerate(parts):
        if isinstance(found, type) and dataclasses.is_dataclass(found):
            names = {field.name for field in dataclasses.fields(found)}
            if part in names:
                return part
        try:
            found = importlib.import_module("deepinfer_jax." + ".".join(parts[: place + 1]))
        except ModuleNotFoundError:
            found = getattr(found, part)
    return found


def options(command: str) -> set[str]:
    """The options of `deepinfer-jax COMMAND`."""
    (commands,) = (
        action
        for action in cli._parser()._actions
        if isinstance(action, argparse._SubParsersAction)
    )
    return set(commands.choices[command]._option_string_actions)


def exists(field: str) -> bool:
    if field.startswith("$JAX_"):
        return field[1:].lower() in jax.config.values
    if field.startswith("deepinfer-jax "):
        _, command, *option = field.split(" ")
        return set(option) <= options(command)
    if field.startswith("jax."):
        return callable(getattr(importlib.import_module("jax.profiler"), field.rpartition(".")[2]))
    called = re.fullmatch(r"([\w.]+)\((\w+)\)", field)
    try:
        if called:
            return called[2] in inspect.signature(attribute(called[1])).parameters
        return bool(attribute(field))
    except AttributeError:
        return False


@pytest.mark.parametrize("field", FIELDS)
def test_every_field_exists(field):
    assert exists(field)


@pytest.mark.parametrize(
    "field",
    [
        "requests.Options.nothing",
        "loading.load(nothing)",
        "deepinfer-jax info --nothing",
        "$JAX_NO",
    ],
)
def test_a_field_that_does_not_exist_would_be_found(field):
    assert not exists(field)


def test_names_in_the_explanations_exist():
    for text in SPOKEN:
        for name in re.findall(r"`([\w.]+\.[\w.]+)`", text):
            first = name.split(".", 1)[0]
            short = {"Result": "requests.", "Hidden": "model.forward."}
            assert attribute(short.get(first, "") + name) is not None, name


def test_names_are_names_once():
    names = [setting.name for setting in SETTINGS]
    assert len(names) == len(set(names)) == 63
    for setting in SETTINGS:
        assert re.fullmatch(r"[A-Z0-9_]+", setting.name)
        assert not setting.name.startswith(PREFIX)
        assert setting.meaning
        assert setting.here


def test_what_contradicts_itself_is_refused():
    with pytest.raises(ValueError, match="answer must be one of"):
        Setting("A", "", "b", "maybe", "c")
    with pytest.raises(ValueError, match="fields go with the answer"):
        Setting("A", "", "b", "field", "c")
    with pytest.raises(ValueError, match="fields go with the answer"):
        Setting("A", "", "b", "not yet", "c", ("loading.load(model)",))


# -- the command ----------------------------------------------------------------------------------


@pytest.fixture
def environment(monkeypatch):
    for name in [name for name in os.environ if name.startswith(PREFIX)]:
        monkeypatch.delenv(name)
    return monkeypatch


def shown(capsys, *arguments: str) -> str:
    assert cli.main(["env", *arguments]) == 0
    return capsys.readouterr().out


def test_the_whole_table_is_shown(capsys):
    out = shown(capsys)
    for setting in SETTINGS:
        assert setting.variable in out
    assert all(len(line) <= 100 for line in out.splitlines())


@pytest.mark.parametrize("name", ["USE_NEXTN_DECODE", "DEEPINFER_USE_NEXTN_DECODE",
                                  "use_nextn_decode"])  # fmt: skip
def test_one_name_in_any_spelling(capsys, name):
    out = shown(capsys, name)
    assert out.splitlines()[0] == "DEEPINFER_USE_NEXTN_DECODE (default 5)"
    assert "deepinfer-jax generate --speculative" in out
    assert out.count(PREFIX) == 1


def test_an_unknown_name_is_refused_with_the_nearest(capsys):
    assert cli.main(["env", "NEXTN"]) == 2
    assert "near it are USE_NEXTN_DECODE" in capsys.readouterr().err


def test_what_is_set_is_shown_with_what_to_write(capsys, environment):
    assert shown(capsys, "--set") == "no variable DEEPINFER_... is set\n"
    environment.setenv("DEEPINFER_DECODE_TOKEN_BLACKLIST", "5,6")
    environment.setenv("DEEPINFER_SOMETHING", "1")
    out = shown(capsys, "--set")
    assert "DEEPINFER_DECODE_TOKEN_BLACKLIST=5,6\n" in out
    assert "requests.Options.banned_token_ids" in out
    assert "DEEPINFER_SOMETHING=1\n  unknown" in out
    assert shown(capsys, "--set", "GLOO_TIMEOUT") == "none of these is set\n"
    assert "5,6" in shown(capsys, "--set", "DECODE_TOKEN_BLACKLIST")


def test_the_three_answers_read_as_sentences():
    by_name = {setting.name: variables.describe(setting) for setting in SETTINGS}
    assert "here   not needed, because " in by_name["GLOO_TIMEOUT"]
    assert "here   not yet: " in by_name["COMPUTE_SUM_SMALLER_PROBS"]
    assert "here   by request\n" in by_name["DECODE_TOKEN_BLACKLIST"]


def test_nothing_but_the_command_reads_them():
    assert list(published.are_set({"DEEPINFER_GLOO_TIMEOUT": "1", "PATH": "x"})) == [
        ("DEEPINFER_GLOO_TIMEOUT", "1", published.find(["GLOO_TIMEOUT"])[0])
    ]
