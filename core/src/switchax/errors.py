"""What can go wrong, as types and as data.

Two families only. The call is wrong: `ValueError` or `TypeError` (the classes here
that derive from them say more precisely what). The call is right but not supported
here: `UnsupportedError`, which carries its refusals as data.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Iterable, Mapping

__all__ = [
    "ContestedNameError",
    "ContractError",
    "DecisionLockError",
    "DegradedChoiceError",
    "DegradedChoiceWarning",
    "Refusal",
    "RegistrationError",
    "SettingsError",
    "UnknownOperationError",
    "UnsupportedError",
    "described",
    "first_line",
    "house_message",
    "near_miss",
    "printable",
]


@dataclasses.dataclass(frozen=True)
class Refusal:
    """One reason why an operation does not honour a request on a target.

    Attributes:
        code: What kind of reason: "feature", "platform", "dtype", "size", ...
        field: The field of the request or target it is about.
        actual: The value found there, as text.
        allowed: What would have been accepted, as text.
        hint: What the reader can do about it.

    Raises:
        TypeError: If one of them is no text.
    """

    code: str
    field: str
    actual: str
    allowed: str
    hint: str = ""

    def __post_init__(self) -> None:
        for field, value in vars(self).items():
            if not isinstance(value, str):
                got, todo = f"{field}={value!r}", f"write str({field})"
                raise TypeError(house_message("Refusal", "text", got, todo))

    def __str__(self) -> str:
        text = f"{self.field}={self.actual} (allowed: {self.allowed})"
        return f"{text}; {self.hint}" if self.hint else text


class UnsupportedError(NotImplementedError):
    """A legal call that the operation, or every candidate, refuses.

    Args:
        message: One readable text.
        refusals: The reasons, by qualified operation name; each a tuple of `Refusal`.

    Example:
        >>> refusal = Refusal("dtype", "dtype", "float64", "float32")
        >>> error = UnsupportedError("no", {"sdpa:sdpa": (refusal,)})
        >>> error.refusals["sdpa:sdpa"][0].code
        'dtype'
    """

    def __init__(
        self, message: str, refusals: Mapping[str, tuple[Refusal, ...]] | None = None
    ) -> None:
        super().__init__(message)
        self.refusals: dict[str, tuple[Refusal, ...]] = dict(refusals or {})


class DegradedChoiceError(UnsupportedError):
    """Strict mode: only an operation of a worse cost class honours the request."""


class DegradedChoiceWarning(UserWarning):
    """Said once: a worse cost class was taken because the better ones refused."""


class UnknownOperationError(ValueError):
    """A name that no installed operation has."""


class ContestedNameError(ValueError):
    """A name claimed by several operations, so that it means none of them."""


class DecisionLockError(RuntimeError):
    """A choice that differs from the locked decisions, or a lock file that fails."""


class RegistrationError(TypeError):
    """An operation or kind whose declaration contradicts itself."""


class ContractError(ImportError):
    """A plugin built for a contract that this core does not speak."""


class SettingsError(ValueError):
    """An unknown setting or a value it does not take."""


_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")


def described(error: BaseException) -> str:
    """Returns `Type: text` in one line, even of an error that cannot say its text."""
    try:
        text = str(error)
    except KeyboardInterrupt:
        raise
    except BaseException as second:
        text = f"(its text raised {type(second).__name__})"
    return printable(" ".join(f"{type(error).__name__}: {text}".split()))


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's text, or its type where it has none."""
    return printable(next(iter(str(error).splitlines()), "") or type(error).__name__)


def printable(text: str) -> str:
    """Returns foreign text whose control characters a terminal does not obey."""
    return _CONTROL.sub(lambda found: repr(found[0])[1:-1], text)


def near_miss(name: str, known: Iterable[str], prefix: str = "") -> str:
    """Returns " (did you mean 'x'?)" for the closest known name, else "".

    Args:
        name: What was written.
        known: What could have been.
        prefix: What all begin with, which therefore makes none more alike.
    """
    rests = [known_name.removeprefix(prefix) for known_name in known]
    match = difflib.get_close_matches(str(name).removeprefix(prefix), rests, n=1)
    return f" (did you mean {prefix + match[0]!r}?)" if match else ""


def house_message(where: str, rule: str, got: str, todo: str) -> str:
    """Formats an error as `<operation>: expected <rule>, got <got>; <what to do>`."""
    return f"{where}: expected {rule}, got {got}; {todo}"
