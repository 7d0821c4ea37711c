"""Operation kinds: a contract that operations implement.

A kind says which arguments a call has, what they mean (its oracle), how a call is
checked and described (`bind`), and how core brings it to the form that an operation
declares (`plan`). Core ships `attention`; a plugin may add kinds with the hook
`switchax_kinds`, and gets registration, dispatch and `explain` for them.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import jax

from .capabilities import Capabilities, Cost
from .errors import Refusal, RegistrationError, house_message
from .request import Request

if TYPE_CHECKING:
    from jax.sharding import PartitionSpec

    from .metadata import OperationMetadata
    from .placement import Placement, Shards
    from .testing.suite import Suite

__all__ = ["Adaptation", "Call", "Feature", "OperationKind", "Plan"]

Arrays = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Feature:
    """Something a call may use and an operation may refuse.

    Attributes:
        arguments: Arguments of a forward method that the feature brings. Each is taken
            by a forward method of an operation that declares it.
        optional: Arguments that a forward method may take with it.
        summary: One line.
    """

    arguments: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    summary: str = ""

    def __post_init__(self) -> None:
        for field in ("arguments", "optional"):
            names = getattr(self, field)
            if not isinstance(names, tuple) or not all(
                isinstance(name, str) for name in names
            ):
                rule, got = f"{field} to be a tuple of names", f"{field}={names!r}"
                todo = "write ('bias',), with the comma"
                raise RegistrationError(house_message("Feature", rule, got, todo))


@dataclasses.dataclass(frozen=True)
class Call:
    """One checked and normalised call.

    Attributes:
        request: Its static description.
        arrays: Its array arguments by name; absent ones are left out.
    """

    request: Request
    arrays: Arrays


@dataclasses.dataclass(frozen=True)
class Adaptation:
    """One change that brings a call to the form an operation takes.

    Attributes:
        name: Such as "layout" or "fold_mask".
        detail: What is changed.
        cost: What it costs at run time, in words.
        materialises: It writes an array of q_len x kv_len, which changes the cost
            class of whatever operation needs it.
    """

    name: str
    detail: str
    cost: str
    materialises: bool = False

    def __str__(self) -> str:
        return f"{self.name} ({self.detail}; {self.cost})"


@dataclasses.dataclass(frozen=True)
class Plan:
    """How one operation would run one request.

    Attributes:
        request: The request as the operation will see it.
        adaptations: What core does to get there, in order.
        refusals: Why it cannot; empty if it can.
        source: The request as the user made it, where `request` is another.
    """

    request: Request
    adaptations: tuple[Adaptation, ...] = ()
    refusals: tuple[Refusal, ...] = ()
    source: Request | None = None

    def cost(self, declared: Cost) -> Cost:
        """The operation's cost class after adaptation."""
        worse = any(adaptation.materialises for adaptation in self.adaptations)
        return max(declared, Cost.MATERIALISES) if worse else declared


