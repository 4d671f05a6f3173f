"""The arithmetic of evaluation; the measurements themselves are the model card's."""

import numpy as np

from deepinfer_jax.training import corpus, dataset, evaluate


def test_accepted_counts_walk_from_round_to_round():
    tokens = [7, 1, 2, 3, 4, 5]
    drafts = np.full((6, 2), 9)
    drafts[1] = [2, 3]  # both right
    drafts[4] = [9, 5]  # wrong at once, what follows does not count
    assert list(evaluate.accepted_counts(tokens, 1, drafts).values()) == [2, 0]


def test_a_draft_past_the_end_is_no_acceptance():
    left = evaluate.accepted_counts([7, 1, 2], 1, np.array([[0, 0], [2, 3], [4, 5]]))
    assert left == {1: 1}


def test_replies_are_judged_with_and_without_their_end_token():
    tokenizer = dataset.load_tokenizer()
    for task in corpus.TASKS:
        example = corpus.heldout(task, 1, 3)[0]
        prompt, answer = corpus.render(example, tokenizer)
        right = evaluate.Reply(example, prompt, answer, 0)
        assert evaluate.is_right(right), task
        assert evaluate.is_right(evaluate.Reply(example, prompt, answer[:-1], 0)), task
        assert not evaluate.is_right(evaluate.Reply(example, prompt, [], 0)), task
