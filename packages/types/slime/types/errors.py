"""Every error that a package of this project raises on purpose.

    SlimeError                      status on the wire
    ├── InvalidField (+)            INVALID_ARGUMENT     a value that breaks the contract
    ├── ConfigError                 INVALID_ARGUMENT     flags and files that a user gave
    │   ├── UnknownFlag (v)
    │   ├── InvalidSetting (v)      out of range, contradictory, wrong type
    │   ├── NotAvailable            a known name without an implementation yet
    │   ├── MissingFile
    │   ├── InvalidFile             a file that exists and cannot be used; names the line
    │   └── PluginError (+)         a plug-in path that does not lead to a fitting callable, or a wrong answer of one
    ├── NotFound                    NOT_FOUND
    ├── StaleWriter                 FAILED_PRECONDITION  a write of an older incarnation
    ├── LeaseLost                   FAILED_PRECONDITION
    ├── WrongState                  FAILED_PRECONDITION  a call that the state does not allow
    ├── DeadlineExceeded            DEADLINE_EXCEEDED
    ├── Unavailable                 UNAVAILABLE          a peer that does not answer
    │   └── PortInUse
    ├── Unauthenticated             UNAUTHENTICATED
    ├── PermissionDenied            PERMISSION_DENIED    a token of a role that may not make the call
    ├── OutOfSpace                  RESOURCE_EXHAUSTED   a full disk
    ├── Busy                        RESOURCE_EXHAUSTED   more calls at once than the server takes: call again later
    ├── DataLoss                    DATA_LOSS            stored bytes that are damaged or gone
    ├── EngineError                 INTERNAL             an engine that died or answered with an error
    └── RemoteError                 INTERNAL             an unexpected exception in the peer

Those with (v) are ValueErrors too, those with (+) ValueErrors and TypeErrors: so `except ValueError:` in the code of a
user catches them, as it does where the same rules are written with Python's own errors.

An error names what was wrong (`field`, `value`) and what was `expected`. The server kit sends these four as an
`ErrorDetail`, and the client kit raises the same class again.
"""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar


class SlimeError(Exception):
    """Base of all; `status` is the name of its gRPC status code."""

    status: ClassVar[str] = "INTERNAL"

    def __init__(self, message: str, *, field: str = "", value: object = "", expected: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.value = _shorten(value)
        self.expected = expected

    @classmethod
    def restore(cls, message: str, *, field: str = "", value: str = "", expected: str = "") -> SlimeError:
        """The error of this class that another process raised: for classes whose own __init__ takes other arguments."""
        error = cls.__new__(cls)
        SlimeError.__init__(error, message, field=field, value=value, expected=expected)
        return error

    def __reduce__(self) -> tuple[Any, ...]:
        state = {"field": self.field, "value": self.value, "expected": self.expected}
        return partial(type(self).restore, **state), (self.message,)


def _shorten(value: object, limit: int = 200) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= limit else text[: limit - 1] + "…"


class InvalidField(SlimeError, ValueError, TypeError):
    """A value that breaks the contract: `InvalidField("tokens", 3.5, "an array of integers")`."""

    status = "INVALID_ARGUMENT"

    def __init__(self, field: str, value: object, expected: str, message: str = "") -> None:
        super().__init__(
            message or f"{field}: got {_shorten(value)}, expected {expected}",
            field=field,
            value=value,
            expected=expected,
        )


class ConfigError(SlimeError):
    status = "INVALID_ARGUMENT"


class UnknownFlag(ConfigError, ValueError):
    pass


class InvalidSetting(ConfigError, ValueError):
    pass


class NotAvailable(ConfigError):
    status = "UNIMPLEMENTED"


class MissingFile(ConfigError):
    pass


class InvalidFile(ConfigError):
    pass


class PluginError(ConfigError, ValueError, TypeError):
    pass


class NotFound(SlimeError):
    status = "NOT_FOUND"


class StaleWriter(SlimeError):
    status = "FAILED_PRECONDITION"


class LeaseLost(SlimeError):
    status = "FAILED_PRECONDITION"


class WrongState(SlimeError):
    status = "FAILED_PRECONDITION"


class DeadlineExceeded(SlimeError):
    status = "DEADLINE_EXCEEDED"


class Unavailable(SlimeError):
    status = "UNAVAILABLE"


class PortInUse(Unavailable):
    pass


class Unauthenticated(SlimeError):
    status = "UNAUTHENTICATED"


class PermissionDenied(SlimeError):
    status = "PERMISSION_DENIED"


class OutOfSpace(SlimeError):
    status = "RESOURCE_EXHAUSTED"


class Busy(SlimeError):
    status = "RESOURCE_EXHAUSTED"


class DataLoss(SlimeError):
    status = "DATA_LOSS"


class EngineError(SlimeError):
    pass


class RemoteError(SlimeError):
    pass


def error_classes() -> dict[str, type[SlimeError]]:
    """All classes below SlimeError by name, those of other packages included once they are imported."""
    found: dict[str, type[SlimeError]] = {}
    pending: list[type[SlimeError]] = [SlimeError]
    while pending:
        cls = pending.pop()
        found[cls.__name__] = cls
        pending.extend(cls.__subclasses__())
    return found
