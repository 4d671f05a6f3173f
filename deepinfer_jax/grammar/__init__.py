"""Structured output: replies that follow a JSON schema, a regular expression or a grammar.

Everything here runs on the host and is free of the model; only `expand` is for the device. A
grammar says of every token whether the reply may go on with it: whether the bytes so far and the
token's bytes begin a text of the grammar. How a text is cut into tokens is left to the model.

Once: `make_vocabulary(tokenizer, size)`, `Compiler(vocabulary)`. Per request: `Compiler.submit`
gives a `Ticket` at once; when its `outcome()` is `Compiled` the request may be scheduled, and
`start(compiled)` is its first state; a `GrammarError` ends that request and no other. Per look, for
the requests that have a state:

    (a) fetch the drafts [B, N] that the device made
    (b) looked = masks(state, drafts) of every request; verify at most `looked.legal` drafts of it,
        and end it if it has a `looked.failure`
    (c) stack(looked or None of every slot, rows=N + 1, vocabulary) is [B, N + 1, W] uint32 for the
        device, where `expand(packed, V)` makes the bool mask that `sampling.sample` takes
    (d) state = advance(state, tokens that were emitted); end the request if it has a failure

`masks(state, ())` gives the mask of one row: of the first token after the prompt, and, asked before
drafting, of the first draft.

A state is a value: `masks` does not change it, and a state from long ago still works. After
preemption `advance(start(compiled), everything emitted)` is an equal state. The states that come
from one `start` share a matcher that is moved to whichever is asked about, so two threads must not
use them at once; different requests may, and llguidance lets other threads run while it works.

llguidance, the extra `structured`, is imported when a vocabulary is made, not before.
"""

from deepinfer_jax.grammar.bits import expand, pack
from deepinfer_jax.grammar.compiler import Compiled, Compiler, Ticket
from deepinfer_jax.grammar.errors import GrammarError
from deepinfer_jax.grammar.matcher import Masks, State, advance, masks, stack, start
from deepinfer_jax.grammar.schema import Grammar
from deepinfer_jax.grammar.settings import GrammarLimits, GrammarSettings
from deepinfer_jax.grammar.trigger import Phase, Trigger
from deepinfer_jax.grammar.vocabulary import Vocabulary, make_vocabulary

__all__ = [
    "Compiled",
    "Compiler",
    "Grammar",
    "GrammarError",
    "GrammarLimits",
    "GrammarSettings",
    "Masks",
    "Phase",
    "State",
    "Ticket",
    "Trigger",
    "Vocabulary",
    "advance",
    "expand",
    "make_vocabulary",
    "masks",
    "pack",
    "stack",
    "start",
]
