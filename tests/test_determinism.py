"""The library and the command: arguments, findings, table, exit status."""

import dataclasses
import subprocess
import sys

import jax
import numpy as np
import pytest

import deepinfer_jax
from deepinfer_jax import cli, determinism
from deepinfer_jax.cli import checking
from deepinfer_jax.determinism import Check, Finding, Pair, equality
from tests import tiny_model

EQUAL = Finding("chunks", "cuts", 1234567, 0, 4.24)
BROKEN = Finding("drafts", "wrong drafts", 40, 3, 0.5, "request 1: raw[4] is 1 instead of 2")


# -- equality --------------------------------------------------------------------------------------


def test_bits_see_what_values_do_not():
    nan, zero = np.array([np.nan], np.float32), np.array([0.0], np.float32)
    assert not equality.unequal(nan, nan).any()
    assert equality.unequal(zero, -zero).all()
    with pytest.raises(ValueError, match=r"one shape and type.*float32\(1,\) and int32\(1,\)"):
        equality.unequal(zero, np.array([0], np.int32))
    with pytest.raises(ValueError, match=r"different names: \['a'\] and \['b'\]"):
        equality.different({"a": zero}, {"b": zero})


def test_a_finding_counts_values_and_shows_the_first():
    def pairs(_):
        yield Pair("here", {"x": np.arange(4)}, {"x": np.arange(4)})
        yield Pair("there", {"x": np.array([[1, 5], [7, 9]])}, {"x": np.array([[1, 2], [7, 3]])})

    finding = determinism.run_check(Check("made", "up", pairs), None)  # pyright: ignore
    assert (finding.compared, finding.differing) == (8, 2)
    assert finding.first == "there: x[0, 1] is 5 instead of 2"
    with pytest.raises(dataclasses.FrozenInstanceError):
        finding.differing = 0  # pyright: ignore


def test_what_compares_nothing_says_why():
    check = Check("made", "up", lambda _: iter(()), nothing="one device")
    finding = determinism.run_check(check, None)  # pyright: ignore
    assert (finding.compared, finding.skipped) == (0, "one device")


# -- arguments -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"names": ["chunk"]}, ValueError, "unknown check 'chunk'; there are: repetition, batch"),
        ({"names": "chunks"}, TypeError, r"names must be a list of names, got 'chunks'"),
        ({"names": []}, ValueError, "names is empty: give some of repetition"),
        ({"tokens": 0}, ValueError, r"tokens must be between 1 and 998 \(max_length less prompts"),
        ({"tokens": 999}, ValueError, "got 999"),
        ({"tokens": True}, TypeError, "tokens must be an integer, got True"),
        ({"seed": -1}, ValueError, "seed must be between 0 and"),
        ({"seed": 0.5}, TypeError, "seed must be an integer, got 0.5"),
    ],
)
def test_a_bad_argument_is_refused_by_the_call(options, error, message):
    with pytest.raises(error, match=message):
        determinism.check(tiny_model.model(), **options)


def test_a_model_too_short_for_prompts_is_refused():
    with pytest.raises(ValueError, match="max_length of the model is 26: the prompts"):
        determinism.check_arguments(26, 1, 0)
    determinism.check_arguments(27, 1, 0)


def test_names_choose_once_and_in_order():
    chosen = determinism.select(["scan", "batch", "scan"])
    assert [check.name for check in chosen] == ["scan", "batch"]
    assert len(set(determinism.NAMES)) == len(determinism.NAMES)


# -- the command -----------------------------------------------------------------------------------


def run(*args):
    return cli.main(["check-determinism", *map(str, args)])


@pytest.fixture
def found(monkeypatch):
    """Replaces the checks themselves; returns what they were asked for."""
    asked = []

    def check(model, **options):
        asked.append((model, options))
        return iter(results)

    results = []
    monkeypatch.setattr(determinism, "check", check)
    monkeypatch.setattr(checking, "use_compilation_cache", lambda: None)
    return results, asked


