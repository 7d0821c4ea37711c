"""Mistakes in a declaration surface when it is registered."""

import copy
import dataclasses
import functools
import pickle

import jax
import jax.numpy as jnp
import pytest

import switchax
from switchax import (
    ATTENTION,
    BaseOperation,
    Capabilities,
    ContestedNameError,
    Cost,
    OperationRegistry,
    RegistrationError,
    Target,
    UnsupportedError,
    registrations,
)
from switchax.discovery import FoundPlugin
from switchax.errors import described, first_line

from .standins import defined_elsewhere, registration, stand_in

X = jnp.ones((1, 4, 2, 8))


@pytest.fixture
def register():
    with registration() as register:
        yield register


def refused(cls, *parts):
    with pytest.raises(RegistrationError) as caught:
        OperationRegistry.register(cls)
    for part in parts:
        assert part in str(caught.value)
    assert cls not in {entry.operation for entry in registrations.entries()}


def taking(*names, method="forward_native"):
    """A forward method of a signature."""
    scope = {}
    exec(f"def forward(self, {', '.join(names)}): return query", scope)
    return {method: scope["forward"]}


PLAIN = ("query", "key", "value", "*", "softmax_scale")


def test_the_example_of_the_design_registers_as_written(register):
    @register
    class MyFlash(BaseOperation):
        kind = ATTENTION
        capabilities = Capabilities(
            platforms={"tpu"},
            dtypes={"bfloat16", "float32"},
            cost=Cost.FUSED,
            opaque=True,
            features={"causal", "window", "q_offset", "gqa", "lse"},
            differentiable={"query", "key", "value"},
            multiples={"q_len": 128, "kv_len": 128, "head_dim": 128},
            shardable={"batch", "heads"},
        )

        @classmethod
        def get_impl_name(cls):
            return "my_flash", "my_flash_shared"

        def forward_tpu(
            self, query, key, value, *, causal, window, q_offset, softmax_scale
        ):
            raise AssertionError("never called here")

    names = [entry.names for entry in registrations.entries()]
    assert ("my_flash", "my_flash_shared") in names
    x = jax.ShapeDtypeStruct((1, 128, 2, 128), "bfloat16")
    answer = switchax.explain(
        query=x, key=x, value=x, operation="my_flash_shared", target="tpu:v5e"
    )
    assert answer.chosen.endswith(":my_flash")


def test_the_decorator_returns_the_class(register):
    cls = stand_in("itself")
    assert OperationRegistry.register(cls) is cls
    OperationRegistry.unregister(cls)
    assert cls not in {entry.operation for entry in registrations.entries()}


@pytest.mark.parametrize("thing", [int, "vanilla", None], ids=repr)
def test_only_operations_are_registered(thing):
    refused(thing, "expected a subclass of BaseOperation", repr(thing))


def test_kind_and_capabilities_are_needed():
    for missing in ("kind", "capabilities"):
        cls = stand_in("lacking")
        setattr(cls, missing, None)
        refused(cls, f"class attribute {missing} to be an instance of", "got None")


def test_an_abstract_class_is_refused():
    class Nameless(BaseOperation):
        kind = ATTENTION
        capabilities = Capabilities()

    refused(Nameless, "no abstract methods", "get_impl_name")


@pytest.mark.parametrize("name", ["", "two words", "a:b", "auto", 3, "-x"], ids=repr)
def test_a_bad_name_is_refused(name):
    refused(stand_in("good", name), "names of letters", repr(name))


def test_names_are_a_str_or_a_tuple_that_differ():
    refused(stand_in(), "a str or a tuple of str", "()")
    refused(stand_in("same", "same"), "names to differ")
    cls = stand_in("listed")
    cls.get_impl_name = classmethod(lambda cls: ["listed"])
    refused(cls, "a str or a tuple of str", "['listed']")


def test_get_impl_name_is_a_classmethod():
    cls = stand_in("plain")
    cls.get_impl_name = lambda self: "plain"
    refused(cls, "get_impl_name to be a classmethod", "@classmethod")


@pytest.mark.parametrize("error", [OSError, SystemExit])
def test_a_get_impl_name_that_raises_is_refused(error):
    def fail(cls):
        raise error("no disk")

    cls = stand_in("mute")
    cls.get_impl_name = classmethod(fail)
    refused(cls, "get_impl_name() to return names", f"{error.__name__}: no disk")


