"""Images on their way into a prompt: pixels, features of the tower, spans of rows."""

from deepinfer_jax.images.features import Features
from deepinfer_jax.images.pixels import Picture
from deepinfer_jax.images.spans_in_prompt import ImageSpan, grid_of

__all__ = ["Features", "ImageSpan", "Picture", "grid_of"]
