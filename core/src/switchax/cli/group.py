"""The group of commands, those that plugins add included."""

from __future__ import annotations

import sys
from typing import Any

import click

from switchax._version import __version__
from switchax.errors import RegistrationError, SettingsError, near_miss
from switchax.loading import call_hooks

from .conform import conform
from .doctor import doctor
from .errors import WrongCall, house_form, one_line, plain_warnings
from .explain import explain
from .inspect import inspect
from .listing import list_operations
from .new import new
from .output import stdout_kept

__all__ = ["Group", "main", "make_group"]


class Group(click.Group):
    """The root group; it asks plugins for commands only where it has none itself.

    So `switchax doctor` and `switchax --version` load no plugin's command, and a
    plugin cannot replace a command of core's, nor one of another plugin's.
    """

    _asked = False

    def add_command(self, cmd: click.Command, name: str | None = None) -> None:
        """Adds a command; a name that is taken is an error.

        Args:
            cmd: The command.
            name: Its name, the command's own by default.

        Raises:
            RegistrationError: If another command has the name.
        """
        name = name or cmd.name or ""
        if self.commands.get(name, cmd) is not cmd:
            raise RegistrationError(
                f"switchax_commands: expected a new command, got {name!r}, which "
                "exists; choose another name"
            )
        super().add_command(cmd, name)

    def ask_plugins(self) -> None:
        """Lets every plugin add its commands, once.

        Raises:
            SettingsError: If settings are wrong, so that nothing can be loaded.
        """
        if not self._asked:
            with stdout_kept():
                call_hooks("switchax_commands", group=self)
            self._asked = True

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Returns a command of core's, else a plugin's."""
        if cmd_name not in self.commands:
            self.ask_plugins()
        return super().get_command(ctx, cmd_name)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Returns all names; core's alone where settings stop the others."""
        try:
            self.ask_plugins()
        except SettingsError as error:
            click.echo(one_line(error), err=True)
        return super().list_commands(ctx)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Finds the command that is called, or says which there are."""
        name = args[0]
        if self.get_command(ctx, name) is None and not name.startswith("-"):
            known = ", ".join(sorted(self.commands))
            got = f"{name!r}{near_miss(name, self.commands)}"
            text = f"switchax: expected a command of {known}, got {got}"
            raise WrongCall(f"{text}; see `switchax --help`", ctx)
        return super().resolve_command(ctx, args)

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        """Parses the group's own options."""
        with house_form(), plain_warnings():
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: click.Context) -> Any:
        """Runs the command."""
        with house_form(), plain_warnings():
            return super().invoke(ctx)


def make_group() -> Group:
    """Returns a new group of core's commands, for `main` and for tests."""
    group = Group(
        "switchax",
        help="Shows which attention kernels are installed, and which one a call gets.",
        context_settings={"help_option_names": ["-h", "--help"]},
        commands=[list_operations, doctor, explain, inspect, conform, new],
        no_args_is_help=True,
    )
    version = click.version_option(__version__, message="switchax %(version)s")
    return version(group)


def main() -> None:
    """Runs the command line; the entry point of the script `switchax`."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a name that the terminal cannot show
            stream.reconfigure(errors="backslashreplace")
    make_group().main(prog_name="switchax")