def test_names_are_asked_once(register):
    def fail(cls):
        raise OSError("no disk")

    cls = register(stand_in("forgetful"))
    cls.get_impl_name = classmethod(fail)
    assert {"forgetful", "vanilla"} <= set(OperationRegistry.list_implementations())
    for operation in ("vanilla", "forgetful", "auto"):
        assert switchax.attention(X, X, X, operation=operation).shape == X.shape


def test_a_name_that_equals_every_other_is_refused():
    class Greedy(str):
        __slots__ = ()

        def __eq__(self, other):
            return True

        __hash__ = str.__hash__

    refused(stand_in(Greedy("greedy")), "names of letters")


def test_a_plugin_takes_out_no_operation_of_another(register):
    mine = register(stand_in("mine"))
    thief = FoundPlugin("thief", "thief-dist", "1", "thief")
    with (
        registrations.loading(thief),
        pytest.raises(
            RegistrationError, match=r"unregister: expected an operation of .*thief"
        ),
    ):
        OperationRegistry.unregister(mine)
    assert mine in {entry.operation for entry in registrations.entries()}


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (SystemExit("bye"), r"unavailable\(\) raised SystemExit: bye"),
        (OSError("no disk"), r"unavailable\(\) raised OSError: no disk"),
        (None, r"unavailable\(\) raised TypeError: expected a str, got None"),
    ],
    ids=repr,
)
def test_an_unavailable_that_fails_costs_nobody_else(register, answer, says):
    def unavailable(cls):
        if isinstance(answer, BaseException):
            raise answer
        return answer

    body = {"forward_native": taking(*PLAIN)["forward_native"]}
    methods = {**body, "unavailable": classmethod(unavailable)}
    register(stand_in("fragile", cost=Cost.FUSED, methods=methods))
    assert switchax.attention(X, X, X).shape == X.shape
    assert "fragile" not in OperationRegistry.list_implementations()
    with pytest.raises(UnsupportedError, match=f"^fragile: expected .*{says}"):
        switchax.attention(X, X, X, operation="fragile")


def test_refusals_that_leave_the_program_cost_nobody_else(register):
    def refusals(cls, request, target):
        raise SystemExit("bye")

    cls = stand_in("leaving", cost=Cost.FUSED)
    cls.refusals = classmethod(refusals)
    register(cls)
    with pytest.warns(switchax.DegradedChoiceWarning, match="SystemExit: bye"):
        assert switchax.attention(X, X, X).shape == X.shape
    with pytest.raises(UnsupportedError, match=r"refusals\(\) raised SystemExit: bye"):
        switchax.attention(X, X, X, operation="leaving")


def with_init(name, init):
    methods = {**taking(*PLAIN), "__init__": init}
    return stand_in(name, methods=methods, cost=Cost.FUSED)


def test_an_init_of_another_signature_is_refused():
    def init(self, size):
        pass

    refused(with_init("sized", init), "__init__ to take metadata=None", "(size)")


@pytest.mark.parametrize("error", [OSError, ValueError, SystemExit])
def test_an_init_that_raises_is_said_to_be_its_plugins_fault(register, error):
    def init(self, metadata=None):
        raise error("no disk")

    register(with_init("unborn", init))
    says = rf":unborn: expected .*, got {error.__name__}: no disk .*; upgrade or block"
    for create in (
        lambda: switchax.attention(X, X, X),
        lambda: OperationRegistry.create("unborn"),
    ):
        with pytest.raises(RegistrationError, match=says):
            create()
    assert switchax.attention(X, X, X, operation="vanilla").shape == X.shape


def test_an_init_may_refuse_its_configuration_by_name(register):
    def init(self, metadata=None):
        raise ValueError("choosy: expected a config, got none; give one")

    register(with_init("choosy", init))
    with pytest.raises(ValueError, match=r"^choosy: expected a config"):
        switchax.attention(X, X, X, operation="choosy")


def test_an_init_that_forgets_its_base_is_an_error_that_says_so(register):
    cls = register(with_init("hollow", lambda self, metadata=None: None))
    says = r"hollow: expected .* keeps its metadata.*super\(\).__init__\(metadata\)"
    with pytest.raises(RegistrationError, match=says):
        switchax.attention(X, X, X, operation="hollow")
    with pytest.raises(RegistrationError, match=says):
        cls()(X, X, X)


