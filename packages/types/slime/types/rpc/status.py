"""SlimeErrors on the wire: a gRPC status, with an `ErrorDetail` in the trailing metadata."""

from __future__ import annotations

import logging
import os
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, TypeVar

import grpc

from slime.types.errors import (
    DeadlineExceeded,
    InvalidField,
    NotAvailable,
    NotFound,
    OutOfSpace,
    PermissionDenied,
    RemoteError,
    SlimeError,
    Unauthenticated,
    Unavailable,
    WrongState,
    error_classes,
)  # fmt: skip
from slime.v1 import error_pb2

log = logging.getLogger(__name__)

F = TypeVar("F", bound=Callable[..., Any])
METADATA_KEY = "slime-error-bin"
TAKES_BYTES = "takes_bytes"
# All of a call's trailing metadata, base64 and escapes included, has to fit into the 8 KiB that clients accept.
LONGEST_MESSAGE = 2500
LONGEST_STATUS = 400
LIBRARIES = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))
# gRPC's details of calls that this side cancelled.
_CANCELLED_HERE = ("Locally cancelled", "Channel closed")

# Parts of gRPC's details of a connection that failed -> the reason.
_NO_CONNECTION = {
    "Connection refused": "nothing listens there",
    "errors resolving": "there is no host of that name",
    "DNS resolution failed": "there is no host of that name",
    "SETTINGS frame": "the server there does not answer as a gRPC server does; one with TLS requires --tls-ca",
}

# Classes for statuses without a detail, as other implementations send them.
_BY_CODE: dict[grpc.StatusCode, type[SlimeError]] = {
    grpc.StatusCode.NOT_FOUND: NotFound,
    grpc.StatusCode.FAILED_PRECONDITION: WrongState,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.UNAVAILABLE: Unavailable,
    grpc.StatusCode.UNAUTHENTICATED: Unauthenticated,
    grpc.StatusCode.PERMISSION_DENIED: PermissionDenied,
    grpc.StatusCode.RESOURCE_EXHAUSTED: OutOfSpace,
    grpc.StatusCode.UNIMPLEMENTED: NotAvailable,
}


class Cancelled(SlimeError):
    """The call was cancelled by its client."""

    status = "CANCELLED"


class MessageTooLarge(SlimeError):
    """A message is larger than --max-message-mb of one of the two sides."""

    status = "RESOURCE_EXHAUSTED"


def detail_of(error: SlimeError) -> error_pb2.ErrorDetail:
    return error_pb2.ErrorDetail(
        name=type(error).__name__,
        message=_cut(error.message, LONGEST_MESSAGE),
        field=_cut(error.field, 200),
        value=_cut(error.value, 200),
        expected=_cut(error.expected, 500),
    )


def _cut(text: str, limit: int) -> str:
    """Cuts `text` to `limit` bytes of UTF-8."""
    data = text.encode("utf-8", "backslashreplace")
    return data.decode() if len(data) <= limit else data[: limit - 3].decode("utf-8", "ignore") + "…"


def error_of(detail: error_pb2.ErrorDetail) -> SlimeError:
    """Rebuilds an error from its detail; RemoteError if its class is not known here."""
    cls = error_classes().get(detail.name)
    message = detail.message
    if cls is None:
        cls, message = RemoteError, f"{detail.name}: {message}"
    return cls.restore(message, field=detail.field, value=detail.value, expected=detail.expected)


def abort_with(context: grpc.ServicerContext, error: SlimeError) -> NoReturn:
    context.set_trailing_metadata(((METADATA_KEY, detail_of(error).SerializeToString()),))
    context.abort(grpc.StatusCode[error.status], _cut(error.message, LONGEST_STATUS))
    raise AssertionError("abort raises")


def raised_by(call: grpc.RpcError, address: str, method: str = "", timeout: float | None = None) -> SlimeError:
    """Returns the error of a failed call: the server's own, or one for a status without a detail."""
    for key, value in call.trailing_metadata() or ():  # type: ignore[attr-defined]
        if key == METADATA_KEY:
            return error_of(error_pb2.ErrorDetail.FromString(value))
    code, text = call.code(), call.details() or ""  # type: ignore[attr-defined]
    where = f"{address}{method}"
    if code is grpc.StatusCode.CANCELLED:
        if not text.startswith(_CANCELLED_HERE):
            return Unavailable(f"{where}: the server ended the call, as it does when it stops", field=address)
        return Cancelled(f"{where}: the call was cancelled", field=address)
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        within = "before its deadline" if timeout is None else f"within {timeout:g} s"
        return DeadlineExceeded(f"{where}: no answer {within}", field=address)
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and "larger than max" in text:
        return MessageTooLarge(f"{where}: {text}", field="--max-message-mb")
    if code is grpc.StatusCode.INVALID_ARGUMENT:
        return InvalidField("request", text, "a valid request", message=f"{where}: {text}")
    if code is grpc.StatusCode.UNAVAILABLE:
        reason = next((words for part, words in _NO_CONNECTION.items() if part in text), None)
        if reason is not None:
            return Unavailable(f"cannot connect to {address}: {reason}", field=address)
    return _BY_CODE.get(code, RemoteError)(f"{where}: {text}", field=address)


