"""Correcting specs, and laying arrays out by them on eight CPU devices."""

import contextlib
import functools
import json
import math
import re
import threading
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

import switchax
from switchax import sharding
from switchax.axes import (
    BATCH,
    EMPTY,
    HEAD,
    HEAD_DIM,
    KV_HEAD,
    MODE_TRAIN,
    QUERY_LENGTH,
    RUNTIME_MODES,
    TP,
)
from switchax.partition import PartitionAxis, PartitionManager, axis_rules
from switchax.sharding import (
    UnknownMeshAxisWarning,
    constrain,
    correct_spec,
    current_mesh,
)

from .meshes import entered

P = PartitionSpec
AUTO, EXPLICIT, MANUAL = AxisType.Auto, AxisType.Explicit, AxisType.Manual
FIVE = "dp1_fsdp2_tp2_sp2_ep1"

# Measured on eformer 0.0.101 with jax 0.10.2, eight forced CPU devices.
CASES = json.loads(
    (Path(__file__).parent / "data" / "shard_correction.json").read_text()
)["cases"]

# The cases in which we differ on purpose, by position: our answer and the row.
PREFIX = "a size that does not divide keeps the longest prefix of its axes that does"
ONE_BY_ONE = "an absent name is dropped by itself, not with the whole dimension"
NO_MESH = "without a mesh there is one device"
TWICE = "one mesh axis twice: ValueError naming both dimensions"
SET_MESH = "jax.set_mesh is seen"
DIFFERENT = {
    10: (P("fsdp", "sp", None, None), ONE_BY_ONE),
    11: (P("fsdp", "sp"), PREFIX),
    14: (ValueError, TWICE),
    15: (P("tp", None), ONE_BY_ONE),
    16: (ValueError, TWICE),
    20: (P(), NO_MESH),
    27: (None, NO_MESH),
    29: (P(("fsdp", "dp"), "sp", "tp", None), SET_MESH),
    30: (P(("fsdp", "dp"), "sp", "tp", None), SET_MESH),
    31: (ValueError, TWICE),
    32: (ValueError, TWICE),
}


def make_mesh(text, kind=AUTO):
    """A mesh named like "dp2_tp4"; "all1" is the five axes of size 1."""
    text = "dp1_fsdp1_tp1_sp1_ep1" if text == "all1" else text
    sizes = {name: int(n) for name, n in re.findall(r"([a-z]+)(\d+)", text)}
    kinds = (kind,) * len(sizes) if isinstance(kind, AxisType) else kind
    devices = np.array(jax.devices()[: math.prod(sizes.values())])
    return Mesh(devices.reshape(tuple(sizes.values())), tuple(sizes), axis_types=kinds)


@pytest.fixture(autouse=True)
def said(monkeypatch):
    """Names that were warned of: none yet."""
    monkeypatch.setattr(sharding, "_said", set())


def as_spec(text):
    """A spec from its repr in our own data file."""
    names = {"PartitionSpec": P, "UNCONSTRAINED": P.UNCONSTRAINED}
    return eval(text, {"__builtins__": {}}, names)


def lies_as(x, mesh, spec):
    return x.sharding.is_equivalent_to(NamedSharding(mesh, spec), x.ndim)


CORRECTIONS = [n for n, c in enumerate(CASES) if c["fn"].startswith("get_")]
SHARDS = [n for n, c in enumerate(CASES) if c["fn"] == "PartitionManager.shard"]


@pytest.mark.parametrize("number", CORRECTIONS)
def test_measured_correction(number):
    case = CASES[number]
    expected, _ = DIFFERENT.get(number, (None, None))
    spec, shape = as_spec(case["spec_in"]), case["shape"]
    expected = as_spec(case["spec_out"]) if expected is None else expected
    unknown = "nope" in case["spec_in"]
    with pytest.warns(UnknownMeshAxisWarning) if unknown else contextlib.nullcontext():
        mesh = case["mesh"] and make_mesh(case["mesh"])
        if isinstance(expected, type):
            with pytest.raises(expected):
                correct_spec(spec, shape, mesh)
        else:
            assert correct_spec(spec, shape, mesh) == expected
            if mesh:
                assert correct_spec(spec, shape, mesh.abstract_mesh) == expected
                with entered(mesh):
                    assert correct_spec(spec, shape) == expected


