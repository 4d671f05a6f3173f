"""The state of one reply under its grammar, and the masks that follow from it.

The end token is allowed exactly where the grammar may end, so that nothing else is allowed after a
text that the grammar cannot prolong. After the end token everything is: the published engine's
rule, and of no consequence, because a reply ends there and no later row is read. While the trigger
is awaited everything is allowed as well, the end token included.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from deepinfer_jax.grammar import bits, trigger
from deepinfer_jax.grammar.compiler import Compiled
from deepinfer_jax.grammar.cursor import Cursor, allows
from deepinfer_jax.grammar.errors import GrammarError
from deepinfer_jax.grammar.trigger import Phase, Trigger
from deepinfer_jax.grammar.vocabulary import Vocabulary

_ALL = np.uint32(0xFFFFFFFF)


@dataclasses.dataclass(frozen=True, slots=True)
class State:
    """A reply so far. Equal replies under equal grammars are equal states.

    Attributes:
      compiled: the grammar.
      phase: of the trigger.
      taken: tokens that the grammar itself has taken, without the end token.
      masked: whether a token was ever chosen under a mask.
      failure: why the request must end; it stays.
      cursor: the matcher, shared with all states of one `start`.
    """

    compiled: Compiled
    phase: Phase
    taken: tuple[int, ...]
    masked: bool
    failure: GrammarError | None = dataclasses.field(compare=False)
    cursor: Cursor = dataclasses.field(compare=False, repr=False)

    @property
    def trigger(self) -> Trigger:
        grammar = self.compiled.grammar
        return Trigger(tuple(grammar.trigger_token_ids), grammar.bound_token_id)

    @property
    def status(self) -> int:
        """The published engine's number: 0 free, 1 first mask, 2 under masks, -1 failed."""
        if self.failure is not None:
            return -1
        if not trigger.constrained(self.trigger, self.phase):
            return 0
        return 2 if self.masked else 1

    @property
    def may_end(self) -> bool:
        """Whether the reply is over, or what the grammar has taken is one of its texts."""
        if self.phase.finished or not trigger.running(self.trigger, self.phase):
            return self.phase.finished
        self.cursor.go(self.taken)
        return self.cursor.may_end()


class Masks(NamedTuple):
    """What `masks` returns.

    rows: [k + 1, W] uint32; row j is the mask of the token that follows j drafts, all ones where
      nothing is ruled and behind the first illegal draft.
    legal: leading drafts that may be verified.
    failure: why the request must end instead, or None.
    """

    rows: np.ndarray
    legal: int
    failure: GrammarError | None


def start(compiled: Compiled) -> State:
    """The state of an empty reply."""
    grammar = compiled.grammar
    cursor = Cursor(grammar.kind, compiled.vocabulary, compiled.prototype)
    return State(compiled, Phase(), (), masked=False, failure=None, cursor=cursor)


def advance(state: State, tokens: Sequence[int]) -> State:
    """The state after `tokens`, which were emitted; all of them since `start` give an equal one.

    A token that its mask forbids is a mistake of whoever used the mask: the state then has a
    `failure`, as at a limit of the grammar. A failed state stays as it is.
    """
    if state.failure is not None:
        return state
    rule, phase, masked = state.trigger, state.phase, state.masked
    fresh: dict[int, int | None] = {}
    for place, token in enumerate(map(int, tokens)):
        after = trigger.advance(rule, phase, token, state.compiled.vocabulary.eos)
        if after is None:
            return _failed(state, _rejected(place, token))
        masked = masked or (trigger.constrained(rule, phase) and not phase.finished)
        if _in_grammar(rule, phase):
            fresh[place] = None if after.finished else token
        phase = after
    try:
        taken = _taken(state, fresh) if fresh else state.taken
        return dataclasses.replace(state, phase=phase, taken=taken, masked=masked)
    except GrammarError as error:
        return _failed(state, error)


def _taken(state: State, fresh: dict[int, int | None]) -> tuple[int, ...]:
    """What the grammar has taken after `fresh`, tokens by their place; None is the end token.

    Raises GrammarError for one that is not allowed where it stands.
    """
    places = list(fresh)
    text = tuple(token for token in fresh.values() if token is not None)
    state.cursor.go(state.taken)
    good = state.cursor.accepts(text)
    if good < len(text):
        raise _rejected(places[good], text[good])
    state.cursor.go(state.taken, text)
    if len(text) < len(fresh) and not state.cursor.may_end():
        raise _rejected(places[good], state.compiled.vocabulary.eos)
    return state.cursor.settle()


def masks(state: State, drafts: Sequence[int] = ()) -> Masks:
    """The masks of `drafts` [k] and of the token after them; see `Masks`. `state` is unchanged.

    Where a draft is legal but no mask can be computed behind it, it does not count as legal.
    """
    vocabulary = state.compiled.vocabulary
    rows = np.full((len(drafts) + 1, bits.words(vocabulary.size)), _ALL)
    if state.failure is not None:
        return Masks(rows, 0, state.failure)
    rule, phase = state.trigger, state.phase
    ahead: tuple[int, ...] = ()
    for place in range(len(drafts) + 1):
        try:
            row = _row(state, phase, ahead)
        except GrammarError as error:
            return Masks(rows, max(place - 1, 0), error if place == 0 else None)
        if row is not None:
            rows[place] = row
        if place == len(drafts):
            break
        token = int(drafts[place])
        if not 0 <= token < vocabulary.size or not allows(rows[place], token):
            return Masks(rows, place, None)
        after = trigger.advance(rule, phase, token, vocabulary.eos)
        assert after is not None, "the mask forces the trigger's tokens"
        if _in_grammar(rule, phase) and not after.finished:
            ahead = (*ahead, token)
        phase = after
    return Masks(rows, len(drafts), None)


def _row(state: State, phase: Phase, ahead: tuple[int, ...]) -> np.ndarray | None:
    """Mask [W] of the next token in `phase`, after `ahead` in the grammar; None: all allowed."""
    forced = trigger.forced_next(state.trigger, phase)
    if forced is not None:
        row = np.zeros(bits.words(state.compiled.vocabulary.size), np.uint32)
        word, bit = divmod(forced, bits.WORD)
        row[word] = np.uint32(1 << bit)
        return row
    if not _in_grammar(state.trigger, phase):
        return None
    state.cursor.go(state.taken, ahead)
    return state.cursor.row()


def stack(looked: Sequence[Masks | None], rows: int, vocabulary: Vocabulary) -> np.ndarray:
    """Packed masks [B, rows, W] uint32 of a batch, for the device; all ones where there are none.

    `looked` has an entry for every slot, None for one without a grammar; `rows` is N + 1.
    """
    packed = np.full((len(looked), rows, bits.words(vocabulary.size)), _ALL)
    for slot, one in enumerate(looked):
        if one is not None:
            count = min(rows, len(one.rows))
            packed[slot, :count] = one.rows[:count]
    return packed


def _in_grammar(rule: Trigger, phase: Phase) -> bool:
    return trigger.running(rule, phase) and not phase.finished


def _failed(state: State, error: GrammarError) -> State:
    return dataclasses.replace(state, failure=error)


def _rejected(place: int, token: int) -> GrammarError:
    return GrammarError(
        "rejected",
        f"tokens[{place}] is {token}, which the grammar does not allow there; were the masks of "
        "this request applied to the row it was chosen from?",
    )
