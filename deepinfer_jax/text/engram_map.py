"""The Engram compressed-token map: token id -> id of its normalised text (docs/model.md 5.1).

Spellings that differ in case, accents or surrounding space share one compressed id, and the Engram
hashes those ids. A wrong map silently rehashes the whole table, so the stored map is bound to its
tokenizer by hashes and refused when either differs.
"""

import hashlib
import json
import pathlib
import re
import unicodedata

import numpy as np
import tokenizers

from deepinfer_jax import strict_json

MAP_FILE = "engram_token_map.bin"
SIDECAR_FILE = "engram_token_map.json"
TOKENIZER_FILE = "tokenizer.json"

_LONE_SPACE = "\ue000"  # stands for a text that is exactly one space while both ends are stripped
_FIELDS = ("size", "compressed_size", "map_sha256", "tokenizer_sha256")  # of the sidecar
_SPACES = re.compile(r"[ \t\r\n]+")


def normalize(text: str) -> str:
    """The text without case, accents, compatibility forms and surrounding space."""
    text = unicodedata.normalize("NFD", unicodedata.normalize("NFKC", text))
    text = "".join(c for c in text if not unicodedata.category(c).startswith("M")).lower()
    text = _SPACES.sub(" ", text)
    if text == " ":
        text = _LONE_SPACE
    return text.strip().replace(_LONE_SPACE, " ")


def token_map(tokenizer: tokenizers.Tokenizer) -> np.ndarray:
    """Compressed id of every token id, int32 [vocabulary].

    Compressed ids are given in the order of first appearance. A token that is no whole text (its
    bytes decode to U+FFFD) is its own key, by its raw spelling in the vocabulary.
    """
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    texts = tokenizer.decode_batch([[i] for i in range(size)], skip_special_tokens=False)
    first_seen: dict[str, int] = {}
    ids = np.empty(size, np.int32)
    for token, text in enumerate(texts):
        spelling = tokenizer.id_to_token(token) or ""
        key = spelling if "\ufffd" in text else normalize(text) or text
        ids[token] = first_seen.setdefault(key, len(first_seen))
    return ids


def save_token_map(folder: str | pathlib.Path) -> int:
    """Derive the map of `folder`/tokenizer.json, write it with its sidecar; the compressed size."""
    folder = pathlib.Path(folder)
    source = folder / TOKENIZER_FILE
    ids = token_map(tokenizers.Tokenizer.from_file(str(source)))
    data = ids.astype("<i4").tobytes()
    compressed = int(ids.max()) + 1
    sidecar = {
        "size": len(ids),
        "compressed_size": compressed,
        "map_sha256": hashlib.sha256(data).hexdigest(),
        "tokenizer_sha256": hashlib.sha256(source.read_bytes()).hexdigest(),
    }
    (folder / MAP_FILE).write_bytes(data)
    (folder / SIDECAR_FILE).write_text(json.dumps(sidecar, indent=1) + "\n", "utf-8")
    return compressed


def load_token_map(folder: str | pathlib.Path) -> np.ndarray:
    """The stored map of a model folder, int32 [vocabulary].

    Raises FileNotFoundError where a file is missing, ValueError where the map or the tokenizer is
    not the one that the sidecar was written for.
    """
    folder = pathlib.Path(folder)
    for name in (MAP_FILE, SIDECAR_FILE, TOKENIZER_FILE):
        if not (folder / name).is_file():
            raise FileNotFoundError(
                f"{name} is missing in {folder}; save_token_map(folder) derives the map from "
                f"{TOKENIZER_FILE}"
            )
    mend = "restore it, or derive the map again with save_token_map(folder)"
    sidecar = strict_json.read_object(folder / SIDECAR_FILE, mend)
    lacking = [field for field in _FIELDS if field not in sidecar]
    if lacking:
        raise ValueError(f"{folder / SIDECAR_FILE} lacks {', '.join(lacking)}; {mend}")
    data = (folder / MAP_FILE).read_bytes()
    for name, content, field in (
        (MAP_FILE, data, "map_sha256"),
        (TOKENIZER_FILE, (folder / TOKENIZER_FILE).read_bytes(), "tokenizer_sha256"),
    ):
        found = hashlib.sha256(content).hexdigest()
        if found != sidecar[field]:
            raise ValueError(
                f"{folder / name} has sha256 {found}, {SIDECAR_FILE} expects {sidecar[field]}; "
                f"restore the file, or derive the map again with save_token_map(folder)"
            )
    ids = np.frombuffer(data, "<i4").astype(np.int32)
    found = (len(ids), int(ids.max()) + 1)
    if found != (sidecar["size"], sidecar["compressed_size"]):
        raise ValueError(
            f"{folder / MAP_FILE} holds (size, compressed size) {found}, {SIDECAR_FILE} expects "
            f"({sidecar['size']}, {sidecar['compressed_size']}); derive it again with "
            f"save_token_map(folder)"
        )
    return ids
