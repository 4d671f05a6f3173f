"""Text in and out: tokenizer, chat prompts, streams, and the Engram token map.

`load_tokenizer(folder)` opens a model folder's tokenizer.json. User text can never become a control
token: it is encoded without the control vocabulary, and a rendered prompt is never encoded again.
"""

from deepinfer_jax.text.decoding import StreamDecoder
from deepinfer_jax.text.engram_map import load_token_map, save_token_map, token_map
from deepinfer_jax.text.reply import Piece, Reply, ReplyParser
from deepinfer_jax.text.tokenizer import Tokenizer, load_tokenizer

__all__ = [
    "Piece",
    "Reply",
    "ReplyParser",
    "StreamDecoder",
    "Tokenizer",
    "load_token_map",
    "load_tokenizer",
    "save_token_map",
    "token_map",
]
