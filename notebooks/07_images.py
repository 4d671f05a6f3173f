# %% [markdown]
# # What becomes of a picture
#
# From pixels to patches, through the tower to image rows, into a span of a prompt, and to the
# experts that its rows choose. **Every weight here is random**: sizes, places, roundings and bits
# are those of the architecture, what the model makes of the picture means nothing. The formulas
# are in `docs/model.md` 12.

# %%
import dataclasses
import tempfile

import jax
import matplotlib.pyplot as plt
import numpy as np
from matplotlib import cbook

import deepinfer_jax as di
from deepinfer_jax import images, params, resources, tables
from deepinfer_jax.config import ModelConfig, VisionConfig
from deepinfer_jax.images import spans
from deepinfer_jax.model import forward

small = ModelConfig.from_json(resources.config_file("tiny-s"))  # six layers, eight experts
vision = VisionConfig(
    num_hidden_layers=4,
    hidden_size=96,
    num_attention_heads=4,
    intermediate_size=256,
    patch_size=14,  # this and what follows: as released
    rope_theta=10000.0,
    downsample_ratio=3,
    max_image_tokens=1024,
    min_pixels=544**2,
)
cfg = dataclasses.replace(small, vision=vision, image_token_id=5)
numerics = di.Numerics.native(cfg.quantized)
weights = params.init(jax.random.key(0), cfg)

# %% [markdown]
# ## Patches
#
# A photograph of Grace Hopper (United States Navy, public domain; it comes with matplotlib). The
# size rule of the release brings it to at least 544 x 544 pixels in whole patches of 14; the rest
# of the frame is grey.

# %%
with cbook.get_sample_data("grace_hopper.jpg") as file:
    picture = images.picture_from_file(file.name, vision)
side = picture.patch_size
grid = picture.patches.reshape(picture.height, picture.width, 3, side, side)
high, wide = picture.height * side, picture.width * side
shown = grid.transpose(0, 3, 1, 4, 2).reshape(high, wide, 3) / 2 + 0.5
rows, columns = images.grid_of(picture, vision)
print(f"{wide} x {high} pixels: {picture.height} x {picture.width} patches")
print(f"of {side} x {side}, {rows} x {columns} cells of 3 x 3 patches; its name is")
print(picture.key)

fig, (whole, corner) = plt.subplots(1, 2, figsize=(9, 5))
whole.imshow(shown)
for line in range(0, picture.height + 3, 3):
    whole.axhline(line * side - 0.5, color="white", linewidth=0.5)
for line in range(0, picture.width + 3, 3):
    whole.axvline(line * side - 0.5, color="white", linewidth=0.5)
whole.set(title="cells: one row of the prompt each", xticks=[], yticks=[])
whole.set(xlim=(-0.5, wide - 0.5), ylim=(high - 0.5, -0.5))
middle = grid[12:15, 18:21]
patches = np.pad(middle, [(0, 0)] * 3 + [(1, 1)] * 2, constant_values=1.0)
corner.imshow(patches.transpose(0, 3, 1, 4, 2).reshape(3 * (side + 2), 3 * (side + 2), 3) / 2 + 0.5)
corner.set(title="one cell: nine patches", xticks=[], yticks=[])
plt.show()

# %% [markdown]
# ## Image rows
#
# The tower lets all patches of the picture see each other; the aligner makes one row of nine. A
# picture's rows are a function of the picture: alone or with others in a call, from the tower or
# from a file that another machine wrote, they are the same bits.

# %%
(features,) = images.encode_images(weights, [picture], cfg, numerics)
flipped = images.Picture(np.ascontiguousarray(picture.patches[::-1]), picture.height, picture.width)
pair = images.encode_images(weights, [flipped, picture], cfg, numerics, batch=2)
origin = images.origin_of(weights, cfg, numerics)
with tempfile.TemporaryDirectory() as folder:
    images.save_features(folder, features, origin)
    read = images.load_features(folder, picture.key, origin)
for other in (pair[1], read):
    assert (features.rows.view(np.uint16) == other.rows.view(np.uint16)).all()
print(f"{features.rows.shape[0]} rows of {features.rows.shape[1]}, equal in every bit three times")

# %% [markdown]
# Even a random tower keeps what is near and alike together: the first three principal components
# of the rows, as red, green and blue, one pixel for a cell.

# %%
centred = features.rows.astype(np.float64)
centred -= centred.mean(axis=0)
parts = np.linalg.svd(centred, full_matrices=False)[0][:, :3]
low, high = np.quantile(parts, [0.02, 0.98], axis=0)
colours = np.clip((parts - low) / (high - low), 0, 1).reshape(rows, columns, 3)
fig, axis = plt.subplots(figsize=(4, 4))
axis.imshow(colours)
axis.set(title="image rows of a random tower", xticks=[], yticks=[])
plt.show()

