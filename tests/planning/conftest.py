"""Recorded vectors of the planner."""

import json

import pytest


@pytest.fixture
def recorded(golden_root):
    def load(name):
        path = golden_root / "dspark_planner" / name
        if not path.is_file():
            pytest.skip(f"{golden_root} has no dspark_planner/{name}")
        return json.loads(path.read_text())

    return load
