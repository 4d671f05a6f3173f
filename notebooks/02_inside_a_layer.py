# %% [markdown]
# # Inside a layer
#
# What a row looks at, which experts it asks, how the residual streams mix, when the n-gram memory
# speaks: from one pass of `spark-tiny` over a story that it wrote. Nothing is hooked in. `capture`
# names values and layers, and a pass gives them back as a tree of arrays; the formulas are in
# `docs/model.md`, all names in `docs/inside.md`.

# %%
import jax
import matplotlib.pyplot as plt
import numpy as np

import deepinfer_jax as di
from deepinfer_jax import plots

plots.use_style()
model = di.load("spark-tiny")
cfg = model.cfg
for layer, kind in enumerate(cfg.kinds()):
    extra = ", Engram" if kind.engram is not None else ""
    print(f"layer {layer}: {kind.role}, {kind.ratio} tokens an entry{extra}")

# %% [markdown]
# ## A real text, and a pass over it
#
# Every field of `Capture` is a tuple of layers, or "all"; what is not named is neither computed nor
# kept. The pass is `di.score`, the trainer's: its log-probabilities are those that the sampler saw,
# in every bit, looked into or not.

# %%
question = "Tell me a story about a cat and a kite."
(result,) = di.generate(model, [question], max_tokens=64, temperature=0.8, seed=1)
prompt = model.tokenizer.render_chat([{"role": "user", "content": question}], thinking=False)
ids = [*prompt, *result.tokens]
pieces = [model.tokenizer.decode([token]) for token in ids]
print("".join(pieces), f"\n\n{len(ids)} tokens")

capture = di.Capture(
    windows="all",
    selected="all",
    index_scores=(4, 6),
    probabilities=(0, 1, 4, 6),
    router_load="all",
    attention_mix="all",
    engram_gates="all",
    stream_norms="all",
)
score = jax.jit(di.score, static_argnames=("cfg", "numerics", "capture"))
tokens, lengths = np.array([ids], np.int32), np.array([len(ids)], np.int32)
scores = score(model.params, model.tables, tokens, lengths, cfg, model.numerics, capture=capture)
seen = jax.tree.map(np.asarray, scores.captured)
print(seen)

own = np.asarray(scores.raw)[0, len(prompt) - 1 :]
assert (own == np.float32(result.logprobs)).all()

# %% [markdown]
# ## Windows and selected positions
#
# A row sees the last 32 positions through its window. Layers with global KV add 32 compressed
# entries, chosen by an index: in layer 1 an entry stands for two tokens, in layer 6 for one. Early
# rows take everything there is; later ones have to choose.

# %%
fig, axes = plt.subplots(1, 3, figsize=(12, 4.1))
for axis, layer in zip(axes, (0, 1, 6), strict=True):
    ratio = cfg.compress_ratios[layer]
    chosen = seen.of("selected", layer)[0] if ratio else None
    plots.attended(seen.of("windows", layer)[0], chosen, max(ratio, 1), axis, legend=layer == 1)
    axis.set_title(f"layer {layer}: {cfg.kinds()[layer].role}")
plt.show()

# %% [markdown]
# What the last row chose from: the index scores of layer 6, which may only look into the blocks
# that layer 4 kept as candidates.

# %%
last = len(ids) - 1
fig, axes = plt.subplots(2, 1, figsize=(11, 4), sharex=True)
for axis, layer in zip(axes, (4, 6), strict=True):
    values = seen.of("index_scores", layer)[0, last]
    chosen = np.isin(np.arange(len(values)), seen.of("selected", layer)[0, last])
    known = np.isfinite(values)
    low = values[known].min()
    bars = {"left": (known & ~chosen, "0.75"), "selected": (chosen, plots.COLOURS[1])}
    for label, (which, colour) in bars.items():
        tops = values[which] - low + 0.05
        axis.bar(np.flatnonzero(which), tops, bottom=low - 0.05, color=colour, label=label)
    outside = np.flatnonzero(~known)
    axis.plot(outside, np.full(len(outside), low), "kx", ms=3, label="no candidate")
    axis.set(ylabel=f"index score, layer {layer}")
    axis.grid(False)
axes[0].legend(ncol=3, loc="upper right")
plots.name_tokens(axes[1], pieces)
plt.show()

# %% [markdown]
# Where attention then goes: to the window, to selected entries, or to the sink, a score that every
# head keeps for nothing at all.

# %%
parts = {}
for layer in seen.layers("probabilities"):
    p = seen.of("probabilities", layer)[0, cfg.sliding_window :]  # rows with a full window
    window = cfg.sliding_window
    every = p[..., :window].sum(-1), p[..., window:-1].sum(-1), p[..., -1]
    parts[layer] = np.array([part.mean(0) for part in every])  # [3, heads]
fig, axes = plt.subplots(1, len(parts), figsize=(11, 2.8), sharey=True)
for axis, (layer, share) in zip(axes, parts.items(), strict=True):
    below = np.zeros(share.shape[1])
    for values, label, colour in zip(
        share, ("window", "selected", "sink"), (plots.COLOURS[5], plots.COLOURS[1], "0.6"),
        strict=True,
    ):  # fmt: skip
        axis.bar(range(share.shape[1]), values, bottom=below, label=label, color=colour)
        below = below + values
    axis.set(title=f"layer {layer}", xlabel="head")
axes[0].set_ylabel("share of attention")
axes[-1].legend(loc="lower right", frameon=True)
plt.show()

# %% [markdown]
# ## Experts
#
# Three of sixteen experts work on every token. Over one short story the load is far from even:
# what is balanced is balanced over a training batch.

# %%
plots.expert_load(seen.router_load, seen.layers("router_load"))
plt.show()

# %% [markdown]
# ## Streams
#
# The residual is not one vector but four. Each sub-layer writes into them by weights of its own and
# mixes them by a matrix whose rows and columns add up to 1 (mHC). Mostly it is near the identity;
# here the second and third layers exchange streams.

# %%
plots.mixes(seen.attention_mix.comb, seen.layers("attention_mix"))
plt.show()

# %%
norms = seen.stream_norms[:, 0].mean(-1)  # of the four streams
plots.over_tokens(
    np.log10(norms), pieces, [f"layer {n}" for n in seen.layers("stream_norms")],
    "log10 of the root mean square",
)  # fmt: skip
plt.show()

# %% [markdown]
# ## Memory
#
# Engram reads a table by hashes of the last two to four tokens and adds what it finds through a
# gate of each stream. The gate opens where the stream agrees with what the table says.

# %%
gates = seen.of("engram_gates", 1)[0].T
streams = [f"stream {n}" for n in range(cfg.hc_mult)]
plots.over_tokens(gates, pieces, streams, "gate", vmin=0, vmax=1)
plt.show()
top = np.argsort(-gates.max(0))[:6]
for place in sorted(top):
    print(f"{''.join(pieces[max(place - 3, 0) : place + 1])!r:32} gate {gates[:, place].max():.2f}")
