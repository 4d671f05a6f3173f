# %% [markdown]
# # On policy, exactly
#
# Policy gradients assume that the replies were sampled from the very policy that is differentiated.
# Two engines that compute the same formulas do not give that: their log-probabilities differ, and
# the ratio of the two policies is never quite 1. Here sampler and trainer share one `forward`, and
# the difference is 0: not small, 0.
#
# Below: replies in groups, rewards, advantages, and a few steps of GRPO that move the output matrix
# of `spark-tiny` alone, which keeps the gradient light. `rl.policy_gradient` moves all weights; a
# whole run is `python -m deepinfer_jax.rl.examples.grpo` (`docs/rl.md`).

# %%
import functools
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

from deepinfer_jax import params, plots, rl
from deepinfer_jax.rl.examples import policy

plots.use_style()
settings = policy.Settings(groups=2, members=4, rows="tiled")
task = policy.make_task(settings)
weights = params.widen(task.model.params)  # float32, what an optimizer moves
task.model

# %% [markdown]
# ## Questions and groups
#
# Each question is asked several times. A member of a group has a seed of its own, named by the
# question and its number: no two share noise, and neither batch nor order enters.


# %%
def ask(weights, step):
    """(names, replies, advantages) of the questions of a step."""
    names, asked = policy.questions_of("train", step, settings.groups, settings)
    replies = policy.answer(task, weights, names, asked, settings.members, settings.temperature)
    return asked, replies, rl.group_advantages(replies.rewards, settings.members)


@functools.partial(jax.jit, static_argnames=("cfg", "numerics"))
def learn(head, weights, tables, rollout, advantages, sampling, cfg, numerics):
    """(new head, what the trainer saw): one step along the sign of the policy gradient."""

    def loss(head):
        ours = rl.score({**weights, "head": head}, tables, rollout, sampling, cfg, numerics)
        ratio = jnp.exp(ours.processed - rollout.processed)  # of trainer and sampler
        value = -advantages[:, None] * ratio * rollout.sampled
        return value.sum() / rollout.sampled.sum(), (ours, ratio)

    (_, seen), slope = jax.value_and_grad(loss, has_aux=True)(head)
    return head - 4e-4 * jnp.sign(slope), seen


def learn_from(head, replies, advantages):
    return learn(
        head, weights, task.model.tables, replies.rollout, advantages, replies.groups.sampling,
        task.model.cfg, task.model.numerics,
    )  # fmt: skip


def empty():
    """Replies without a token, of the shape of others."""
    b, width = settings.groups * settings.members, policy.WIDTH + policy.NEW
    groups = rl.make_groups([[1]] * settings.groups, settings.members, seed=0, width=policy.WIDTH)
    nothing, none = jnp.zeros((b, width - 1), jnp.float32), jnp.zeros(b, jnp.int32)
    tokens, counted = jnp.zeros((b, width), jnp.int32), jnp.int32(0)
    made = rl.Rollout(tokens, none, none, nothing, nothing, nothing, none > 0, counted)
    return policy.Replies(made, groups, np.zeros(b), np.zeros(b)), jnp.zeros(b, jnp.float32)


# %% [markdown]
# Two programs do all the work; new weights are another argument of both. While the first is
# compiled, so is the second, on replies without a token.

# %%
with ThreadPoolExecutor() as pool:
    warm = pool.submit(learn_from, weights["head"], *empty())
    asked, replies, advantages = ask(weights, 0)
    warm.result()
for number, question in enumerate(asked):
    print(f"group {number}: {question.text}")
replies.rollout

# %% [markdown]
# ## Rewards and advantages
#
# A verifier reads every reply; what counts is how a reply compares with its group. A group whose
# members all do equally well says nothing.

# %%
tokens, ends = np.asarray(replies.rollout.tokens), np.asarray(replies.rollout.lengths)
starts, members = np.asarray(replies.groups.lengths), settings.members
for row, reward in enumerate(replies.rewards):
    text = task.model.tokenizer.decode(tokens[row, starts[row] : ends[row]].tolist())
    print(f"{row // members}.{row % members}  reward {reward:.2f}  {text[:70]!r}")

