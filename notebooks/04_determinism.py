# %% [markdown]
# # The token where texts part
#
# Eight prompts, answered together and one by one, always with the most probable token. With plain
# XLA operations the two runs compute the same formulas and still disagree: the number of rows in a
# call decides in which order a compiler adds. Then the very same calls with the invariant numerics
# of this package. The contract is `docs/determinism.md`.

# %%
import dataclasses
import functools
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import deepinfer_jax as di
from deepinfer_jax import plots, sampling
from deepinfer_jax.model import head

plots.use_style()
model = di.load("spark-tiny", max_length=128)
LENGTH = 112  # tokens of a prompt and its reply
plain = dataclasses.replace(model.numerics, rows="batched")  # `dot` and `sum` as XLA likes them
print("invariant", model.numerics.fingerprint(), "plain", plain.fingerprint())

# %% [markdown]
# ## One call, one token of each sequence
#
# The only program below: one row for every sequence goes through the model, which keeps in the
# cache what later rows need; the most probable token is said. *Together* and *alone* differ in the
# number of rows, and in nothing else.

# %%
stories = [
    f"Tell me a story about a {who} and a {what}."
    for who, what in zip(
        "cat dog bird fish frog bear fox boy".split(),
        "kite ball tree boat hat star cake bike".split(),
        strict=True,
    )
]
prompts = [
    model.tokenizer.render_chat([{"role": "user", "content": story}], thinking=False)
    for story in stories
]


@functools.partial(jax.jit, static_argnames=("cfg", "numerics"), donate_argnames="cache")
def step(params, tables, tokens, position, cache, cfg, numerics):
    """The token after `tokens` [B], which stand at `position`, its log-prob, and the cache."""
    slots = jnp.arange(len(tokens))
    rows = di.text_rows(tokens, slots, jnp.full(len(tokens), position))
    hidden, cache = di.forward(params, tables, rows, cache, cfg, numerics)
    logits = head.logits(params, hidden.output, numerics)
    best = jnp.argmax(logits, axis=-1)
    return best, sampling.logprob(logits, best), cache


def write(numerics, numbers, length=LENGTH):
    """Tokens [B, length] and log-probs [B, length - 1] of these prompts with their replies."""
    cache = di.init_cache(model.cfg, numerics, len(numbers), LENGTH)
    tokens = np.zeros((len(numbers), length), np.int32)
    logprobs = np.zeros((len(numbers), length - 1), np.float32)
    for row, number in zip(tokens, numbers, strict=True):
        row[: len(prompts[number])] = prompts[number][:length]
    ends = np.array([len(prompts[number]) for number in numbers])
    for t in range(length - 1):
        now, place = tokens[:, t], np.int32(t)
        best, logprob, cache = step(
            model.params, model.tables, now, place, cache, model.cfg, numerics
        )
        free = t + 1 >= ends  # beyond the prompt
        tokens[free, t + 1] = np.asarray(best)[free]
        logprobs[free, t] = np.asarray(logprob)[free]
    return tokens, logprobs


everyone = list(range(len(prompts)))
with ThreadPoolExecutor() as pool:  # two sizes, two numerics: four programs, compiled side by side
    jobs = [(n, who) for n in (plain, model.numerics) for who in (everyone, [0])]
    list(pool.map(lambda job: write(*job, length=2), jobs))

# %%
runs = {}
for name, numerics in {"plain XLA": plain, "invariant": model.numerics}.items():
    together = write(numerics, everyone)
    alone = [write(numerics, [number]) for number in everyone]
    alone = tuple(np.concatenate(parts) for parts in zip(*alone, strict=True))
    runs[name] = together, alone
    parted = (together[0] != alone[0]).any(axis=1)
    unequal = (together[1] != alone[1])[~parted].sum()
    print(f"{name}: {parted.sum()} of {len(parted)} texts part", end="; ")
    print(f"of the log-probs of the others {unequal} differ")

# %% [markdown]
# ## Where they part
#
# At first only log-probabilities differ, in their last bits and then more. Sooner or later two
# tokens stand so close that the difference decides, and from there on the two texts have nothing to
# do with each other.

# %%
(tokens, _), (others, _) = runs["plain XLA"]
places = np.where((tokens != others).any(1), (tokens != others).argmax(1), LENGTH)
number = int(places.argmin())
place, start = int(places[number]), len(prompts[number])
print(stories[number], "\n")
print("both     ", model.tokenizer.decode(tokens[number, start:place].tolist()), "...\n")
for name, row in (("together ", tokens[number]), ("alone    ", others[number])):
    print(name, "...", model.tokenizer.decode(row[place : place + 30].tolist()), "\n")

# %%
fig, axes = plt.subplots(1, 2, figsize=(10, 3.6), sharey=True)
for axis, (name, ((tokens, ours), (others, theirs))) in zip(axes, runs.items(), strict=True):
    for number in everyone:
        same = np.cumprod(tokens[number] == others[number]).astype(bool)[1:]  # equal so far
        at = np.arange(1, LENGTH)[same]
        apart = np.abs(ours[number] - theirs[number])[same]
        (line,) = axis.plot(at, apart, ".-", linewidth=0.6, markersize=3)
        if len(at) < LENGTH - 1:
            axis.plot(at[-1], apart[-1], "x", color=line.get_color(), markersize=9)
    axis.set(title=name, xlabel="position", yscale="symlog", ylim=(0, 10))
    axis.set_yscale("symlog", linthresh=1e-6)
axes[0].set_ylabel("|together - alone| of a log-prob (nats)")
fig.suptitle("one line for each prompt, as long as its two texts agree (x: they part)", fontsize=9)
plt.show()

# %% [markdown]
# ## The contract
#
# In the right picture every point lies at 0, and not because a tolerance hides something: the
# arrays are equal in every bit. It holds for any number of rows, order, padding, chunks and drafts;
# `deepinfer-jax check-determinism spark-tiny` tries them all on your device.

# %%
(tokens, ours), (others, theirs) = runs["invariant"]
assert (tokens == others).all()
assert (ours.view(np.uint32) == theirs.view(np.uint32)).all()
print(f"{ours.size} log-probs of {len(prompts)} prompts: equal in every bit")
