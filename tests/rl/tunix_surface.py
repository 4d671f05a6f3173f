"""What the adapter needs of tunix, recorded: its names, fields, defaults and arguments.

`read` makes the record from the installed package, `stand_in` makes modules from the record, for
machines without the package. `test_tunix_package.py` compares the two where it is installed.
"""

from __future__ import annotations

import abc
import dataclasses
import importlib
import inspect
import json
import types
from pathlib import Path
from typing import Any

RECORD = Path(__file__).with_name("tunix_surface.json")
_BASE, _COMMON = "tunix.rl.rollout.base_rollout", "tunix.rl.common"
_DATA = ("RolloutConfig", "RolloutOutput")


def read() -> dict[str, Any]:
    """The record of the installed package."""
    base, common = importlib.import_module(_BASE), importlib.import_module(_COMMON)
    methods = {
        name: _arguments(member)
        for name, member in vars(base.BaseRollout).items()
        if getattr(member, "__isabstractmethod__", False)
    }
    fields = {
        name: {field.name: _default(field) for field in dataclasses.fields(getattr(base, name))}
        for name in _DATA
    }
    return {
        "BaseRollout": methods,
        **fields,
        "compute_per_token_logps": _arguments(common.compute_per_token_logps),
    }


def _arguments(function: Any) -> list[str]:
    return [str(each.replace(annotation=inspect.Parameter.empty))
            for each in inspect.signature(function).parameters.values()]  # fmt: skip


def _default(field: dataclasses.Field) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return "required" if field.default is dataclasses.MISSING else field.default


def stand_in(log_probs: Any) -> dict[str, types.ModuleType]:
    """Modules of the recorded names; `log_probs` is what `compute_per_token_logps` does."""
    record = json.loads(RECORD.read_text("utf-8"))
    base, common = types.ModuleType(_BASE), types.ModuleType(_COMMON)
    for name in _DATA:
        fields = []
        for field, default in record[name].items():
            if default == "required":
                fields.append((field, Any))
            elif isinstance(default, dict):
                fields.append((field, Any, dataclasses.field(default_factory=dict)))
            else:
                fields.append((field, Any, dataclasses.field(default=default)))
        setattr(base, name, dataclasses.make_dataclass(name, fields))
    methods = {name: abc.abstractmethod(lambda self: None) for name in record["BaseRollout"]}
    base.BaseRollout = abc.ABCMeta("BaseRollout", (), methods)
    common.compute_per_token_logps = log_probs
    names = ("tunix", "tunix.rl", "tunix.rl.rollout")
    return {name: types.ModuleType(name) for name in names} | {_BASE: base, _COMMON: common}
