"""Which module defines a class, and which distribution a module belongs to."""

from __future__ import annotations

import functools
import importlib.metadata
import inspect
import sys

from .discovery import FoundPlugin

__all__ = ["common_parts", "defining_module", "holds"]


def defining_module(cls: type) -> str:
    """Returns the module whose code defines a class.

    `__module__` can be another class's, copied by `functools.update_wrapper`; then no
    method that the class itself defines comes from there.
    """
    functions = [
        inspect.unwrap(getattr(value, "__func__", value))
        for value in vars(cls).values()
    ]
    own = [f.__globals__ for f in functions if inspect.isfunction(f)]
    modules = [str(names["__name__"]) for names in own if "__name__" in names]
    stated = cls.__module__
    return stated if stated in modules or not modules else modules[0]


def common_parts(module: str, other: str) -> int:
    """Returns how many leading packages two modules share.

    A namespace package counts for nothing by itself: anybody may add to it.
    """
    count = 0
    for left, right in zip(module.split("."), other.split("."), strict=False):
        if left != right:
            break
        count += 1
    shared = ".".join(module.split(".")[:count])
    return 0 if shared != other and _is_namespace(shared) else count


def _is_namespace(name: str) -> bool:
    package = sys.modules.get(name)
    return (
        package is not None
        and hasattr(package, "__path__")
        and getattr(package, "__file__", None) is None
    )


@functools.cache
def holds(plugin: FoundPlugin, module: str) -> bool:
    """Whether a plugin's distribution lists a module among its files."""
    try:
        files = importlib.metadata.files(plugin.distribution) or ()
        names = {file.as_posix() for file in files}
    except Exception:  # whatever a damaged RECORD raises
        return False
    path = module.replace(".", "/")
    return not names.isdisjoint({f"{path}.py", f"{path}/__init__.py"})
