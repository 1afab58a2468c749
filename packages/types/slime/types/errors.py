"""The errors that the packages of this project raise on purpose, and one constructor for each kind of fault.

    SlimeError                      status on the wire
    ├── InvalidField (+)            INVALID_ARGUMENT     a value that breaks the contract
    ├── ConfigError                 INVALID_ARGUMENT     flags and files that a user gave
    │   ├── UnknownFlag (v)
    │   ├── InvalidSetting (v)      out of range, contradictory, wrong type
    │   ├── NotAvailable            a known name that is not implemented
    │   ├── MissingFile
    │   ├── InvalidFile (v)         a file that exists and cannot be used; names the line
    │   └── PluginError (+)         a plug-in path without a suitable callable, or one that returned a wrong value
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

Classes with (v) are ValueErrors, too, and those with (+) ValueErrors and TypeErrors, so that `except ValueError:` in
user code catches them as it does Python's own errors.

An error names what was wrong (`field`, `value`) and what was `expected`. The server kit sends these three and the
message as an `ErrorDetail`, and the client kit raises the same class again.

The constructors of ConfigError word the faults of flags and files; its subclasses inherit them:

    must_be      --temperature must be greater than 0, got -1
    one_of       --train-backend must be one of fsdp, megatron, got 'megatorn'; did you mean megatron?
    conflict     --colocate and --rollout-external-engine-addrs cannot be used together: external engines have no ...
    requires     --save-interval requires --save DIR
    required     --num-rollout is required: iterations of the run
    unavailable  --use-foo is not supported yet: there is no kernel for it; use --use-bar
    not_installed  --use-wandb requires the package wandb: pip install "slime-launcher[wandb]"
    unknown      unknown option --rolout-batch-size; did you mean --rollout-batch-size?
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar, Self

# Similarity, from 0 to 1, from which a name counts as a misspelling of another.
SIMILAR = 0.66


# Characters that control a terminal (but for tabs and line ends), that reorder text, or that UTF-8 cannot encode.
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


class SlimeError(Exception):
    """Base class; `status` is the name of the gRPC status code.

    Messages quote servers and files, so characters that would control a terminal are escaped, as in Python.
    """

    status: ClassVar[str] = "INTERNAL"

    def __init__(self, message: str, *, field: str = "", value: object = "", expected: str = "") -> None:
        message = _CONTROLS.sub(lambda found: found[0].encode("unicode_escape").decode(), message)
        super().__init__(message)
        self.message = message
        self.field = field
        self.value = _shorten(value)
        self.expected = expected

    @classmethod
    def restore(cls, message: str, *, field: str = "", value: str = "", expected: str = "") -> SlimeError:
        """Rebuilds an error that another process raised, without calling an __init__ that takes other arguments."""
        error = cls.__new__(cls)
        SlimeError.__init__(error, message, field=field, value=value, expected=expected)
        return error

    def __reduce__(self) -> tuple[Any, ...]:
        state = {"field": self.field, "value": self.value, "expected": self.expected}
        return partial(type(self).restore, **state), (self.message,)


# Characters of a value that errors show.
LIMIT = 200


def _is_blank(value: object) -> bool:
    return isinstance(value, str) and not value.strip()


def _shorten(value: object) -> str:
    text = value if isinstance(value, str) else _shown(value)
    return text if len(text) <= LIMIT else text[: LIMIT - 1] + "…"


def _shown(value: object) -> str:
    """Returns `repr(value)`, or the beginning of a longer one: a few aliases of YAML make a list of 10^12 items."""
    text = ""
    for piece in _pieces(value):
        text += piece
        if len(text) > LIMIT:
            break
    return text


def _pieces(value: object) -> Iterator[str]:
    if type(value) is list:
        yield "["
        for number, item in enumerate(value):
            yield ", " if number else ""
            yield from _pieces(item)
        yield "]"
    elif type(value) is dict:
        yield "{"
        for number, (key, item) in enumerate(value.items()):
            yield (", " if number else "") + repr(key) + ": "
            yield from _pieces(item)
        yield "}"
    elif isinstance(value, int) and value.bit_length() > 4 * LIMIT:
        # Python refuses to write out more than some thousand digits.
        yield f"a number of {value.bit_length()} bits"
    else:
        yield repr(value)


def counted(count: int, noun: str, plural: str = "") -> str:
    """Spells a number of things: `1 node`, `2 passes`, `0 entries`; `plural` where a verb changes, too."""
    return f"{count} {noun if count == 1 else plural or _plural(noun)}"


def _plural(noun: str) -> str:
    if noun.endswith("y") and noun[-2:] not in ("ay", "ey", "oy"):
        return noun[:-1] + "ies"
    return noun + ("es" if noun.endswith(("s", "x", "ch", "sh")) else "s")


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Returns the known name most similar to `name`, the first of equally similar ones; None if none is similar.

    A name that exactly one known name extends by words is taken as short for it: `--sglang-tp` for `--sglang-tp-size`.
    If none is similar, a name may abbreviate words of one (`--hf-ckpt`), or add words to it (`--lr-rate`).
    """
    names, name = list(known), name[:100]
    longer = [candidate for candidate in names if candidate.startswith((f"{name}-", f"{name}_"))]
    if len(longer) == 1:
        return longer[0]
    matcher = difflib.SequenceMatcher(b=_letters(name))
    best, similarity = None, 0.0
    for candidate in names:
        matcher.set_seq1(_letters(candidate))
        threshold = max(SIMILAR, similarity)
        if matcher.real_quick_ratio() < threshold or matcher.quick_ratio() < threshold:
            continue
        ratio = matcher.ratio()
        if ratio >= SIMILAR and ratio > similarity:
            best, similarity = candidate, ratio
    if best is None:
        # By letters, `--hf-ckpt` is far from `--hf-checkpoint`, and `--lr-rate` from `--lr`.
        typed = _words(name)
        abbreviated = [candidate for candidate in names if _abbreviates(typed, _words(candidate))]
        begun = [candidate for candidate in names if typed[: len(_words(candidate))] == _words(candidate)]
        best = abbreviated[0] if len(abbreviated) == 1 else max(begun, key=len, default=None)
    return best