@pytest.mark.parametrize(
    ("ask", "kind", "says"),
    [
        (lambda r: r.unregister(3), TypeError, "unregister: .*BaseOperation, got 3"),
        (lambda r: r.unregister([]), TypeError, r"unregister: .*got \[\]"),
        (lambda r: r.get(3), TypeError, "operation: expected a name .*got 3"),
        (lambda r: r.create([]), TypeError, r"operation: expected a name .*got \[\]"),
        (lambda r: r.create("vanilla", 3), TypeError, r"create: .*metadata=3 \(int\)"),
        (
            lambda r: r.list_implementations("atention"),
            ValueError,
            r"list_implementations: .*'atention' \(did you mean 'attention'\?\)",
        ),
        (lambda r: r.list_implementations(3), TypeError, r"kind=3 \(int\)"),
    ],
)
def test_the_registry_is_asked_with_the_right_types(ask, kind, says):
    with pytest.raises(kind, match=says) as caught:
        ask(OperationRegistry)
    assert type(caught.value) is kind


def test_implementations_are_listed_by_a_kind_or_its_name():
    of_kind = OperationRegistry.list_implementations(ATTENTION)
    assert of_kind == OperationRegistry.list_implementations("attention")
    assert "vanilla" in of_kind


def test_the_parts_of_a_kind_check_themselves():
    with pytest.raises(RegistrationError, match=r"Feature: .*arguments='bias'; write"):
        switchax.Feature("bias")
    with pytest.raises(TypeError, match=r"ArraySpec.of: .*got 3; pass an array"):
        switchax.ArraySpec.of(3)
    with pytest.raises(TypeError, match=r"attention: .*metadata=3 \(int\)"):
        ATTENTION.request(3, query=X, key=X, value=X)


def test_the_name_of_a_kind_is_checked():
    for name in (3, "", "a b", None):
        kind = type("Kind", (type(ATTENTION),), {"name": name})()
        with pytest.raises(RegistrationError, match="register kind: expected a name"):
            registrations.add_kind(kind)
    assert set(registrations.kinds()) == {"attention"}


def test_an_operation_of_another_kind_of_that_name_is_refused():
    cls = stand_in("double")
    cls.kind = type("Kind", (type(ATTENTION),), {})()
    refused(cls, "the kind 'attention' of switchax.kinds", "a name of its own")


def test_an_unknown_feature_gets_the_near_miss():
    refused(stand_in("x", features={"casual"}), "'casual' (did you mean 'causal'?)")


@pytest.mark.parametrize(
    ("field", "value", "part"),
    [
        ("platforms", {"gpus"}, "'gpus' (did you mean 'gpu'?)"),
        ("platforms", "tpu", "write {'tpu'}"),
        ("dtypes", {"bfloat61"}, "(did you mean 'bfloat16'?)"),
        ("layouts", ("bthb",), "(did you mean 'bthd'?)"),
        ("layouts", "bthd", "write ('bthd',)"),
        ("layouts", (), "at least one of layouts"),
        ("layouts", 3, "write ('bthd',)"),
        ("layouts", ([],), "got []"),
        ("platforms", set(), "at least one of platforms, got none"),
        ("platforms", 3, "a set of names, got 3"),
        ("dtypes", (), "at least one of dtypes, got none"),
        ("dtypes", {jnp.float32}, "write the names as str"),
        ("features", [[]], "a set of names, got [[]]"),
        ("features", {3}, "a set of names, got {3}"),
        ("forward_mode", 3, "a set of names, got 3"),
        ("multiples", 3, "multiples=3"),
        ("limits", {3: 3}, "a set of names, got {3: 3}"),
        ("forward_mode", {"tpus"}, "(did you mean 'tpu'?)"),
        ("multiples", {"q_len": 0}, "multiples['q_len']=0"),
        ("limits", {"head_dim": 1.5}, "limits['head_dim']=1.5"),
        ("cost", 1, "use Cost.FUSED"),
    ],
)
def test_capabilities_check_themselves(field, value, part):
    with pytest.raises(RegistrationError) as caught:
        Capabilities(**{field: value})
    beginnings = f"{field} ", f"{field}[", f"at least one of {field},"
    beginnings = tuple(f"Capabilities: expected {text}" for text in beginnings)
    assert str(caught.value).startswith(beginnings)
    assert part in str(caught.value)


