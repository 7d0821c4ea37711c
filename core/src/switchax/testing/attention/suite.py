"""The cases of attention: what is declared must be right, the rest refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

import jax

from switchax.axes import MODE_TRAIN
from switchax.capabilities import DTYPES, Capabilities
from switchax.errors import RegistrationError, UnsupportedError, first_line
from switchax.kinds.attention.features import FEATURES
from switchax.operation import BaseOperation
from switchax.target import Target
from switchax.testing.lowered import lower_for
from switchax.testing.running import devices, wide_types
from switchax.testing.suite import Case, Finding, Suite

from .calls import AttentionCall, draw
from .checks import CHECKS
from .combined import as_declared, honoured, rule_of, together
from .fitting import Fitting
from .programs import Programs
from .singles import (
    BLOCKS,
    CACHES,
    EFFECTS,
    EMPTY_BESIDE_SINKS,
    NEWEST,
    OPERANDS,
    PLAIN,
    SPLITS,
    STEPS,
    USES,
    beside_dropout,
    logits,
    shapes,
    that_hide,
    visibilities,
)
from .strategies import drawn_calls
from .subject import Subject
from .ways import dirty_ways, other_ways

__all__ = ["AttentionCase", "AttentionSuite"]

# What a call is made simpler by, one at a time, best first.
_SIMPLER: tuple[dict[str, Any], ...] = (
    {"mode": MODE_TRAIN},
    {"plain": False},
    {"bias": ""},
    {"mask": ""},
    {"pattern": ""},
    {"segments": ""},
    {"lengths": ""},
    {"window": None},
    {"causal": False},
    {"soft_cap": None},
    {"sinks": None, "sink_level": 0.0},
    {"sink_level": 0.0},
    {"offset": "zero"},
    {"scale": None},
    {"bias_level": 0.0},
    {"factor": 1.0},
    {"bias_dtype": ""},
    {"layout": "bthd"},
    {"dtype": "float32"},
    {"v_head_dim": None},
    {"batch": 1},
    {"heads": 1, "kv_heads": 1},
    {"heads": 2, "kv_heads": 1},
    {"heads": 4, "kv_heads": 2},
    {"q_len": 1},
    {"q_len": 3},
    {"kv_len": 3},
    {"head_dim": 8},
    {"seed": 0},
)

# Lower than what may stand for -inf in a dtype.
_LOWEST = {"float16": -6e4, "bfloat16": -1e10}
_COMPUTING = frozenset({"value", "dropout"})
_MADE_SMALLER = frozenset({"value", "lse", "effect", "dropout"})
_MADE_SMALLER |= {"mapped", "mapped operands"}
_VALUES_TOO = frozenset({"dropout", "at once", "x64"})
_ON_DEVICES = frozenset({"mesh", "sequence mesh", "shard_map"})


@dataclasses.dataclass(frozen=True)
class AttentionCase(Case):
    """One call of attention, and what is asked of it.

    Attributes:
        rule: The rule that it is about.
        call: The call.
        check: A name of `switchax.testing.attention.checks.CHECKS`.
        dirty: Whether what nothing can see is NaN or Inf.
        feature: The one that the check "refused" is about.
        combined: Whether it combines what others ask singly; then the smallest call
            that fails says which rule is broken; R7 where it must be dirty to fail.
        programs: Compiled programs, shared by the cases of a suite.
    """

    rule: str
    call: AttentionCall
    check: str = "value"
    dirty: bool = False
    feature: str = ""
    combined: bool = False
    programs: Programs = dataclasses.field(
        default_factory=Programs, compare=False, repr=False
    )

    @property
    def title(self) -> str:  # type: ignore[override]
        """The check and the call."""
        parts = [self.check, str(self.call)]
        parts += ["dirty padding"] if self.dirty else []
        parts += [f"without {self.feature}"] if self.feature else []
        return ", ".join(parts)

    @property
    def dtype(self) -> str:  # type: ignore[override]
        """Dtype of the operands."""
        return self.call.dtype

    @property
    def claims(self) -> frozenset[str]:  # type: ignore[override]
        """The call's features, where it must honour them."""
        return frozenset() if self.check == "refused" else self.call.features

    @property
    def computes(self) -> bool:  # type: ignore[override]
        """Whether a kernel runs, and its result counts."""
        return self.check in _COMPUTING and 0 not in self.call.lengths_of_axes

    def run(self, operation: BaseOperation) -> Finding:
        """Runs the check."""
        rule = self.feature if self.check == "refused" else self.rule
        wide = "float64" if self.check == "x64" else self.call.dtype
        with jax.default_matmul_precision("highest"), wide_types(wide):
            subject = Subject(operation, self.call, rule, self.programs, self.dirty)
            try:
                return CHECKS[self.check](subject)
            except RegistrationError as error:  # of what the forward method returned
                return Finding(text=first_line(error), rule="R1", quantity="output")

    def lower(self, operation: BaseOperation, target: Target) -> Finding:
        """Compiles the call and its gradient, and expects refusals where they are due.

        What needs values is passed over.
        """
        if self.check not in ("value", "dropout", "refused") or (
            0 in self.call.lengths_of_axes
        ):
            return Finding()
        drawn = draw(self.call, dirty=False)
        asked = {"return_lse": True} if self.feature == "lse" else {}
        arguments = {**drawn.arrays, **drawn.options, **asked}
        with wide_types(self.call.dtype):
            try:
                lower_for(operation, arguments, target)
            except UnsupportedError:
                if self.check == "refused":
                    return Finding()
                raise
            declared = operation.capabilities.differentiable
            names = [n for n in drawn.floats if n in declared]
            if names and self.check == "value":
                lower_for(operation, arguments, target, _gradient_to(names))
        return Finding()

    def simpler(self) -> Iterator[Case]:
        """Yields calls with one thing less."""
        # Of what fails without dropout, with no other call beside it, or without 64-bit
        # types, neither is the rule.
        if self.check == "dropout":
            yield self._value(dropout=0.0, plain=True)
        elif self.check in _VALUES_TOO:
            yield self._value()
        if self.check not in _MADE_SMALLER:
            return
        if self.dirty and self.combined:
            yield dataclasses.replace(self, rule=rule_of(self.call), dirty=False)
        for change in _SIMPLER:
            call = dataclasses.replace(self.call, **change)
            if call != self.call and _is_smaller(call, self.call) and _is_legal(call):
                is_clean = self.combined and not self.dirty
                rule = rule_of(call) if is_clean else self.rule
                yield dataclasses.replace(self, rule=rule, call=call)

    def _value(self, **changes: Any) -> AttentionCase:
        call = dataclasses.replace(self.call, **changes)
        rule = rule_of(call)
        return AttentionCase(rule, call, combined=True, programs=self.programs)

    @property
    def may_change_rule(self) -> bool:  # type: ignore[override]
        """Whether a smaller case may be of another rule."""
        return self.combined or self.check in _VALUES_TOO

    def snippet(self, name: str) -> str:
        """Returns Python that runs the case again."""
        given = [repr(self.rule), f"AttentionCall({_arguments(self.call)})"]
        given += [repr(self.check)] if self.check != "value" else []
        given += ["dirty=True"] if self.dirty else []
        given += [f"feature={self.feature!r}"] if self.feature else []
        return "\n".join(
            [
                *(devices() if self.check in _ON_DEVICES else ()),
                "from switchax import OperationRegistry",
                "from switchax.testing.attention import AttentionCall, AttentionCase",
                "",
                f"case = AttentionCase({', '.join(given)})",
                f"print(case.run(OperationRegistry.create({name!r})))",
            ]
        )