class ErrorsToStatus(grpc.ServerInterceptor):
    """Turns exceptions of a servicer into statuses: a SlimeError into its own, any other exception into RemoteError.

    The traceback of an unexpected exception goes to the log; the client gets only the line in a plug-in, if any.
    A servicer may answer with the bytes of a message in place of the message, which are sent as they are. A method
    with `@takes_bytes` gets the bytes of its requests in place of the messages, and raises `unreadable` itself.
    """

    def intercept_service(self, continuation: Callable[..., Any], details: grpc.HandlerCallDetails) -> Any:
        handler = continuation(details)
        if handler is None or details.method.startswith("/grpc."):
            return handler
        make, behavior = _parts(handler)
        wrap = _streaming if handler.response_streaming else _unary
        return make(
            wrap(_with_readable(behavior, handler.request_streaming), details.method),
            request_deserializer=None if hasattr(behavior, TAKES_BYTES) else _reader(handler.request_deserializer),
            response_serializer=_writer(handler.response_serializer),
        )


def takes_bytes(method: F) -> F:
    """Marks a method of a servicer that gets its requests as bytes."""
    setattr(method, TAKES_BYTES, True)
    return method


def unreadable(error: Exception) -> InvalidField:
    return InvalidField("request", f"bytes that cannot be read ({error})", "a message of slime.v1")


class _Unreadable:
    """A request whose bytes are not a message; gRPC would answer INTERNAL, as if the server had failed."""

    def __init__(self, error: Exception) -> None:
        self.error = error


def _reader(deserialize: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def read(data: bytes) -> Any:
        try:
            return deserialize(data)
        except Exception as error:
            return _Unreadable(error)

    return read


def _writer(serialize: Callable[[Any], bytes]) -> Callable[[Any], bytes]:
    return lambda message: message if isinstance(message, bytes) else serialize(message)


def _with_readable(behavior: Callable[..., Any], request_streaming: bool) -> Callable[..., Any]:
    """Wraps `behavior`, raising InvalidField for requests that could not be parsed."""

    def readable(request: Any) -> Any:
        if isinstance(request, _Unreadable):
            raise unreadable(request.error)
        return request

    if request_streaming:
        return lambda requests, context: behavior(map(readable, requests), context)
    return lambda request, context: behavior(readable(request), context)


def _parts(handler: Any) -> tuple[Callable[..., Any], Callable[..., Any]]:
    if handler.request_streaming:
        if handler.response_streaming:
            return grpc.stream_stream_rpc_method_handler, handler.stream_stream
        return grpc.stream_unary_rpc_method_handler, handler.stream_unary
    if handler.response_streaming:
        return grpc.unary_stream_rpc_method_handler, handler.unary_stream
    return grpc.unary_unary_rpc_method_handler, handler.unary_unary


def _unary(behavior: Callable[..., Any], method: str) -> Callable[..., Any]:
    def answer(request: Any, context: grpc.ServicerContext) -> Any:
        try:
            return behavior(request, context)
        except Exception as error:
            _abort(context, error, method)

    return answer


def _streaming(behavior: Callable[..., Any], method: str) -> Callable[..., Any]:
    def answer(request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        try:
            yield from behavior(request, context)
        except Exception as error:
            _abort(context, error, method)

    return answer


def _abort(context: grpc.ServicerContext, error: Exception, method: str) -> NoReturn:
    if isinstance(error, SlimeError):
        forget_frames(error)
        abort_with(context, error)
    if context.code() is not None or isinstance(error, grpc.RpcError):  # aborted already, or the client went away
        raise error
    log.exception("%s failed", method)
    place = place_in_plugin(error)
    forget_frames(error)
    abort_with(context, RemoteError(f"{method}: {type(error).__name__}: {error}{place}", field=method))


def forget_frames(error: BaseException) -> None:
    """Drops the tracebacks of an error that is over, and of those that led to it.

    Their frames hold what the call worked on, mostly with the error itself: as a result of a task, for one. Only
    Python's collector, which may run rarely, would free such a circle.
    """
    over: list[BaseException | None] = [error]
    known: set[int] = set()
    while over:
        each = over.pop()
        if each is not None and id(each) not in known:
            known.add(id(each))
            each.__traceback__ = None
            over += [each.__cause__, each.__context__]


def place_in_plugin(error: BaseException) -> str:
    """Returns ` (FILE, line N, in FUNCTION)` of the innermost frame outside of slime and of libraries, if any."""
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        file = frame.f_code.co_filename
        ours = str(frame.f_globals.get("__name__", "")).startswith("slime.")
        if not ours and not file.startswith(("<", *LIBRARIES)):
            return f" ({os.path.basename(file)}, line {line}, in {frame.f_code.co_name})"
    return ""
