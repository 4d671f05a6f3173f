"""The trained vocabulary: control spellings first, single digits, the same file each time."""

import json

import tokenizers

from deepinfer_jax.training import dataset, tokenizer

SHIPPED = dataset.TOKENIZER.read_text("utf-8")


def test_training_repeats():
    small = tokenizer.train(examples=300, prose=0)
    assert small == tokenizer.train(examples=300, prose=0)
    vocab = json.loads(small)["model"]["vocab"]
    assert [vocab[spelling] for spelling in tokenizer.CONTROL] == list(range(19))


def test_the_shipped_vocabulary_is_of_the_promised_form():
    full = tokenizers.Tokenizer.from_str(SHIPPED)
    assert full.get_vocab_size() == tokenizer.VOCAB_SIZE
    assert [full.token_to_id(spelling) for spelling in tokenizer.CONTROL] == list(range(19))
    assert len(SHIPPED.encode()) < 125_000


def test_every_digit_is_a_token_of_its_own():
    vocab = json.loads(SHIPPED)["model"]["vocab"]
    digits = set("0123456789")
    assert {token for token in vocab if digits & set(token)} == digits


def test_any_text_survives():
    full = tokenizers.Tokenizer.from_str(SHIPPED)
    for text in ("naïve 東京 😀\n\tx", "".join(map(chr, range(0x20, 0x250)))):
        assert full.decode(full.encode(text).ids) == text
