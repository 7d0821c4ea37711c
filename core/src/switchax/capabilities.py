"""What an operation declares that it honours."""

from __future__ import annotations

import dataclasses
import enum
import types
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

from .errors import RegistrationError, near_miss
from .target import PLATFORMS

__all__ = ["Capabilities", "Cost"]

DTYPES = frozenset({"float16", "bfloat16", "float32", "float64"})
LAYOUTS = frozenset({"bthd", "bhtd", "thd"})


class Cost(enum.IntEnum):
    """Cost class, best first; auto never passes over a better class in silence."""

    FUSED = 0
    """One kernel; what lies between, such as scores, never leaves the chip."""
    CHUNKED = 1
    """Plain JAX, in memory that grows as the operands."""
    MATERIALISES = 2
    """Writes what grows faster, such as an array of q_len x kv_len."""

    def __str__(self) -> str:
        return self.name.lower()


def _names(value: Any, what: str) -> frozenset[str]:
    todo = "write the names as str, in braces"
    if isinstance(value, str):
        todo = f"write {{{value!r}}}"
    elif isinstance(value, Iterable):
        names = list(value)
        if all(isinstance(name, str) for name in names):
            return frozenset(names)
    raise RegistrationError(
        f"Capabilities: expected {what} to be a set of names, got {value!r}; {todo}"
    )


