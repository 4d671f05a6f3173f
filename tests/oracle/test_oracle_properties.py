"""What must hold of the oracle on any model: replay, copies of state, images."""

import dataclasses

import numpy as np
import pytest

from tests.oracle import Oracle, dequantize, random_model

PROMPT, KEEP = 41, 17


@pytest.fixture(scope="module", params=[3, 6])
def parts(request) -> tuple:
    rng = np.random.default_rng(request.param)
    config = random_model.random_config(rng, vision=True)
    weights = dequantize(random_model.random_weights(config, rng))
    token_map = random_model.random_token_map(config, rng)
    tokens = rng.integers(0, config["text_config"]["vocab_size"], PROMPT)
    return config, weights, token_map, tokens


def oracle(parts: tuple, **options) -> Oracle:
    return Oracle(*parts[:3], quantize_kv=True, quantize_activations=True, **options)


def assert_same(left, right) -> None:
    """Equal bits of two records, states or drafts, field by field."""
    for field in dataclasses.fields(left):
        np.testing.assert_equal(getattr(left, field.name), getattr(right, field.name))


def test_mask_and_compact_replay_agree_on_every_kept_row(parts):
    runs = {}
    for mode in ("mask", "compact"):
        model = oracle(parts, replay=(mode, KEEP))
        state = model.new_state()
        records = model.prefill(state, parts[3])
        records.append(model.step(state, 5))
        runs[mode] = model, state, records
    (mask, mask_state, masked), (compact, compact_state, compacted) = runs.values()
    clip = PROMPT - KEEP
    assert compact_state.clip == clip
    for left, right in zip(masked[clip:], compacted[clip:], strict=True):
        assert_same(left, right)
    assert all(record.logits is None for record in compacted[:clip])
    assert all(record.logits is not None for record in masked[:clip])
    for layer, rows in compact_state.window.items():
        in_decoder = layer >= compact.layout.n_encoder
        assert min(rows) == (clip if in_decoder else 0)
        assert all(np.array_equal(mask_state.window[layer][p], rows[p]) for p in rows)
    assert_same(mask.draft(mask_state, 9), compact.draft(compact_state, 9))


def test_replay_keeps_the_long_range_entries(parts):
    states = []
    for replay in (("off", 0), ("compact", KEEP)):
        model = oracle(parts, replay=replay)
        states.append(model.new_state())
        model.prefill(states[-1], parts[3])
    off, compact = states
    for name in ("compressed", "index_keys", "pending"):
        np.testing.assert_equal(getattr(off, name), getattr(compact, name))


def test_replay_that_keeps_everything_changes_nothing(parts):
    results = []
    for replay in (("off", 0), ("mask", PROMPT), ("compact", PROMPT)):
        model = oracle(parts, replay=replay)
        results.append(model.prefill(model.new_state(), parts[3][:20])[-1])
    assert_same(results[0], results[1])
    assert_same(results[0], results[2])


def test_a_copied_state_forgets_wrong_tokens(parts):
    model = oracle(parts)
    state = model.new_state()
    model.prefill(state, parts[3][:11])
    before = state.copy()
    model.draft(state, 3)
    for wrong in (7, 8, 9):
        model.step(state, wrong)
    again = [model.step(before, token) for token in parts[3][11:14]][-1]
    straight = model.prefill(model.new_state(), parts[3][:14])[-1]
    assert_same(again, straight)


def test_image_rows_route_by_their_own_bias_and_leave_engram_out(parts):
    config, weights, token_map, tokens = parts
    model = oracle(parts)
    row = np.random.default_rng(1).normal(size=config["text_config"]["hidden_size"])
    images = {3: row, 4: row, 5: row, 6: row}
    records = model.prefill(model.new_state(), tokens[:12], images)
    for layer, streams in records[4].after_engram.items():
        before = records[4].block_out[layer - 1] if layer else np.tile(row, (len(streams), 1))
        assert np.array_equal(streams, before)
    other = {name: -value if name.endswith("bias_vl") else value for name, value in weights.items()}
    changed = Oracle(config, other, token_map, True, True)
    flipped = changed.prefill(changed.new_state(), tokens[:12], images)
    assert_same(records[2], flipped[2])
    assert not np.array_equal(records[3].router_ids, flipped[3].router_ids)


def test_wrong_replay_is_refused(parts):
    with pytest.raises(ValueError, match="replay must be one of"):
        oracle(parts, replay=("half", 99))
    with pytest.raises(ValueError, match="at least the window"):
        oracle(parts, replay=("mask", 1))
    model = oracle(parts, replay=("compact", KEEP))
    state = model.new_state()
    model.prefill(state, parts[3][:2])
    with pytest.raises(ValueError, match="whole prompt at once"):
        model.prefill(state, parts[3][2:])
