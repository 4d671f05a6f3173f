"""CANN's operations as Python functions, without a line of C (docs/ascend.md 3).

`table.OPERATIONS` says of each what it takes; everything else is derived from it. A call checks
its arguments, makes descriptors, asks for the workspace, queues the operation on the current
stream and destroys the descriptors:

    library = Library(search_path(os.environ))
    add = bind(BY_NAME["add"], library, npu())
    y = add(self=x, other=x)

Nothing here has run on an NPU: it was tested against a library that records calls.
"""

from ascend.aclnn.calling import bind, call, describe, signature
from ascend.aclnn.devices import Device, npu
from ascend.aclnn.errors import CallFailedError, OperandRefusedError, UnavailableError
from ascend.aclnn.library import Library, search_path
from ascend.aclnn.operations import Argument, Operation
from ascend.aclnn.table import BY_NAME, OPERATIONS
from ascend.aclnn.tensors import DTYPES, Tensor, of_numpy, of_torch

__all__ = [
    "BY_NAME",
    "DTYPES",
    "OPERATIONS",
    "Argument",
    "CallFailedError",
    "Device",
    "Library",
    "OperandRefusedError",
    "Operation",
    "Tensor",
    "UnavailableError",
    "bind",
    "call",
    "describe",
    "npu",
    "of_numpy",
    "of_torch",
    "search_path",
    "signature",
]
