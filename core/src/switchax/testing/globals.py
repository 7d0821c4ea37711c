"""What is global to a process, and must be after a case as it was before."""

from __future__ import annotations

import os
import sys
import threading
from typing import Any

import jax
import numpy as np

__all__ = ["Globals"]

_OURS = ("JAX_", "XLA_", "SWITCHAX_")


class Globals:
    """Settings of JAX, the environment and numpy's generator, as they are now."""

    def __init__(self) -> None:
        self._settings = _settings()
        self._environment, self._modules = dict(os.environ), len(sys.modules)
        self._numpy = np.random.get_state(legacy=False)

    def restored(self) -> list[str]:
        """Sets everything as it was; returns what had been changed, as text."""
        return [*self._jax(), *self._variables(), *self._generator()]

    def _jax(self) -> list[str]:
        # What is new was defined by an import, and has no value to go back to.
        now = _settings()
        before = {n: x for n, x in self._settings.items() if now[n] != x}
        texts = [f"{n} from {x!r} to {now[n]!r}" for n, x in before.items()]
        for name, value in before.items():
            jax.config.update(name, value)  # type: ignore[no-untyped-call]
        return texts

    def _variables(self) -> list[str]:
        before, now = self._environment, dict(os.environ)
        # What a library sets for itself when it is imported is no fault.
        new = () if len(sys.modules) != self._modules else _OURS
        names = sorted(
            name
            for name in before | now
            if before.get(name) != now.get(name)
            and (name in before or name.startswith(new))
        )
        for name in names:
            if name in before:
                os.environ[name] = before[name]
            else:
                del os.environ[name]
        return [f"os.environ[{name!r}]" for name in names]

    def _generator(self) -> list[str]:
        now = np.random.get_state(legacy=False)
        if jax.tree.all(jax.tree.map(np.array_equal, now, self._numpy)):
            return []
        np.random.set_state(self._numpy)
        return ["the state of numpy.random"]


def _settings() -> dict[str, Any]:
    """JAX's settings as another thread sees them: without those of a `with` here."""
    found: dict[str, Any] = {}
    thread = threading.Thread(target=lambda: found.update(jax.config.values))
    thread.start()
    thread.join()
    return found
