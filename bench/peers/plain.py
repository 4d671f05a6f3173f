"""Plain torch as a peer: the step of `torch_step.py`, called or recorded into a CUDA graph."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import released
import torch
from peers import torch_step
from peers.torch_step import Model, Shape, State

from deepinfer_jax.config import ModelConfig

STORED = {
    "weights": "bfloat16; layers take turns with two stacks of experts, whose eight would need 217 "
    "GB: a step reads as many bytes as with eight",
    "cache": "bfloat16",
    "activations": "bfloat16",
}
SETS = 2
FUSED = "norm rotate split collapse expand activate attend"  # what a compiler makes one kernel of


@dataclasses.dataclass(frozen=True)
class How:
    """graph: the step is recorded; routed: which product of experts; attention: torch's own or
    FlashMLA's; compiled: small pieces through torch.compile.
    """

    graph: bool = True
    routed: str = "grouped"
    attention: str = "torch"
    compiled: bool = False


HOWS = {
    "torch-eager": How(graph=False),
    "torch-graph": How(),
    "torch-graph-gathered": How(routed="gathered"),
    "torch-compiled": How(compiled=True),
    "torch-flashmla": How(compiled=True, attention="flash_mla"),
}


def flash_mla(q: Any, rows: Any, ids: Any, sink: Any, scale: float) -> Any:
    """`torch_step.attend` by FlashMLA's sparse kernel."""
    from flash_mla import flash_mla_sparse_fwd

    return flash_mla_sparse_fwd(
        q.contiguous(), rows[:, None], ids[:, None].int(), scale, 512, sink
    )[0]


def compile_pieces() -> None:
    """Replace the small functions of the step by compiled ones."""
    import torch._dynamo

    torch._dynamo.config.recompile_limit = 64
    for name in FUSED.split():
        setattr(torch_step, name, torch.compile(getattr(torch_step, name), dynamic=False))


def filled(shape: Shape, held: int, device: Any) -> State:
    """A state of slots that hold `held` tokens, of vectors that no text ever made."""
    state = shape.state(device, torch.bfloat16)
    for each in (state.rows, *state.keys):
        for part in each.flatten(0, -2).split(1 << 22):
            part.normal_()
    state.history.random_(0, shape.cfg.engram_compressed_vocab_size)
    state.lengths.fill_(held)
    return state


def recorded(step: Callable[[], None]) -> Callable[[], None]:
    """The step as one call of a CUDA graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def model_of(cfg: ModelConfig, how: How, device: Any, made: Any, shape: Shape) -> Model:
    weights, experts = made
    attention = {"torch": torch_step.attend, "flash_mla": flash_mla}[how.attention]
    routed = getattr(torch_step, f"experts_{how.routed}")
    token_map = torch.arange(cfg.vocab_size, device=device) % cfg.engram_compressed_vocab_size
    return Model(cfg, weights, experts, token_map, shape, attention, routed)


def measured(
    name: str, cells: list[tuple[int, int]], steps: int, repeats: int, small: bool
) -> Iterator[dict[str, Any]]:
    """Of each cell (batch, tokens held) the `samples_ms` of a step."""
    how, cfg = HOWS[name], released.slice_config(small)
    cuda = torch.cuda.is_available()
    device = "cuda" if cuda else "cpu"
    made = torch_step.drawn(cfg, device, SETS)
    if how.compiled:
        compile_pieces()
    for batch, context in cells:
        torch_step_model = functools.partial(model_of, cfg, how, device, made)
        shape = Shape(cfg, batch, context + steps * (repeats + 2) + 8)
        model, state = torch_step_model(shape), filled(shape, context, device)
        tokens = torch.arange(batch, device=device) * 7 + 11

        def step(model: Model = model, state: State = state, tokens: Any = tokens) -> None:
            tokens.copy_(torch_step.sampled(model.step(tokens, state)))

        run = recorded(step) if how.graph and cuda else step
        samples = []
        for _ in range(repeats + 1):
            start = time.perf_counter()
            for _ in range(steps):
                run()
            if cuda:
                torch.cuda.synchronize()
            samples.append(1e3 * (time.perf_counter() - start) / steps)
        peak = torch.cuda.max_memory_allocated() if cuda else None
        yield {"samples_ms": samples[1:], "peak_bytes": peak, "how": dataclasses.asdict(how)}
        del model, state, run, step
        if cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
