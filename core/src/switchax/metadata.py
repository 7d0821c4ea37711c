"""What an operation is created with: dtypes, backend, configurations.

Small for now. Mesh, partition axes and sharding rules join it here.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Mapping
from typing import Any

import numpy as np
from jax.typing import DTypeLike

from .errors import house_message
from .target import Target

__all__ = ["OperationMetadata"]


@dataclasses.dataclass(frozen=True)
class OperationMetadata:
    """Settings of one operation instance; frozen and hashable.

    Attributes:
        runtime_dtype: Query, key and value are cast to it first; None leaves them,
            and then they must agree.
        backend: Platform whose forward method runs: "cpu", "cuda", "rocm", "tpu",
            "tt", "gpu" (resolved to its vendor), or None for the target's own.
        operation_configs: An explicit configuration by operation name.

    Raises:
        TypeError: For something that is no dtype, or an unhashable config.
        ValueError: For an unknown backend.

    Example:
        >>> OperationMetadata(runtime_dtype="bfloat16").runtime_dtype
        'bfloat16'
    """

    runtime_dtype: DTypeLike | None = None
    backend: str | None = None
    operation_configs: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.runtime_dtype is not None:
            name = np.dtype(self.runtime_dtype).name
            object.__setattr__(self, "runtime_dtype", name)
        if self.backend is not None:
            object.__setattr__(self, "backend", Target.parse(self.backend).platform)
        if not isinstance(self.operation_configs, Mapping):
            got = f"operation_configs={self.operation_configs!r}"
            raise TypeError(
                house_message(
                    "OperationMetadata",
                    "a mapping from operation name to config",
                    got,
                    "pass {'name': config}",
                )
            )
        configs = types.MappingProxyType(dict(self.operation_configs))
        object.__setattr__(self, "operation_configs", configs)
        hash(self)  # an unhashable config would fail later, deep inside jit

    def __hash__(self) -> int:
        configs = frozenset(self.operation_configs.items())
        return hash((self.runtime_dtype, self.backend, configs))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, OperationMetadata):
            return NotImplemented
        return (self.runtime_dtype, self.backend, dict(self.operation_configs)) == (
            other.runtime_dtype,
            other.backend,
            dict(other.operation_configs),
        )
