"""`BaseOperation`: what a kernel author derives from."""

from __future__ import annotations

import abc
import inspect
import weakref
from collections.abc import Iterable
from typing import Any, ClassVar

from .capabilities import Capabilities
from .checks import as_metadata
from .errors import Refusal, UnsupportedError
from .kind import OperationKind
from .metadata import OperationMetadata
from .metadata.configs import check_configs, config_of
from .request import Request
from .sameness import is_same
from .target import Target, current_target

__all__ = ["BaseOperation", "forward_method", "forward_parameters", "note_names"]

# Where a platform's forward method is looked for, most specific first.
_CHAINS = {
    "cpu": ("forward_cpu", "forward_native"),
    "cuda": ("forward_cuda", "forward_gpu", "forward_native"),
    "rocm": ("forward_rocm", "forward_gpu", "forward_native"),
    "tpu": ("forward_tpu", "forward_native"),
    "tt": ("forward_tt", "forward_native"),
}


_names: weakref.WeakKeyDictionary[type, tuple[str, ...]] = weakref.WeakKeyDictionary()


class BaseOperation(abc.ABC):
    """One implementation of an operation kind.

    A subclass sets `kind` and `capabilities`, names itself, and defines
    `forward_native` or the forward methods of its platforms. A forward method takes
    the kind's arrays, its required arguments, and exactly the arguments of the
    features declared; core has normalised them and brought them to the declared
    layout and sizes. It returns the output, or `(output, lse)` with feature "lse".

    A subclass that can be tuned sets `config_class`, a frozen dataclass that checks
    itself; an instance reads the one in its `metadata.operation_configs` as
    `self.config`, None without one.

    Instances are frozen by convention: two of one class whose attributes are the same
    share compiled programs. Numbers, text, dtypes, containers and dataclasses of them
    are compared by value and type; arrays, functions and other objects are the same
    only if they are one object, so that one that `__init__` makes is another one in
    each call by name, which is traced again: keep such things in the module. The
    `base_config` of `metadata` is None within a forward method: read what you need of
    it in `__init__`.

    Args:
        metadata: Dtypes, backend and configurations; the default fits most uses.

    Example:
        ```python
        @OperationRegistry.register
        class MyFlash(BaseOperation):
            kind = ATTENTION
            capabilities = Capabilities(
                platforms={"tpu"}, features={"causal"}, differentiable={"query"},
                multiples={"head_dim": 128}, cost=Cost.FUSED, opaque=True,
            )

            @classmethod
            def get_impl_name(cls):
                return "my_flash", "flash_attn2"

            def forward_tpu(self, query, key, value, *, causal, softmax_scale):
                from .kernel import my_flash  # heavy imports live here

                return my_flash(query, key, value, causal, softmax_scale)
        ```
    """

    kind: ClassVar[OperationKind]
    capabilities: ClassVar[Capabilities]
    config_class: ClassVar[type | None] = None
    """A frozen dataclass that checks itself; None if there is nothing to configure."""

    def __init__(self, metadata: OperationMetadata | None = None) -> None:
        name = self.names()[0]
        self.metadata = as_metadata(name, metadata)
        if self.metadata.operation_configs:
            check_configs(name, self.metadata, type(self))

    @classmethod
    @abc.abstractmethod
    def get_impl_name(cls) -> str | tuple[str, ...]:
        """Returns the canonical name, or it and the shared names after it."""

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Returns every name as a tuple, canonical first."""
        known = _names.get(cls)
        if known is not None:
            return known
        names = cls.get_impl_name()
        return (names,) if isinstance(names, str) else tuple(names)

    @classmethod
    def refusals(cls, request: Request, target: Target) -> Iterable[Refusal]:
        """Returns reasons that no table of capabilities can state.

        Args:
            request: The request as the forward method would see it.
            target: The device it would run on.
        """
        return ()

    @classmethod
    def unavailable(cls) -> str:
        """Returns why the operation cannot be used in this environment, or "".

        For a kernel library that is missing or does not fit, with what to install.
        It must be cheap: look for the library, do not import it.
        """
        return ""

    def get_impl_metadata(self) -> OperationMetadata:
        """Returns the metadata the operation was created with."""
        return self.metadata

    @property
    def config(self) -> Any:
        """The explicit configuration for this operation, by any of its names."""
        return config_of(type(self), self.metadata)

    def current_backend(self) -> str:
        """Returns the platform whose forward method runs."""
        if self.metadata.backend is not None:
            return self.metadata.backend
        return current_target().platform

    def forward_native(self, *args: Any, **kwargs: Any) -> Any:
        """Runs in plain JAX on any platform; a subclass defines it or others."""
        name = self.names()[0]
        platforms = ", ".join(sorted(self.capabilities.platforms))
        raise UnsupportedError(
            f"{name}: expected a platform of {platforms}, got one it has no method "
            "for; choose another operation"
        )

    def forward_cpu(self, *args: Any, **kwargs: Any) -> Any:
        """Runs on CPU; `forward_native` unless a subclass defines it."""
        return self.forward_native(*args, **kwargs)

    def forward_gpu(self, *args: Any, **kwargs: Any) -> Any:
        """Runs on CUDA and ROCm; `forward_native` unless a subclass defines it."""
        return self.forward_native(*args, **kwargs)

    def forward_cuda(self, *args: Any, **kwargs: Any) -> Any:
        """Runs on CUDA; `forward_gpu` unless a subclass defines it."""
        return self.forward_gpu(*args, **kwargs)

    def forward_rocm(self, *args: Any, **kwargs: Any) -> Any:
        """Runs on ROCm; `forward_gpu` unless a subclass defines it."""
        return self.forward_gpu(*args, **kwargs)

    def forward_tpu(self, *args: Any, **kwargs: Any) -> Any:
        """Runs on TPU; `forward_native` unless a subclass defines it."""
        return self.forward_native(*args, **kwargs)

    def forward_tt(self, *args: Any, **kwargs: Any) -> Any:
        """Runs on Tenstorrent; `forward_native` unless a subclass defines it."""
        return self.forward_native(*args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the operation on a call of its kind.

        Args:
            *args: The kind's arrays, in order.
            **kwargs: The kind's other arguments.

        Returns:
            The kind's output, whatever was asked for: `AttentionOutput` for attention,
            where `switchax.attention` returns the array alone.

        Raises:
            TypeError: For an unknown keyword or a wrong type.
            ValueError: For a wrong value.
            UnsupportedError: For a legal call that this operation refuses.
        """
        from .running import run_operation

        return run_operation(self, args, kwargs)

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and is_same(vars(self), vars(other))

    def is_same_as(self, other: BaseOperation) -> bool:
        """Whether no compiled program can tell them apart, which is what == means."""
        return self == other

    def __hash__(self) -> int:
        return hash((type(self), self.metadata))


def note_names(cls: type[BaseOperation], names: tuple[str, ...]) -> None:
    """Keeps names that were checked: asked again, a class might say others."""
    _names[cls] = names


def forward_method(cls: type[BaseOperation], platform: str) -> str | None:
    """Returns the name of the method that serves a platform, or None.

    Args:
        cls: An operation class.
        platform: "cpu", "cuda", "rocm", "tpu", "tt", or "native".
    """
    chain = _CHAINS.get(platform, ("forward_native",))
    return next((name for name in chain if _defines(cls, name)), None)


def _defines(cls: type[BaseOperation], name: str) -> bool:
    return getattr(cls, name) is not getattr(BaseOperation, name)


def forward_parameters(cls: type[BaseOperation], method: str) -> tuple[str, ...]:
    """Returns the names a forward method takes, without self."""
    return tuple(inspect.signature(getattr(cls, method)).parameters)[1:]


def defined_methods(cls: type[BaseOperation]) -> tuple[str, ...]:
    """Returns the names of the forward methods that the class defines."""
    names = dict.fromkeys(name for chain in _CHAINS.values() for name in chain)
    return tuple(name for name in names if _defines(cls, name))