def test_a_table_and_what_it_holds_for(found, capsys):
    results, asked = found
    results.append(EQUAL)
    assert run(tiny_model.folder(), "--only", "chunks", "--tokens", 9, "--seed", 4) == 0
    ((model, options),) = asked
    assert options == {"tokens": 9, "seed": 4, "names": ["chunks"]}
    printed = capsys.readouterr()
    head, rule, row, _, *facts = printed.out.splitlines()
    assert head.split() == ["check", "varied", "compared", "differing", "seconds"]
    assert set(rule) == {"-"}
    assert row.split() == ["chunks", "cuts", "1,234,567", "0", "4.2"]
    assert model.numerics.fingerprint() in facts[1]
    assert deepinfer_jax.__version__ in facts[2]
    assert facts[3].startswith("device    cpu")
    assert "[1/1] chunks: equal, 4.2 s" in printed.err


def test_a_differing_bit_is_status_1_and_is_shown(found, capsys):
    results, _ = found
    results.extend([EQUAL, BROKEN])
    assert run(tiny_model.folder()) == 1
    printed = capsys.readouterr()
    assert "drafts: 3 DIFFER" in printed.err
    assert "first: request 1: raw[4] is 1 instead of 2" in printed.err
    assert printed.out.splitlines()[3].split()[-3:] == ["40", "3", "0.5"]


def test_nothing_compared_is_never_called_equal(found, capsys):
    results, _ = found
    results.append(Finding("devices", "meshes", 0, 0, 0.0, skipped="one device"))
    results.append(Finding("other", "things", 0, 0, 0.0))
    assert run(tiny_model.folder()) == 0
    printed = capsys.readouterr()
    for text in (printed.out, printed.err):
        assert "skipped: one device" in text
        assert "skipped: nothing to compare" in text
        assert "equal" not in text


INTERRUPTED = """
import os, signal, sys, time, types
signal.signal(signal.SIGINT, signal.default_int_handler)  # also where it is ignored
from deepinfer_jax import cli
from deepinfer_jax.cli import checking
from deepinfer_jax.determinism import checks

def slow(setup):
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(300)
    yield

checks.CHECKS = (checks.Check("slow", "nothing", slow),)
checks.make_setup = lambda *args, **options: None
checking._load = lambda args: types.SimpleNamespace(max_length=1000, cfg=None)
sys.exit(cli.main(["check-determinism"]))
"""


def test_an_interruption_does_not_wait_for_checks_in_work():
    command = [sys.executable, "-c", INTERRUPTED]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
    assert done.returncode == 130
    assert done.stderr.endswith("deepinfer-jax check-determinism: interrupted\n")


def test_an_unknown_platform_is_refused(monkeypatch, capsys):
    def nothing():
        raise RuntimeError("Unable to initialize backend 'bogus'")

    monkeypatch.setattr(jax, "devices", nothing)
    assert run() == 2
    assert "JAX finds no device: Unable to initialize" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["nowhere"], "unknown model 'nowhere': give one of the shipped names"),
        (["--only", "chunk"], "unknown check 'chunk'; there are:"),
        (["--tokens", 0], "tokens must be between 1 and 4070"),
        (["--max-length", 20], "max_length of the model is 20: the prompts"),
        (["--max-length", 0], "max_length must be in 1..4096 (max_position_embeddings"),
        (["--seed", -1], "seed must be between 0 and"),
    ],
)
def test_bad_input_is_refused_before_anything_is_read(args, message, monkeypatch, capsys):
    monkeypatch.setattr(checking, "_load", lambda args: pytest.fail("weights were read"))
    assert run(*args) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("deepinfer-jax check-determinism: ")
    assert message in printed.err


def test_the_checks_are_named(capsys):
    assert run("--list") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(determinism.NAMES)


@pytest.mark.exhaustive
def test_a_real_check_of_a_folder(monkeypatch, capsys):
    monkeypatch.setattr(checking, "use_compilation_cache", lambda: None)
    assert run(tiny_model.folder(), "--only", "repetition", "--tokens", 3) == 0
    assert " 0 " in capsys.readouterr().out.splitlines()[2]


@pytest.mark.parametrize(("backend", "form"), [("cpu", "tiled"), ("gpu", "pallas")])
@pytest.mark.parametrize("name", ["fp32", "fp32-kvq"])
def test_float32_numerics_are_those_of_the_back_end(name, backend, form, monkeypatch):
    """Those of a CPU would be refused on a GPU, where they keep no promise."""
    monkeypatch.setattr("jax.default_backend", lambda: backend)
    assert checking._numerics(name).rows == form
    assert checking._numerics("native") is None