@pytest.mark.parametrize("enter", [entered, jax.set_mesh], ids=["with", "set_mesh"])
@pytest.mark.parametrize("number", SHARDS)
def test_measured_shard(number, enter):
    case = CASES[number]
    expected, _ = DIFFERENT.get(number, (None, None))
    if expected is None and "PartitionSpec" in case.get("sharding", ""):
        expected = as_spec(case["sharding"])
    mesh = case["mesh"] and make_mesh(case["mesh"])
    manager = PartitionManager(PartitionAxis())

    def shard(x):
        return manager.shard(
            x, case["axes"], case["mode"], auto_correct=case["auto_correct"]
        )

    x = jnp.ones(case["shape"])
    with enter(mesh) if mesh else contextlib.nullcontext():
        if isinstance(expected, type):
            with pytest.raises(expected):
                shard(x)
            return
        y = (jax.jit(shard) if case["jit"] else shard)(x)
    if expected is None:
        assert y is x
    else:
        assert lies_as(y, mesh, expected)


# Correction: the rules.


def test_axes_that_the_mesh_lacks_are_dropped_quietly_one_by_one():
    mesh = make_mesh("dp2_tp4")
    spec = PartitionAxis().resolve_spec([BATCH, QUERY_LENGTH, HEAD], MODE_TRAIN)
    assert correct_spec(spec, (2, 4, 8), mesh) == P("dp", None, "tp")
    with axis_rules({"__PAGE__": ("data", "dp")}):
        assert correct_spec(P(("data", "dp")), (2,), mesh) == P("dp")
    own = PartitionAxis(head_axis="model")
    assert correct_spec(P("model"), (2,), mesh, partition_axis=own) == P()
    with PartitionManager(own):
        assert correct_spec(P("model"), (2,), mesh) == P()


def test_name_that_nobody_knows_warns_once_and_raises_when_strict():
    mesh = make_mesh("dp2_tp4")
    with pytest.warns(UnknownMeshAxisWarning, match="'tpp' .did you mean 'tp'"):
        assert correct_spec(P(("tpp", "dp")), (2,), mesh) == P("dp")
    assert correct_spec(P(("tpp", "dp")), (2,), mesh) == P("dp")  # said already
    with pytest.warns(UnknownMeshAxisWarning, match="'other'"):
        correct_spec(P("other"), (2,), mesh)
    with switchax.use(strict=True), pytest.raises(ValueError, match="strict is set"):
        correct_spec(P("tpp"), (2,), mesh)


@pytest.mark.parametrize(
    ("length", "kept"),
    [
        (8, ("a", "b", "c")),
        (4, ("a", "b")),
        (12, ("a", "b")),
        (2, ("a",)),
        (6, ("a",)),
        (1, ()),
        (7, ()),
        (0, ("a", "b", "c")),
    ],
)
def test_longest_prefix_that_divides_stays(length, kept):
    mesh = make_mesh("a2_b2_c2")
    expected = P(kept, None) if kept else P()
    assert correct_spec(P(("a", "b", "c"), None), (length, 3), mesh) == expected
    # An axis behind one that does not divide would be another layout: not kept.
    assert correct_spec(P(("b", "a")), (2,), mesh) == P("b")


def test_axis_twice_is_an_error_that_names_both_dimensions():
    mesh = make_mesh("dp2_tp4")
    with pytest.raises(ValueError, match="'tp' in dimension 0 and dimension 2"):
        correct_spec(P("tp", None, ("dp", "tp")), (4, 4, 4), mesh)
    with pytest.raises(ValueError, match="'tp' in dimension 1 and dimension 1"):
        correct_spec([None, ("tp", "tp")], (4, 4), mesh)


def test_corrected_spec_has_one_entry_for_each_dimension_or_none():
    mesh = make_mesh("dp2_tp4")
    assert correct_spec(P(("dp",)), (2, 3, 4), mesh) == P("dp", None, None)
    assert correct_spec(P(None, "dp", "tp"), (2, 2), mesh) == P(None, "dp")
    assert correct_spec(P(None, "tp"), (2, 3), mesh) == P()
    assert correct_spec(None, (2, 3), mesh) == P()
    assert correct_spec(P("dp"), (), mesh) == P()


