"""Errors of the command line: one line on stderr, in the house form."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import IO, Any

import click

from switchax.errors import SettingsError, house_message

__all__ = ["Failure", "WrongCall", "house_form", "one_line", "plain_warnings"]


def one_line(text: object) -> str:
    """Returns text without line breaks, runs of blanks and control characters."""
    return "".join(c for c in " ".join(str(text).split()) if c.isprintable())


class Failure(click.ClickException):
    """Something that is not as it should be here; exit code 1."""

    def show(self, file: IO[Any] | None = None) -> None:
        """Writes the message to stderr."""
        lines = (line.strip() for line in self.message.splitlines())
        click.echo(one_line("; ".join(filter(None, lines))), file=file, err=True)


class WrongCall(click.UsageError):
    """A wrong call of the command line; exit code 2."""

    def show(self, file: IO[Any] | None = None) -> None:
        """Writes the message to stderr, without click's usage lines."""
        click.echo(one_line(self.message), file=file, err=True)


# What click 8.2 and later raise to show the help; it is no error.
_HELP = getattr(click.exceptions, "NoArgsIsHelpError", WrongCall)


@contextlib.contextmanager
def house_form() -> Iterator[None]:
    """Turns click's own usage errors, and wrong settings, into the house form."""
    try:
        yield
    except (WrongCall, _HELP):
        raise
    except click.UsageError as error:
        path = error.ctx.command_path if error.ctx is not None else "switchax"
        got = error.format_message().rstrip(".").removeprefix("Got ")
        todo = f"see `{path} --help`"
        text = house_message(path, "arguments as in its help", got, todo)
        raise WrongCall(text, error.ctx) from error
    except SettingsError as error:
        raise Failure(f"{error} (`switchax doctor` shows them all)") from error


@contextlib.contextmanager
def plain_warnings() -> Iterator[None]:
    """Shows each warning as one line on stderr, those of users in any case."""

    def show(message: Warning | str, *_: Any, **__: Any) -> None:
        click.echo(f"warning: {one_line(message)}", err=True)

    with warnings.catch_warnings():
        warnings.filterwarnings("always", category=UserWarning)
        warnings.showwarning = show
        yield
