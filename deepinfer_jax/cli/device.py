"""What JAX runs on, asked for before anything is made for it."""

import argparse

from deepinfer_jax.cli.refusal import Refused


def require_device() -> None:
    """Raise Refused where JAX has no device, as for a `JAX_PLATFORMS` that it does not know."""
    import jax

    try:
        jax.devices()
    except RuntimeError as error:
        raise Refused(f"JAX finds no device: {error}") from None


def add_rows(parser: argparse.ArgumentParser) -> None:
    """Declare `--rows`, the form of the numerics (`loading.load`)."""
    parser.add_argument(
        "--rows",
        choices=("tiled", "ffi", "pallas", "cuda"),
        help="form of the numerics, each with bits of its own: tiled, a CPU's default; ffi, faster "
        "there, needs a C++ compiler; pallas, a GPU's; cuda, faster on Hopper, needs nvcc",
    )