def test_specs_in_other_forms():
    mesh = make_mesh("dp2_tp4")
    spec = [["dp", None, ("tp", EMPTY)], EMPTY]
    assert correct_spec(spec, (8, 2), mesh) == P(("dp", "tp"), None)
    # No array lies "unconstrained".
    assert correct_spec(P(P.UNCONSTRAINED, "dp"), (4, 4), mesh) == P(None, "dp")
    with pytest.raises(ValueError, match="a PartitionSpec, got spec='dp'"):
        correct_spec("dp", (2,), mesh)


def test_lengths_may_be_numpy_ints():
    mesh = jax.make_mesh((2, 4), ("dp", "tp"), (AUTO,) * 2)
    assert correct_spec(P("dp", "tp"), np.array([8, 8]), mesh) == P("dp", "tp")


@pytest.mark.parametrize(
    ("spec", "shape", "error"),
    [
        (3, (8,), TypeError),
        ({"dp": "tp"}, (8,), TypeError),
        ({"dp", "tp"}, (8, 8), TypeError),
        (({"dp"}, None), (8, 8), TypeError),
        (b"dp", (8, 8), TypeError),
        (P("dp"), 8, TypeError),
        (P("dp"), "8", TypeError),
        (P("dp"), (8.0,), TypeError),
        (P("dp"), (None,), TypeError),
        (P("dp"), {8}, TypeError),
        (P("dp", unreduced={"tp"}), (8,), ValueError),
        (P("dp", reduced={"tp"}), (8,), ValueError),
    ],
)
def test_what_is_no_layout_is_refused(spec, shape, error):
    mesh = jax.make_mesh((2, 4), ("dp", "tp"), (AUTO,) * 2)
    with pytest.raises(error, match="correct_spec: expected"):
        correct_spec(spec, shape, mesh)


def test_a_shape_without_an_array_is_not_laid_out():
    with pytest.raises(TypeError, match="expected an array"):
        constrain(jax.ShapeDtypeStruct((8,), "float32"), P("dp"))


def test_what_is_no_mesh_is_refused():
    for wrong in ("dp", {"dp": 2}, NamedSharding(make_mesh("dp2"), P())):
        with pytest.raises(TypeError, match="a Mesh or AbstractMesh, got mesh="):
            correct_spec(P("dp"), (2,), wrong)
        with pytest.raises(TypeError, match="a Mesh or AbstractMesh, got mesh="):
            constrain(jnp.ones(2), P("dp"), wrong)


def test_meshes_of_every_kind_correct_alike():
    for kind in (AUTO, EXPLICIT, (AUTO, EXPLICIT)):
        mesh = make_mesh("dp2_tp4", kind)
        for form in (mesh, mesh.abstract_mesh):
            assert correct_spec(P(("dp", "tp")), (4,), form) == P("dp")
    # In JAX 0.12 the axes of an abstract mesh are Explicit by default.
    assert correct_spec(P("dp", "tp"), (4, 3), AbstractMesh((2, 4), ("dp", "tp"))) == P(
        "dp", None
    )
    assert correct_spec(P("dp"), (4,), jax.sharding.get_mesh()) == P()


def test_manual_axes_are_not_split_again():
    mesh = make_mesh("dp2_tp4", (MANUAL, AUTO)).abstract_mesh
    assert correct_spec(P("dp", "tp"), (4, 4), mesh) == P(None, "tp")
    assert correct_spec(P(("dp", "tp")), (4,), mesh) == P("tp")


# Correction: properties.

NAMES = ["dp", "fsdp", "tp", "sp", "ep"]
TOKENS = [BATCH, QUERY_LENGTH, HEAD, HEAD_DIM, KV_HEAD, TP, None, EMPTY, *NAMES]
MEMBERS = st.sampled_from(TOKENS)
LOGICAL = st.lists(MEMBERS | st.lists(MEMBERS, max_size=3), max_size=5)
SHAPES = st.lists(st.sampled_from([0, 1, 2, 3, 4, 6, 8, 12, 64]), max_size=5)
FIELDS = st.dictionaries(
    st.sampled_from(["head_axis", "batch_axis", "attention_dim_axis", "kv_head_axis"]),
    st.none() | st.sampled_from(NAMES) | st.lists(st.sampled_from(NAMES), max_size=2),
    max_size=3,
)


