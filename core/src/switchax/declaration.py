"""Checks an operation's declaration when it is registered: mistakes surface there."""

from __future__ import annotations

import inspect
import re
import weakref
from typing import Any

from .capabilities import Capabilities
from .errors import RegistrationError, described, near_miss
from .kind import OperationKind
from .operation import (
    BaseOperation,
    defined_methods,
    forward_method,
    forward_parameters,
    note_names,
)

__all__ = ["check_init", "check_kind_name", "check_once", "check_operation"]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
_RESERVED = frozenset({"auto"})


_checked: weakref.WeakSet[type[BaseOperation]] = weakref.WeakSet()


def check_once(cls: type[BaseOperation]) -> None:
    """Checks a class that need not be registered, at its first use.

    Raises:
        RegistrationError: As `check_operation`.
    """
    if cls not in _checked:
        _check(cls)
        _checked.add(cls)


def check_operation(cls: type[BaseOperation]) -> tuple[str, ...]:
    """Returns a class's names.

    Raises:
        RegistrationError: If it contradicts itself or its kind.
    """
    if not (isinstance(cls, type) and issubclass(cls, BaseOperation)):
        raise RegistrationError(
            f"register: expected a subclass of BaseOperation, got {cls!r}; "
            "derive from switchax.BaseOperation"
        )
    names = _check(cls)
    check_init(cls)
    return names


def _check(cls: type[BaseOperation]) -> tuple[str, ...]:
    """Checks all but `__init__`, which only a call by name needs."""
    _check_attributes(cls)
    names = _checked_names(cls)
    note_names(cls, names)
    _check_config_class(cls)
    _check_features(cls)
    _check_methods(cls)
    for base in cls.__mro__[: cls.__mro__.index(BaseOperation)]:
        if vars(base).get("__slots__"):
            got = f"{base.__qualname__}.__slots__"
            todo = "leave __slots__ out: instances are compared by their attributes"
            raise _fail(cls, "attributes in __dict__", got, todo)
    return names


def check_kind_name(kind: OperationKind) -> None:
    """Raises a RegistrationError for a name that a kind cannot have."""
    name = getattr(kind, "name", None)
    if type(name) is not str or not _NAME.fullmatch(name):
        raise RegistrationError(
            f"register kind: expected a name of letters, digits, '_', '.' and '-', got "
            f"{name!r} of {type(kind).__module__}; choose another"
        )


def _fail(
    cls: type[BaseOperation], rule: str, got: str, todo: str
) -> RegistrationError:
    return RegistrationError(f"{cls.__qualname__}: expected {rule}, got {got}; {todo}")


def _check_attributes(cls: type[BaseOperation]) -> None:
    for name, kind in (("kind", OperationKind), ("capabilities", Capabilities)):
        value = getattr(cls, name, None)
        if not isinstance(value, kind):
            rule = f"class attribute {name} to be an instance of {kind.__name__}"
            raise _fail(cls, rule, repr(value), f"set {name} = ...")
    if inspect.isabstract(cls):
        missing = ", ".join(sorted(cls.__abstractmethods__))
        raise _fail(cls, "no abstract methods", missing, "define them")


def _checked_names(cls: type[BaseOperation]) -> tuple[str, ...]:
    try:
        names = cls.get_impl_name()
    except TypeError as error:
        rule = "get_impl_name to be a classmethod without arguments"
        raise _fail(
            cls, rule, described(error), "decorate it with @classmethod"
        ) from error
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        rule, got = "get_impl_name() to return names", described(error)
        raise _fail(cls, rule, got, "return constants") from error
    as_tuple = (names,) if isinstance(names, str) else names
    if not isinstance(as_tuple, tuple) or not as_tuple:
        rule = "get_impl_name() to return a str or a tuple of str"
        raise _fail(cls, rule, repr(names), "canonical name first")
    for name in as_tuple:
        # A subclass of str could equal every name there is.
        if type(name) is not str or not _NAME.fullmatch(name) or name in _RESERVED:
            rule = "names of letters, digits, '_', '.' and '-', and not 'auto'"
            raise _fail(cls, rule, repr(name), "choose another")
    if len(set(as_tuple)) < len(as_tuple):
        raise _fail(cls, "names to differ", repr(names), "say each once")
    return as_tuple


def check_init(cls: type[BaseOperation]) -> None:
    """Raises a RegistrationError for a class that no name can make an instance of."""
    signature = inspect.signature(cls)
    try:
        signature.bind(None)
        signature.bind()
    except TypeError as error:
        rule = "__init__ to take metadata=None, and no more that must be given"
        got, todo = f"{signature}", "keep what BaseOperation takes"
        raise _fail(cls, rule, got, todo) from error