def _gradient_to(names: list[str]) -> Callable[..., Any]:
    def use(function: Callable[..., Any]) -> Callable[..., Any]:
        def loss(floats: Any, rest: Any) -> Any:
            return function({**rest, **floats})["attention_outputs"].sum()

        def gradient(arrays: dict[str, Any]) -> Any:
            floats = {name: arrays[name] for name in names}
            return jax.grad(loss)(floats, arrays)

        return gradient

    return use


def _arguments(call: AttentionCall) -> str:
    text = str(call)
    return "" if text == "defaults" else text


def _is_smaller(one: AttentionCall, other: AttentionCall) -> bool:
    sizes = ("batch", "heads", "q_len", "kv_len", "head_dim")
    return all(getattr(one, size) <= getattr(other, size) for size in sizes)


def _is_legal(call: AttentionCall) -> bool:
    if call.layout == "thd" and call.mask in ("sample", "samples"):
        return False
    return call.kv_heads > 0 and call.heads % call.kv_heads == 0


class AttentionSuite(Suite):
    """The contract of attention, R1 to R13; see core/CONTRACT.md."""

    rules: ClassVar[Mapping[str, str]] = {
        "R1": "shapes, heads and layouts",
        "R2": "logits",
        "R3": "visibility",
        "R4": "alignment",
        "R5": "window",
        "R6": "empty rows",
        "R7": "dirty padding",
        "R8": "precision",
        "R9": "sinks",
        "R10": "dropout",
        "R11": "gradients",
        "R12": "nothing is lost",
        "R13": "transforms",
    }

    def cases(
        self, operation: type[BaseOperation], platform: str, level: str, seed: int
    ) -> Iterator[AttentionCase]:
        """Yields the simplest first: see `Suite.cases`."""
        programs, capabilities = Programs(), operation.capabilities
        fitting, known = Fitting(operation, platform), set()
        for case in _cases(capabilities, level, seed):
            call = dataclasses.replace(case.call, seed=case.call.seed + 2 * seed)
            if case.check == "refused":
                call = fitting.beside(call)
            elif _is_declared(case, capabilities):
                call = fitting.fitted(call)
            else:
                continue
            case = dataclasses.replace(case, call=call, programs=programs)
            if case not in known:
                known.add(case)
                yield case

    def not_tested(
        self, operation: type[BaseOperation], platform: str
    ) -> Mapping[str, str]:
        """The platforms that are not here, and meshes where there is one device."""
        found = {
            f"platform {name}": f"this is {platform}"
            for name in sorted(operation.capabilities.platforms - {platform})
        }
        if jax.device_count() < 4:
            found["meshes"] = f"they need 4 devices, here are {jax.device_count()}"
        return found


