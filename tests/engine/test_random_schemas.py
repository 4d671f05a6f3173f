"""A model's replies to a thousand random schemas, with drafts and without: none is invalid."""

from __future__ import annotations

import json
import random

import jsonschema
import pytest

from deepinfer_jax import engine, planning
from deepinfer_jax.grammar import GrammarError
from deepinfer_jax.prompts import make_requests
from deepinfer_jax.requests import Options
from tests import tiny_model
from tests.grammar.random_schemas import random_schema

COUNT = 1060
COMPACT = {"whitespace_flexible": False}


def answered(schemas, policy):
    """Results and errors by the number of the schema, which decides prompt and noise, too."""
    model, numbers = tiny_model.model(), list(schemas)
    prompts = [
        {"tokens": [5 + n % 97, 6, 7], "id": str(n),
         "grammar": {"kind": "json", "schema": {**schema, "x-guidance": COMPACT}}}
        for n, schema in schemas.items()
    ]  # fmt: skip
    options = Options(seed=9, max_tokens=400)
    requests = make_requests(prompts, options, model.tokenizer, model.cfg, model.max_length)
    found, errors = {}, {}
    for update in engine.run(model, requests, batch_size=8, policy=policy):
        if update.result:
            found[numbers[update.index]] = update.result
        if update.error:
            errors[numbers[update.index]] = update.error
    assert len(found) + len(errors) == len(schemas)
    return found, errors


@pytest.mark.exhaustive
def test_a_thousand_replies_to_random_schemas_validate():
    schemas = {n: random_schema(random.Random(5000 + n)) for n in range(COUNT)}
    found, errors = answered(schemas, planning.Fixed(2))
    for error in errors.values():
        assert isinstance(error, GrammarError), error
        assert error.reason == "unsatisfiable", error
    finished = {n: result for n, result in found.items() if result.finish_reason == "stop"}
    for n, result in finished.items():
        jsonschema.Draft202012Validator(schemas[n]).validate(json.loads(result.text))
    assert len(finished) >= 1000
    some = {n: schemas[n] for n in range(0, COUNT, 5)}
    plain, _ = answered(some, planning.OFF)
    assert plain == {n: found[n] for n in some if n in found}
