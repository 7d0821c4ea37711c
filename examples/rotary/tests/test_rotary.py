"""The kind "rotary": its operations conform, broken ones do not, and it is explained.

The distribution must be installed, for its kind is found by its entry point.
"""

import dataclasses
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import switchax
from switchax.testing import conform
from switchax_rotary import ROTARY, rotary, rotary_oracle
from switchax_rotary.operation import XlaRotary

X = np.random.default_rng(0).normal(size=(2, 5, 3, 8)).astype("float32")
PLACES = np.arange(5, dtype="int32")


@pytest.mark.parametrize("name", ["rotary_xla", "rotary_pallas"])
def test_an_operation_conforms(name):
    report = conform(name)
    assert report.passed, report
    assert report.kind == "rotary"
    wanted = ROTARY.suite.rules.keys() - {"RO10"}  # of which no case is about alone
    if name == "rotary_pallas":
        wanted -= {"RO3", "RO4", "RO5"}  # whose features it refuses, under RO8
    assert report.by_rule().keys() == wanted


def broken(change, dtype="float32", *features):
    """Returns rotary_xla with a change of what it is given or returns.

    It declares no more than shows the change, so that less is asked of it.
    """

    brought = [n for f in features for n in XlaRotary.kind.features[f].arguments]

    class Broken(XlaRotary):
        mistake = change.__name__
        capabilities = dataclasses.replace(
            XlaRotary.capabilities, dtypes={dtype}, features=features
        )

        @classmethod
        def get_impl_name(cls):
            return "broken"

        def forward_native(self, **given):
            x, positions = given.pop("x"), given.pop("positions")
            options = {
                "base": given["base"],
                "interleaved": given.get("interleaved", False),
                "rotary_dim": given.get("rotary_dim", x.shape[3]),
                "scale": given.get("scale", 1.0),
            }
            return change(super().forward_native, x, positions, options)

        # An operation takes what it declares, and no more.
        forward_native.__signature__ = inspect.Signature(
            inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD)
            for name in ("self", "x", "positions", "base", *brought)
        )

    return Broken


def turned_as_asked(turn, x, positions, options):
    return turn(x, positions, **options)


def other_base(turn, x, positions, options):
    return turn(x, positions, **{**options, "base": 1.01 * options["base"]})


def base_of_the_first_call_of_a_shape(turn, x, positions, options):
    base = BASES.setdefault((x.shape, options["rotary_dim"]), options["base"])
    return turn(x, positions, **{**options, "base": base})


BASES = {}


def places_of_sample_0(turn, x, positions, options):
    return turn(x, jnp.broadcast_to(positions[:1], positions.shape), **options)


def one_token_is_the_first(turn, x, positions, options):
    return turn(x, positions if x.shape[1] > 1 else 0 * positions, **options)


def places_of_two_samples(turn, x, positions, options):
    return turn(x, jnp.resize(positions[:2], positions.shape), **options)


def never_interleaved(turn, x, positions, options):
    return turn(x, positions, **{**options, "interleaved": False})


def frequencies_of_the_whole_head(turn, x, positions, options):
    share = options["rotary_dim"] / x.shape[3]
    return turn(x, positions, **{**options, "base": options["base"] ** share})


def scale_ignored(turn, x, positions, options):
    return turn(x, positions, **{**options, "scale": 1.0})


def second_block_not_turned(turn, x, positions, options):
    number = jnp.arange(x.shape[1])[:, None, None]
    return jnp.where(number < 128, turn(x, positions, **options), x)


def interleaved_ones_have_the_usual_base(turn, x, positions, options):
    base = 10000.0 if options["interleaved"] else options["base"]
    return turn(x, positions, **{**options, "base": base})


def scale_in_the_dtype_of_x(turn, x, positions, options):
    scale = float(np.asarray(options["scale"], x.dtype))
    return turn(x, positions, **{**options, "scale": scale})


