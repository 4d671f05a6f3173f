"""`deepinfer-jax convert`: a checkpoint from the released layout to Orbax, or back."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from deepinfer_jax.cli import cluster
from deepinfer_jax.cli.refusal import Refused

_DESCRIPTION = """\
Write a checkpoint in the released layout (safetensors) as Orbax, or one of Orbax in the released
layout: whichever SOURCE is not. No bit of a weight changes, and what stands beside the weights is
copied. Several processes can write Orbax together; each reads and holds the part of its devices.
"""


def add_command(commands: Any) -> None:
    """Declare the command and its arguments."""
    parser = commands.add_parser(
        "convert",
        help="a checkpoint from the released layout to Orbax, or back",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    add = parser.add_argument
    add("source", type=Path, metavar="SOURCE", help="folder of the checkpoint")
    add("folder", type=Path, metavar="FOLDER", help="where to write; must hold no checkpoint yet")
    add("--shard-gigabytes", type=float, default=5.0, metavar="X", help="bytes of tensors per file "
        "of the released layout to stay below; default 5 GiB")  # fmt: skip
    cluster.add_options(parser)


def run(args: argparse.Namespace) -> int:
    """Convert; returns the exit status. Raises Refused for folders that do not go together."""
    if not args.shard_gigabytes > 0:
        raise Refused(f"--shard-gigabytes must be above 0, got {args.shard_gigabytes}")
    job = cluster.job_of(args)
    cluster.join(job)
    from deepinfer_jax import checkpoint
    from deepinfer_jax.config import ModelConfig

    limit = int(args.shard_gigabytes * (1 << 30))
    try:
        onto = None
        if job.processes > 1:
            onto = checkpoint.over_all(ModelConfig.from_json(args.source))
        made = checkpoint.convert(args.source, args.folder, onto, limit)
    except (ImportError, FileExistsError, FileNotFoundError, ValueError) as error:
        raise Refused(str(error)) from None
    if job.number == 0:
        print(f"{args.folder}: {made}")
    return 0