def test_only_what_is_declared_is_differentiable():
    refused(stand_in("x", differentiable={"bias"}), "differentiable='bias'")
    refused(stand_in("x", differentiable={"quary"}), "(did you mean 'query'?)")
    refused(stand_in("x", differentiable={"lse"}), "add 'lse' to features")


def test_every_platform_needs_a_method():
    methods = taking(*PLAIN, method="forward_tpu")
    cls = stand_in("x", methods=methods, platforms={"tpu", "cuda"})
    refused(cls, "platform 'cuda' without one", "define forward_cuda or forward_native")


@pytest.mark.parametrize("platform", ["cuda", "rocm"])
def test_forward_gpu_serves_both_vendors(register, platform):
    methods = taking(*PLAIN, method="forward_gpu")
    register(stand_in("x", methods=methods, platforms={platform}))
    answer = switchax.explain(query=X, key=X, value=X, operation="x", target=platform)
    assert answer.chosen.endswith(":x")


@pytest.mark.parametrize(
    ("names", "features", "parts"),
    [
        (PLAIN, {"causal"}, ["take 'causal' of feature 'causal'", "do not declare"]),
        ((*PLAIN, "q_segment_ids"), {"segment_ids"}, ["take 'kv_segment_ids'"]),
        ((*PLAIN, "bias"), (), ["what features bring", "declare feature 'bias'"]),
        ((*PLAIN, "return_lse"), (), ["what features bring", "'return_lse'"]),
        ((*PLAIN, "casual"), {"causal"}, ["'casual' (did you mean 'causal'?)"]),
        ((*PLAIN, "**rest"), (), ["name its arguments", "**rest"]),
        (("*arrays", "softmax_scale"), (), ["name its arguments", "*arrays"]),
        (("query", "/", *PLAIN[1:]), (), ["remove the '/'"]),
        (PLAIN[:3], (), ["take 'softmax_scale'"]),
        (("query", "key", "*", "softmax_scale"), (), ["take 'value'"]),
    ],
    ids=[
        "argument_not_taken",
        "half_taken",
        "no_feature",
        "no_lse",
        "misspelt",
        "kwargs",
        "args",
        "positional_only",
        "no_scale",
        "no_value",
    ],
)
def test_signatures_and_features_must_agree(names, features, parts):
    refused(stand_in("x", methods=taking(*names), features=features), *parts)


def test_several_layouts_need_the_argument(register):
    layouts = ("bthd", "bhtd")
    refused(stand_in("x", layouts=layouts), "take 'layout'")
    register(stand_in("x", methods=taking(*PLAIN, "layout"), layouts=layouts))


def test_two_classes_of_one_plugin_cannot_have_one_name(register):
    first, second = stand_in("double"), stand_in("double")
    first.__qualname__ = "First"
    register(first)
    refused(second, "canonical name of its own", "'double'", "First")


def test_classes_of_one_factory_are_all_kept(register):
    register(stand_in("made_a"))
    register(stand_in("made_b"))
    names = {entry.name for entry in registrations.entries()}
    assert {"made_a", "made_b"} <= names


def test_a_reloaded_class_replaces_the_old_one(register):
    register(stand_in("again"))
    second = register(stand_in("again"))
    found = [e.operation for e in registrations.entries() if e.name == "again"]
    assert found == [second]


def test_a_class_that_copies_anothers_name_does_not_replace_it(register):
    first = register(stand_in("claimed"))
    other = defined_elsewhere(stand_in("claimed"))
    second = register(functools.update_wrapper(other, first, updated=()))
    assert (second.__module__, second.__qualname__) == (
        first.__module__,
        first.__qualname__,
    )
    found = [e.operation for e in registrations.entries() if e.name == "claimed"]
    assert set(found) == {first, second}
    with pytest.raises(ContestedNameError):
        OperationRegistry.get("claimed")


class Unprintable(Exception):
    def __str__(self):
        raise TypeError("not all arguments converted")


@pytest.mark.parametrize("method", ["refusals", "unavailable"])
def test_an_error_that_cannot_say_its_text_costs_nobody_else(register, method):
    def fail(cls, *given):
        raise Unprintable

    cls = stand_in("mute", cost=Cost.FUSED)
    setattr(cls, method, classmethod(fail))
    register(cls)
    assert switchax.attention(X, X, X, operation="vanilla").shape == X.shape
    assert "vanilla" in OperationRegistry.list_implementations()
    says = rf"{method}\(\) raised Unprintable: \(its text raised TypeError\)"
    with pytest.raises(UnsupportedError, match=says):
        switchax.attention(X, X, X, operation="mute")