@st.composite
def meshes(draw):
    names = draw(st.lists(st.sampled_from([*NAMES, "x", "y"]), unique=True, min_size=1))
    left, sizes = 8, []
    for _ in names:
        sizes.append(draw(st.sampled_from([s for s in (1, 2, 4, 8) if s <= left])))
        left //= sizes[-1]
    kinds = draw(st.tuples(*[st.sampled_from([AUTO, EXPLICIT])] * len(names)))
    devices = np.array(jax.devices()[: math.prod(sizes)]).reshape(sizes)
    mesh = Mesh(devices, tuple(names), axis_types=kinds)
    return draw(st.sampled_from([mesh, mesh.abstract_mesh]))


def check_corrected(spec, shape, mesh):
    corrected = correct_spec(spec, shape, mesh)
    NamedSharding(mesh, corrected).shard_shape(tuple(shape))
    assert correct_spec(corrected, shape, mesh) == corrected
    assert len(corrected) in (0, len(shape))
    return corrected


@settings(deadline=None, max_examples=300)
@given(FIELDS, LOGICAL, st.sampled_from(RUNTIME_MODES), SHAPES, meshes())
def test_resolved_and_corrected_is_never_rejected(fields, logical, mode, shape, mesh):
    paxis = PartitionAxis(**fields)
    flat = [name for entry in paxis.resolve_axis(logical, mode) for name in each(entry)]
    if len(set(flat)) < len(flat):
        with pytest.raises(ValueError, match="each mesh axis at most once"):
            paxis.resolve_spec(logical, mode)
        return
    check_corrected(paxis.resolve_spec(logical, mode), shape, mesh)


def each(entry):
    return entry if isinstance(entry, list | tuple) else [entry] if entry else []


@settings(deadline=None, max_examples=300)
@given(
    st.lists(
        st.none()
        | st.just(P.UNCONSTRAINED)
        | st.lists(st.sampled_from([*NAMES, "x", "y", "zz"]), max_size=3).map(tuple),
        max_size=5,
    ),
    SHAPES,
    meshes(),
)
def test_any_spec_is_corrected_or_uses_an_axis_twice(entries, shape, mesh):
    flat = [name for e in entries if isinstance(e, tuple) for name in e]
    if len(set(flat)) < len(flat):
        with pytest.raises(ValueError, match="each mesh axis at most once"):
            correct_spec(P(*entries), shape, mesh)
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UnknownMeshAxisWarning)
        corrected = check_corrected(P(*entries), shape, mesh)
    # What is left is a prefix of what the mesh has, and one axis more would not fit.
    for length, entry, kept in zip(shape, entries, corrected, strict=False):
        asked = [n for n in each(entry or ()) if n in mesh.shape] if entry else []
        kept = [kept] if isinstance(kept, str) else list(kept or ())
        assert asked[: len(kept)] == kept
        if len(asked) > len(kept):
            parts = math.prod(mesh.shape[n] for n in asked[: len(kept) + 1])
            assert length % parts


# The mesh in force.


def test_current_mesh_in_the_documented_order():
    outer, inner = make_mesh("dp8"), make_mesh("tp8")
    assert current_mesh() is None
    with entered(outer):
        assert current_mesh() == outer
        with jax.set_mesh(inner):
            assert current_mesh() == inner
            with jax.sharding.use_abstract_mesh(outer.abstract_mesh):
                assert current_mesh() == outer.abstract_mesh
            assert correct_spec(P("dp"), (8,)) == P()
            assert correct_spec(P("dp"), (8,), outer) == P("dp")  # the argument first
        assert current_mesh() == outer
    assert current_mesh() is None


def test_current_mesh_is_seen_under_transformations():
    seen = []

    def look(x):
        seen.append(current_mesh())
        return x * 2

    mesh = make_mesh("dp8")
    x = jnp.ones(8)
    for enter in (jax.set_mesh, entered):
        with enter(mesh):
            jax.jit(look)(x)
            jax.grad(lambda x: look(x).sum())(x)
            jax.vmap(look)(x)
    assert seen == [mesh] * len(seen)
    assert len(seen) >= 6
    with jax.set_mesh(mesh):
        jax.jit(jax.shard_map(look, in_specs=P("dp"), out_specs=P("dp")))(x)
    assert seen[-1].axis_types == (MANUAL,)


def test_mesh_of_one_thread_is_not_that_of_another():
    seen = []
    with jax.set_mesh(make_mesh("dp8")):
        thread = threading.Thread(target=lambda: seen.append(current_mesh()))
        thread.start()
        thread.join()
    assert seen == [None]


# Laying out. The mesh is entered in both ways, and its axes are of every type.

