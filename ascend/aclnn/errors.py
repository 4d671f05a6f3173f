"""What can go wrong around a call of CANN: one type for each thing that a caller may do."""

from __future__ import annotations


class OperandRefusedError(ValueError):
    """An operand is not what the operation takes; nothing was called."""


class UnavailableError(RuntimeError):
    """The operation, or a function of CANN that it needs, is not here; nothing takes its place."""


class CallFailedError(RuntimeError):
    """CANN answered with a status other than zero.

    operation  name in the table
    phase      "descriptor", "workspace size", "execution" or "release"
    status     what came back; for a descriptor, 0: a null pointer came back
    detail     CANN's own message of this thread, "" where it had none
    """

    def __init__(
        self, operation: str, phase: str, status: int, detail: str, about: str = ""
    ) -> None:
        self.operation, self.phase, self.status, self.detail = operation, phase, status, detail
        what = f" of {about}" if about else ""
        answer = f"status {status}" if status else "a null pointer"
        said = detail or "CANN has no message for it: look into its log (ASCEND_PROCESS_LOG_PATH)"
        super().__init__(f"{operation}: {phase}{what} failed with {answer}: {said}")