def _check_config_class(cls: type[BaseOperation]) -> None:
    config: Any = cls.config_class
    if config is None:
        return
    if not isinstance(config, type) or not hasattr(config, "__dataclass_params__"):
        todo = "set it to a class with @dataclasses.dataclass(frozen=True)"
        raise _fail(cls, "config_class to be a dataclass", repr(config), todo)
    if not config.__dataclass_params__.frozen or config.__hash__ is None:
        got, todo = config.__qualname__, "add frozen=True: a config is a key of jit"
        raise _fail(cls, "config_class to be frozen and hashable", got, todo)


def _check_features(cls: type[BaseOperation]) -> None:
    kind, capabilities = cls.kind, cls.capabilities
    for feature in sorted(capabilities.features):
        if feature not in kind.features:
            got = f"feature {feature!r}{near_miss(feature, kind.features)}"
            todo = f"known are {', '.join(kind.features)}"
            raise _fail(cls, f"features of kind {kind.name!r}", got, todo)
    sizes = {"multiples": kind.sizes, "limits": kind.sizes, "shardable": kind.shardable}
    for field, known_sizes in sizes.items():
        for axis in sorted(getattr(capabilities, field)):
            if kind.sizes and axis not in known_sizes:
                got = f"{field} of {axis!r}{near_miss(axis, known_sizes)}"
                todo = f"known are {', '.join(known_sizes) or 'none'}"
                raise _fail(cls, f"sizes of kind {kind.name!r}", got, todo)
    known = {*kind.arguments, *kind.outputs}
    for feature in capabilities.features:
        known |= set(kind.features[feature].arguments)
    for name in sorted(capabilities.differentiable):
        if name not in known:
            got = f"differentiable={name!r}{near_miss(name, known)}"
            todo = "declare the feature that brings it, or leave it out"
            raise _fail(cls, "arguments or outputs that it declares", got, todo)
        if name in kind.outputs and name not in capabilities.features:
            got = f"differentiable={name!r}"
            todo = f"add {name!r} to features"
            raise _fail(cls, "outputs that it declares", got, todo)


def _check_methods(cls: type[BaseOperation]) -> None:
    methods = defined_methods(cls)
    for platform in sorted(cls.capabilities.platforms):
        if forward_method(cls, platform) is None:
            got = f"platform {platform!r} without one"
            todo = f"define forward_{platform} or forward_native"
            raise _fail(cls, "a forward method for every platform", got, todo)
    for method in methods:
        _check_signature(cls, method)
    taken = {name for method in methods for name in forward_parameters(cls, method)}
    for feature in sorted(cls.capabilities.features):
        missing = [n for n in cls.kind.features[feature].arguments if n not in taken]
        if missing:
            rule = f"a forward method to take {missing[0]!r} of feature {feature!r}"
            todo = "take it, or do not declare the feature"
            raise _fail(cls, rule, f"methods {', '.join(methods)} without it", todo)


def _check_signature(cls: type[BaseOperation], method: str) -> None:
    kind = cls.kind
    parameters = inspect.signature(getattr(cls, method)).parameters
    for parameter in list(parameters.values())[1:]:
        if parameter.kind is parameter.POSITIONAL_ONLY:
            todo = "core passes every argument by name; remove the '/'"
            raise _fail(cls, f"{method} to take names", str(parameter) + ", /", todo)
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            rule = f"{method} to name its arguments"
            todo = "what is swallowed unseen is computed wrong"
            raise _fail(cls, rule, str(parameter), todo)
    names = forward_parameters(cls, method)
    for name in (*kind.arguments, *kind.required):
        if name not in names:
            todo = f"add or rename it: every call hands over {name!r} by this name"
            raise _fail(cls, f"{method} to take {name!r}", f"{names}", todo)
    if len(cls.capabilities.layouts) > 1 and "layout" not in names:
        got = f"layouts={cls.capabilities.layouts}"
        todo = "it could not tell them apart"
        raise _fail(cls, f"{method} to take 'layout'", got, todo)
    allowed = {*kind.arguments, *kind.required, *kind.always}
    for feature in cls.capabilities.features:
        allowed |= {*kind.features[feature].arguments, *kind.features[feature].optional}
    for name in names:
        if name not in allowed:
            bringing = [f for f in kind.features if name in kind.features[f].arguments]
            todo = "leave it out"
            if bringing:
                todo = f"declare feature {bringing[0]!r}, or leave it out"
            got = f"{name!r}{near_miss(name, allowed)}"
            raise _fail(cls, f"{method} to take what features bring", got, todo)
