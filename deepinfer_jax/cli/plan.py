"""`deepinfer-jax plan`: what a model needs and takes on a mesh, without its weights or devices."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from deepinfer_jax import resources, whole_files
from deepinfer_jax.cli.compiled import use_compilation_cache
from deepinfer_jax.cli.information import model_path
from deepinfer_jax.cli.refusal import Failed, Refused

if TYPE_CHECKING:
    from deepinfer_jax.config import ModelConfig
    from deepinfer_jax.scale import Hardware, Layout, Plan, Workload

_DESCRIPTION = """\
Plan a model on devices that need not be here: memory of a device, time of a round and of a prefill
on the roofline, what limits them, the largest batch that fits. The steps are compiled over as many
virtual devices of the CPU, without weights; nothing is run.
"""
_EPILOG = """\
Times are bounds from below, made of data sheets; docs/scale.md of the source repository says what
is counted, and how far measured rounds are from it. Exit status: 0 it fits; 1 it does not, or
something failed; 2 the input was refused.
"""


def add_command(commands: Any) -> None:
    """Declare the command and its arguments."""
    parser = commands.add_parser(
        "plan",
        help="memory and time of a model on a mesh of devices",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    add = parser.add_argument
    names = ", ".join((*resources.model_names(), *resources.config_names()))
    add("--config", default="deepseek-v4.1-flash", metavar="MODEL",
        help=f"folder, config.json, or one of {names}; default the released model")  # fmt: skip
    add("--devices", type=int, required=True, metavar="N", help="devices of the mesh")
    add("--hardware", default="h200", metavar="NAME",
        help="of configs/hardware, or a file like those; default h200")  # fmt: skip
    add("--rules", metavar="NAME", help="mesh and rules: of configs/meshes, or a file like those; "
        "default: the one of this hardware and number, or experts over all devices")  # fmt: skip
    add(
        "--context",
        type=int,
        default=65536,
        metavar="N",
        help="tokens of a sequence; default 65536",
    )
    add("--concurrency", type=int, metavar="N", help="sequences on the mesh; default 32 a device")
    add("--drafts", type=int, metavar="N", help="of a round; default as many as the model makes")
    add("--acceptance", type=float, default=0.75, metavar="P",
        help="assumed: that a draft is right if all before it are; default 0.75")  # fmt: skip
    add("--prefill-rows", type=int, default=1024, metavar="N",
        help="prompt rows of a device in a call; default 1024")  # fmt: skip
    add("--balance", type=float, default=1.0, metavar="X",
        help="busiest device over the mean; default 1")  # fmt: skip
    add("--arithmetic", choices=("bf16", "stored"), default="bf16",
        help="bf16 (default): weights are decoded first; stored: in their formats")  # fmt: skip
    add("--exchange", choices=("gathered", "routed"), default="gathered",
        help="gathered (default): rows go to all devices; routed: to their experts")  # fmt: skip
    add("--as-measured", action="store_true",
        help="rates that were reached on this hardware in place of its data sheet")  # fmt: skip
    add("--no-compile", action="store_true", help="numbers only, within a second")
    add("--json", metavar="FILE", help="write everything there")
    add("--plot", metavar="FILE", help="draw memory and time there (extra notebooks)")


def run(args: argparse.Namespace) -> int:
    """Plan; returns the exit status. Raises Refused for input that makes no plan."""
    from deepinfer_jax import scale

    try:
        cfg, layout, hardware, work = _asked(args)
        made = scale.plan(cfg, layout, hardware, work)
    except (OSError, TypeError, ValueError) as error:
        raise Refused(str(error)) from None
    programs, note = _compiled(args, cfg, layout, work)
    print(scale.format_plan(made, programs, note), end="")
    _write(args, made, programs)
    return 0 if made.feasible else 1


def _asked(args: argparse.Namespace) -> tuple[ModelConfig, Layout, Hardware, Workload]:
    from deepinfer_jax import scale
    from deepinfer_jax.config import ModelConfig

    if args.devices < 1:
        raise ValueError(f"--devices must be at least 1, got {args.devices}")
    cfg = ModelConfig.from_json(model_path(args.config))
    hardware = scale.load_hardware(args.hardware)
    hardware = hardware.as_measured() if args.as_measured else hardware
    layout = _layout(args, hardware)
    work = scale.Workload(
        context=args.context,
        concurrency=32 * layout.devices if args.concurrency is None else args.concurrency,
        drafts=cfg.most_drafts if args.drafts is None else args.drafts,
        acceptance=args.acceptance,
        prefill=args.prefill_rows,
        balance=args.balance,
        arithmetic=args.arithmetic,
        exchange=args.exchange,
    )
    return cfg, layout, hardware, work


def _layout(args: argparse.Namespace, hardware: Hardware) -> Layout:
    from deepinfer_jax import scale

    usual = f"{args.hardware}-{args.devices}"
    if args.rules is None:
        if usual in scale.layout_names():
            return scale.load_layout(usual)
        return scale.over_experts(args.devices, whole_head=args.devices > hardware.domain)
    layout = scale.load_layout(args.rules)
    if layout.devices != args.devices:
        raise ValueError(
            f"--rules {args.rules} is a mesh of {layout.devices} devices, but --devices is "
            f"{args.devices}: give that number or other rules"
        )
    return layout


def _compiled(
    args: argparse.Namespace, cfg: ModelConfig, layout: Layout, work: Workload
) -> tuple[tuple[Any, ...], str]:
    """The compiled steps and what to know about them, or none and why."""
    if args.no_compile:
        return (), ""
    import jax

    from deepinfer_jax.scale import compiled

    problem = compiled.why_not(layout)
    if problem:
        return (), problem
    # Where every operation came from is of no use here, and costs a part of the time to compile.
    jax.config.update("jax_traceback_in_locations_limit", 0)
    try:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", layout.devices)
    except RuntimeError as error:  # devices exist already: this process is somebody else's
        if len(jax.devices("cpu")) < layout.devices:
            raise Failed(f"{error}; --no-compile plans without compiling") from None
    use_compilation_cache()
    return compiled.compile_steps(cfg, layout, work), compiled.FORM_NOTE


def _write(args: argparse.Namespace, made: Plan, programs: tuple[Any, ...]) -> None:
    from deepinfer_jax import scale

    if args.json:
        with whole_files.replacing(args.json, text=True) as file:
            json.dump(scale.as_json(made, programs), file, indent=1)
            file.write("\n")
    if args.plot:
        from deepinfer_jax import plots

        try:
            figure = plots.plan(made)[0].figure
        except ImportError as error:
            raise Failed(str(error)) from None
        try:
            figure.savefig(args.plot)
        except ValueError as error:  # no format of matplotlib's
            raise Failed(f"--plot {args.plot}: {error}") from None