def constant_for_a_second_derivative(turn, x, positions, options):
    @jax.custom_vjp
    def run(x, positions):
        return turn(x, positions, **options)

    def back(positions, cotangent):
        return turn(jax.lax.stop_gradient(cotangent), -positions, **options), None

    run.defvjp(lambda x, positions: (run(x, positions), positions), back)
    return run(x, positions)


def places_of_the_first_under_vmap(turn, x, positions, options):
    @jax.custom_batching.custom_vmap
    def run(x, positions):
        return turn(x, positions, **options)

    @run.def_vmap
    def rule(size, is_mapped, x, positions):
        places = positions[0] if is_mapped[1] else positions
        each = jax.vmap(
            lambda x: turn(x, places, **options), 0 if is_mapped[0] else None
        )
        return each(x) if is_mapped[0] else jnp.stack([run(x, places)] * size), True

    return run(x, positions)


def scaled_ones_are_not_interleaved(turn, x, positions, options):
    interleaved = options["interleaved"] and options["scale"] == 1.0
    return turn(x, positions, **{**options, "interleaved": interleaved})


def places_in_the_dtype_of_x(turn, x, positions, options):
    return turn(x, positions.astype(x.dtype).astype("int32"), **options)


def gradient_not_turned_back(turn, x, positions, options):
    still = jax.lax.stop_gradient(x)
    return turn(still, positions, **options) + (x - still)


def always_float32(turn, x, positions, options):
    return turn(x, positions, **options).astype("float32")


@pytest.mark.parametrize(
    ("rule", "operation"),
    [
        ("RO1", broken(other_base)),
        ("RO1", broken(base_of_the_first_call_of_a_shape)),
        ("RO2", broken(places_of_sample_0)),
        ("RO2", broken(one_token_is_the_first)),
        ("RO2", broken(places_of_two_samples)),
        ("RO3", broken(never_interleaved, "float32", "interleaved")),
        ("RO4", broken(frequencies_of_the_whole_head, "float32", "partial")),
        ("RO5", broken(scale_ignored, "float32", "scale")),
        (
            "RO5",
            broken(scaled_ones_are_not_interleaved, "float32", "interleaved", "scale"),
        ),
        ("RO6", broken(places_in_the_dtype_of_x, "float16")),
        ("RO7", broken(gradient_not_turned_back)),
        ("RO10", broken(always_float32, "bfloat16")),
    ],
    ids=lambda value: value if isinstance(value, str) else value.mistake,
)
def test_a_broken_operation_fails_by_its_rule(rule, operation):
    report = conform(operation, max_failures=1)
    assert not report.passed
    (failure,) = report.failures
    assert (failure.rule, failure.kind) == (rule, "wrong"), report


def test_the_snippet_of_a_failure_runs(capsys):
    operation = broken(other_base)
    (failure,) = conform(operation, max_failures=1).failures
    exec(failure.snippet, {operation.__name__: operation})
    assert capsys.readouterr().out.startswith("wrong: ")


LIMITS = {
    "one sample": {"limits": {"batch": 1}},
    "a token": {"limits": {"heads": 1, "length": 1}, "dtypes": {"float16"}},
    "wide": {"multiples": {"head_dim": 64}, "dtypes": {"float32"}},
    "narrow": {
        "multiples": {"length": 16},
        "limits": {"head_dim": 4},
        "dtypes": {"bfloat16"},
    },
    "blocks": {"multiples": {"length": 128}, "dtypes": {"float32", "float64"}},
}
ALL = "interleaved", "partial", "scale"


@pytest.mark.parametrize("declared", LIMITS.values(), ids=LIMITS)
def test_calls_come_in_the_sizes_that_are_declared(declared):
    right = declaring(broken(turned_as_asked, "float32", *ALL), declared)
    report = conform(right)
    assert report.passed, str(report)
    assert not sum(result.refused for result in report.results)


@pytest.mark.parametrize("seed", [8, 18, 19])  # whose terms cancel
def test_second_derivatives_of_small_calls_are_held_to_what_differences_are(seed):
    small = {"limits": {"length": 1, "heads": 1}, "dtypes": {"float64"}}
    report = conform(declaring(broken(turned_as_asked), small), seed=seed)
    assert report.passed, str(report)