KINDS = {"auto": AUTO, "explicit": EXPLICIT, "mixed": (EXPLICIT, AUTO, AUTO)}
SPEC = P("dp", "tp")
WAYS = {
    "eager": lambda f: f,
    "jit": jax.jit,
    "eager vmap": lambda f: lambda x: jax.vmap(f)(x[None])[0],
    "jit vmap": lambda f: lambda x: jax.jit(jax.vmap(f))(x[None])[0],
    "eager grad": lambda f: jax.grad(lambda x: (f(x) ** 2).sum() / 2),
    "jit grad": lambda f: jax.jit(jax.grad(lambda x: (f(x) ** 2).sum() / 2)),
    "remat": lambda f: jax.jit(jax.grad(lambda x: (jax.remat(f)(x) ** 2).sum() / 2)),
    "scan": lambda f: jax.jit(
        lambda x: jax.lax.scan(lambda c, _: (f(c), ()), f(x), None, 2)[0]
    ),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("enter", [entered, jax.set_mesh], ids=["with", "set_mesh"])
def test_array_is_laid_out_with_its_values(enter, kind, way):
    mesh = make_mesh("dp2_sp2_tp2", KINDS[kind])
    x = jnp.arange(32.0).reshape(4, 8)  # made outside of the mesh: a trap
    with enter(mesh):
        y = WAYS[way](lambda x: constrain(x, SPEC))(x)
        # Arrays made inside, and of the mesh already, are welcome too.
        here = WAYS[way](lambda x: constrain(x, SPEC))(jnp.ones((4, 8)))
        again = constrain(constrain(x, P("tp")), SPEC)
    np.testing.assert_array_equal(y, x)
    np.testing.assert_array_equal(again, x)
    np.testing.assert_array_equal(here, np.ones((4, 8)))
    assert lies_as(again, mesh, SPEC)
    if way in ("eager", "jit"):
        assert lies_as(y, mesh, SPEC)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("enter", [entered, jax.set_mesh], ids=["with", "set_mesh"])
def test_one_dimension_over_axes_of_two_types(enter, kind):
    mesh = make_mesh("dp2_sp2_tp2", KINDS[kind])
    x = jnp.arange(32.0).reshape(4, 8)
    with enter(mesh):
        for way in (WAYS["eager"], WAYS["jit"]):
            y = way(lambda x: constrain(x, P(("dp", "tp"))))(x)
            assert lies_as(y, mesh, P(("dp", "tp"), None))
            np.testing.assert_array_equal(y, x)


def test_passed_mesh_needs_no_other():
    for kind in KINDS.values():
        mesh = make_mesh("dp2_sp2_tp2", kind)
        x = jnp.arange(32.0).reshape(4, 8)
        for f in (constrain, jax.jit(constrain, static_argnums=(1, 2))):
            assert lies_as(f(x, SPEC, mesh), mesh, SPEC)


def test_committed_and_numpy_arrays_move_too():
    mesh = make_mesh("dp2_sp2_tp2")
    with jax.set_mesh(mesh):
        elsewhere = jax.device_put(jnp.ones((4, 8)), jax.devices()[5])
        for x in (elsewhere, np.ones((4, 8), np.float32)):
            assert lies_as(constrain(x, SPEC), mesh, SPEC)
            assert lies_as(constrain(x, None), mesh, P())


def test_array_that_a_trace_closes_over_is_constrained():
    mesh = make_mesh("dp2_sp2_tp2")
    x = jnp.ones((4, 8))
    with jax.set_mesh(mesh):
        y = jax.jit(lambda: constrain(x, SPEC))()
        assert lies_as(y, mesh, SPEC)


def test_whole_array_stays_where_it_is_and_a_split_one_is_gathered():
    mesh = make_mesh("dp2_sp2_tp2")
    manager = PartitionManager(PartitionAxis())
    x = jnp.ones((4, 8))
    with jax.set_mesh(mesh):
        for ask in ([None, EMPTY], [], [[], None]):
            assert manager.shard(x, ask, MODE_TRAIN) is x
            split = constrain(x, SPEC)
            assert lies_as(manager.shard(split, ask, MODE_TRAIN), mesh, P())
            whole = jax.jit(lambda x, ask=ask: manager.shard(x, ask, MODE_TRAIN))(split)
            assert lies_as(whole, mesh, P())


def test_spec_of_which_nothing_is_left_asks_for_nothing():
    """On a mesh of other axes nothing is gathered just because we have no say."""
    mesh = make_mesh("data2_model4")
    manager = PartitionManager(PartitionAxis())
    x = jax.device_put(jnp.ones((4, 8)), NamedSharding(mesh, P("data", "model")))
    with jax.set_mesh(mesh):
        assert manager.shard(x, [BATCH, HEAD], MODE_TRAIN) is x
        y = jax.jit(lambda x: manager.shard(x, [BATCH, HEAD], MODE_TRAIN))(x)
        assert lies_as(y, mesh, P("data", "model"))


def test_zero_length_dimension_is_split():
    mesh = make_mesh("dp2_sp2_tp2")
    with jax.set_mesh(mesh):
        for f in (lambda x: constrain(x, SPEC), jax.jit(lambda x: constrain(x, SPEC))):
            assert f(jnp.ones((0, 8))).shape == (0, 8)


def test_inside_shard_map_only_axes_that_are_not_manual_matter():
    mesh = make_mesh("dp2_sp2_tp2")
    x = jnp.arange(32.0).reshape(4, 8)

    def double(x):
        return constrain(x, P("dp", "tp")) * 2

    with jax.set_mesh(mesh):
        whole = jax.shard_map(double, in_specs=P("dp"), out_specs=P("dp"))
        part = jax.shard_map(
            double, in_specs=P("dp"), out_specs=P("dp"), axis_names={"dp"}
        )
        for f in (whole, jax.jit(whole), jax.jit(part)):
            np.testing.assert_array_equal(f(x), x * 2)
        assert lies_as(jax.jit(part)(x), mesh, SPEC)
    # With the mesh as an argument only, and the same mesh passed to constrain.
    passed = jax.shard_map(
        lambda x: constrain(x, SPEC, mesh) * 2,
        mesh=mesh,
        in_specs=P("dp"),
        out_specs=P("dp"),
    )
    np.testing.assert_array_equal(jax.jit(passed)(x), x * 2)
    with entered(mesh):
        old = jax.shard_map(double, mesh=mesh, in_specs=P("dp"), out_specs=P("dp"))
        np.testing.assert_array_equal(jax.jit(old)(x), x * 2)


@pytest.mark.parametrize("kind", KINDS)
def test_abstract_mesh_lowers_and_has_no_devices_for_an_eager_array(kind):
    mesh = make_mesh("dp2_sp2_tp2", KINDS[kind])
    x = jnp.ones((4, 8))
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        f = jax.jit(lambda x: constrain(x, SPEC))
        text = f.lower(jax.ShapeDtypeStruct((4, 8), "float32")).as_text()
        assert re.search(r'sharding_constraint.*"dp".*"tp"', text)
        assert constrain(x, SPEC) is x
    on_mesh = jax.device_put(x, NamedSharding(mesh, P(None, "dp")))
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        assert lies_as(constrain(on_mesh, SPEC), mesh, SPEC)


@pytest.mark.parametrize("kind", KINDS)
def test_what_grad_and_vmap_run_at_once_is_eager_to_an_abstract_mesh(kind):
    mesh = make_mesh("dp2_sp2_tp2", KINDS[kind]).abstract_mesh
    x = jnp.arange(32.0).reshape(4, 8)

    def squares(x):
        return (constrain(x, SPEC, mesh) ** 2).sum()

    contexts = [contextlib.nullcontext()]
    if kind == "auto":  # JAX computes nothing at once under abstract explicit axes
        contexts.append(jax.sharding.use_abstract_mesh(mesh))
    for in_force in contexts:
        with in_force:
            np.testing.assert_array_equal(jax.grad(squares)(x), 2 * x)
            each = jax.vmap(lambda row: constrain(row, P("dp"), mesh))(x)
            np.testing.assert_array_equal(each, x)


@pytest.mark.parametrize("how", [jax.jit, jax.grad, jax.vmap])
def test_another_mesh_than_the_one_set_is_refused_where_that_is_traced(how):
    devices = np.array(jax.devices()).reshape(2, 2, 2)
    first, second = (Mesh(d, ("dp", "tp"), axis_types=(AUTO,) * 2) for d in devices)
    x = jnp.ones((4, 8))
    with jax.set_mesh(first), pytest.raises(ValueError, match="mesh that is set"):
        how(lambda x: constrain(x, P("dp"), second).sum())(x)
    with jax.set_mesh(first):
        assert lies_as(constrain(x, P("dp"), second), second, P("dp"))
        same = Mesh(first.devices, ("dp", "tp"), axis_types=(AUTO,) * 2)
        np.testing.assert_array_equal(
            how(lambda x: constrain(x, P(), same).sum())(x), how(lambda x: x.sum())(x)
        )


def test_what_nothing_splits_follows_the_others_onto_the_mesh():
    """Committed elsewhere: no computation takes it beside what lies on the mesh."""
    mesh, x = make_mesh("dp2_sp2_tp2"), jnp.ones((1, 3))
    with jax.set_mesh(mesh):
        assert constrain(x, P("dp", "tp")) is x
        there = jax.device_put(x, jax.devices()[0])
        assert lies_as(constrain(there, P("dp", "tp")), mesh, P())
        split = jax.device_put(jnp.ones((8, 3)), NamedSharding(mesh, P("sp")))
        assert constrain(split, P(None, "tp")) is split


@pytest.mark.parametrize("operation", ["vanilla", "sdpa", "chunked"])
@pytest.mark.parametrize("beside", ["bias", "mask", "one kv head"])
def test_operands_committed_to_one_device_are_all_moved(operation, beside):
    there = functools.partial(jax.device_put, device=jax.devices()[0])
    batch, kv_heads = (1, 1) if beside == "one kv head" else (2, 4)
    query = there(jnp.ones((batch, 4, 4, 8)))
    key = value = there(jnp.ones((batch, 4, kv_heads, 8)))
    given = {}
    if beside in ("bias", "mask"):
        dtype = bool if beside == "mask" else "float32"
        given[beside] = there(jnp.ones((1, 1, 4, 4), dtype))
    alone = switchax.attention(query, key, value, operation=operation, **given)
    mesh = jax.make_mesh((2, 4), ("dp", "tp"), (AUTO,) * 2)
    metadata = switchax.OperationMetadata(mesh=mesh)
    args = {"operation": operation, "metadata": metadata, **given}
    found = switchax.attention(query, key, value, **args)
    np.testing.assert_allclose(found, alone, rtol=1e-6)


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"spec": 5}, TypeError),
        ({"spec": "dp"}, ValueError),
        ({"spec": P("dp", "dp")}, ValueError),
        ({"spec": P("dp"), "partition_axis": 5}, TypeError),
    ],
)
def test_what_is_refused_on_a_mesh_is_refused_without(given, error):
    with pytest.raises(error):
        constrain(jnp.ones((2, 2)), **given)