fig, axes = plt.subplots(1, 2, figsize=(9, 2.8))
for axis, values, title in zip(
    axes, (replies.rewards, advantages), ("reward", "advantage: reward over its group"), strict=True
):
    for group in range(settings.groups):
        at = np.arange(group * members, (group + 1) * members)
        label = f"group {group}"
        axis.bar(at, np.asarray(values)[at], color=plots.COLOURS[group], label=label)
    axis.axhline(0, color="0.5", linewidth=1)
    axis.set(title=title, xlabel="reply")
axes[0].set_ylim(0, 1.2)
axes[0].legend()
plt.show()

# %% [markdown]
# ## The difference is 0
#
# The trainer's pass goes over the finished replies; the sampler made them token by token. Before
# the first update the two agree in every bit, and every ratio is exactly 1.

# %%
sampled = np.asarray(replies.rollout.sampled)
head, (ours, ratio) = learn_from(weights["head"], replies, advantages)
for name in ("raw", "processed", "kept_mass"):
    trainer, sampler = (np.asarray(getattr(side, name)) for side in (ours, replies.rollout))
    assert (trainer.view(np.uint32) == sampler.view(np.uint32)).all(), name
assert (np.asarray(ratio)[sampled] == 1).all()
print(f"{sampled.sum()} tokens: trainer and sampler equal in every bit")

# %% [markdown]
# ## A few steps
#
# New questions every time, sampled and scored with the newest weights. The difference stays 0: it
# is no matter of closeness. Beside it, what an honest distance of two policies looks like: the
# *first* replies under the newest weights, where nothing but learning moves the numbers. In the
# right picture it is a single digit that right and wrong replies to the first question differ in.

# %%
apart, moved = [], []
for step in range(1, 5):
    newest = {**weights, "head": head}
    asked, later, gains = ask(newest, step)
    _, (now, _) = learn_from(head, replies, advantages)
    change = np.asarray(now.raw - replies.rollout.raw)[sampled]
    head, (ours, _) = learn_from(head, later, gains)
    apart.append(float(jnp.abs(ours.raw - later.rollout.raw).max()))
    moved.append(np.abs(change).max())
    print(f"step {step}: reward {later.rewards.mean():.2f}, |trainer - sampler| {apart[-1]}")
assert apart == [0] * len(apart)

fig, axes = plt.subplots(1, 2, figsize=(11, 3))
steps = np.arange(1, len(apart) + 1)
axes[0].plot(steps, moved, "o-", color=plots.COLOURS[1], label="newest and first policy")
axes[0].plot(steps, apart, "o-", color=plots.COLOURS[0], label="trainer and sampler")
axes[0].set_yscale("symlog", linthresh=1e-7)
axes[0].set(xlabel="step", xticks=steps, ylabel="largest difference of a log-prob (nats)")
axes[0].set_ylim(bottom=-3e-8)
axes[0].legend(loc="center right")

span = max(ends - starts)
change = np.full((len(tokens), span), np.nan)
for row, (start, end) in enumerate(zip(starts, ends, strict=True)):
    change[row, : end - start] = np.asarray(now.raw - replies.rollout.raw)[row, start - 1 : end - 1]
far = np.nanmax(np.abs(change))
image = axes[1].imshow(change, aspect="auto", cmap="RdBu", vmin=-far, vmax=far)
fig.colorbar(image, ax=axes[1], label="change of the log-prob")
labels = [f"{row // members}.{row % members} ({a:+.1f})" for row, a in enumerate(advantages)]
axes[1].set_yticks(range(len(labels)), labels, fontsize=8)
axes[1].set(xlabel="token of the reply", ylabel="reply (advantage)")
axes[1].set_title("the first replies after four updates: blue is more probable now")
axes[1].grid(False)
plt.show()
