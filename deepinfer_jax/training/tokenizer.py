"""Trains the byte-level BPE of spark-tiny on a sample of its corpus.

2048 ids: the control spellings of V4.1 first, then bytes and merges. Every digit is a token of its
own, so that numbers are read and written digit by digit. The same corpus gives the same file.

`python -m deepinfer_jax.training.tokenizer --out FOLDER` writes tokenizer.json and the Engram map.
"""

import argparse
import itertools
import json
import pathlib

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from deepinfer_jax.text import save_token_map
from deepinfer_jax.training import corpus
from deepinfer_jax.training.corpus import chat, library

VOCAB_SIZE = 2048
CONTROL = (
    "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>", "<｜System｜>", "<｜User｜>",
    "<｜Assistant｜>", "<think>", "</think>", "｜DSML｜", "<｜latest_reminder｜>", "<｜image｜>",
    "<｜ref｜>", "<｜/ref｜>", "<｜box｜>", "<｜/box｜>", "<｜point｜>", "<｜/point｜>",
    "<｜polygon｜>", "<｜/polygon｜>",
)  # fmt: skip
_HIDDEN = CONTROL[:3]  # special in the sense of the file format: left out of decoded text
_SPLIT = r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def train(examples: int = 60_000, prose: int = 8_000, seed: int = 0) -> str:
    """tokenizer.json as compact JSON, trained on this many examples and library documents."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        show_progress=False,
        special_tokens=[_added(token) for token in CONTROL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(_sample(examples, prose, seed), trainer)
    data = json.loads(tokenizer.to_str())
    return json.dumps(data, ensure_ascii=False, separators=(",", ":")) + "\n"


def _added(token: str) -> tokenizers.AddedToken:
    return tokenizers.AddedToken(token, normalized=False, special=token in _HIDDEN)


def _sample(examples: int, prose: int, seed: int):
    """Texts to train on; control spellings are no text and are cut away."""
    for example in itertools.islice(corpus.examples(seed), examples):
        yield from _between_controls(chat.document_text(example))
    documents = library.documents()
    step = max(1, len(documents) // max(1, prose))
    for document in documents[::step] if prose else ():
        yield from _between_controls(document)


def _between_controls(text: str) -> list[str]:
    for token in CONTROL:
        text = text.replace(token, "\0")
    return [part for part in text.split("\0") if part]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=pathlib.Path, required=True, help="folder to write")
    folder = parser.parse_args().out
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(train(), "utf-8")
    size = save_token_map(folder)
    print(f"{folder}: vocabulary {VOCAB_SIZE}, compressed {size}")


if __name__ == "__main__":
    main()