STEPS = {"limits": {"length": 1}}
BLOCKS = {"multiples": {"length": 128}}


@pytest.mark.parametrize(
    ("rule", "operation", "declared"),
    [
        ("RO5", broken(scale_ignored, "float32", *ALL), {"limits": {"batch": 1}}),
        ("RO3", broken(never_interleaved, "float32", "interleaved"), STEPS),
        ("RO4", broken(frequencies_of_the_whole_head, "float32", "partial"), STEPS),
        ("RO5", broken(scale_ignored, "float32", "scale"), STEPS),
        ("RO1", broken(second_block_not_turned), BLOCKS),
        (
            "RO3",
            broken(interleaved_ones_have_the_usual_base, "float32", "interleaved"),
            {},
        ),
        ("RO5", broken(scale_in_the_dtype_of_x, "bfloat16", "scale"), {}),
        ("RO9", broken(constant_for_a_second_derivative), {"forward_mode": False}),
        (
            "RO9",
            broken(places_of_the_first_under_vmap),
            {"differentiable": (), "forward_mode": False, "second_order": False},
        ),
    ],
    ids=lambda value: getattr(value, "mistake", str(value)),
)
def test_a_mistake_is_found_in_the_sizes_that_are_declared(rule, operation, declared):
    (failure,) = conform(declaring(operation, declared), max_failures=1).failures
    assert failure.rule == rule, str(failure)


def declaring(operation, declared):
    """The operation with other capabilities."""
    capabilities = dataclasses.replace(operation.capabilities, **declared)
    return type(operation.__name__, (operation,), {"capabilities": capabilities})


def test_sizes_that_no_call_has_are_an_error():
    operation = declaring(broken(turned_as_asked), {"limits": {"head_dim": 1}})
    with pytest.raises(ValueError, match="expected a call that fits what is declared"):
        conform(operation)


def test_products_depend_on_distances_alone():
    query, key = X, X[::-1]
    near = [rotary_oracle(a, PLACES + p) for a, p in ((query, 3), (key, 1))]
    far = [rotary_oracle(a, PLACES + p) for a, p in ((query, 52), (key, 50))]
    np.testing.assert_allclose((near[0] * near[1]).sum(3), (far[0] * far[1]).sum(3))


def test_the_oracle_turns_a_point_of_the_plane():
    x = np.array([1.0, 0.0]).reshape(1, 1, 1, 2)
    turned = rotary_oracle(x, [2], scale=0.5)[0, 0, 0]
    np.testing.assert_allclose(turned, [np.cos(1), np.sin(1)])


def test_auto_takes_what_is_not_experimental():
    found = rotary(X, PLACES)
    np.testing.assert_allclose(found, rotary_oracle(X, PLACES), atol=1e-6)
    explained = switchax.explain(kind="rotary", x=X, positions=PLACES)
    assert explained.chosen == "rotary:rotary_xla"
    names = switchax.OperationRegistry.list_implementations("rotary")
    assert names == ["rotary_pallas", "rotary_xla"]


def test_explain_says_why_the_kernel_refuses():
    answer = switchax.explain(
        kind="rotary",
        x=jax.ShapeDtypeStruct((1, 8, 2, 64), "float16"),
        positions=jax.ShapeDtypeStruct((8,), "int32"),
        pairing="interleaved",
        rotary_dim=32,
        scale=0.5,
        target="tpu",
    )
    kernel, plain = answer.candidates
    assert {refusal.field for refusal in kernel.refusals} == {
        "platform",
        "dtype",
        "interleaved",
        "partial",
        "scale",
    }
    assert plain.refusals == ()


def test_the_kernel_refuses_another_pairing():
    with pytest.raises(switchax.UnsupportedError, match="'interleaved' is not among"):
        rotary(X, PLACES, pairing="interleaved", operation="rotary_pallas")


def test_an_instance_is_called_likewise():
    operation = switchax.OperationRegistry.create("rotary_pallas")
    found = operation(X, PLACES, base=500.0)
    np.testing.assert_allclose(found, rotary_oracle(X, PLACES, base=500.0), atol=1e-6)


