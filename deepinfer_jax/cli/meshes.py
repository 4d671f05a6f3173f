"""`--mesh`, and what of a run several devices or processes change."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import MutableMapping
from typing import TYPE_CHECKING, NamedTuple

from deepinfer_jax.cli.refusal import Refused

if TYPE_CHECKING:
    from deepinfer_jax.axes import Rules
    from deepinfer_jax.config import ModelConfig
    from deepinfer_jax.engine.balance import Balancing
    from deepinfer_jax.engine.sites import Site
    from deepinfer_jax.layout import Onto
    from deepinfer_jax.scale import Layout

_WAITING = "--xla_cpu_collective_call_terminate_timeout_seconds"
_MOST_SECONDS = 600
_SIZES = re.compile(r"(data|expert|context)=([1-9][0-9]{0,5})")


class MeshSizes(NamedTuple):
    """Of `--mesh`: devices along each axis."""

    data: int = 1
    expert: int = 1
    context: int = 1

    @property
    def devices(self) -> int:
        """All of them."""
        return self.data * self.expert * self.context


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of several devices."""
    add = parser.add_argument_group("several devices (docs/parallel.md)").add_argument
    add(
        "--mesh",
        metavar="data=D,expert=E,context=C",
        help="D x E x C devices, made on a CPU: requests are spread over D x E, experts over E, "
        "the compressed KV of each request over C; or a layout of configs/meshes, or such a file, "
        "which may split vocabulary and Engram tables too. The replies are those of one device",
    )
    add("--extra-experts", type=int, default=0, metavar="N", help="at least N slots of every layer "
        "for replicas of experts; default 0")  # fmt: skip
    add("--rearrange-every", type=int, default=0, metavar="CALLS", help="move experts to where the "
        "load is, after so many calls of the devices; default 0: never")  # fmt: skip


def sizes_of(args: argparse.Namespace) -> MeshSizes | None:
    """Of `--mesh`; None without. Raises Refused for what is none."""
    for name in ("extra_experts", "rearrange_every"):
        option = f"--{name.replace('_', '-')}"
        if args.mesh is None and getattr(args, name):
            raise Refused(f"{option} needs --mesh")
        if getattr(args, name) < 0:
            raise Refused(f"{option} must be at least 0")
    if args.mesh is None:
        return None
    if "=" not in args.mesh:
        layout = _named(args.mesh)
        return MeshSizes(**{name: layout.size(name) for name in MeshSizes._fields})
    found = [_SIZES.fullmatch(part) for part in args.mesh.split(",")]
    sizes = {match[1]: int(match[2]) for match in found if match}
    if not all(found) or len(sizes) != len(found):
        raise Refused(
            "--mesh must be like data=2,expert=4, or the name of a layout (deepinfer-jax plan "
            f"--rules), got {args.mesh!r}"
        )
    return MeshSizes(**sizes)


def rules_of(args: argparse.Namespace) -> Rules:
    """What is split over the mesh: by the layout that `--mesh` names, otherwise experts only."""
    from deepinfer_jax import layout

    return layout.EXPERTS if "=" in args.mesh else _named(args.mesh).rules


def _named(name: str) -> Layout:
    """A layout of configs/meshes, or of such a file, that an engine can have; raises Refused."""
    from deepinfer_jax import scale

    try:
        layout = scale.load_layout(name)
    except (OSError, ValueError) as error:
        raise Refused(f"--mesh: {error}") from None
    if layout.engram == "host":
        raise Refused(
            f"--mesh {name} has Engram tables in the memory of hosts, which an engine over a mesh "
            "does not: take another layout, such as data=2,expert=4"
        )
    return layout


def wait_longer(environ: MutableMapping[str, str]) -> None:
    """Let the devices of a CPU wait for each other for ten minutes, unless XLA_FLAGS says how long.

    They wait in every collective, and XLA ends the process where one came a minute after another,
    as happens on a machine with other work. Has to be called before JAX makes devices.
    """
    import jax

    flags = environ.get("XLA_FLAGS", "").strip()
    # XLA ends a process at a flag that it does not know, and flags may be in a file.
    known = jax.__version_info__ < (0, 12)
    if known and _WAITING not in flags and (not flags or flags.startswith("-")):
        environ["XLA_FLAGS"] = f"{flags} {_WAITING}={_MOST_SECONDS}".strip()


def make_devices(sizes: MeshSizes | None, processes: int) -> None:
    """As many CPU devices in this process as its part of the mesh needs, where it has none yet.

    Raises Refused where the mesh cannot be shared by the processes.
    """
    import jax

    if sizes is None:
        return
    count = sizes.devices
    if count % processes:
        raise Refused(f"--mesh: {count} devices cannot be shared by {processes} processes")
    wait_longer(os.environ)
    try:
        jax.config.update("jax_num_cpu_devices", count // processes)
    except RuntimeError:
        return  # JAX has its devices already


def site_of(args: argparse.Namespace, cfg: ModelConfig) -> tuple[Site, Balancing]:
    """Where the engine's arrays lie, and how experts move. Raises Refused."""
    import jax

    from deepinfer_jax import layout
    from deepinfer_jax.engine import balance
    from deepinfer_jax.engine.balance import Balancing
    from deepinfer_jax.engine.sites import ONE, Site

    sizes = sizes_of(args)
    if sizes is None:
        return ONE, Balancing()
    count, devices = sizes.devices, jax.devices()
    if len(devices) < count or (jax.process_count() > 1 and len(devices) != count):
        raise Refused(
            f"--mesh {args.mesh} needs {count} devices, {len(devices)} are there; change the sizes"
        )
    mesh = layout.device_mesh(sizes.data, sizes.expert, devices[:count], sizes.context)
    rules = rules_of(args)
    balancing = Balancing(args.rearrange_every, window=max(args.rearrange_every, 1))
    try:
        parts = layout.expert_parts(mesh, rules)
        site = Site(mesh, layout.initial_placements(cfg, parts, args.extra_experts), rules)
        balance.check(site, balancing)
    except ValueError as error:
        raise Refused(f"--mesh {args.mesh}: {error}") from None
    return site, balancing


def straight(args: argparse.Namespace, site: Site) -> Onto | None:
    """Where weights go from their files at once; None: by way of the default device.

    One process that moves experts keeps weights there, to begin anew with where a device fails.
    """
    if site.mesh is None or (site.processes == 1 and args.rearrange_every):
        return None
    from deepinfer_jax import layout

    return layout.Onto(site.mesh, site.placements, site.rules)
