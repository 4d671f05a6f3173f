# %% [markdown]
# # How many drafts to verify
#
# A drafter proposes tokens, the model verifies some of them in one pass. Verifying more costs
# time, verifying fewer gives up tokens. This notebook follows one decision: confidences of a real
# drafter, their survival, what rows cost on a device, and the plan for one request and for many.
# Nothing here can change a token: see `docs/speculation.md`.

# %%
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import deepinfer_jax as di
from deepinfer_jax import planning, plots, rounds

plots.use_style()
model = di.load("spark-tiny")
block = model.cfg.dspark_block_size

# %% [markdown]
# ## Confidence
#
# Six prompts, prefilled in one call. Right after it the drafter can propose a whole block for
# each: the context it needs has been stored on the way.

# %%
texts = [
    "What is 27 + 45?",
    "Sort: pear, apple, fig",
    "Tell me a story.",
    "Repeat: kqzw vt",
    "What is 9 + 9?",
    "Write a Python function that adds.",
]
ids = [model.tokenizer.render_chat([{"role": "user", "content": t}], thinking=False) for t in texts]
lengths = np.array([len(row) for row in ids], np.int32)
prompts = np.zeros((len(ids), lengths.max()), np.int32)
for row, tokens in zip(prompts, ids, strict=True):
    row[: len(tokens)] = tokens

B = len(ids)
sampling = jax.device_put(di.make_sampling(B, temperature=1.0, seeds=range(B)))
cache = di.init_cache(model.cfg, model.numerics, B, 128)
static = ("cfg", "numerics")
prefill = jax.jit(di.prefill, static_argnames=static)
first, cache = prefill(
    model.params,
    model.tables,
    di.batch_rows(prompts, lengths),
    cache,
    sampling,
    model.cfg,
    model.numerics,
)
running = di.Running(first.token, jnp.ones(B, bool), jnp.full(B, 64), jnp.full((B, 1), -1))
propose = jax.jit(rounds.propose, static_argnames=(*static, "size", "mode"))
draft = propose(
    model.params, model.tables, running, cache, sampling, model.cfg, model.numerics, size=block
)
for text, token, drafts in zip(texts, first.token, draft.tokens, strict=True):
    print(
        f"{text:36} {model.tokenizer.decode([int(token)])!r} then"
        f" {model.tokenizer.decode([int(t) for t in drafts])!r}"
    )

# %%
probability = planning.probabilities(draft.confidence, jnp.array(model.confidence_temperatures))
survival = np.asarray(planning.survival(probability))

fig, (left, right) = plt.subplots(1, 2, figsize=(10, 3.4), sharey=True)
for text, p, s in zip(texts, np.asarray(probability), survival, strict=True):
    left.plot(range(1, block + 1), p, "o-", label=text[:24])
    right.plot(range(1, block + 1), s, "o-")
left.set(xlabel="draft", ylabel="probability", title="accepted, if all before it were")
right.set(xlabel="draft", title="survival: it and all before it", ylim=(0, 1.02))
left.legend(fontsize=7)
plt.show()

# %% [markdown]
# ## What rows cost
#
# `deepinfer-jax profile` measures rounds on your device. Here are two curves: one of this kind, a
# small model on two processor cores, where every row costs; and an invented accelerator, where
# rows are almost free up to a point and time is a staircase.

# %%
sizes = np.arange(6, 6 * (block + 1) + 1, 6)
curves = {
    "processor": planning.make_cost(sizes, 6.0 + 1.1 * sizes),
    "accelerator": planning.make_cost(sizes, 5.0 + 0.6 * np.ceil(sizes / 16) + 0.01 * sizes),
}
fig, axes = plt.subplots(figsize=(5, 3))
for name, cost in curves.items():
    axes.step(cost.sizes, cost.ms, where="pre", label=name)
axes.set(xlabel="rows of a verification", ylabel="ms", ylim=(0, None))
axes.legend()
plt.show()

# %% [markdown]
# ## The plan
#
# Drafts of all requests queue by survival; with b of them verified, the expected tokens are the
# requests plus the b best survivals. The plan takes the b with the most expected tokens per
# millisecond.

# %%
plan = jax.jit(planning.plan)
active = np.ones(B, bool)
best = np.sort(survival.ravel())[::-1]
rows = B + np.arange(best.size + 1)
expected = B + np.concatenate([[0], np.cumsum(best)])

fig, (left, right) = plt.subplots(1, 2, figsize=(10, 3.2))
left.plot(rows, expected, color="0.3")
left.set(xlabel="rows", ylabel="expected tokens of the round", ylim=(0, None))
for name, cost in curves.items():
    chosen = plan(survival, survival, active, cost)
    rate = expected / np.asarray(planning.step_ms(cost, rows))
    (line,) = right.plot(rows, rate, label=name)
    right.plot(int(chosen.rows), float(chosen.objective), "o", color=line.get_color())
    print(f"{name:12} {int(chosen.rows)} rows, drafts of each request {chosen.lengths.tolist()}")
right.set(xlabel="rows", ylabel="expected tokens per ms", ylim=(0, None))
right.legend()
plt.show()

# %% [markdown]
# ## Against load
#
# The same six requests, over and over: more requests share a pass, each row has a price, and the
# plan becomes choosier. On this accelerator rows stay so cheap that every draft is worth its row.

# %%
loads = np.array([1, 2, 4, 8, 16, 32, 64])
fig, axes = plt.subplots(figsize=(5.5, 3.2))
for name in curves:
    mean = []
    for load in loads:
        some = np.tile(survival, (-(-load // B), 1))[:load]
        grid = np.unique(np.linspace(load, load * (block + 1), 24).astype(int))
        ms = (
            6.0 + 1.1 * grid
            if name == "processor"
            else 5.0 + 0.6 * np.ceil(grid / 16) + 0.01 * grid
        )
        chosen = plan(some, some, np.ones(load, bool), planning.make_cost(grid, ms))
        mean.append(float(np.mean(np.asarray(chosen.lengths))))
    axes.semilogx(loads, mean, "o-", base=2, label=name)
axes.set(xlabel="running requests", ylabel="drafts verified of each", ylim=(0, block + 0.2))
axes.legend()
plt.show()

# %% [markdown]
# ## Is the confidence right?
#
# A calibrated confidence of 0.8 is right eight times in ten. `planning.reliability` counts, and
# `plots.reliability` draws it; here on invented rounds of a drafter that is too sure of
# itself, before and after `planning.fit_temperatures`.

# %%
rng = np.random.default_rng(0)
logits = rng.normal(1.0, 1.5, (4000, block)).astype(np.float32)
true = 1 / (1 + np.exp(-logits))
right = np.cumprod(rng.random(true.shape) < true, axis=1).sum(axis=1)
found = planning.fit_temperatures(2 * logits, right)  # the head says twice what it knows

fig, axes = plt.subplots(1, 2, figsize=(7, 3.4), sharey=True)
heats = {"before": np.ones(block), "after": found.temperatures}
for which, (title, heat) in zip(axes, heats.items(), strict=True):
    alive = np.asarray(
        planning.survival(planning.probabilities(2 * logits, jnp.array(heat, jnp.float32)))
    )
    plots.reliability(planning.reliability(alive[:, 1], right > 1), which)
    which.set_title(f"second draft, {title}")
plt.show()
print(
    "temperatures",
    found.temperatures.round(2),
    "error",
    found.before.round(3),
    "to",
    found.after.round(3),
)