# %% [markdown]
# ## The span
#
# In the prompt stand START, the rows of the picture with a NEWLINE after each line, and END. They
# are ordinary positions; their embeddings replace those of tokens.

# %%
before, behind = 12, 24  # text around it; random ids, like everything here
kinds = images.span_kinds(rows, columns)
length = before + len(kinds) + behind
image = np.zeros(length, bool)
image[before : before + len(kinds)] = True
rng = np.random.default_rng(0)
tokens = np.where(image, cfg.image_token_id, rng.integers(8, cfg.vocab_size, length))
embeddings = np.zeros((length, cfg.hidden_size), features.rows.dtype)
embeddings[image] = images.span_embeddings(weights["vision"], features)
print(
    f"{before} tokens, a span of {rows} x ({columns} + 1) + 2 = {len(kinds)} rows, {behind} tokens"
)

names = ("START", "IMAGE", "NEWLINE", "END", "text")
strip = np.full(length, 4)
strip[image] = kinds
lines = np.pad(strip, (0, -length % 60), constant_values=5).reshape(-1, 60)
palette = plt.get_cmap("Set2", 6)
fig, axis = plt.subplots(figsize=(9, 1.6))
axis.imshow(np.ma.masked_equal(lines, 5), cmap=palette, vmin=0, vmax=5)
axis.set(title="the prompt, sixty positions a line", xticks=[], yticks=[])
handles = [plt.Rectangle((0, 0), 1, 1, color=palette(i)) for i in range(5)]
axis.legend(handles, names, ncol=5, loc="upper center", bbox_to_anchor=(0.5, -0.05), frameon=False)
plt.show()

# %% [markdown]
# ## Experts
#
# Rows of a span choose their experts with a bias of their own, `bias_vl`: the router may spread
# pictures over other experts than text. Below, once with it and once with the bias of text in its
# place.

# %%
token_map = np.arange(cfg.vocab_size, dtype=np.int32) % cfg.engram_compressed_vocab_size
constants = tables.make_tables(cfg, token_map, length)
batch = dataclasses.replace(
    di.text_rows(tokens, np.zeros(length, np.int32), np.arange(length)),
    image=image,
    embeddings=embeddings,
)
run = jax.jit(forward.forward, static_argnames=("cfg", "numerics"))


def routed(tree):
    """Experts [layers, rows, 2] of the whole prompt."""
    cache = di.init_cache(cfg, numerics, 1, length)
    return np.asarray(run(tree, constants, batch, cache, cfg, numerics)[0].routed)


gate = weights["layers"]["ffn"]["gate"]
as_text = {**gate, "bias_vl": gate["bias"]}
ffn = {**weights["layers"]["ffn"], "gate": as_text}
with_own = routed(weights)
with_text = routed({**weights, "layers": {**weights["layers"], "ffn": ffn}})

# %%
layers = (0, 2, 5)
inside = image.copy()
inside[image] = kinds == spans.IMAGE
fig, axes = plt.subplots(2, 3, figsize=(9, 5.6))
for axis, layer in zip(axes[0], layers, strict=True):
    chosen = with_own[layer, inside, 0].reshape(rows, columns)
    axis.imshow(chosen, cmap="tab10", vmin=0, vmax=9)
    axis.set(title=f"first expert, layer {layer}", xticks=[], yticks=[])
places = np.arange(cfg.n_routed_experts)
for axis, layer in zip(axes[1], layers, strict=True):
    for shift, (label, found) in enumerate(
        {
            "text": with_own[layer, ~image],
            "span": with_own[layer, image],
            "span, bias of text": with_text[layer, image],
        }.items()
    ):
        share = np.bincount(found.reshape(-1), minlength=cfg.n_routed_experts) / found.size
        axis.bar(places + 0.27 * (shift - 1), share, 0.27, label=label)
    axis.set(xlabel="expert", title=f"layer {layer}")
axes[1, 0].set(ylabel="share of the rows' choices")
fig.tight_layout(rect=(0, 0.05, 1, 1))
fig.legend(*axes[1, 0].get_legend_handles_labels(), ncol=3, loc="lower center", frameon=False)
plt.show()

changed = (np.sort(with_own, -1) != np.sort(with_text, -1)).any(-1)
for name, where in (("span", image), ("before it", np.arange(length) < before)):
    print(f"{name}: {changed[:, where].mean():.0%} of the choices differ with the bias of text")
