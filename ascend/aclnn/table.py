"""Every operation of CANN that the binding knows, by name."""

from __future__ import annotations

from ascend.aclnn import attention, caches, experts
from ascend.aclnn.operations import Operation

OPERATIONS: tuple[Operation, ...] = (*attention.TABLE, *caches.TABLE, *experts.TABLE)
BY_NAME: dict[str, Operation] = {each.name: each for each in OPERATIONS}
