"""The state on the device, and the thread that asks the device for what comes next.

A call that runs rounds may return only when they have ended: on a GPU the host launches kernel
after kernel and reads how a loop goes on. So all calls are made by a thread of their own, in the
order in which they are posted, and the next one follows the last at once, whatever the engine is
reading meanwhile. What is posted takes the state as the calls before it leave it; whatever comes
from the host is sent when it is posted.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from deepinfer_jax import moving
from deepinfer_jax.edits import Edits
from deepinfer_jax.engine.sites import ONE, Site, State
from deepinfer_jax.engine.sizes import MOST_STEPS, Sizes
from deepinfer_jax.engine.watch import Watch
from deepinfer_jax.eplb import Placement
from deepinfer_jax.loading import Model
from deepinfer_jax.planning.policies import Move
from deepinfer_jax.rounds import Running
from deepinfer_jax.rows import Rows
from deepinfer_jax.sampling import Sampling

Array = jax.Array | np.ndarray


class Device:
    """Everything posted is done in order. Where something fails, so does all that follows."""

    def __init__(
        self, model: Model, sizes: Sizes, sampling: Sampling, watch: Watch, site: Site = ONE
    ) -> None:
        """An empty device, or several (`site`): nobody sits in the slots."""
        self._model, self._watch, self._site = model, watch, site
        self._state = site.state(model, sizes, sampling)
        self._default: Any = getattr(jax.config, "jax_default_device", None)  # of this thread
        self._thread = ThreadPoolExecutor(1, "deepinfer-device")
        self._lock = threading.Lock()
        self._posted = 0
        self._made: list[tuple[Future[Any], Any]] = []  # done, and not told yet
        self._failure: BaseException | None = None

    def state(self) -> State:
        """As it is when all that was posted is done."""
        return self._post(lambda state: (state, state)).result()

    def close(self) -> None:
        """Wait for what was posted, and forget the state."""
        self._thread.shutdown()
        del self._state

    # -- what can be posted ------------------------------------------------------------------------

    def widen(self, sizes: Sizes) -> None:
        """Room for the ends and edits of `sizes`."""

        def change(state: State) -> tuple[State, None]:
            vocab = self._model.cfg.vocab_size
            return state._replace(running=self._site.widened(state.running, sizes, vocab)), None

        self._post(change)

    def hand_out(self, pages: np.ndarray) -> None:
        """The page table [B, P]; it must not change any more."""
        sent = self._site.slots(pages)
        self._post(lambda s: (s._replace(cache=dataclasses.replace(s.cache, pages=sent)), None))

    def seat(
        self, changed: np.ndarray, left: np.ndarray, ends: np.ndarray,
        edits: Mapping[int, Edits], edited: np.ndarray,
    ) -> None:  # fmt: skip
        """`programs.seat` of the `changed` slots; edits of new ones, and whose slots have some."""
        news = [(np.int32(slot), one) for slot, one in edits.items()]
        given, active = self._site.slots(((changed, left, ends), edited))
        news = self._site.all(news)

        def change(state: State) -> tuple[State, None]:
            made = state.running.edits
            bare = dataclasses.replace(state.running, edits=None)
            running = self._watch.ask(self._site.programs.seat_program, bare, *given)
            if made is not None:
                for slot, one in news:
                    made = self._watch.ask(self._site.programs.edit_program, made, slot, one)
                made = dataclasses.replace(made, active=active)
            return state._replace(running=dataclasses.replace(running, edits=made)), None

        self._post(change)

    def sample(self, sampling: Sampling) -> None:
        """How every slot samples from now on."""
        sent = self._site.slots(sampling)
        self._post(lambda state: (state._replace(sampling=sent), None))

    def take(self, slots: np.ndarray, places: np.ndarray) -> None:
        """`snapshots.take`."""
        sent = self._site.slots((slots, places))

        def change(state: State) -> tuple[State, None]:
            kept = self._watch.ask(self._site.programs.take_program, state.kept, state.cache, *sent)
            return state._replace(kept=kept), None

        self._post(change)

    def restore(self, places: np.ndarray, slots: np.ndarray) -> None:
        """`snapshots.restore`."""
        sent = self._site.slots((places, slots))

        def change(state: State) -> tuple[State, None]:
            cache = self._watch.ask(
                self._site.programs.restore_program, state.cache, state.kept, *sent
            )
            return state._replace(cache=cache), None

        self._post(change)

    def fill(
        self, rows: Rows, complete: np.ndarray, beside: np.ndarray, packed: np.ndarray | None
    ) -> Future[Any]:
        """`programs.fill`: (its round, None)."""
        model, sent = self._model, self._site.slots((rows, complete, beside))
        mask = None if packed is None else self._site.slots(packed)

        def change(state: State) -> tuple[State, Any]:
            made, running, cache = self._ask(
                self._site.programs.fill_program, state.params, state.tables, *sent, *state[:3],
                model.cfg, model.numerics, mask,
            )  # fmt: skip
            return state._replace(running=running, cache=cache), (made, None)

        return self._post(change)

    def look(self, slots: np.ndarray | None, move: Move, limit: int, leave: int) -> Future[Any]:
        """At most `limit` rounds of `slots` [B] bool, None: of all, until `leave` of them stop (0:
        whoever stops).

        (The rounds, what every slot had left before.)
        """
        model = self._model
        sent = {"limit": np.int32(limit), "leave": np.int32(leave), "schedule": move.schedule}
        only, given = self._site.slots(slots), self._site.all(sent)

        def change(state: State) -> tuple[State, Any]:
            alone = _alone(state.running, only)
            made, running, cache = self._ask(
                self._site.programs.decode_program, state.params, state.tables, alone, *state[1:3],
                model.cfg, model.numerics, steps=MOST_STEPS, size=move.size, rows=move.rows,
                mode="coupled", **given,
            )  # fmt: skip
            running = _joined(running, state.running, only)
            return state._replace(running=running, cache=cache), (
                made,
                self._site.whole(alone.left),
            )

        return self._post(change)

    def propose(self, slots: np.ndarray | None, first: np.ndarray, size: int) -> Future[Any]:
        """`programs.propose` of `slots` [B] bool, None: of all."""
        model, (only, sent) = self._model, self._site.slots((slots, first))

        def change(state: State) -> tuple[State, Any]:
            made = self._ask(
                self._site.programs.propose_program, state.params, state.tables,
                _alone(state.running, only), *state[1:3], sent, model.cfg, model.numerics,
                size=size,
            )  # fmt: skip
            return state, made

        return self._post(change)

    def settle(
        self, slots: np.ndarray | None, drafts: Array, confidence: Array, legal: np.ndarray,
        packed: np.ndarray,
    ) -> Future[Any]:  # fmt: skip
        """`programs.settle` of `slots` [B] bool, None: of all: (its round, None)."""
        model = self._model
        only, *sent = self._site.slots((slots, drafts, confidence, legal, packed))

        def change(state: State) -> tuple[State, Any]:
            made, running, cache = self._ask(
                self._site.programs.settle_program, state.params, state.tables,
                _alone(state.running, only), *sent, *state[1:3], model.cfg, model.numerics,
            )  # fmt: skip
            running = _joined(running, state.running, only)
            return state._replace(running=running, cache=cache), (made, None)

        return self._post(change)

    def move(self, name: str, layer: int, old: Placement, new: Placement) -> None:
        """Move the weights of one layer of experts, between two calls (`moving.move`)."""
        mesh = self._site.mesh
        assert mesh is not None, "the experts of one device have nowhere to go"

        def change(state: State) -> tuple[State, None]:
            params, _ = self._watch.ask(moving.move, state.params, name, layer, old, new, mesh)
            return state._replace(params=params), None

        self._post(change)

    # -- in order ----------------------------------------------------------------------------------

    def _post(self, change: Callable[[State], tuple[State, Any]]) -> Future[Any]:
        """Do this when all before is done. The promise is of the second of what it returns."""
        promise: Future[Any] = Future()
        with self._lock:
            self._posted += 1
        self._thread.submit(self._run, change, promise)
        return promise

    def _run(self, change: Callable[[State], tuple[State, Any]], promise: Future[Any]) -> None:
        made: Any = None
        try:
            if self._failure is None:
                with jax.default_device(self._default) if self._default else _nothing:
                    self._state, made = change(self._state)
        except BaseException as error:  # whoever waits for the promise hears of it
            self._failure = error
        self._made.append((promise, self._failure or made))
        with self._lock:
            self._posted -= 1
            last = not self._posted
        if last:
            self._tell()

    def _ask(self, program: Callable[..., Any], *args: Any, **more: Any) -> Any:
        """A call that may take long. Before it, and not earlier, those who wait are told what is
        done: with what they do then they would keep this thread from making the call.
        """
        self._tell()
        return self._watch.ask(program, *args, **more)

    def _tell(self) -> None:
        for promise, made in self._made:
            if isinstance(made, BaseException):
                promise.set_exception(made)
            else:
                promise.set_result(made)
        self._made.clear()


_nothing = contextlib.nullcontext()


def _alone(running: Running, slots: jax.Array | None) -> Running:
    """What runs, but of all slots only these; None: all."""
    if slots is None:
        return running
    return dataclasses.replace(running, active=running.active & slots)


def _joined(after: Running, before: Running, slots: jax.Array | None) -> Running:
    """`after` with the slots awake that were left out of it."""
    if slots is None:
        return after
    return dataclasses.replace(after, active=after.active | (before.active & ~slots))
