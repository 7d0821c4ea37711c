"""The device a program will run on, present or described."""

import re
import types

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

import switchax
from switchax import OperationRegistry, Target, UnsupportedError, current_target
from switchax.target import target_of_device

from .standins import registration, stand_in

TPU = AbstractDevice(device_kind="TPU v5 lite", num_cores=None, platform="tpu")
X = jax.ShapeDtypeStruct((2, 128, 4, 64), "bfloat16")


def fake(platform, device_kind="", compute_capability=None):
    return types.SimpleNamespace(
        platform=platform,
        device_kind=device_kind,
        compute_capability=compute_capability,
    )


@pytest.mark.parametrize(
    ("text", "platform", "generation"),
    [
        ("cpu", "cpu", ""),
        (" TPU ", "tpu", ""),
        ("tpu:v5e", "tpu", "v5e"),
        ("tpu:v7x", "tpu", "7x"),
        ("cuda:h100", "cuda", "sm90"),
        ("cuda:sm_80", "cuda", "sm80"),
        ("cuda:sm120", "cuda", "sm120"),
        ("rocm:gfx942", "rocm", "gfx942"),
        ("gpu", "cuda", ""),
    ],
)
def test_parse_reads_platform_and_generation(text, platform, generation):
    target = Target.parse(text)
    assert (target.platform, target.generation) == (platform, generation)
    assert Target.parse(target) is target


def test_a_target_is_written_as_it_is_read():
    for text in ("cpu", "tpu:v6e", "cuda:sm90", "rocm:gfx950"):
        assert str(Target.parse(text)) == text


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("tpv", "(did you mean 'tpu'?)"),
        ("", "for example 'tpu:v5e'"),
        ("tpu:v5", "such as v2"),
        ("tpu:v5ee", "(did you mean 'v5e'?)"),
        ("cuda:h10", "(did you mean 'h100'?)"),
        ("rocm:mi300", "such as gfx90a"),
        (None, "got target=None"),
    ],
    ids=repr,
)
def test_parse_says_what_it_expected(text, part):
    with pytest.raises(ValueError, match=r"^target: expected") as caught:
        Target.parse(text)
    assert part in str(caught.value)


@pytest.mark.parametrize(
    ("device", "expected"),
    [
        (fake("cpu", "cpu"), "cpu"),
        (fake("tpu", "TPU v4"), "tpu:v4"),
        (fake("tpu", "TPU v5 lite"), "tpu:v5e"),
        (fake("tpu", "TPU v5e"), "tpu:v5e"),
        (fake("tpu", "TPU v5"), "tpu:v5p"),
        (fake("tpu", "TPU v5p"), "tpu:v5p"),
        (fake("tpu", "TPU v6 lite"), "tpu:v6e"),
        (fake("tpu", "TPU7x"), "tpu:7x"),
        (fake("gpu", "NVIDIA H100 80GB HBM3", "9.0"), "cuda:sm90"),
        (fake("cuda", "NVIDIA B200", "10.0"), "cuda:sm100"),
        (fake("gpu", "NVIDIA A100-SXM4-40GB"), "cuda"),
        (fake("cuda", "NVIDIA L4"), "cuda:sm89"),
        (fake("gpu", "AMD Instinct MI300X", "gfx942:sramecc+"), "rocm:gfx942"),
        (fake("rocm", "AMD Instinct MI300X", "gfx942"), "rocm:gfx942"),
        (fake("gpu", "Radeon"), "rocm"),
    ],
    ids=str,
)
def test_a_device_has_a_target(device, expected):
    assert str(target_of_device(device)) == expected


def test_the_default_device_is_the_last_resort():
    assert current_target() == Target("cpu")
    assert current_target(backend="tpu") == Target("tpu")
    assert current_target([jnp.ones(2)], backend="tpu") == Target("cpu")
    with jax.default_device(jax.devices("cpu")[0]):
        assert current_target() == Target("cpu")


def test_tracers_have_no_device():
    seen = []
    jax.jit(lambda x: seen.append(current_target([x], backend="tpu")))(jnp.ones(2))
    assert seen == [Target("tpu")]


def test_the_mesh_comes_before_arguments_and_backend():
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))
    with jax.set_mesh(mesh):
        assert current_target(backend="tpu") == Target("cpu")
    with jax.sharding.use_abstract_mesh(tpu_mesh()):
        assert current_target([jnp.ones(2)], backend="rocm").generation == "v5e"


def tpu_mesh():
    return AbstractMesh((4,), ("dp",), (AxisType.Auto,), abstract_device=TPU)


@pytest.fixture
def flash():
    with registration() as register:
        yield register(
            stand_in("tpu_flash", "flash", platforms={"tpu"}, cost=switchax.Cost.FUSED)
        )


def test_an_abstract_tpu_mesh_chooses_for_the_tpu(flash):
    def attend(x):
        return switchax.attention(x, x, x)

    with jax.sharding.use_abstract_mesh(tpu_mesh()):
        assert OperationRegistry.get("flash") is flash
        jax.eval_shape(attend, X)
    decision = switchax.decisions.recorded()[-1]
    assert decision.chosen.entry.operation is flash
    assert str(decision.target) == "tpu:v5e"
    jax.eval_shape(attend, X)
    assert switchax.decisions.recorded()[-1].target == Target("cpu")


