"""Images on their way into a prompt: pixels, features of the tower, spans of rows.

`picture_of` takes what users have. Pillow, the extra `vision`, is imported at the first use.
"""

from deepinfer_jax.images.encoding import encode_images
from deepinfer_jax.images.features import (
    Features,
    Origin,
    load_features,
    origin_of,
    save_features,
)
from deepinfer_jax.images.limits import ImageLimits
from deepinfer_jax.images.pixels import (
    Picture,
    picture_from_array,
    picture_from_bytes,
    picture_from_file,
    picture_from_image,
)
from deepinfer_jax.images.sources import picture_of
from deepinfer_jax.images.spans import span_embeddings, span_kinds, span_length
from deepinfer_jax.images.spans_in_prompt import ImageSpan, grid_of

__all__ = [
    "Features",
    "ImageLimits",
    "ImageSpan",
    "Origin",
    "Picture",
    "encode_images",
    "grid_of",
    "load_features",
    "origin_of",
    "picture_from_array",
    "picture_from_bytes",
    "picture_from_file",
    "picture_from_image",
    "picture_of",
    "save_features",
    "span_embeddings",
    "span_kinds",
    "span_length",
]