def test_a_refusal_is_text():
    with pytest.raises(TypeError, match=r"Refusal: expected text, got actual=3; "):
        switchax.Refusal("size", "head_dim", 3, "64")


def test_what_only_another_platforms_method_takes_is_refused(register):
    def by_cpu(self, query, key, value, *, softmax_scale):
        return query

    def by_tpu(self, query, key, value, *, softmax_scale, causal):
        return query

    register(
        stand_in(
            "uneven",
            methods={"forward_cpu": by_cpu, "forward_tpu": by_tpu},
            platforms={"cpu", "tpu"},
            features={"causal"},
        )
    )
    arguments = {"query": X, "key": X, "value": X, "causal": True}
    for target, fits in (("tpu", True), ("cpu", False)):
        answer = switchax.explain(
            **arguments, target=Target(target), operation="uneven"
        )
        assert (answer.chosen is not None) is fits
    with pytest.raises(UnsupportedError, match="not taken by forward_cpu") as caught:
        switchax.attention(X, X, X, causal=True, operation="uneven")
    ((refusal,),) = caught.value.refusals.values()
    assert (refusal.code, refusal.field) == ("feature", "causal")


@pytest.mark.parametrize(
    ("forward", "rule"),
    [
        (lambda self, query, key, value: query, "to take 'softmax_scale'"),
        (lambda self, query, key, value, **rest: query, "to name its arguments"),
        (
            lambda self, query, key, value, softmax_scale, bogus=7: query,
            "to take what features bring",
        ),
    ],
)
def test_an_operation_that_is_not_registered_is_held_to_the_same(forward, rule):
    operation = stand_in("unregistered", methods={"forward_native": forward})
    with pytest.raises(RegistrationError, match=rule):
        operation()(X, X, X)


@pytest.mark.parametrize(
    "again", [copy.deepcopy, lambda c: pickle.loads(pickle.dumps(c))]
)
def test_capabilities_can_be_copied_and_pickled(again):
    copied = again(Capabilities(multiples={"kv_len": 8}, limits={"q_len": 1}))
    assert (copied.multiples, copied.limits) == ({"kv_len": 8}, {"q_len": 1})
    assert dataclasses.replace(copied, dtypes={"float16"}).limits == {"q_len": 1}


def test_a_type_error_of_the_kernel_stays_its_own(register):
    def forward(self, query, key, value, *, softmax_scale):
        raise TypeError("no jvp of a custom_vjp here")

    register(stand_in("typed", methods={"forward_native": forward}))
    with pytest.raises(TypeError, match=r"^no jvp of"):
        switchax.attention(X, X, X, operation="typed")


def test_an_instance_may_need_arguments_that_a_call_by_name_lacks():
    class NeedsOne(stand_in("needs_one")):
        def __init__(self, gain):
            super().__init__()
            self.gain = gain

    assert NeedsOne(3)(X, X, X).attention_outputs.shape == X.shape
    with pytest.raises(RegistrationError, match="__init__"):
        OperationRegistry.register(NeedsOne)


def test_who_registers_anew_while_a_call_is_dispatched_does_not_disturb_it(register):
    new = stand_in("swapped")

    def swap():
        if new not in {entry.operation for entry in registrations.entries()}:
            OperationRegistry.unregister(old)
            register(new)
        return ""

    old = stand_in("swapped")
    old.unavailable = staticmethod(swap)
    OperationRegistry.register(old)
    assert switchax.attention(X, X, X, operation="swapped").shape == X.shape


def test_a_foreign_error_moves_no_cursor():
    assert described(ValueError("\x1b]0;title\x07 red")) == (
        r"ValueError: \x1b]0;title\x07 red"
    )
    assert first_line(ValueError("one\x1b[2J\ntwo")) == r"one\x1b[2J"


def test_who_unregisters_while_names_are_listed_does_not_disturb_it(register):
    leaving = [register(stand_in(f"leaving_{n}")) for n in range(20)]

    def leave():
        for cls in leaving:
            OperationRegistry.unregister(cls)
        return ""

    stays = register(stand_in("stays"))
    stays.unavailable = staticmethod(leave)
    assert "stays" in OperationRegistry.list_implementations()
