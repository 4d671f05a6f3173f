"""The executor: a jitted step's jaxpr run by torch on one device (docs/ascend_executor.md)."""

from ascend.executor.calling import Executed, fetch, place
from ascend.executor.program import Program
from ascend.executor.rules import UnknownPrimitiveError

__all__ = ["Executed", "Program", "UnknownPrimitiveError", "fetch", "place"]
