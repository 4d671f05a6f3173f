"""Images: from files to patches, and the places that they take in a prompt."""

from deepinfer_jax.images.pixels import Picture
from deepinfer_jax.images.spans_in_prompt import ImageSpan, span_length

__all__ = ["ImageSpan", "Picture", "span_length"]
