"""What JAX runs on, asked for before anything is made for it."""

from deepinfer_jax.cli.refusal import Refused


def require_device() -> None:
    """Raise Refused where JAX has no device, as for a `JAX_PLATFORMS` that it does not know."""
    import jax

    try:
        jax.devices()
    except RuntimeError as error:
        raise Refused(f"JAX finds no device: {error}") from None
