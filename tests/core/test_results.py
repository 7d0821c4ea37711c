"""A forward method's result is looked at: no wrong shape or dtype reaches a model."""

import re

import jax
import jax.numpy as jnp
import pytest

import switchax
from switchax import ATTENTION, BaseOperation, Capabilities, RegistrationError

from .kernels import kernel
from .standins import registration

X = jnp.ones((2, 3, 2, 4))


def operation_returning(make):
    class Answers(BaseOperation):
        kind = ATTENTION
        capabilities = Capabilities(
            features={"lse"}, dtypes={"float16", "bfloat16", "float32"}
        )

        @classmethod
        def get_impl_name(cls):
            return "answers"

        def forward_native(self, query, key, value, *, softmax_scale):
            return make(query)

    return Answers


LSE = jnp.zeros((2, 2, 3))
WRONG = {
    "layout": lambda q: (q.swapaxes(1, 2), LSE),
    "scalar": lambda q: (q.sum(), LSE),
    "heads": lambda q: (jnp.concatenate([q, q], 2), LSE),
    "integer": lambda q: (q.astype("int32"), LSE),
    "complex": lambda q: (q.astype("complex64"), LSE),
    "none": lambda q: None,
    "list": lambda q: [q, LSE],
    "lse of another layout": lambda q: (q, LSE.swapaxes(1, 2)),
    "lse rounded": lambda q: (q, LSE.astype("bfloat16")),
    "lse of integers": lambda q: (q, LSE.astype("int32")),
    "swapped": lambda q: (LSE, q),
    "a shape alone": lambda q: (jax.ShapeDtypeStruct(q.shape, q.dtype), LSE),
}


@pytest.mark.parametrize("make", WRONG.values(), ids=WRONG)
def test_a_wrong_result_is_one_clear_error(make):
    with registration() as register:
        register(operation_returning(make))
        with pytest.raises(RegistrationError, match=r"^answers: attention: expected"):
            switchax.attention(X, X, X, operation="answers", return_lse=True)


def test_two_outputs_are_taken_for_an_output_and_its_lse():
    with registration() as register:
        register(operation_returning(lambda q: (q, q)))
        with pytest.raises(RegistrationError, match="a pair is an output and its lse"):
            switchax.attention(X, X, X, operation="answers")


def test_an_lse_that_is_no_array_is_refused_unasked():
    with registration() as register:
        register(operation_returning(lambda q: (q, 1)))
        with pytest.raises(RegistrationError, match="lse to be an array or None"):
            switchax.attention(X, X, X, operation="answers")


TOO_NARROW = [("float32", "bfloat16"), ("bfloat16", "float16"), ("float16", "bfloat16")]


@pytest.mark.parametrize(("asked", "returned"), TOO_NARROW)
def test_an_output_that_was_rounded_is_not_taken_for_one_that_was_not(asked, returned):
    x = X.astype(asked)
    with registration() as register:
        register(operation_returning(lambda q: q.astype(returned)))
        with pytest.raises(RegistrationError, match=f"holds {asked}.*{returned}"):
            switchax.attention(x, x, x, operation="answers")


def test_an_output_in_float32_is_rounded_to_query_s_dtype():
    x = X.astype("bfloat16")
    with registration() as register:
        register(operation_returning(lambda q: q.astype("float32")))
        assert switchax.attention(x, x, x, operation="answers").dtype == x.dtype


def test_what_is_returned_unasked_is_looked_at():
    with registration() as register:
        register(operation_returning(lambda q: (q, q)))
        with pytest.raises(RegistrationError, match="expected lse of shape"):
            switchax.attention(X, X, X, operation="answers")


def test_shardable_is_of_opaque_operations():
    with pytest.raises(RegistrationError, match="of an opaque operation only"):
        Capabilities(shardable={"batch"})


def test_capabilities_explain_every_feature_and_size():
    words = set(re.findall(r"\w+", Capabilities.__doc__))
    assert words >= {*switchax.ATTENTION.features, *switchax.ATTENTION.sizes}


