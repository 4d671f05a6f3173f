"""Images on their way into a prompt: pixels, features of the tower, spans of rows."""

from deepinfer_jax.images.encoding import encode_images
from deepinfer_jax.images.features import (
    Features,
    Origin,
    load_features,
    origin_of,
    save_features,
)
from deepinfer_jax.images.pixels import Picture
from deepinfer_jax.images.spans import span_embeddings, span_kinds, span_length
from deepinfer_jax.images.spans_in_prompt import ImageSpan, grid_of

__all__ = [
    "Features",
    "ImageSpan",
    "Origin",
    "Picture",
    "encode_images",
    "grid_of",
    "load_features",
    "origin_of",
    "save_features",
    "span_embeddings",
    "span_kinds",
    "span_length",
]
