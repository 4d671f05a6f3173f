"""From prompts to replies: one to the terminal, many to JSON Lines.

What needs JAX is imported when a command runs, as in `generating`.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepinfer_jax.cli import cluster, inputs, meshes, records
from deepinfer_jax.cli import failures as failing
from deepinfer_jax.cli.appending import LineFile
from deepinfer_jax.cli.cluster import Job
from deepinfer_jax.cli.compiled import use_compilation_cache
from deepinfer_jax.cli.device import require_device
from deepinfer_jax.cli.failures import Failures
from deepinfer_jax.cli.inputs import Bad, Given
from deepinfer_jax.cli.interrupts import Interrupts
from deepinfer_jax.cli.metrics import Metrics
from deepinfer_jax.cli.progress import Progress, report
from deepinfer_jax.cli.records import Lines
from deepinfer_jax.cli.refusal import Failed, Refused
from deepinfer_jax.cli.speculation import check_option, policy_of

if TYPE_CHECKING:
    from deepinfer_jax.engine import Engine
    from deepinfer_jax.loading import Model
    from deepinfer_jax.planning.policies import Policy
    from deepinfer_jax.requests import Request


@dataclasses.dataclass(frozen=True)
class Work:
    """What a run has to do, by index: requests, what their lines say, prompts that cannot be run.

    given: of all indices, also those of other shards.
    """

    given: Sequence[Given]
    requests: Mapping[int, Request]
    asked: Mapping[int, Mapping[str, Any]]
    bad: Mapping[int, Bad]


@dataclasses.dataclass(frozen=True)
class Files:
    """Where a run writes to; `out` None is the terminal. skip: ids that have their results, each
    with its numerics.
    """

    out: LineFile | None
    failures: Failures
    metrics: Metrics
    skip: Mapping[str, str]


def answer(args: argparse.Namespace, given: Sequence[Given]) -> int:
    """Reply to prompts as the arguments say; returns the exit status.

    Raises Refused for input that cannot be run, and Failed, in the end, where prompts or requests
    have no reply.
    """
    check_option(args.speculative)
    job = cluster.job_of(args)
    if job.processes > 1 and args.mesh is None:
        raise Refused("several processes need --mesh data=D,expert=E: the devices of all of them")
    meshes.make_devices(meshes.sizes_of(args), job.processes)
    cluster.join(job)
    for name in ("out", "errors", "metrics"):
        setattr(args, name, job.path(getattr(args, name)))
    errors = args.errors or failing.default_path(args.out)
    alone = errors is not None and all(each.raw is not None for each in given)
    work = _work(args, given, alone)
    require_device()
    cluster.check_devices(job)
    with contextlib.ExitStack() as opened:
        files = _open(args, work, errors, opened)
        if work.bad:
            first = next(iter(work.bad.values())).reason
            print(f"{len(work.bad)} prompts cannot be run, the first: {first}", file=sys.stderr)
        indices = [i for i, each in work.requests.items() if str(each.id) not in files.skip]
        if work.requests or not work.bad:
            with cluster.Peers(job, functools.partial(cluster.stop, out=args.out)):
                _run(args, work, indices, files, job)
        else:
            _begin(work, files)
        if args.out and args.resume:
            places = {str(each.id): index for index, each in work.requests.items()}
            records.settle(args.out, places, in_order=args.in_order)
    failures, done = files.failures, len(indices) - files.failures.failed
    if failures.failed or failures.refused:
        total = len(indices) + failures.refused
        why = f"; {failures.path} says why" if failures.path else ""
        raise Failed(
            f"{failures.failed + failures.refused} of {total} requests failed, {done} results are "
            f"written{why}"
        )
    return 0


def _work(args: argparse.Namespace, given: Sequence[Given], alone: bool) -> Work:
    """Everything that can be told before a model is loaded. Raises Refused for what cannot be run;
    `alone`: only where that is not the fault of single prompts.
    """
    from deepinfer_jax import checkpoint, engine, loading
    from deepinfer_jax.grammar.vocabulary import require_llguidance

    try:
        made = inputs.make_requests(args, given, inputs.shard_of(args.shard))
        weights = checkpoint.digest(loading.find_folder(args.model))
        engine.slots_for(max(len(made), 1), args.batch_size)
        requests, asked, bad = {}, {}, {}
        for index, one in made.items():
            lines = None if isinstance(one, Bad) else records.asked(one, args.model, weights)
            reason = one.reason if isinstance(one, Bad) else ""
            if lines is not None:
                reason = records.unwritable(lines, given[index].place)
            if not reason:
                requests[index], asked[index] = one, lines
            elif alone:
                bad[index] = Bad(one.name if isinstance(one, Bad) else one.id, reason)
            else:
                raise Refused(reason)
        if any(request.options.rule for request in requests.values()):
            require_llguidance()
    except (TypeError, ValueError, OSError, ImportError) as error:
        raise Refused(str(error)) from None
    return Work(given, requests, asked, bad)


def _open(
    args: argparse.Namespace, work: Work, errors: Path | None, opened: contextlib.ExitStack
) -> Files:
    """Files to write to; what `--out` holds already is read. Raises Refused."""
    out, skip = None, {}
    if args.out is not None:
        out = records.open_out(args.out, resume=args.resume)
        opened.callback(out.close)
        if args.resume:
            skip = records.finished(args.out, [*work.asked.values()])
    failures = Failures(errors, resume=args.resume)
    opened.callback(failures.close)
    metrics = Metrics(args.metrics, resume=args.resume)
    opened.callback(metrics.close)
    return Files(out, failures, metrics, skip)


def _begin(work: Work, files: Files) -> None:
    """Nothing is left that could refuse the run: its file of errors takes the place of another's,
    beginning with the prompts that cannot be run.
    """
    files.failures.begin()
    for index, bad in work.bad.items():
        files.failures.refuse(work.given[index], index, bad.name, bad.reason)


def _run(
    args: argparse.Namespace, work: Work, indices: Sequence[int], files: Files, job: Job
) -> None:
    """Load the model and reply to the requests of these indices."""
    from deepinfer_jax import engine, loading

    use_compilation_cache()
    try:
        cfg = loading.config_of(args.model)
        told = {"--mesh": args.mesh, "--extra-experts": args.extra_experts, "config.json": cfg}
        told["rules of --mesh"] = args.mesh and meshes.rules_of(args)
        cluster.require_same(job, told)  # they lay the weights out together
        site, balancing = meshes.site_of(args, cfg)
        model = loading.load(
            args.model, max_length=args.max_length, rows=args.rows,
            onto=meshes.straight(args, site),
        )  # fmt: skip
    except (ValueError, OSError) as error:
        raise Refused(str(error)) from None
    if args.out:
        records.check_numerics(args.out, files.skip, model.numerics.fingerprint())
    cluster.require_same(job, _told(args, work, model))
    indices = cluster.due(job, work.requests, indices)
    slots = engine.slots_for(max(len(indices), 1), args.batch_size, site.parts)
    policy = policy_of(args.speculative, model, slots)
    cluster.require_same(job, {"step times for --speculative": repr(policy)})
    if not indices:
        _begin(work, files)
        print("nothing is missing", file=sys.stderr)
        return
    one = len(args.prompt) == 1 and not files.skip and site.mesh is None
    lines = None
    if files.out or not one:
        lines = Lines(
            files.out or sys.stdout, work.asked, in_order=args.in_order and not one,
            indices=cluster.own(job, work.requests, indices), timed=not args.no_timing,
        )  # fmt: skip
    if one or lines is None:
        _begin(work, files)
        _stream(model, work.requests[indices[0]], lines, policy)
    else:
        run = functools.partial(
            engine.start, model, batch_size=args.batch_size, policy=policy, observer=files.metrics,
            site=site, balancing=balancing,
        )  # fmt: skip
        _many(args, run, work, indices, files, lines, job)


def _told(args: argparse.Namespace, work: Work, model: Model) -> dict[str, Any]:
    """All that decides what an engine asks of the devices, and when, by what people call it."""
    lines = work.asked.values()
    told: dict[str, Any] = {
        "prompts": [[line["id"], line["model"], line["prompt"]] for line in lines],
        "tokens of prompts": [request.tokens for request in work.requests.values()],
        "options of replies": [line["options"] for line in lines],
        "--seed": [line["seed"] for line in lines],
        "weights of --model": [line["weights"] for line in lines],
    }
    names = "batch_size", "speculative", "mesh", "extra_experts", "rearrange_every"
    told |= {f"--{name.replace('_', '-')}": getattr(args, name) for name in names}
    return {**told, "--max-length": model.max_length, "numerics": model.numerics.fingerprint()}


def _stream(model: Model, request: Request, lines: Lines | None, policy: Policy) -> None:
    """One reply to the terminal as it comes, and its line to `lines` if there are any."""
    from deepinfer_jax import generation

    # Characters that the terminal's encoding lacks are escaped.
    inputs.reconfigure(sys.stdout, errors="backslashreplace")
    for update in generation.updates(model, [request], eager=True, speculative=policy):
        sys.stdout.write(update.text)
        sys.stdout.flush()
        if update.error:
            sys.stdout.write("\n")
            raise Failed(str(update.error))
        if update.result and lines is not None:
            lines.write(update.result, 0)
    sys.stdout.write("\n")


def _many(
    args: argparse.Namespace, start: Callable[..., Engine], work: Work, indices: Sequence[int],
    files: Files, lines: Lines, job: Job,
) -> None:  # fmt: skip
    """A line for every request of these `indices` that is this process's, with progress on a
    terminal and a report.
    """
    due = [work.requests[index] for index in indices]
    try:
        running = start(due)
    except ValueError as error:
        raise Refused(str(error)) from None
    _begin(work, files)
    progress = Progress(len(due), sys.stderr)
    own = set(cluster.own(job, work.requests, indices))
    try:
        with Interrupts(running, alone=job.processes == 1) as interrupts:
            if len(due) > 1:
                running.warm_up(progress.warming)
            _collect(running, interrupts, progress, work, indices, files, lines, own)
            if interrupts.asked:
                raise KeyboardInterrupt
    except KeyboardInterrupt:
        if lines.count + files.failures.failed < len(due):
            raise KeyboardInterrupt(_interrupted(args, lines.count, len(due))) from None
    finally:
        progress.close()
        lines.close()
        found = running.statistics()
        said = report(found, refused=len(work.bad), skipped=len(files.skip))
        print("\n".join(said), file=sys.stderr)


def _collect(
    running: Engine, interrupts: Interrupts, progress: Progress, work: Work,
    indices: Sequence[int], files: Files, lines: Lines, own: Collection[int],
) -> None:  # fmt: skip
    """Write what comes of the requests that are this process's `own`, until all have ended."""
    ended, said = 0, False
    progress.show(0, running.statistics)
    for update in running.updates():
        index = indices[update.index]
        request = work.requests[index]
        if update.result and index in own:
            lines.write(update.result, index)
        if update.error and index in own:
            reason = _failure(request, update.error)
            files.failures.fail(work.given[index], index, request.id, reason)
            lines.skip(index)
            progress.close()
            print(reason, file=sys.stderr)
        ended += bool(update.result or update.error)
        if interrupts.asked and not said:
            said = True
            progress.close()
            count = running.usage().running
            print(f"{count} running requests may end; Ctrl-C once more stops", file=sys.stderr)
        progress.show(ended, running.statistics)


def _failure(request: Request, error: Exception) -> str:
    """One line about a request that ended without result; some errors name it themselves."""
    said, name = str(error), f"request {request.id!r}"
    return said if said.startswith(name) else f"{name}: {said}"


def _interrupted(args: argparse.Namespace, done: int, total: int) -> str:
    where = f" in {args.out}; the same command with --resume goes on" if args.out else ""
    return f"interrupted: {done} of {total} results are written{where}"