def test_what_core_needs_is_not_laid_on_the_user():
    cls = operation_returning(lambda q: (q, LSE))
    cls.capabilities = Capabilities(features={"lse"}, multiples={"kv_len": 64})
    bias = jnp.ones(X.shape[1:2] * 2)
    with registration() as register:
        register(cls)
        with pytest.raises(switchax.UnsupportedError) as error:
            switchax.attention(X, X, X, bias=bias, operation="answers")
    (reasons,) = error.value.refusals.values()
    assert [r.field for r in reasons] == ["bias", "kv_lengths"]
    assert reasons[0].actual == f"float32[{len(bias)},{len(bias)}]"
    assert reasons[1].actual == f"needed to pad (kv_len {len(bias)} to 64)"
    assert "leave it out" not in reasons[1].hint


def test_a_right_result_passes():
    with registration() as register:
        register(operation_returning(lambda q: (q, LSE)))
        out = switchax.attention(X, X, X, operation="answers", return_lse=True)
    assert out.attention_outputs.dtype == X.dtype


@pytest.mark.parametrize(
    "arguments",
    [
        {"multiples": {"kvlen": 4}},
        {"limits": {"headdim": 2}},
        {"shardable": {"hedas"}, "opaque": True},
    ],
)
def test_a_misspelt_size_does_not_register(arguments):
    cls = operation_returning(lambda q: q)
    cls.capabilities = Capabilities(features={"lse"}, **arguments)
    with pytest.raises(RegistrationError, match="did you mean"):
        switchax.OperationRegistry.register(cls)


def test_a_size_that_core_cannot_split_does_not_register():
    cls = operation_returning(lambda q: q)
    cls.capabilities = Capabilities(
        features={"lse"}, opaque=True, shardable={"batch", "kv_len"}
    )
    with pytest.raises(RegistrationError, match=r"'kv_len'; known are batch, heads"):
        switchax.OperationRegistry.register(cls)


@pytest.mark.parametrize("field", ["opaque", "experimental", "priority"])
def test_fields_of_another_type_are_refused(field):
    with pytest.raises(RegistrationError, match=f"expected {field} to be"):
        Capabilities(**{field: "high"})


def test_refusals_that_are_none_cost_only_the_operation():
    cls = operation_returning(lambda q: q)
    cls.refusals = classmethod(lambda cls, request, target: ["no"])
    with registration() as register:
        register(cls)
        switchax.attention(X, X, X, operation="vanilla")
        with pytest.raises(switchax.UnsupportedError, match="type Refusal"):
            switchax.attention(X, X, X, operation="answers")


@pytest.mark.parametrize(
    "options",
    [
        {"logits_soft_cap": 1e38},
        {"logits_soft_cap": 1e39},
        {"logits_soft_cap": 1e-39},
        {"softmax_scale": 1e39},
    ],
)
def test_numbers_beyond_the_logits_dtype_are_errors(options):
    (name,) = options
    with pytest.raises(ValueError, match=f"{name} between"):
        switchax.attention(X, X, X, **options)


def test_a_forward_method_is_given_what_the_contract_says():
    calls = []
    with registration() as register:
        register(kernel("spy", set(ATTENTION.features) - {"lse", "weights"}, calls))
        switchax.attention(X, X, X, operation="spy", window=(None, None))
        switchax.attention(
            *(X, X, X),
            operation="spy",
            bias=jnp.ones((3,), "bfloat16"),
            mask=jnp.ones((2, 1, 3, 1), bool),
            kv_lengths=jnp.asarray([7, -1], "int8"),
            causal=True,
            window=[1, None],
            q_offset=jnp.int32(2),
            logits_soft_cap=2,
            softmax_aux=jnp.ones((2,)),
            dropout_prob=0.5,
            dropout_key=jax.random.key(0, impl="rbg"),
        )
    absent, given = calls
    for name in ("query", "key", "value"):
        del absent[name]
    static = {n: absent.pop(n) for n in ("softmax_scale", "causal", "dropout_prob")}
    assert static == {"softmax_scale": 0.5, "causal": False, "dropout_prob": 0.0}
    assert absent.pop("q_offset") == 0
    assert all(x is None for x in absent.values()), absent
    for name, shape, dtype in (
        ("bias", (1, 1, 1, 3), "bfloat16"),
        ("mask", (2, 1, 3, 1), "bool"),
        ("kv_lengths", (2,), "int32"),
        ("q_offset", (), "int32"),
        ("softmax_aux", (2,), "float32"),
    ):
        assert (given[name].shape, given[name].dtype) == (shape, dtype), name
    assert (given["causal"], given["window"]) == (True, (1, None))
    assert type(given["logits_soft_cap"]) is float
    assert jax.random.key_impl(given["dropout_key"]) == "rbg"