def _words(name: str) -> list[str]:
    return re.split("[-_]+", name.lower().strip("-_"))


def _abbreviates(typed: list[str], words: list[str]) -> bool:
    """Tells whether every typed word leaves out letters of its word, though not the first, and one is whole."""
    if len(typed) != len(words) or not set(typed) & set(words):
        return False
    pairs = [(short, word, iter(word)) for short, word in zip(typed, words, strict=True)]
    return all(short[:1] == word[:1] and all(letter in left for letter in short) for short, word, left in pairs)


def _letters(name: str) -> str:
    """Returns what counts for similarity: neither case nor what joins words."""
    return name.lower().translate({ord("-"): None, ord("_"): None})


def _did_you_mean(near: str | None) -> str:
    return f"; did you mean {near}?" if near else ""


def _because(reason: str) -> str:
    return f": {reason}" if reason else ""


def _name_and_value(setting: str) -> tuple[str, str]:
    """Splits `--save-interval 5`; a flag alone has the value ""."""
    name, _, value = setting.partition(" ")
    return name, value


class InvalidField(SlimeError, ValueError, TypeError):
    """A value that breaks the contract: `InvalidField("tokens", 3.5, "an array of integers")`."""

    status = "INVALID_ARGUMENT"

    def __init__(self, field: str, value: object, expected: str, message: str = "") -> None:
        super().__init__(
            message or f"{field}: got {_shorten(repr(value) if _is_blank(value) else value)}, expected {expected}",
            field=field,
            value=value,
            expected=expected,
        )


