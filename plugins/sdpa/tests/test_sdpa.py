"""What is sdpa's own: corrections around JAX's function, and cuDNN's limits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import switchax
from switchax import Target
from switchax.kinds.attention.oracle import attention_oracle
from switchax_sdpa import kernel
from switchax_sdpa import operation as plugin
from switchax_sdpa.operation import CudnnAttention, SdpaAttention, cudnn_refusals

CAUSAL = {"softmax_scale": 0.5, "causal": True, "window": None}


@pytest.fixture(autouse=True)
def standard_promotion():
    with jax.numpy_dtype_promotion("standard"):
        yield


def operands(dtype: str = "float32", kv_len: int = 6) -> tuple[jax.Array, ...]:
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = [(1, 6, 2, 8), (1, kv_len, 2, 8), (1, kv_len, 2, 8)]
    return tuple(
        jax.random.normal(key, shape, dtype)
        for key, shape in zip(keys, shapes, strict=True)
    )


def test_what_jax_does_otherwise_is_as_measured():
    # If one of these fails, JAX has changed, and a correction may go.
    q, k, v = operands()
    mask = jnp.zeros((1, 1, 6, 6), bool)
    attend = jax.numpy_dtype_promotion("standard")(jax.nn.dot_product_attention)
    mean = attend(q, k, v, mask=mask)
    np.testing.assert_allclose(mean[0, 0], v.mean(axis=1)[0], atol=1e-6)
    hidden = jnp.broadcast_to(jnp.arange(6) < 5, (1, 1, 6, 6))
    leak = attend(q, k, v.at[:, 5].set(jnp.nan), mask=hidden)
    assert np.isnan(leak).all()
    half = (x.astype(jnp.bfloat16) for x in (q, k, v))
    _, lse = attend(*half, return_residual=True)
    assert lse.dtype == jnp.bfloat16


def test_rows_that_see_nothing_give_zero():
    q, k, v = operands()
    mask = jnp.arange(6)[:, None] > 2
    output, _, lse = switchax.attention(
        q, k, v, mask=mask, operation="sdpa", return_lse=True
    )
    assert not output[:, :3].any()
    assert (lse[:, :, :3] == -jnp.inf).all()
    assert np.isfinite(lse[:, :, 3:]).all()


def test_a_bias_of_minus_infinity_beside_a_mask_hides_the_key():
    q, k, v = operands()
    mask = jnp.arange(6) != 4
    bias = jnp.where(jnp.arange(6) < 5, -jnp.inf, 0.0)
    attend = {"operation": "sdpa", "mask": mask}
    np.testing.assert_allclose(
        switchax.attention(q, k, v, bias=bias, **attend),
        jnp.broadcast_to(v[:, 5:], v.shape),
        atol=1e-6,
    )


def test_a_bias_of_the_smallest_number_still_beats_what_is_masked():
    q, k, v = operands()
    bias = jnp.full((1, 1, 6, 6), jnp.finfo(jnp.float32).min)
    options = {"bias": bias, "causal": True, "return_lse": True}
    found = switchax.attention(q, k, v, operation="sdpa", **options)
    expected = attention_oracle(q, k, v, bias=bias, causal=True)
    np.testing.assert_allclose(found.attention_outputs, expected.output, atol=1e-5)
    np.testing.assert_allclose(found.lse, expected.lse, rtol=1e-6)


def test_biases_near_the_smallest_number_keep_their_order_and_gradient():
    q, k, v = operands()
    least = float(jnp.finfo(jnp.float32).min)
    bias = jnp.full((1, 1, 6, 6), least).at[..., 1].set(0.9 * least)
    options = {"mask": jnp.arange(6) < 3, "bias": bias}
    found = switchax.attention(q, k, v, operation="sdpa", **options)
    np.testing.assert_allclose(found, jnp.broadcast_to(v[:, 1:2], v.shape), atol=1e-6)

    def loss(bias, name):
        options["bias"] = bias
        return (switchax.attention(q, k, v, operation=name, **options) ** 2).sum()

    bias = jnp.full((1, 1, 6, 6), least)
    found, expected = (jax.grad(loss)(bias, name) for name in ("sdpa", "vanilla"))
    assert abs(expected).max() > 0.1
    np.testing.assert_allclose(found, expected, atol=1e-6)


def test_a_bias_lets_no_nan_of_a_later_key_into_an_earlier_row():
    q, k, v = operands()
    k = k.at[:, 5].set(jnp.nan)
    options = {"causal": True, "bias": jnp.zeros((6, 6))}
    found = switchax.attention(q, k, v, operation="sdpa", **options)
    expected = switchax.attention(q, k, v, operation="vanilla", **options)
    assert np.isfinite(found[:, :5]).all()
    np.testing.assert_allclose(found, expected, atol=1e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_lse_is_refused(dtype):
    q, k, v = operands(dtype)
    with pytest.raises(switchax.UnsupportedError, match="float32"):
        switchax.attention(q, k, v, operation="sdpa", return_lse=True)


@pytest.mark.parametrize(
    ("target", "change", "field"),
    [
        ("cuda:sm75", {}, "generation"),
        ("cuda:a100", {"head_dim": 136}, "head_dim"),
        ("cuda:h100", {"head_dim": 264}, "head_dim"),
        ("cuda:h100", {"head_dim": 60}, "head_dim"),
        ("cuda:h100", {"has_mask": True, "q_len": 7}, "q_len, kv_len with a mask"),
        ("cuda:h100", {"causal": False, "window": (2, 2)}, "window"),
        ("cuda:h100", {"dtype": "float16", "has_mask": True}, "dtype with a mask"),
    ],
)
def test_cudnn_refuses_what_jax_would_raise_for(target, change, field):
    fits = {
        "dtype": "bfloat16",
        "q_len": 8,
        "kv_len": 8,
        "head_dim": 64,
        "causal": True,
        "window": None,
        "has_mask": False,
    }
    assert not cudnn_refusals(Target.parse("cuda:h100"), **fits)
    reasons = cudnn_refusals(Target.parse(target), **{**fits, **change})
    assert [reason.field for reason in reasons] == [field]


@pytest.mark.parametrize(
    ("operation", "dtype", "implementation"),
    [
        (CudnnAttention, "bfloat16", "cudnn"),
        (SdpaAttention, "bfloat16", "cudnn"),
        (SdpaAttention, "float32", "xla"),
    ],
)
def test_on_cuda_cudnn_runs_where_it_fits(
    monkeypatch, operation, dtype, implementation
):
    asked = []

    def record(q, *_, implementation, **__):
        asked.append(implementation)
        return q

    monkeypatch.setattr(kernel.jax.nn, "dot_product_attention", record)
    monkeypatch.setattr(plugin, "cudnn_problem", lambda: "")
    options = {**CAUSAL, "bias": None, "mask": None}
    if operation is SdpaAttention:
        options["return_lse"] = False
    operation().forward_cuda(*operands(dtype), **options)
    assert asked == [implementation]


def test_cudnn_on_a_cpu_is_one_clear_error():
    with pytest.raises(switchax.UnsupportedError, match="expected platform cuda") as e:
        switchax.attention(*operands("bfloat16"), operation="cudnn")
    (refusals,) = e.value.refusals.values()
    assert refusals[0].actual == "cpu"


def test_without_cudnn_a_program_for_cuda_takes_xla_or_is_refused(monkeypatch):
    def lacking(q, *_, implementation, **__):
        if implementation == "cudnn":
            raise RuntimeError("cuDNN is not detected.")
        return q

    monkeypatch.setattr(kernel.jax.nn, "dot_product_attention", lacking)
    plugin.cudnn_problem.cache_clear()
    options = {**CAUSAL, "bias": None, "mask": None}
    try:
        SdpaAttention().forward_cuda(*operands("bfloat16"), **options, return_lse=False)
        says = r"^cudnn: expected .*cuDNN is not detected; install JAX for CUDA, or .*"
        with pytest.raises(switchax.UnsupportedError, match=says):
            CudnnAttention().forward_cuda(*operands("bfloat16"), **options)
    finally:
        plugin.cudnn_problem.cache_clear()


@pytest.mark.parametrize("backend", ["cuda", "gpu"])
@pytest.mark.parametrize("operation", ["auto", "sdpa", "cudnn"])
def test_a_backend_that_is_not_here_is_never_an_error_of_jax(backend, operation):
    q, k, v = operands("bfloat16")
    metadata = switchax.OperationMetadata(backend=backend)

    def attend(q, k, v):
        return switchax.attention(q, k, v, operation=operation, metadata=metadata)

    if operation == "auto":
        assert attend(q, k, v).shape == q.shape
    else:
        with pytest.raises(switchax.UnsupportedError, match=f"^{operation}: expected "):
            attend(q, k, v)
    with pytest.raises(switchax.UnsupportedError, match=r"^(sdpa|cudnn): expected "):
        jax.jit(attend)(q, k, v)


@pytest.mark.parametrize("axis", ["batch", "q_len", "heads", "head_dim"])
def test_symbolic_sizes_are_honoured_or_refused(axis):
    n = export.symbolic_shape("n")[0]
    sizes = {"batch": 2, "q_len": 6, "heads": 2, "head_dim": 8, axis: n}
    x = jax.ShapeDtypeStruct(tuple(sizes.values()), "bfloat16")
    call = {"query": x, "key": x, "value": x, "softmax_scale": 1.0, "target": "tpu"}
    plain = switchax.explain(**call, operation="sdpa")
    assert plain.chosen == "sdpa:sdpa"
    causal = switchax.explain(**call, causal=True, operation="sdpa")
    assert (causal.chosen is None) is (axis == "q_len")
    fused = switchax.explain(**{**call, "target": "cuda:h100"}, operation="cudnn")
    assert f"{axis}=n" in fused.error


@pytest.mark.parametrize(("axis", "one"), [("kv_len", 1), ("head_dim", 3)])
def test_products_that_jax_cannot_compile_on_a_cpu_are_refused(axis, one):
    shape = [1, 5, 2, 8]
    shape[one] = 1
    sizes = {"query": [1, 5, 2, shape[3]], "key": [1, shape[1], 1, shape[3]]}
    call = {n: jnp.ones(size, "bfloat16") for n, size in sizes.items()}
    call["value"] = call["key"]
    what = f"{axis}=1;" if jax.__version_info__ < (0, 11) else "dtype=bfloat16;"
    with pytest.raises(switchax.UnsupportedError, match=what):
        switchax.attention(**call, operation="sdpa")
    wide = {name: array.astype("float32") for name, array in call.items()}
    assert (switchax.attention(**wide, operation="sdpa") == 1).all()


def test_bfloat16_is_refused_where_jax_cannot_lower_its_gradient():
    q, k, v = operands("bfloat16")

    def loss(q):
        return jax.nn.dot_product_attention(q, k, v).astype("float32").sum()

    with jax.numpy_dtype_promotion("strict"):
        with pytest.raises(jax.dtypes.TypePromotionError):  # if not, JAX has changed
            jax.jit(jax.grad(loss))(q)
        named = {"query": q, "key": k, "value": v, "operation": "sdpa"}
        refused = switchax.explain(**named, target="tpu").error
        assert "jax_numpy_dtype_promotion='strict'; " in refused
        wide = (x.astype("float32") for x in (q, k, v))
        assert switchax.attention(*wide, operation="sdpa").shape == q.shape


def test_what_was_chosen_under_another_promotion_is_not_remembered():
    q, k, v = operands("bfloat16", kv_len=19)  # of no other test
    named = {"query": q, "key": k, "value": v, "operation": "sdpa", "target": "tpu"}
    for promotion, chosen in (("standard", "sdpa:sdpa"), ("strict", None)) * 2:
        with jax.numpy_dtype_promotion(promotion):
            assert switchax.explain(**named).chosen == chosen


def test_sums_in_bfloat16_are_as_measured():
    # If this fails, XLA has changed, and a refusal may go.
    rng = np.random.default_rng(0)
    shapes = [(2, 8, 17, 64), (2, 8, 2048, 64), (2, 8, 2048, 64)]
    q, k, v = (rng.normal(size=shape) for shape in shapes)
    operands = [jnp.asarray(x, "bfloat16") for x in (q, k, 1 + v / 8)]

    def attend(*operands):
        turned = (x.swapaxes(1, 2) for x in operands)
        return jax.nn.dot_product_attention(*turned)

    found = np.asarray(jax.jit(attend)(*operands)).astype("float64")
    expected = attention_oracle(*operands, layout="bhtd").output.swapaxes(1, 2)
    units = np.abs(found - expected).max() * 2**8
    is_newer = jax.__version_info__ >= (0, 11)
    assert units > 8 if is_newer else units < 2
    call = dict(zip(("query", "key", "value"), operands, strict=True))
    chosen = switchax.explain(**call, layout="bhtd", operation="sdpa").chosen
    assert (chosen is None) is is_newer
