# %% [markdown]
# # The released model on a cluster, on paper
#
# What DeepSeek-V4.1-Flash (552 billion parameters in the backbone, 763 with its memory tables and
# drafter) needs and takes on 8 to 128 devices, from its configuration alone: no weights, nothing
# compiled, a few seconds on a CPU. Times are bounds from below (`docs/scale.md`).

# %%
import dataclasses

import matplotlib.pyplot as plt

from deepinfer_jax import plots, resources, scale
from deepinfer_jax.config import ModelConfig

cfg = ModelConfig.from_json(resources.config_file("deepseek-v4.1-flash"))
h200 = scale.load_hardware("h200")
node = scale.load_layout("h200-8")
asked = scale.Workload(context=65536, concurrency=256)

# %% [markdown]
# ## One node
#
# Weights are split over the experts and the rows of the Engram tables; attention is whole on every
# device, each with its own sequences. Does it fit, and how many sequences would?

# %%
plan = scale.plan(cfg, node, h200, asked)
print(scale.format_plan(plan))

# %%
plots.plan(plan)
plt.show()

# %% [markdown]
# ## Memory over devices
#
# Thirty-two sequences of 65,536 tokens on each device. What is split shrinks with the mesh; what is
# whole on every device (attention, shared experts) is what is left in the end. The dashed line is
# nine tenths of a device.

# %%
names = ("h200-8", "h200-8-host", "h200-16", "h200-64", "h200-128")
layouts = [scale.load_layout(name) for name in names]
routed = dataclasses.replace(asked, exchange="routed")
plans = [
    scale.plan(cfg, each, h200, dataclasses.replace(routed, concurrency=32 * each.devices))
    for each in layouts
]
plots.plan_memory(plans)
plt.show()

# %% [markdown]
# ## Time of a round by context and batch
#
# Five drafts are verified in every round. Longer contexts cost little: a row reads its window and
# 512 selected entries, whatever stands before them; only the index is scanned. Batches cost little
# until the experts are all in use anyway.

# %%
contexts = [1 << power for power in range(10, 21, 2)]
figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
for count in (8, 64, 512):
    made = [
        scale.plan(cfg, node, h200, dataclasses.replace(routed, context=length, concurrency=count))
        for length in contexts
    ]
    left.plot(contexts, [1e3 * p.decode.seconds for p in made], "o-", label=f"{count} sequences")
left.set(xscale="log", xlabel="tokens of context", ylabel="ms of a round", ylim=0)
left.legend()
counts = [8 << power for power in range(9)]
for label, kind in (("routed", "routed"), ("gathered", "gathered")):
    made = [
        scale.plan(cfg, node, h200, dataclasses.replace(asked, exchange=kind, concurrency=count))
        for count in counts
    ]
    right.plot(counts, [p.tokens_per_second for p in made], "o-", label=f"{label}, 75 % accepted")
    right.plot(counts, [p.full_acceptance for p in made], "--", label=f"{label}, all accepted")
right.set(xscale="log", xlabel="sequences on 8 devices", ylabel="tokens/s of a device", ylim=0)
right.legend(fontsize="small")
plt.show()

# %% [markdown]
# ## What limits a round
#
# The share of a round's time that arithmetic, memory and links take, by batch. Few rows wait for
# the experts' bytes; many keep the arithmetic busy; beyond one node the exchange takes its part.

# %%
figure, panels = plt.subplots(1, 2, figsize=(11, 4), layout="constrained", sharey=True)
for axes, layout in zip(panels, (node, scale.load_layout("h200-64")), strict=True):
    shares = {limit: [] for limit in ("memory", "arithmetic", "links")}
    per_device = [1 << power for power in range(9)]
    for count in per_device:
        work = dataclasses.replace(routed, concurrency=count * layout.devices)
        step = scale.plan(cfg, layout, h200, work).decode
        for limit, values in shares.items():
            spent = sum(section.seconds for section in step.sections if section.limit == limit)
            values.append(spent / step.seconds)
    axes.stackplot(per_device, shares.values(), labels=shares)
    axes.set(xscale="log", xlabel="sequences on a device", title=f"{layout.devices} x H200")
panels[0].set_ylabel("share of the round")
panels[0].legend(loc="lower left")
plt.show()

# %% [markdown]
# ## Other hardware
#
# The same node of eight with the figures of other data sheets. TPU v6e has too little memory for
# eight of them.

# %%
for name in scale.hardware_names():
    made = scale.plan(cfg, scale.over_experts(8), scale.load_hardware(name), routed)
    fits = f"up to {made.largest:,} sequences" if made.largest else "does not fit"
    rate = f"{made.tokens_per_second:8,.0f} tokens/s" if made.feasible else ""
    print(f"{made.hardware.name:22}{fits:28}{rate:18}{made.decode.limit}")
