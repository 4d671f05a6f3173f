"""Two-stage evaluation: replies go to a file first, judging them is another step that only reads.

- `tasks`: what is asked, with the right answers; `verifiers`: what is right, by name.
- `prompts` (of `tasks`) gives the requests of n samples an item, each with a seed from its own id;
  `deepinfer-jax eval generate` runs them and writes lines as `deepinfer-jax generate` does.
- `scoring` reads the lines again: pass@k, standard errors over items, lengths, verdicts, and what
  is missing or does not belong; `reporting` writes the report.
- `layouts` makes task files of benchmarks that others publish; `shipped` made those that come with
  the package.

How to use it: docs/evaluation.md.
"""

from deepinfer_jax.evaluation.scoring import Report, score
from deepinfer_jax.evaluation.tasks import Item, Task, find_task, read_task
from deepinfer_jax.evaluation.verdicts import Verdict
from deepinfer_jax.evaluation.verifiers import VERIFIERS, Verifier, make

__all__ = [
    "VERIFIERS",
    "Item",
    "Report",
    "Task",
    "Verdict",
    "Verifier",
    "find_task",
    "make",
    "read_task",
    "score",
]
