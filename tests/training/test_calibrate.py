"""What calibration makes of replies: labels, and which rounds have them."""

import numpy as np

from deepinfer_jax.training import calibrate
from deepinfer_jax.training.evaluate import Reply
from tests import tiny_model


def test_rounds_with_a_whole_block_behind_them_have_labels(monkeypatch):
    model = tiny_model.model()
    size = model.cfg.most_drafts
    reply = Reply(None, [9, 8], list(range(20, 20 + size + 2)), 0)
    tokens = np.array(reply.prompt + reply.reply)
    drafts = np.full((len(tokens), size), -1)
    drafts[2] = tokens[3 : 3 + size]  # all right
    drafts[3] = tokens[4 : 4 + size]
    drafts[3, 1] = 0  # right, wrong, right ...: only the first counts
    logits = np.arange(drafts.size, dtype=np.float32).reshape(drafts.shape)

    def drafted(asked, made, temperature):
        assert temperature == 0.7
        yield reply, drafts, logits

    monkeypatch.setattr(calibrate, "drafted", drafted)
    confidence, accepted = calibrate.rounds_of(model, [reply], 0.7)
    assert accepted.tolist() == [size, 1]
    np.testing.assert_array_equal(confidence, logits[2:4])
