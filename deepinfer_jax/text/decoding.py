"""From token ids to text, whole or as a stream.

Byte-level vocabularies spell every byte as one printable character. Reading the spellings back as
bytes makes streaming exact: a character appears when its last byte has come, however many tokens it
was split over, and the pieces of a stream always join to the text of the whole.
"""

import codecs
from collections.abc import Sequence

import tokenizers


def byte_of_character() -> dict[str, int]:
    """The byte that each character of a byte-level spelling stands for.

    Printable Latin-1 characters stand for themselves; the other bytes, in ascending order, for the
    characters from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    table = {chr(byte): byte for byte in printable}
    table.update({chr(0x100 + place): byte for place, byte in enumerate(others)})
    return table


def token_bytes(tokenizer: tokenizers.Tokenizer) -> tuple[bytes, ...]:
    """The bytes of every token id; a control token's are its own spelling in UTF-8."""
    alphabet = byte_of_character()
    spelled = []
    for token in range(tokenizer.get_vocab_size(with_added_tokens=True)):
        spelling = tokenizer.id_to_token(token) or ""
        if all(character in alphabet for character in spelling):
            spelled.append(bytes(alphabet[character] for character in spelling))
        else:
            spelled.append(spelling.encode())
    return tuple(spelled)


class StreamDecoder:
    """Turns ids into text as they come; bytes of an unfinished character wait for the next ids.

    Bytes that can be no UTF-8 become U+FFFD, as in decoding the whole.
    """

    def __init__(self, table: Sequence[bytes]):
        self._table = table
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Sequence[int]) -> str:
        """The text that these ids complete; may be empty."""
        return self._decoder.decode(join_bytes(self._table, ids))

    def finish(self) -> str:
        """What an unfinished character at the end reads as; the decoder starts afresh."""
        return self._decoder.decode(b"", final=True)


def join_bytes(table: Sequence[bytes], ids: Sequence[int]) -> bytes:
    """The bytes of these ids. Raises ValueError for an id outside the vocabulary."""
    for token in ids:
        if not 0 <= token < len(table):
            raise ValueError(
                f"ids must lie in 0..{len(table) - 1}, got {token}; is this the model's tokenizer?"
            )
    return b"".join([table[token] for token in ids])