def test_runtime_dtype_is_computed_in_and_cast_back():
    metadata = switchax.OperationMetadata(runtime_dtype="bfloat16")
    found = rotary(X, PLACES, metadata=metadata)
    assert found.dtype == jnp.float32
    np.testing.assert_array_equal(found, found.astype("bfloat16").astype("float32"))


def test_a_call_without_entries_has_none():
    for name in ("rotary_xla", "rotary_pallas"):
        assert rotary(X[:, :0], PLACES[:0], operation=name).shape == (2, 0, 3, 8)


def test_symbolic_sizes_are_for_plain_jax():
    (batch,) = jax.export.symbolic_shape("batch")
    x = jax.ShapeDtypeStruct((batch, 5, 3, 8), "float32")

    def turn(name):
        return jax.eval_shape(lambda x: rotary(x, PLACES, operation=name), x)

    assert turn("rotary_xla").shape == x.shape
    with pytest.raises(switchax.UnsupportedError, match="a number"):
        turn("rotary_pallas")


@pytest.mark.skipif(jax.device_count() < 2, reason="needs two devices")
@pytest.mark.parametrize("axis", ["Auto", "Explicit"])
def test_a_mesh_splits_plain_jax_and_is_refused_by_the_kernel(axis):
    kind = getattr(jax.sharding.AxisType, axis)
    mesh = jax.make_mesh((2,), ("dp",), (kind,), devices=jax.devices()[:2])
    with jax.set_mesh(mesh):
        spec = jax.sharding.PartitionSpec("dp")
        x = jax.device_put(X, jax.sharding.NamedSharding(mesh, spec))
        found = jax.jit(lambda x: rotary(x, PLACES, operation="rotary_xla"))(x)
        with pytest.raises(switchax.UnsupportedError, match="mesh"):
            rotary(x, PLACES, operation="rotary_pallas")
    assert found.sharding.shard_shape(found.shape) == (1, 5, 3, 8)
    np.testing.assert_allclose(found, rotary_oracle(X, PLACES), atol=1e-6)


@pytest.mark.parametrize(
    ("changed", "error", "text"),
    [
        ({"pairs": "half"}, TypeError, "unknown keyword 'pairs'"),
        ({"x": None}, TypeError, "expected x to be an array"),
        ({"x": X.astype("int32")}, TypeError, "x of a floating dtype, got x of int32"),
        ({"x": X[0]}, ValueError, r"got x of shape \[5, 3, 8\]"),
        ({"x": X[..., :7]}, ValueError, "an even head_dim, got head_dim=7; pass"),
        ({"positions": X[0, :, 0, 0]}, TypeError, "positions of int32 or narrower"),
        ({"positions": PLACES.astype("uint32")}, TypeError, "got positions of uint32"),
        ({"positions": PLACES[:4]}, ValueError, r"shape \[5\] or \[2, 5\], got .*4"),
        ({"positions": 0}, TypeError, "expected positions to be an array"),
        ({"rotary_dim": 3}, ValueError, "got rotary_dim=3"),
        ({"rotary_dim": 10}, ValueError, "to head_dim=8, got rotary_dim=10"),
        ({"rotary_dim": 4.0}, TypeError, "rotary_dim to be a static int"),
        ({"pairing": "halves"}, ValueError, "did you mean 'half'"),
        ({"scale": 2.0}, ValueError, "got scale=2.0"),
        ({"scale": 0.0}, ValueError, "got scale=0.0"),
        ({"base": 0.5}, ValueError, "got base=0.5"),
        ({"base": "10000"}, TypeError, "base to be a static real number"),
    ],
)
def test_a_wrong_call_is_told_what_to_do(changed, error, text):
    arguments = {"x": X, "positions": PLACES, **changed}
    with pytest.raises(error, match=text) as caught:
        rotary(**arguments)
    assert str(caught.value).startswith("rotary: expected ")
    assert "; " in str(caught.value)
