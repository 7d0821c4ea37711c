"""Compares a planned request with capabilities: refusals that need no kernel."""

from __future__ import annotations

from collections.abc import Iterable

from .capabilities import Capabilities
from .errors import Refusal, described
from .kind import Plan
from .operation import BaseOperation, forward_method, forward_parameters
from .request import Request
from .target import Target

__all__ = ["availability", "refusals_of"]


def availability(cls: type[BaseOperation], target: Target) -> tuple[Refusal, ...]:
    """Returns why an operation cannot be used on a target, whatever the call."""
    reasons = []
    platforms = cls.capabilities.platforms
    if target.platform not in platforms:
        allowed = ", ".join(sorted(platforms))
        hint = "run on another device, or choose another operation"
        reasons.append(Refusal("platform", "platform", target.platform, allowed, hint))
    try:
        missing = cls.unavailable()
        if not isinstance(missing, str):
            raise TypeError(f"expected a str, got {missing!r}")
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a fault of one plugin, shown as one
        reasons.append(_fault("unavailable", "unavailable", error))
    else:
        if missing:
            reasons.append(
                Refusal("unavailable", "library", "missing", "installed", missing)
            )
    return tuple(reasons)


def _fault(code: str, method: str, error: BaseException) -> Refusal:
    """The refusal of an operation whose own rules raise: only it may suffer."""
    hint = f"{method}() raised {described(error)}: upgrade or block its plugin"
    return Refusal(code, f"{method}()", "raised", "an answer", hint)


def refusals_of(
    cls: type[BaseOperation],
    plan: Plan,
    target: Target,
    method: str | None,
    backend: str | None = None,
) -> tuple[Refusal, ...]:
    """Returns every reason why an operation would not run a planned request.

    Args:
        cls: The operation.
        plan: Its plan for the request.
        target: The device.
        method: The forward method that would run, or None if there is none.
        backend: The platform that `metadata.backend` asks for, if that decided.
    """
    reasons = [*availability(cls, target), *plan.refusals]
    request = plan.request
    elsewhere = any(reason.code == "platform" for reason in reasons)
    # It may run there by the method of another platform only if that is its own too.
    here = forward_method(cls, target.platform)
    if backend not in (None, target.platform) and method != here and not elsewhere:
        hint = "that is what the call is on: move its arrays, or leave backend out"
        allowed = str(target.platform)
        reasons.append(
            Refusal("backend", "metadata.backend", str(backend), allowed, hint)
        )
    elif method is None and not elsewhere:
        hint = "unset force_native, or choose another operation"
        allowed = "an operation with forward_native"
        reasons.append(Refusal("method", "force_native", "True", allowed, hint))
    capabilities = cls.capabilities
    if request.dtype not in capabilities.dtypes:
        allowed = ", ".join(sorted(capabilities.dtypes))
        reasons.append(Refusal("dtype", "dtype", request.dtype, allowed, "cast"))
    reasons += _feature_refusals(cls, plan, method)
    reasons += _limit_refusals(capabilities, request)
    if not reasons:  # its own rules may rely on the table's
        try:
            own = tuple(cls.refusals(request, target))
            if not all(isinstance(reason, Refusal) for reason in own):
                raise TypeError(f"expected refusals of type Refusal, got {own!r}")
            reasons += own
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # likewise
            reasons.append(_fault("fault", "refusals", error))
    return tuple(reasons)


def _feature_refusals(
    cls: type[BaseOperation], plan: Plan, method: str | None
) -> Iterable[Refusal]:
    """Refuses features, those that the user asked for before those core needs."""
    request, source = plan.request, plan.source or plan.request
    taken = set(forward_parameters(cls, method)) if method else None
    for feature in sorted(
        request.features, key=lambda f: (f not in source.features, f)
    ):
        if feature not in cls.capabilities.features:
            why = "not among its features"
        elif taken is not None and not taken.issuperset(
            cls.kind.features[feature].arguments
        ):
            why = f"not taken by {method}"
        else:
            continue
        if feature in source.features:
            actual = source.value_of(feature)
            hint = f"{feature!r} is {why}: leave it out, or choose another operation"
            declared = cls.kind.features[feature]
            if not (declared.arguments or declared.optional):  # no argument says it
                hint = f"{feature!r}, {declared.summary}, is {why}: choose another "
                hint += "operation"
        else:
            steps = ", ".join(f"{a.name} ({a.detail})" for a in plan.adaptations)
            actual = f"needed to {steps}"
            hint = f"{feature!r} is {why}, and core needs it to adapt the call: "
            hint += "choose another operation"
        yield Refusal("feature", feature, actual, "unused", hint)


def _limit_refusals(capabilities: Capabilities, request: Request) -> Iterable[Refusal]:
    sizes = request.sizes
    for axis, limit in capabilities.limits.items():
        size = sizes.get(axis, 0)
        if not isinstance(size, int) or size > limit:  # a symbol may be any size
            hint = "choose another operation"
            yield Refusal("limit", axis, str(size), f"at most {limit}", hint)
