"""Parameters on disk: the released safetensors layout, and Orbax for sharded training state."""

from deepinfer_jax.checkpoint.converting import convert, over_all
from deepinfer_jax.checkpoint.mapped import Mapped
from deepinfer_jax.checkpoint.orbax import restore_orbax, save_orbax
from deepinfer_jax.checkpoint.reading import load_params
from deepinfer_jax.checkpoint.shards import digest
from deepinfer_jax.checkpoint.writing import save_params

__all__ = [
    "Mapped", "convert", "digest", "load_params", "over_all", "restore_orbax",
    "save_orbax", "save_params",
]  # fmt: skip