class ConfigError(SlimeError):
    """A mistake in flags, files or arguments. Settings are spelled as the user can type them: `--foo`."""

    status = "INVALID_ARGUMENT"

    def at(self, source: str) -> Self:
        """Returns the error prefixed with the file or variable that holds the setting: `config.json: ...`."""
        return type(self)(f"{source}: {self.message}", field=self.field, value=self.value, expected=self.expected)

    @classmethod
    def must_be(cls, setting: str, expected: str, *, got: object, reason: str = "") -> Self:
        """Reports a wrong value: `must_be("--temperature", "greater than 0", got=-1)`."""
        # Show `1` as it was typed, although the parser made 1.0 of it; where an integer is wanted, 1.0 was typed.
        if isinstance(got, float) and got.is_integer() and abs(got) < 1e15 and not expected.startswith("an integer"):
            got = int(got)
        message = f"{setting} must be {expected}, got {_shorten(_shown(got))}{_because(reason)}"
        return cls(message, field=setting, value=got, expected=expected)

    @classmethod
    def one_of(cls, setting: str, choices: Iterable[object], *, got: object) -> Self:
        """Reports a value that is not among the choices, with the nearest choice."""
        names = [str(choice) for choice in choices]
        error = cls.must_be(setting, f"one of {', '.join(names)}", got=got)
        near = nearest(_shorten(got), names)
        return cls(error.message + _did_you_mean(near), field=setting, value=got, expected=near or error.expected)

    @classmethod
    def conflict(cls, first: str, second: str, reason: str = "") -> Self:
        """Reports two settings that exclude each other, each with its value if that matters: `--num-epoch 2`."""
        name, value = _name_and_value(first)
        message = f"{first} and {second} cannot be used together{_because(reason)}"
        return cls(message, field=name, value=value, expected=f"no {name}, or no {second.partition(' ')[0]}")

    @classmethod
    def requires(cls, setting: str, needed: str, reason: str = "") -> Self:
        """Reports a setting that makes no sense without another: `requires("--save-interval", "--save DIR")`."""
        name, value = _name_and_value(setting)
        return cls(f"{setting} requires {needed}{_because(reason)}", field=name, value=value, expected=needed)

    @classmethod
    def required(cls, setting: str, reason: str = "") -> Self:
        """Reports a missing setting that has no default."""
        return cls(f"{setting} is required{_because(reason)}", field=setting.partition(" ")[0], expected="a value")

    @classmethod
    def unknown(
        cls, kind: str, name: object, known: Iterable[object], *, field: str = "", refused: Iterable[str] = (),
        instead: str | None = None,
    ) -> Self:  # fmt: skip
        """Reports an unknown name, with the nearest known one, or all of them if none is similar.

        field: the setting whose value is the name; without it the name itself is the field.
        refused: known names that would be refused, too, and so are not suggested.
        instead: the replacement of the name, if it is certain.
        """
        names = [str(each) for each in known]
        quoted = str(name) if str(name).startswith("--") else repr(name)
        near = nearest(str(name), names)
        near = None if near in set(refused) else near
        if instead:
            return cls(f"unknown {kind} {quoted}; use {instead}", field=field or str(name), expected=instead)
        # A command can have hundreds of options.
        rest = "; see --help" if str(name).startswith("-") else f"; known ones are {', '.join(names)}" if names else ""
        message = f"{field + ': ' if field else ''}unknown {kind} {_shorten(quoted)}{_did_you_mean(near) or rest}"
        return cls(message, field=field or str(name), value=name if field else "", expected=near or ", ".join(names))


@contextmanager
def errors_name(flag: str) -> Iterator[None]:
    """Prefixes errors about the file or directory that `flag` names with the flag, unless they name it already."""
    try:
        yield
    except ConfigError as error:
        raise error if flag in error.message else error.at(flag) from None


class UnknownFlag(ConfigError, ValueError):
    pass


class InvalidSetting(ConfigError, ValueError):
    pass


class NotAvailable(ConfigError):
    status = "UNIMPLEMENTED"

    @classmethod
    def unavailable(cls, setting: str, reason: str, alternative: str | None = None) -> Self:
        """Reports a known setting, or a value of it, without an implementation. alternative: what to use instead."""
        name, value = _name_and_value(setting)
        instead = f"; use {alternative}" if alternative else ""
        message = f"{setting} is not supported yet{_because(reason)}{instead}"
        return cls(message, field=name, value=value, expected=alternative or "")

    @classmethod
    def not_installed(cls, setting: str, package: str, extra: str) -> Self:
        """Reports a setting whose optional package is missing. extra: installs it, `slime-rollout[agents]`."""
        return cls.requires(setting, f"the package {package}", f'pip install "{extra}"')


class MissingFile(ConfigError):
    pass


class InvalidFile(ConfigError, ValueError):
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
    """Returns all subclasses of SlimeError by name, including those of other packages that are imported."""
    classes: dict[str, type[SlimeError]] = {}
    pending: list[type[SlimeError]] = [SlimeError]
    while pending:
        cls = pending.pop()
        classes[cls.__name__] = cls
        pending.extend(cls.__subclasses__())
    return classes
