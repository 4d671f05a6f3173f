"""Packed rows: whole documents, the same rows for any number of workers, the right mask."""

import itertools
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from deepinfer_jax.training import corpus, dataset
from deepinfer_jax.training.corpus import chat, library
from deepinfer_jax.training.encoder import PieceEncoder

FULL = dataset.load_tokenizer()


@pytest.fixture(scope="module")
def rows():
    return dataset.pack(3, 500 * 512)


def test_the_named_ids_are_the_tokenizers():
    names = (chat.BOS, chat.EOS, "<｜▁pad▁｜>", chat.SYSTEM, chat.USER, chat.ASSISTANT)
    assert [FULL.token_to_id(name) for name in names] == [
        dataset.BOS, dataset.EOS, dataset.PAD, dataset.SYSTEM, dataset.USER, dataset.ASSISTANT,
    ]  # fmt: skip


def test_documents_are_whole(rows):
    assert rows.shape == (500, 512)
    assert rows.dtype == np.uint16
    for row in rows:
        used = int(np.count_nonzero(row != dataset.PAD))
        assert (row[used:] == dataset.PAD).all()
        for document in np.split(row[:used], np.flatnonzero(row[:used] == dataset.BOS)[1:]):
            assert document[0] == dataset.BOS
            assert document[-1] == dataset.EOS


def test_rows_are_almost_full(rows):
    assert np.count_nonzero(rows != dataset.PAD) > 0.97 * rows.size


def test_rows_do_not_depend_on_the_workers_nor_on_the_amount():
    options = {"context": 96, "library_share": 0.0}
    alone = dataset.pack(4, 1300 * 96, **options)
    spread = dataset.pack(4, 1300 * 96, workers=2, **options)
    np.testing.assert_array_equal(alone, spread)
    np.testing.assert_array_equal(alone[:70], dataset.pack(4, 70 * 96, **options))


def test_seeds_and_splits_differ(rows):
    assert not np.array_equal(rows[:50], dataset.pack(5, 50 * 512, library_share=0.0))
    assert not np.array_equal(rows[:50], dataset.pack(3, 50 * 512, split="heldout"))


def test_the_mask_is_the_completions():
    for one in itertools.islice(corpus.examples(6), 100):
        if len(one.prompt_messages) == 1:  # one reply, so the mask is the completion alone
            prompt, answer = corpus.render(one, FULL)
            row = np.array([[*prompt, *answer, dataset.PAD]], np.uint16)
            expected = [False] * len(prompt) + [True] * len(answer) + [False]
            assert dataset.answer_mask(row)[0].tolist() == expected


def test_the_mask_covers_earlier_replies_and_plain_text():
    row = FULL.encode(
        "<｜begin▁of▁sentence｜><｜User｜>Hi<｜Assistant｜></think>Yes<｜end▁of▁sentence｜><｜User｜>No"
        "<｜Assistant｜></think>!<｜end▁of▁sentence｜><｜begin▁of▁sentence｜>A<｜end▁of▁sentence｜>"
    ).ids
    mask = dataset.answer_mask(np.array([row], np.uint16))[0]
    assert FULL.decode(np.array(row)[mask].tolist(), skip_special_tokens=True) == "Yes!A"
    assert np.count_nonzero(mask & (np.array(row) == dataset.EOS)) == 3


def test_the_fast_encoder_is_the_tokenizer():
    encoder = PieceEncoder(FULL)
    texts = [chat.document_text(one) for one in itertools.islice(corpus.examples(7), 600)]
    for text in [*texts, *library.documents()[::20], "", " ", "é <｜User｜> ²x  \n\n y", "a\x1c b"]:
        assert encoder.encode(text) == FULL.encode(text, add_special_tokens=False).ids


def test_rows_are_made_without_the_recipe():
    """A training machine needs neither deepseek-recipe nor JAX."""
    program = (
        "import sys; sys.modules.update(deepseek_recipe=None, jax=None)\n"
        "from deepinfer_jax.training import dataset\n"
        "print(dataset.pack(3, 512, library_share=0.0).shape)"
    )
    root = pathlib.Path(dataset.__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=root, capture_output=True, text=True, timeout=120
    )
    assert done.stdout.strip() == "(1, 512)", done.stderr


@pytest.mark.parametrize(
    "numbers", [(-1, 5), (1, 0), (1, 5, 512, "train", 0), (1, 5, 512, "train", 1, 1.0)]
)
def test_impossible_numbers_are_refused(numbers):
    with pytest.raises(ValueError, match="pack needs"):
        dataset.pack(*numbers)


def test_the_command_writes_the_rows(tmp_path, monkeypatch, capsys):
    out = tmp_path / "rows.npy"
    command = f"dataset --tokens 40_960 --seed 3 --out {out} --workers 1 --split heldout"
    monkeypatch.setattr("sys.argv", command.split())
    dataset.main()
    np.testing.assert_array_equal(np.load(out), dataset.pack(3, 40_960, split="heldout"))
    assert "80 rows of 512" in capsys.readouterr().out
