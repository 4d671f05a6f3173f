# %% [markdown]
# # First tokens
#
# Load a model, let it write, watch it write, and look at what it thought of every token. All of it
# runs on a laptop: `spark-tiny` has 11.7 million parameters and comes with the package.

# %%
import gc

import jax
import matplotlib.pyplot as plt
import numpy as np

import deepinfer_jax as di
from deepinfer_jax import engine, params, plots, prompts, requests

plots.use_style()
model = di.load("spark-tiny")
print(model, "\n")
print(params.summary(model.params))

# %% [markdown]
# ## Generate
#
# A list of prompts in, a list of results out. The first call compiles; from then on programs are
# kept, in this process and, with `JAX_COMPILATION_CACHE_DIR` set, in later ones.

# %%
asked = [
    "Tell me a story about a cat and a kite.",
    "What is 27 + 45?",
    "Sort these numbers: 9 4 7 1",
]
results = di.generate(model, asked, max_tokens=64, temperature=0.8, seed=1)
for prompt, result in zip(asked, results, strict=True):
    print(prompt)
    print(" ", result.text)
    print(" ", result.finish_reason, len(result.tokens), "tokens, seed", result.seed, "\n")

# %% [markdown]
# As the last value of a cell a result shows its improbable tokens on a dark ground:

# %%
shown = results[0]
shown

# %% [markdown]
# ## Stream
#
# The same request, alone, piece by piece. The text is the same to the last bit of every
# probability: who else is served, and when, is no input of a reply.

# %%
pieces = list(di.stream(model, asked[0], max_tokens=64, temperature=0.8, seed=1))
assert "".join(pieces) == results[0].text
print(" | ".join(pieces[:12]), "...")

# %% [markdown]
# ## Log-probabilities
#
# `logprobs` are those of the drawn tokens at temperature 1, in float32 and exactly what a trainer
# would compute for the finished reply; `logprobs_processed` those of the distribution drawn from.
# `score_sequences` names the most probable tokens at each place, afterwards: the pass over the
# whole text gives the sampler's numbers in every bit, so nothing had to be kept while sampling.

# %%
result = results[0]
rendered = model.tokenizer.render_chat([{"role": "user", "content": asked[0]}], thinking=False)
(scored,) = di.score_sequences(model, [[*rendered, *result.tokens]], top=5)
first = len(rendered) - 1  # the place that gives the reply's first token
assert (scored.logprobs[first:] == np.float32(result.logprobs)).all()

for place in range(8):
    ids, values = scored.top_ids[first + place], scored.top_logprobs[first + place]
    others = "  ".join(
        f"{model.tokenizer.decode([int(token)])!r} {np.exp(value):.2f}"
        for token, value in zip(ids, values, strict=True)
    )
    print(f"{result.pieces[place]!r:12} of  {others}")

# %%
count = 40
fig, axis = plt.subplots(figsize=(11, 3.2))
at = np.arange(count)
best = np.exp(scored.top_logprobs[first : first + count, 0])
drawn = np.exp(np.float32(result.logprobs[:count]))
axis.bar(at, best, color="0.85", label="most probable token")
axis.bar(at, drawn, width=0.5, color=plots.COLOURS[0], label="token drawn")
labels = [repr(piece)[1:-1] for piece in result.pieces[:count]]
axis.set_xticks(at, labels, rotation=90, fontsize=8, family="monospace")
axis.set(ylabel="probability", ylim=(0, 1.15), title="sure of most words, open at some")
axis.legend(ncol=2, loc="upper right")
plt.show()

# %% [markdown]
# ## Memory, and giving it back
#
# Underneath is an `Engine`: slots and pages on the device, requests on the host. A request can be
# cancelled at any time; an engine that nobody holds any more gives back what it had, and the thread
# that drove its device ends. There is nothing to shut down.


# %%
def held():
    """Megabytes of all arrays that live."""
    gc.collect()
    return sum(array.nbytes for array in jax.live_arrays()) / 1e6


made = prompts.make_requests(
    asked, requests.Options(max_tokens=64), model.tokenizer, model.cfg, model.max_length
)
record = [("model", held())]
running = engine.start(model, made)
record.append(("engine", held()))
print(running.usage())
for number in range(len(made)):
    running.cancel(number)
print(running.usage())
del running
record.append(("deleted", held()))
del model, shown
record.append(("model, too", held()))

fig, axis = plt.subplots(figsize=(5, 2.6))
axis.barh(*zip(*record, strict=True), color=plots.COLOURS[0])
axis.set(xlabel="MB of arrays", title="what is held, step by step")
axis.invert_yaxis()
plt.show()
assert record[2][1] <= record[0][1] < record[1][1]