def _is_declared(case: AttentionCase, capabilities: Capabilities) -> bool:
    """Whether the operation, with what core does for it, must honour a call."""
    is_honoured = case.call.features <= honoured(capabilities)
    return case.call.dtype in capabilities.dtypes and is_honoured


def _cases(
    capabilities: Capabilities, level: str, seed: int
) -> Iterator[AttentionCase]:
    order = ("float32", "bfloat16", "float16", "float64")
    dtypes = [d for d in order if d in capabilities.dtypes]
    main = dtypes[0]
    full = level == "full"

    def case(rule: str, check: str = "value", **call: Any) -> AttentionCase:
        dirty = call.pop("dirty", False)
        call.setdefault("dtype", main)
        return AttentionCase(rule, AttentionCall(**call), check, dirty)

    # The scale is given first: nothing is asked about its default yet. What a first
    # call may leave behind is asked before any other call could fail by it.
    yield case("R2", scale=0.3)
    yield case("R13", "in turn", scale=0.3)
    yield case("R4", "in turn", causal=True, offset="last", kv_len=9)
    yield case("R2")
    yield case("R13", "forward mode")
    yield case("R13", "second order")
    yield case("R12", "keywords")
    if "weights" in capabilities.features:
        yield case("R12", "weights")
    for dtype in dtypes[1:]:
        yield case("R8", dtype=dtype)
    for dtype in dtypes if "lse" in capabilities.features else ():
        yield case("R8", "lse", dtype=dtype, factor=3.0)
    yield from (case(rule, **call) for rule, call in shapes(full))
    yield from _undeclared(capabilities, case)
    long = {"q_len": 4, "kv_len": 4096, "heads": 1, "kv_heads": 1, "batch": 1}
    tall = {**long, "q_len": 4096, "kv_len": 4}
    for dtype in dtypes:
        yield case("R8", "accumulation", dtype=dtype, alike=True, **long)
        yield case("R8", "accumulation", dtype=dtype, **tall)
        yield case("R8", dtype=dtype, factor=5.0, q_len=33, kv_len=33)
    if "causal" in capabilities.features:  # rows of few keys, all far below 0
        yield case("R8", factor=20.0, q_len=33, kv_len=33, causal=True)
    yield from (case(rule, **call) for rule, call in logits(full))
    for dtype in dtypes:
        yield case("R8", "accumulation", dtype=dtype, bias="key", sinks=0, **tall)
    square = {"q_len": 32, "kv_len": 32, "head_dim": 32}
    if "dropout" in capabilities.features:
        yield case("R10", "dropout", dropout=0.25, **square)
        yield case("R10", "dropout", dropout=0.6, **square)
        yield case("R10", "dropout", dropout=0.25, **BLOCKS)
        whole = {**BLOCKS, "q_len": 256, "kv_len": 256}
        yield case("R10", "dropout", dropout=0.25, **whole)
        yield case("R10", "dropout", dropout=0.25, key_impl="rbg", **square)
        for layout in (x for x in capabilities.layouts[1:] if x != "bthd"):
            yield case("R10", "dropout", dropout=0.25, layout=layout, **square)
    hidden = visibilities(full)
    yield from (case(rule, **call) for rule, call in hidden)
    ways = other_ways(capabilities, dtypes)
    yield from (case(rule, **call) for rule, call in ways)
    lowest = _LOWEST.get(main, -1e10)
    hiders: list[dict[str, Any]] = [{"mask": "full"}, {"causal": True}]
    hiders += [{"lengths": "kv"}, {"window": (2, 0)}]
    hiders += [{"segments": "ids", "q_len": 9, "kv_len": 9}]
    for call in hiders:
        yield case("R3", "hidden", bias="full", bias_level=lowest, **call)
    if main in ("float32", "bfloat16"):  # the least number, by which models hide
        yield case("R2", "hidden", bias="full", bias_level=-3.3e38)
        yield case("R3", "hidden", bias="full", bias_level=-3.3e38, causal=True)
    for dtype in (d for d in dtypes[1:] if d in _LOWEST):
        for call in hiders[:2]:
            for least, of in ((_LOWEST[dtype], ""), (-1e5, "float32")):
                level_of: dict[str, Any] = {"bias_level": least, "bias_dtype": of}
                yield case("R3", "hidden", bias="full", dtype=dtype, **level_of, **call)
    # Positions from 256 on are no numbers of bfloat16. Logits are large, so that one
    # key too many has a weight that shows.
    later: dict[str, Any] = {
        "q_len": 600,
        "kv_len": 600,
        "heads": 2,
        "kv_heads": 1,
        "batch": 1,
    }
    for dtype in (d for d in dtypes if d != "float32"):
        yield case("R8", dtype=dtype, soft_cap=30.0, factor=5.0, q_len=33, kv_len=33)
        yield case("R8", dtype=dtype, causal=True, factor=1.5, **later)
        yield case("R8", dtype=dtype, bias="full", bias_dtype="float32")
        yield case("R8", dtype=dtype, sinks=0, bias_dtype=dtype)
        if dtype != "float64":  # logits about as large as the sinks, of float32
            near: dict[str, Any] = {
                "sinks": 0,
                "sink_level": 95.0,
                "factor": 8.0,
                "q_len": 33,
            }
            yield case("R8", dtype=dtype, kv_len=33, **near)
        yield case(
            "R8", dtype=dtype, bias="full", bias_dtype="float32", bias_level=-200.0
        )
    for call in that_hide(hidden):
        rule = "R6" if call.get("bias") == "minus_inf" else "R7"
        yield case(rule, dirty=True, **call)
    hiding: dict[str, Any] = {"lengths": "kv", "kv_len": 70}
    soiled: list[dict[str, Any]] = [
        {**hiding, "kv_len": 300, "batch": 1},  # more than a block of keys
        *dirty_ways(capabilities),
        {**hiding, "kv_heads": 2},
        {**hiding, "plain": True},
        {"causal": True, "q_len": 5, "kv_len": 200, "kv_heads": 2, "plain": True},
        # Rows that fill the last block would see keys that no other row does.
        {"causal": True, "q_len": 70, "kv_len": 200, "heads": 1, "kv_heads": 1},
        # Rows that are written behind others, into a cache with room for more.
        {"causal": True, "offset": "within", "q_len": 16, "kv_len": 130},
    ]
    soiled += [{**hiding, "soft_cap": 0.8}, {**hiding, "sinks": 0, "bias": "key"}]
    soiled += [{**hiding, "dtype": dtype} for dtype in dtypes[1:]]
    soiled += [{**hiding, "soft_cap": 0.8, "bias": "padding"}]
    soiled += [{"causal": True, "soft_cap": 0.8, "bias": "full"}]
    yield from (case("R7", dirty=True, **call) for call in soiled)
    # And rows that fill it beside those that end before, which see nothing.
    filling: dict[str, Any] = {"causal": True, "q_len": 300, "kv_len": 512}
    filling |= {"heads": 1, "kv_heads": 1, "lengths": "q"}
    narrow = [{**CACHES[0], "dtype": dtype} for dtype in dtypes[1:2]]
    for call in (filling, *CACHES, *narrow):
        made = as_declared(case("R7", **call).call, capabilities)
        yield AttentionCase("R7", made, dirty=True, combined=True)
    yield case("R7", "dropout", dropout=0.25, dirty=True, **hiding)
    for call in EMPTY_BESIDE_SINKS:
        made = as_declared(case("R6", **call).call, capabilities)
        if made.sinks is not None and len(made.features) > 1:
            yield AttentionCase("R6", made, combined=True)
    newest = [{**NEWEST, "dtype": dtype} for dtype in dtypes[1:2]]
    for call in (*STEPS, *newest):
        made = as_declared(case("R4", **call).call, capabilities)
        yield AttentionCase(rule_of(made), made, combined=True)
    # Of bias and sinks the gradient has the dtype.
    for call in ({"bias": "full"}, {"sinks": 0}):
        if main != "bfloat16":
            yield case("R11", bias_dtype="bfloat16", **call)
    if {"lse", "weights"} & capabilities.features:
        yield from (case(rule, plain=True, **call) for rule, call in PLAIN)
    # What users may have set: numbers without a dtype are then wider.
    yield case("R8", "x64")
    wide: dict[str, Any] = {"causal": True, "kv_heads": 2, "q_len": 5, "kv_len": 70}
    yield case("R8", "x64", **wide)
    for more in (
        {"offset": "batch", "window": (20, None), "lengths": "both", "soft_cap": 2.0},
        {"offset": "traced", "mask": "full", "bias": "full", "sinks": 0},
        {"offset": "last", "segments": "ids"},
    ):
        made = as_declared(case("R8", **wide, **more).call, capabilities)
        yield dataclasses.replace(case("R8", "x64"), call=made)
    for call in ({"bias": "full", "sinks": 0}, {"bias": "full"}, {"sinks": 0}, {}):
        yield case("R11", "underivable", **call)
        yield case("R11", "alone", **call)
    for call in EFFECTS:
        yield case("R12", "effect", **call)
    yield case("R13", "in turn", causal=True)
    yield case("R13", "in turn", mask="full")
    yield case("R13", "in turn", pattern="noise")
    yield case("R13", "in turn", soft_cap=8.0)
    yield case("R13", "in turn", window=(2, 0))
    yield case("R13", "at once", scale=0.3)
    yield case("R13", "at once", scale=0.3, **_options(capabilities))
    yield case("R13", "transforms")
    yield case("R13", "transforms", causal=True, kv_heads=2)
    mapped: list[dict[str, Any]] = [
        {"lengths": "kv"},
        {"mask": "sample"},
        {"pattern": "chunks"},
        {"segments": "ids", "q_len": 9, "kv_len": 9},
        {"bias": "full"},
        {"causal": True, "offset": "batch", "kv_len": 9},
        {"causal": True, "offset": "traced", "kv_len": 9},
        {"sinks": 0, "kv_heads": 2},
        {"window": (2, 0), "soft_cap": 0.8, "scale": 0.3},
    ]
    mapped += [{"dtype": dtype, "kv_heads": 2} for dtype in dtypes[1:]]
    yield from (case("R13", "mapped", **call) for call in mapped)
    # What samples share differs between the examples, and no two sizes are alike.
    shared = {"mask": "square", "bias": "head", "kv_len": 9, "lengths": "q"}
    for call in (shared, {"v_head_dim": 16, "kv_len": 9, "kv_heads": 2}):
        made = as_declared(case("R13", **call).call, capabilities)
        if made.features:
            yield dataclasses.replace(case("R13", "mapped"), call=made)
    for call in OPERANDS:
        made = as_declared(case("R13", **call).call, capabilities)
        if made.features:
            yield AttentionCase("R13", made, "mapped operands")
    yield case("R13", "mapped dropout", dropout=0.25)
    if capabilities.forward_mode:  # else one call says that it raises
        yield case("R13", "forward mode", bias="full", causal=True, kv_heads=2)
        yield case("R13", "forward mode", sinks=0, soft_cap=0.8)
    yield case("R13", "second order", causal=True)
    yield case("R13", "second order", soft_cap=0.8)
    yield case("R13", "second order", bias="full", sinks=0)
    seen: dict[str, Any] = {"mask": "full", "kv_heads": 2, "lengths": "kv"}
    seen |= {"window": (2, 0), "segments": "ids", "q_len": 9, "kv_len": 9}
    made = as_declared(case("R13", **seen).call, capabilities)
    yield dataclasses.replace(case("R13", "second order"), call=made)
    if jax.device_count() >= 4:
        even: dict[str, Any] = {"q_len": 8, "kv_len": 8, "batch": 4}
        for check in ("mesh", "shard_map", "sequence mesh"):
            yield case("R13", check, **even)
            yield case("R13", check, causal=True, kv_heads=2, **even)
            for call in SPLITS:
                made = as_declared(case("R13", **even, **call).call, capabilities)
                if made.features - {"gqa"}:
                    yield AttentionCase("R13", made, check)
            if "mask_pattern" in capabilities.features:
                yield case("R13", check, pattern="chunks", **even)
    for call in beside_dropout():
        asked = case("R10", "dropout", dropout=0.25, **{**square, **call})
        made = as_declared(asked.call, capabilities)
        if made.dtype not in dtypes:
            made = dataclasses.replace(made, dtype=main)
        yield dataclasses.replace(asked, call=made)
    combined = [*together(capabilities, dtypes, full)]
    if full:
        combined += drawn_calls(capabilities, seed)
    for made in combined:
        yield AttentionCase(rule_of(made), made, combined=True)
        if full:
            yield AttentionCase("R7", made, dirty=True)


def _options(capabilities: Capabilities) -> dict[str, Any]:
    """All options at once that an operation declares."""
    options: dict[str, dict[str, Any]] = {
        "causal": {"causal": True},
        "window": {"window": (2, 0)},
        "logits_soft_cap": {"soft_cap": 8.0},
    }
    declared = [options[n] for n in options if n in capabilities.features]
    return {name: x for option in declared for name, x in option.items()}


def _undeclared(capabilities: Capabilities, case: Any) -> Iterator[AttentionCase]:
    """Calls that use one thing that is not declared."""
    for feature in FEATURES:
        if feature in USES and feature not in capabilities.features:
            made = case("R12", "refused", **USES[feature])
            yield dataclasses.replace(made, feature=feature)
    for dtype in sorted(DTYPES - capabilities.dtypes):
        made = case("R12", "refused", dtype=dtype)
        yield dataclasses.replace(made, feature=f"dtype {dtype}")
