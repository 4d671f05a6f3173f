"""Collectives of a program's text: loops, calls and branches count as often as they run."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from deepinfer_jax import axes
from deepinfer_jax.scale import hlo

TEXT = """\
HloModule m

%inner (p: f32[4]) -> f32[4] {
  %p = f32[4]{0} parameter(0)
  ROOT %x = f32[4]{0} all-reduce(%p), to_apply=%add
}

%body (t: (s32[], f32[4])) -> (s32[], f32[4]) {
  %g = f32[2,4]{1,0} all-gather(%a), dimensions={0}
  ROOT %c = f32[4]{0} call(%b), to_apply=%inner
}

ENTRY %main (p: f32[4]) -> f32[4] {
  %w = (s32[], f32[4]) while(%t), condition=%c, body=%body, config={"known_trip_count":{"n":"5"}}
  %d = f32[4]{0} conditional(%q, %r), branch_computations={%inner, %inner}
  ROOT %z = (f32[1,3]{1,0}, /*index=1*/f32[1,3]{1,0}) all-to-all(%m, %n)
}
"""


def test_a_text():
    found = {name: (count, elements) for name, count, elements in hlo.collectives(TEXT)}
    assert found == {
        "all-gather": (5, 5 * 8),
        "all-to-all": (1, 6),
        "all-reduce": (5 + 2, 7 * 4),
    }


def test_a_program():
    """An exchange three times in a loop, as JAX and XLA of today write it."""
    mesh = axes.make_mesh({"expert": 4}, jax.devices()[:4])

    def body(x):
        def once(x, _):
            whole = lax.all_gather(x, "expert", tiled=True)
            return lax.all_to_all(whole.reshape(4, 2, 3), "expert", 0, 0)[0] + x, None

        return lax.scan(once, x, None, length=3)[0]

    split = PartitionSpec("expert")
    run = jax.shard_map(body, mesh=mesh, in_specs=split, out_specs=split, check_vma=False)
    text = jax.jit(run).lower(jnp.zeros((8, 3))).compile().as_text()
    found = {name: (count, elements) for name, count, elements in hlo.collectives(text)}
    assert found == {"all-gather": (3, 3 * 24), "all-to-all": (3, 3 * 24)}
