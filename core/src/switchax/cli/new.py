"""`switchax new`: writes a plugin that works, to be made one's own.

Its files stand in `new_template` (plugins/_template in the repository), under a name
that is an identifier, so that they are checked as they are.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path

import click

from switchax import registrations
from switchax.errors import house_message
from switchax.loading import ensure_loaded
from switchax.settings import normalised

from .errors import WrongCall
from .output import show_line, stdout_kept

__all__ = ["new"]

_NAME = re.compile(r"[A-Za-z]([A-Za-z0-9_-]*[A-Za-z0-9])?")
# After "switchax_" they are packages of core, or would be taken for all of them.
_RESERVED = frozenset({"auto", "pytest", "switchax", "testing", "newkernel"})
_LONGEST = 40
# After these the name is part of an identifier.
_PLACEHOLDER = re.compile(r"(switchax_|test_)?newkernel|Newkernel")


@click.command()
@click.argument("name")
@click.option(
    "--into",
    type=click.Path(path_type=Path),
    metavar="PATH",
    help="The folder to write, ./switchax-NAME by default.",
)
def new(name: str, into: Path | None) -> None:
    """Write a plugin with a kernel that works, to start from.

    NAME is what callers pass as operation=NAME; the distribution is switchax-NAME.

    Example: switchax new my_flash
    """
    _check_name(name)
    folder = into if into is not None else Path(f"switchax-{name}")
    try:
        _check_folder(folder)
        number = _write(folder, name)
    except OSError as error:
        got = f"{error.filename or folder}: {error.strerror}"
        raise _wrong("a folder to write in", got, "name another by --into") from error
    # Without a separator pip takes it for the name of a distribution.
    is_plain = len(folder.parts) > 1 and not str(folder).startswith("-")
    path = str(folder) if is_plain else f"./{folder}"
    show_line(f"wrote {number} files to {folder}; next:")
    show_line("  pip install ./core ./plugins/chunked  (in a clone of switchax)")
    show_line(f"  pip install -e {shlex.quote(f'{path}[test]')}")
    show_line("  switchax list")
    show_line(f"  switchax conform {name}  (some minutes; pytest asks the same)")


def _wrong(rule: str, got: str, todo: str) -> WrongCall:
    return WrongCall(house_message("switchax new", rule, got, todo))


def _check_name(name: str) -> None:
    if not _NAME.fullmatch(name) or len(name) > _LONGEST:
        rule = "a name of letters, digits, '_' and '-' that begins with a letter, ends "
        rule += f"with a letter or digit and has at most {_LONGEST} of them"
        raise _wrong(rule, f"{name!r}", "for example my_flash")
    if normalised(name).startswith("switchax-"):
        todo = "switchax- is put before it"
        raise _wrong("a name without switchax- before it", f"{name!r}", todo)
    if normalised(name) in _RESERVED:
        rule = f"a name but {', '.join(sorted(_RESERVED))}"
        raise _wrong(rule, f"{name!r}", "choose another")
    owner = _owners().get(normalised(name))
    if owner is not None:
        got = f"{name!r}, which {owner} has"
        raise _wrong("a name that no installed plugin has", got, "choose another")


def _owners() -> dict[str, str]:
    """Returns who has each name, in the spelling used to compare."""
    with stdout_kept():
        records = list(ensure_loaded().values())
    distributions = {record.plugin.distribution for record in records}
    owners = {normalised(d).removeprefix("switchax-"): d for d in distributions}
    owners |= {normalised(r.plugin.name): r.plugin.distribution for r in records}
    for entry in registrations.entries():
        for name in entry.names:
            owners[normalised(name)] = entry.distribution or entry.plugin
    return owners


def _check_folder(folder: Path) -> None:
    todo = "remove it, or name another by --into"
    if set(str(folder)) & set("[]"):  # what pip and pytest write extras and cases with
        raise _wrong(
            "a folder without [ and ] in its name",
            f"{folder}",
            "name another by --into",
        )
    if folder.is_dir():
        found = next(iter(sorted(folder.iterdir())), None)
        if found is not None:
            got = f"{folder}, which holds {found.name}"
            raise _wrong("an empty folder, or none", got, todo)
    elif folder.exists():
        raise _wrong("an empty folder, or none", f"{folder}, a file", todo)


def _write(folder: Path, name: str) -> int:
    """Writes all files under the name, and returns how many."""
    number = 0
    for parts, file in _files(resources.files(__package__) / "new_template"):
        path = folder.joinpath(*(_renamed(part, name) for part in parts))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(_renamed(file.read_text("utf-8"), name), "utf-8")
        number += 1
    return number


def _files(
    folder: Traversable, parts: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], Traversable]]:
    """Yields each file of the template with the parts of its path."""
    for item in sorted(folder.iterdir(), key=lambda item: item.name):
        # What pip and other tools leave beside the files.
        if item.name == "__pycache__" or item.name.endswith("_cache"):
            continue
        if item.is_dir():
            yield from _files(item, (*parts, item.name))
        else:
            yield (*parts, item.name), item


def _renamed(text: str, name: str) -> str:
    """Puts a name where the template has its own.

    Example:
        >>> _renamed("switchax-newkernel: switchax_newkernel.Newkernel", "my-flash")
        'switchax-my-flash: switchax_my_flash.MyFlash'
    """
    identifier = name.replace("-", "_").lower()  # modules have no capitals
    words = re.split("[-_]+", name)
    class_name = "".join(word[:1].upper() + word[1:] for word in words)

    def put(match: re.Match[str]) -> str:
        if match[0] == "Newkernel":
            return class_name
        return f"{match[1]}{identifier}" if match[1] else name

    return _PLACEHOLDER.sub(put, text)