@pytest.mark.usefixtures("standard_promotion")
def test_explain_takes_a_mesh_or_a_target(flash):
    arrays = {"query": X, "key": X, "value": X}
    on_mesh = switchax.explain(**arrays, mesh=tpu_mesh())
    assert on_mesh.chosen == switchax.explain(**arrays, target="tpu:v5e").chosen
    assert on_mesh.chosen.endswith(":tpu_flash")
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))
    assert switchax.explain(**arrays, mesh=mesh).target == Target("cpu")
    wide = {n: jax.ShapeDtypeStruct(x.shape, "float32") for n, x in arrays.items()}
    assert switchax.explain(**wide).chosen == "chunked:chunked"


@pytest.mark.parametrize(
    ("given", "kind", "says"),
    [
        (("nope",), ValueError, "platform='nope'; Target.parse reads"),
        (("cpv",), ValueError, r"platform='cpv' \(did you mean 'cpu'\?\)"),
        (("gpu",), ValueError, "platform='gpu'.*Target.parse reads"),
        ((3,), TypeError, "platform to be a str, got platform=3"),
        (("tpu", 3), TypeError, "device_kind to be a str, got device_kind=3"),
        (("tpu", "", 5), TypeError, "generation to be a str, got generation=5"),
    ],
)
def test_a_target_checks_itself(given, kind, says):
    with pytest.raises(kind, match=f"^Target: expected .*{says}"):
        Target(*given)


def test_a_device_of_another_platform_is_a_target_that_nothing_honours():
    target = target_of_device(fake("neuron", "NC_v3"))
    assert target == Target("neuron", "NC_v3")
    answer = switchax.explain(query=X, key=X, value=X, target=target)
    assert answer.chosen is None
    assert "platform=neuron" in answer.error


@pytest.mark.parametrize("arrays", [3, None, "tpu", {"query": 1}, jnp.ones(2)])
def test_arrays_are_a_sequence_of_arrays(arrays):
    with pytest.raises(TypeError, match=r"^current_target: expected arrays to be a s"):
        current_target(arrays)


CALL = {"query": X, "key": X, "value": X}


@pytest.mark.parametrize(
    ("question", "kind", "says"),
    [
        ({"request": 3}, TypeError, r"request=3 \(int\)"),
        ({"request": "sdpa"}, TypeError, r"request='sdpa' \(str\)"),
        ({**CALL, "mesh": 3}, TypeError, r"a Mesh or AbstractMesh, got mesh=3 \(int\)"),
        ({**CALL, "target": "tpu", "mesh": tpu_mesh()}, TypeError, "got both; pass"),
        ({**CALL, "target": "nope"}, ValueError, "target='nope'"),
        ({**CALL, "kind": 3}, TypeError, r"kind=3 \(int\)"),
        ({**CALL, "kind": []}, TypeError, r"kind=\[\] \(list\)"),
        ({**CALL, "kind": "atention"}, ValueError, "did you mean 'attention'"),
        ({**CALL, "operation": 3}, TypeError, "operation=3"),
        ({**CALL, "operation": ["auto", "sdpa"]}, ValueError, "'auto' alone"),
    ],
    ids=str,
)
def test_explain_says_what_it_expected(question, kind, says):
    with pytest.raises(kind, match=says) as caught:
        switchax.explain(**question)
    assert re.match(r"(explain|target): expected .+, got .+; .+", str(caught.value))


def test_a_request_of_another_kind_is_not_planned():
    request = switchax.Request("attention", frozenset(), "float32", "bthd", "m")
    with pytest.raises(TypeError, match=r"^attention: expected an AttentionRequ"):
        switchax.explain(request)


def test_an_abstract_mesh_without_a_device_says_nothing():
    mesh = AbstractMesh((4,), ("dp",), (AxisType.Auto,))
    assert switchax.explain(**CALL, mesh=mesh).target == Target("cpu")
    empty = AbstractMesh((), ())
    assert switchax.explain(**CALL, mesh=empty).target == Target("cpu")


def by_platform(name):
    """Has a method of its own on CPU and on TPU."""

    def forward(self, query, key, value, *, softmax_scale):
        return query

    methods = {"forward_cpu": forward, "forward_tpu": forward}
    return stand_in(name, methods=methods, platforms={"cpu", "tpu"})


def test_a_backend_other_than_the_arguments_is_refused_unless_it_means_the_same():
    metadata = switchax.OperationMetadata(backend="tpu")
    x = jnp.ones((1, 4, 2, 8))
    with registration() as register:
        register(by_platform("two_ways"))
        operation = OperationRegistry.create("two_ways", metadata)
        for attend in (
            lambda: switchax.attention(
                x, x, x, operation="two_ways", metadata=metadata
            ),
            lambda: operation(x, x, x),
        ):
            says = "^two_ways: expected metadata.backend cpu, got metadata.backend=tpu"
            with pytest.raises(UnsupportedError, match=says) as caught:
                attend()
            ((refusal,),) = caught.value.refusals.values()
            assert (refusal.code, refusal.actual, refusal.allowed) == (
                "backend",
                "tpu",
                "cpu",
            )
    vanilla = OperationRegistry.create("vanilla", metadata)
    assert vanilla(x, x, x).attention_outputs.shape == x.shape