@dataclasses.dataclass(frozen=True, eq=False)
class Capabilities:
    """The declaration of an operation, read by dispatch.

    Attributes:
        platforms: Of "cpu", "cuda", "rocm", "tpu", "tt"; "gpu" is cuda and rocm,
            "any" is all.
        dtypes: Dtypes of the operands (query, key, value).
        features: Names of the kind's features that are honoured exactly. For
            attention: bias, mask, mask_pattern, segment_ids, q_lengths, kv_lengths,
            causal, window, q_offset, q_offset_per_batch, logits_soft_cap, softmax_aux,
            dropout, gqa, v_head_dim, lse, weights; `ATTENTION.features` says which
            arguments of a forward method each brings. With lse it returns `(output,
            lse)`, with weights an `AttentionOutput`.
        differentiable: Arguments (and the outputs "lse", "weights") whose
            derivative is right. A derivative of anything else raises.
        cost: Cost class.
        layouts: Layouts taken as they are; core brings others to the first.
        multiples: Sizes that must be a multiple of a number, such as
            `{"kv_len": 128}`. Core pads q_len, head_dim and v_head_dim, and kv_len if
            the features have kv_lengths, segment_ids or mask to hide that by. Others
            of attention are batch, heads and kv_heads.
        limits: Largest size taken, such as `{"head_dim": 256}`.
        opaque: The partitioner cannot see into the kernel (Pallas, Triton). On a
            mesh core runs it in a `jax.shard_map`, or refuses.
        shardable: Sizes over which an opaque kernel may be split: "batch" and "heads"
            for attention. An operation that splits sequences builds its own
            shard_map, and is not opaque.
        forward_mode: jvp is right: True, False, or the platforms where it is.
            Elsewhere it raises.
        second_order: Likewise for derivatives of derivatives.
        experimental: Only ever used when named: True, False, or the platforms where
            that is so.
        priority: Among equals of one cost class the higher one is preferred.

    Raises:
        RegistrationError: For an unknown platform, dtype or layout, for none at all,
            or a wrong type, such as a bare string where a set of names belongs.

    Example:
        >>> Capabilities(platforms={"gpu"}, dtypes={"bfloat16"}).platforms
        frozenset({...'cuda'...})
    """

    platforms: AbstractSet[str] = frozenset({"any"})
    dtypes: AbstractSet[str] = frozenset({"bfloat16", "float32"})
    features: AbstractSet[str] = frozenset()
    differentiable: AbstractSet[str] = frozenset()
    cost: Cost = Cost.MATERIALISES
    layouts: tuple[str, ...] = ("bthd",)
    multiples: Mapping[str, int] = dataclasses.field(default_factory=dict)
    limits: Mapping[str, int] = dataclasses.field(default_factory=dict)
    opaque: bool = False
    shardable: AbstractSet[str] = frozenset()
    forward_mode: bool | AbstractSet[str] = False
    second_order: bool | AbstractSet[str] = False
    experimental: bool | AbstractSet[str] = False
    priority: int = 0

    def __post_init__(self) -> None:
        for field in ("platforms", "dtypes", "features", "differentiable", "shardable"):
            names = _names(getattr(self, field), field)
            object.__setattr__(self, field, names)
        for field in ("platforms", "forward_mode", "second_order", "experimental"):
            self._expand_platforms(field)
        self._check("dtypes", self.dtypes, DTYPES)
        if not isinstance(self.layouts, Sequence) or isinstance(self.layouts, str):
            layout = self.layouts if isinstance(self.layouts, str) else "bthd"
            raise RegistrationError(
                f"Capabilities: expected layouts to be a tuple, got {self.layouts!r}; "
                f"write ({layout!r},)"
            )
        object.__setattr__(self, "layouts", tuple(self.layouts))
        self._check("layouts", self.layouts, LAYOUTS)
        self._check_some()
        self._check_sizes()
        if not isinstance(self.opaque, bool):
            raise RegistrationError(
                "Capabilities: expected opaque to be a bool, got "
                f"opaque={self.opaque!r}; write True or False"
            )
        if self.shardable and not self.opaque:
            raise RegistrationError(
                f"Capabilities: expected shardable of an opaque operation only, got "
                f"shardable={sorted(self.shardable)} with opaque=False; the "
                "partitioner splits what it sees into: leave shardable out"
            )
        if type(self.priority) is not int:
            raise RegistrationError(
                f"Capabilities: expected priority to be an int, got "
                f"priority={self.priority!r}; higher is preferred"
            )
        if not isinstance(self.cost, Cost):
            raise RegistrationError(
                f"Capabilities: expected cost to be a Cost, got cost={self.cost!r}; "
                "use Cost.FUSED, Cost.CHUNKED or Cost.MATERIALISES"
            )

    def __reduce__(self) -> tuple[Any, ...]:
        kept = {**vars(self), "multiples": dict(self.multiples)}
        return _restored, ({**kept, "limits": dict(self.limits)},)

    def is_experimental(self, platform: str) -> bool:
        """Whether auto never takes it on a platform."""
        platforms = self.experimental
        return isinstance(platforms, AbstractSet) and platform in platforms

    def honours_derivative(self, platform: str, which: str) -> bool:
        """Whether "forward_mode" or "second_order" is declared for a platform."""
        platforms = getattr(self, which)
        return isinstance(platforms, AbstractSet) and platform in platforms

    def _expand_platforms(self, field: str) -> None:
        value = getattr(self, field)
        if isinstance(value, bool):
            value = {"any"} if value else set()
        names = set(_names(value, field))
        self._check(field, names, PLATFORMS | {"gpu", "any"})
        if "any" in names:
            names = set(PLATFORMS)
        if "gpu" in names:
            names = (names - {"gpu"}) | {"cuda", "rocm"}
        object.__setattr__(self, field, frozenset(names))

    def _check_some(self) -> None:
        """An operation that lacks all of one of these could never run."""
        for field, default in (
            ("platforms", "{'any'}"),
            ("dtypes", "{'bfloat16', 'float32'}"),
            ("layouts", "('bthd',)"),
        ):
            if not getattr(self, field):
                raise RegistrationError(
                    f"Capabilities: expected at least one of {field}, got none, "
                    f"so it runs nowhere; the default is {default}"
                )

    def _check_sizes(self) -> None:
        for field in ("multiples", "limits"):
            sizes = getattr(self, field)
            if not isinstance(sizes, Mapping):
                raise RegistrationError(
                    f"Capabilities: expected {field} to be a mapping from axis to int, "
                    f"got {field}={sizes!r}; write {{'head_dim': 128}}"
                )
            _names(sizes, field)
            sizes = dict(sizes)
            for name, number in sizes.items():
                if type(number) is not int or number < 1:
                    raise RegistrationError(
                        f"Capabilities: expected {field} to be positive ints, got "
                        f"{field}[{name!r}]={number!r}; correct the declaration"
                    )
            object.__setattr__(self, field, types.MappingProxyType(sizes))

    @staticmethod
    def _check(field: str, names: Iterable[str], known: frozenset[str]) -> None:
        for name in names:
            if not isinstance(name, str) or name not in known:
                raise RegistrationError(
                    f"Capabilities: expected {field} of {sorted(known)}, got {name!r}"
                    f"{near_miss(str(name), known)}; correct the declaration"
                )


def _restored(fields: dict[str, Any]) -> Capabilities:
    return Capabilities(**fields)
