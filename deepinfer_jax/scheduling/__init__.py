"""The host side of the batch engine: who runs when, in which slot, with which pages. No arrays.

The device is told what to do next by values, `Step`s: rows of prompts to run, slots that decode,
pages to put in page tables, snapshots of slot state to copy. What a slot computes depends on its
own rows only, so nothing in here can change a bit of any result; it decides the time. How the
pieces fit, from the bottom:

- `pages` is the block manager. Global KV lies in pages that are owned by running jobs and by
  entries of the prefix cache. They are counted, and shared only when full, so nobody writes what
  another one reads.
- `prefixes` is the index of the prefix cache. Pages alone do not make a beginning: window rings,
  pooling state and n-gram history must come from a snapshot, so entries exist where one was kept.
- `jobs` says what there is to do (`Job`) and with what (`Limits`), `orders` who goes first. An
  order gives each job a rank once and for all. Waiting, prompt rows, pages and preemption all go
  by it, which is why the first of all jobs always gets on and none starves. A `Span` of a prompt
  is computed at once: no chunk and no beginning ends inside it.
- `tickets` and `seats` remember jobs that wait and jobs in slots. A slot gets the pages of its
  whole prompt when it is seated, those of its reply as it decodes. When none are free, idle
  prefixes go first, then the seats that stand last: *preemption by recomputation*. Such a job
  waits in its old place, and what it had emitted becomes part of the prompt that it computes again.
- `sharing` looks at the queue to see which beginnings are worth a snapshot (where a waiting job
  parts from the prompt that is computed) and which are worth waiting for. n samples of a prompt
  (`Scheduler.fork`) need nothing else: the first computes it, the others wait and share.
- `scheduler` puts it together: `submit`, `step`, `advance` by what a slot emitted, `finish`.
- `fleet` is the same over several devices, with a scheduler for each.

    scheduler = Scheduler(Limits(slots=8, pages=512, page_tokens=64, rows=256, longest=4096))
    scheduler.submit(Job("a", tokens=(5, 3, 8), max_tokens=20))
    while not (step := scheduler.step(lookahead=rounds * (drafts + 1))).idle:
        for slot, tokens, ended in device.run(step):
            scheduler.advance(slot, len(tokens))
            if ended:
                scheduler.finish(slot)
"""

from deepinfer_jax.scheduling.fleet import Fleet
from deepinfer_jax.scheduling.jobs import MOST_URGENT, Job, Limits, Span
from deepinfer_jax.scheduling.orders import FirstCome, Order, Priority, ShortestFirst
from deepinfer_jax.scheduling.scheduler import Scheduler, Usage
from deepinfer_jax.scheduling.step import Chunk, Grant, Preempted, Saved, Seated, Step

__all__ = [
    "MOST_URGENT",
    "Chunk",
    "FirstCome",
    "Fleet",
    "Grant",
    "Job",
    "Limits",
    "Order",
    "Preempted",
    "Priority",
    "Saved",
    "Scheduler",
    "Seated",
    "ShortestFirst",
    "Span",
    "Step",
    "Usage",
]
