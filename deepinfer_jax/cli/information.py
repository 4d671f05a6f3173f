"""`deepinfer-jax info`: what a configuration amounts to."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from deepinfer_jax import resources
from deepinfer_jax.cli.refusal import Refused


def add_command(commands: Any) -> None:
    """Declare the command and its argument."""
    parser = commands.add_parser(
        "info",
        help="layer roles, parameters, bytes of a model",
        description="Print layer roles, parameter counts, stored bytes and cache bytes of a model. "
        "No weights are read.",
    )
    names = ", ".join((*resources.model_names(), *resources.config_names()))
    parser.add_argument(
        "model", metavar="MODEL", help=f"a folder, a config.json, or one of {names}"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the description; returns the exit status. Raises Refused for what is no model."""
    from deepinfer_jax import info
    from deepinfer_jax.config import ModelConfig

    try:
        cfg = ModelConfig.from_json(model_path(args.model))
    except (OSError, ValueError) as error:
        raise Refused(str(error)) from None
    print(info.format_info(info.describe(cfg)), end="")
    return 0


def model_path(model: str) -> Path:
    """The config of a shipped name, a folder or a file; raises Refused for what is none."""
    if model in resources.model_names():
        return resources.model_folder(model)
    if model in resources.config_names():
        return resources.config_file(model)
    path = Path(model)
    if not path.exists():
        known = ", ".join((*resources.model_names(), *resources.config_names()))
        raise Refused(
            f"unknown model {model!r}: give one of {known}, a folder, or the path of a config.json"
        )
    return path