@pytest.mark.parametrize("shape", [({},), np.ones((2, 2)), (1.0,), 3, "ab"])
def test_what_is_no_shape_is_refused(shape):
    with pytest.raises(TypeError, match="a shape"):
        correct_spec(P("dp"), shape)


def test_a_partition_axis_that_is_none_is_refused():
    with pytest.raises(TypeError, match="a PartitionAxis, got partition_axis=3"):
        correct_spec(P("dp"), (2,), partition_axis=3)


def test_no_collective_where_a_layout_is_only_confirmed():
    mesh = make_mesh("dp2_sp2_tp2")
    x = jax.device_put(jnp.ones((4, 8)), NamedSharding(mesh, SPEC))
    with jax.set_mesh(mesh):
        text = jax.jit(lambda x: constrain(x, SPEC) * 2).lower(x).compile().as_text()
    assert not re.search("all-gather|all-reduce|all-to-all|collective-permute", text)


def test_model_runs_on_one_device_and_on_eight_by_adding_a_mesh():
    manager = PartitionManager(PartitionAxis())

    @jax.jit
    def model(x, w):
        x = manager.shard(x, [BATCH, None], MODE_TRAIN)
        return manager.shard(x @ w, [BATCH, TP], MODE_TRAIN)

    x, w = jnp.arange(32.0).reshape(4, 8), jnp.ones((8, 6))
    alone = model(x, w)
    mesh = make_mesh("dp4_tp2")
    with jax.set_mesh(mesh):
        together = model(x, w)
    np.testing.assert_array_equal(alone, together)
    assert len(alone.sharding.device_set) == 1
    assert lies_as(together, mesh, P("dp", "tp"))


def test_everything_named_is_there():
    assert all(hasattr(sharding, name) for name in sharding.__all__)
