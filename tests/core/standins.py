"""Operations that stand in for kernels, registered for the length of a test."""

import contextlib

from switchax import ATTENTION, BaseOperation, Capabilities, OperationRegistry

__all__ = ["defined_elsewhere", "registration", "stand_in"]


def forward(self, query, key, value, *, softmax_scale):
    return query


def stand_in(*names, reasons=(), methods=None, **capabilities):
    """Returns an operation class that answers every call with the query.

    `reasons` are its refusals; `methods` are its forward methods by name, one
    `forward_native` by default; the rest are its capabilities.
    """
    body = {
        "kind": ATTENTION,
        "capabilities": Capabilities(**capabilities),
        "get_impl_name": classmethod(lambda cls: names),
        "refusals": classmethod(lambda cls, request, target: reasons),
        **(methods or {"forward_native": forward}),
    }
    return type("StandIn", (BaseOperation,), body)


def defined_elsewhere(base):
    """Returns a subclass that the code of a module "elsewhere" defines."""
    scope = {"__name__": "elsewhere", "Base": base}
    exec(
        "class Other(Base):\n"
        "    @classmethod\n"
        "    def get_impl_name(cls):\n"
        "        return super().get_impl_name()",
        scope,
    )
    return scope["Other"]


@contextlib.contextmanager
def registration():
    """Yields `register`; what it registered is taken out again at the end."""
    known = []

    def register(cls):
        OperationRegistry.register(cls)
        known.append(cls)
        return cls

    try:
        yield register
    finally:
        for cls in known:
            OperationRegistry.unregister(cls)