class OperationKind(abc.ABC):
    """A contract: arguments, meaning, oracle.

    Attributes:
        name: The kind's name, one namespace for all kinds.
        features: Every feature a request of this kind may use.
        arguments: The arrays that every forward method takes, in order.
        required: Other arguments that every forward method takes, because there is
            no value of them that means "not used".
        always: Arguments that a forward method may always take.
        sizes: Names of the sizes that `Capabilities.multiples` and `limits` may
            speak of.
        shardable: Names of those that `shard` can split.
        outputs: Names of the outputs that `Capabilities.differentiable` may list
            beside arguments.

    The function that users call is built on `switchax.run_named`; examples/rotary is
    a whole kind from outside.

    Example:
        A kind of one's own needs `bind`, `plan`, `operands`, `output` and `finish`:

        >>> class Rotary(OperationKind):
        ...     name = "rotary"
        ...     arguments = ("x", "positions")
    """

    name: str
    features: Mapping[str, Feature] = {}
    arguments: tuple[str, ...] = ()
    required: tuple[str, ...] = ()
    always: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    sizes: tuple[str, ...] = ()
    shardable: tuple[str, ...] = ()

    @abc.abstractmethod
    def bind(
        self, where: str, arguments: Mapping[str, Any], metadata: OperationMetadata
    ) -> Call:
        """Checks and normalises a call.

        Args:
            where: Who was called, for messages.
            arguments: Arguments as the user gave them, by name.
            metadata: Dtypes to cast to, configs.

        Returns:
            The call; nothing has been traced.

        Raises:
            TypeError: For an unknown keyword or a wrong type.
            ValueError: For a wrong value.
        """

    @abc.abstractmethod
    def plan(self, request: Request, capabilities: Capabilities) -> Plan:
        """Says how an operation of these capabilities would run the request."""

    @abc.abstractmethod
    def operands(self, call: Call, plan: Plan) -> tuple[Arrays, dict[str, Any]]:
        """Applies the plan.

        Returns:
            The arrays a forward method may take, and the static arguments.
        """

    def specs(
        self, request: Request, metadata: OperationMetadata
    ) -> Mapping[str, PartitionSpec]:
        """The wished-for spec of each array argument and output field; none by default.

        Args:
            request: The request as the user made it.
            metadata: Its rules.
        """
        return {}

    def outputs_like_inputs(
        self, request: Request, placement: Placement
    ) -> Mapping[str, PartitionSpec]:
        """How outputs lie where axes are explicit, of how the arguments lay.

        Args:
            request: The request as the user made it.
            placement: Its `passed` says how each argument lay.

        Returns:
            A spec for each output that was asked for, by field.
        """
        raise NotImplementedError(f"kind {self.name!r} knows no explicit axes")

    def shard(
        self, request: Request, capabilities: Capabilities, placement: Placement
    ) -> Shards | None:
        """Says how an opaque kernel of these capabilities is split over a mesh.

        Args:
            request: The request as the user made it.
            capabilities: `shardable` says over what the kernel may be split.
            placement: The mesh, and what `specs` returned.

        Returns:
            The split, or its refusals; None for a call that needs no kernel. By
            default it refuses.
        """
        from .placement import Shards

        hint = "choose an operation that the partitioner sees into"
        what = f"an opaque operation of kind {self.name!r}"
        refusal = Refusal("sharding", "mesh", f"{what} on {placement}", "none", hint)
        return Shards(request, refusals=(refusal,))

    def spread(self, arrays: Arrays, shards: Shards, request: Request) -> Arrays:
        """Makes arrays fit to be split, before they are; as they are by default."""
        return arrays

    def inside_shard(self, arrays: Arrays, shards: Shards) -> Arrays:
        """Makes one device's arrays its own, on it; as they are by default."""
        return arrays

    def shortcut(self, call: Call, plan: Plan) -> dict[str, Any] | None:
        """Outputs of a call that needs no kernel, or None; none by default."""
        return None

    @abc.abstractmethod
    def finish(self, result: Any, request: Request, plan: Plan) -> dict[str, Any]:
        """Undoes the plan on a forward method's result.

        Args:
            result: What the forward method returned.
            request: The request as the user made it.
            plan: The plan that was applied.

        Returns:
            Outputs by name; absent ones are None.
        """

    @abc.abstractmethod
    def output(self, outputs: Mapping[str, Any]) -> Any:
        """What an operation's `__call__` returns."""

    def request(
        self, metadata: OperationMetadata | None = None, /, **arguments: Any
    ) -> Request:
        """Describes a call from shapes alone, for `explain`.

        Args:
            metadata: As in a call.
            **arguments: Arguments of the call; arrays may be `jax.ShapeDtypeStruct`.

        Returns:
            The request, without anything having been computed.

        Raises:
            TypeError: As the call would.
            ValueError: As the call would.

        Example:
            >>> q = jax.ShapeDtypeStruct((1, 8, 2, 64), "float32")
            >>> ATTENTION.request(query=q, key=q, value=q, causal=True).features
            frozenset({'causal'})
        """
        from .checks import as_metadata

        metadata = as_metadata(self.name, metadata)
        bound: list[Request] = []
        specs = {
            name: value
            for name, value in arguments.items()
            if isinstance(value, jax.ShapeDtypeStruct)
        }
        rest = {name: arguments[name] for name in arguments if name not in specs}

        def record(arrays: Arrays) -> None:
            call = self.bind(self.name, {**rest, **arrays}, metadata)
            bound.append(call.request)

        jax.eval_shape(record, specs)
        return bound[0]

    @property
    def oracle(self) -> Callable[..., Any]:
        """The independent float64 reference; imported on first use."""
        raise NotImplementedError(f"kind {self.name!r} ships no oracle")

    @property
    def suite(self) -> Suite:
        """What conformance asks of its operations; imported on first use.

        Raises:
            ValueError: If the kind ships none.
        """
        rule, got = "a kind with a conformance suite", f"kind {self.name!r} without"
        todo = "let its property `suite` return a switchax.testing.Suite"
        raise ValueError(house_message("conform", rule, got, todo))
