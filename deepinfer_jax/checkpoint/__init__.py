"""Parameters on disk: the released safetensors layout, and Orbax for sharded training state."""

from deepinfer_jax.checkpoint.orbax import restore_orbax, save_orbax
from deepinfer_jax.checkpoint.reading import load_params
from deepinfer_jax.checkpoint.writing import save_params

__all__ = ["load_params", "restore_orbax", "save_orbax", "save_params"]
