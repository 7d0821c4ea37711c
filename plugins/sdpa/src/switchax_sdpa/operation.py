"""The operations "sdpa" and "cudnn"."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import jax
from jax import Array

from switchax import (
    ATTENTION,
    AttentionRequest,
    BaseOperation,
    Capabilities,
    Cost,
    OperationRegistry,
    Refusal,
    Request,
    Target,
    UnsupportedError,
    current_target,
)
from switchax.errors import house_message
from switchax.kinds.attention import sees_everything

from .kernel import Implementation, attend

__all__ = ["CudnnAttention", "SdpaAttention"]

FEATURES = {"bias", "mask", "causal", "window", "gqa"}


def _attend(
    implementation: Implementation,
    query: Array,
    key: Array,
    value: Array,
    **options: Any,
) -> Any:
    output, lse = attend(query, key, value, implementation=implementation, **options)
    return output if lse is None else (output, lse)


@OperationRegistry.register
class SdpaAttention(BaseOperation):
    """JAX's own attention: XLA, which writes the scores, or cuDNN where it fits."""

    kind = ATTENTION
    capabilities = Capabilities(
        platforms={"cpu", "gpu", "tpu"},
        dtypes={"float16", "bfloat16", "float32"},
        features=FEATURES | {"lse"},
        differentiable={"query", "key", "value", "bias"},
        cost=Cost.MATERIALISES,
        priority=10,
        # On CUDA it may be cuDNN, which has reverse mode alone.
        forward_mode={"cpu", "rocm", "tpu"},
        second_order={"cpu", "rocm", "tpu"},
    )

    @classmethod
    def get_impl_name(cls) -> str:
        """Returns "sdpa"."""
        return "sdpa"

    @classmethod
    def refusals(cls, request: Request, target: Target) -> Iterable[Refusal]:
        """Refuses what comes back rounded (R8), or does not compile."""
        if request.dtype == "float16" and target.platform in ("cpu", "tpu"):
            hint = "JAX asks for a product that the platform lacks; cast to float32"
            allowed = "float32" if target.platform == "cpu" else "bfloat16, float32"
            yield Refusal("rule", "dtype", "float16", allowed, hint)
        yield from symbolic_refusals(request)
        yield from _bfloat16_refusals(request, target)
        yield from _strict_refusals(request)
        if "lse" in request.features and request.dtype != "float32":
            hint = "its lse is rounded to the operands' dtype; cast to float32"
            yield Refusal(
                "rule", "dtype with return_lse", request.dtype, "float32", hint
            )

    def forward_native(
        self,
        query: Array,
        key: Array,
        value: Array,
        *,
        softmax_scale: float,
        bias: Array | None,
        mask: Array | None,
        causal: bool,
        window: tuple[int | None, int | None] | None,
        return_lse: bool,
    ) -> Any:
        """Computes attention by XLA; see `switchax.attention` for the arguments."""
        return _attend(
            "xla",
            query,
            key,
            value,
            softmax_scale=softmax_scale,
            bias=bias,
            mask=mask,
            causal=causal,
            window=window,
            return_lse=return_lse,
        )

    def forward_cuda(
        self,
        query: Array,
        key: Array,
        value: Array,
        *,
        softmax_scale: float,
        bias: Array | None,
        mask: Array | None,
        causal: bool,
        window: tuple[int | None, int | None] | None,
        return_lse: bool,
    ) -> Any:
        """Computes attention by cuDNN where it fits, else by XLA."""
        fits = (
            bias is None  # its gradient is not always there
            and not return_lse
            and all(isinstance(n, int) for n in (*query.shape, *key.shape))
            and not cudnn_problem()
            and query.dtype.name in CudnnAttention.capabilities.dtypes
            and not cudnn_refusals(
                current_target(),
                dtype=query.dtype.name,
                q_len=query.shape[1],
                kv_len=key.shape[1],
                head_dim=query.shape[3],
                causal=causal,
                window=window,
                has_mask=mask is not None,
            )
        )
        return _attend(
            "cudnn" if fits else "xla",
            query,
            key,
            value,
            softmax_scale=softmax_scale,
            bias=bias,
            mask=mask,
            causal=causal,
            window=window,
            return_lse=return_lse,
        )


@OperationRegistry.register
class CudnnAttention(BaseOperation):
    """cuDNN's fused attention as JAX calls it, or a refusal."""

    kind = ATTENTION
    capabilities = Capabilities(
        platforms={"cuda"},
        dtypes={"float16", "bfloat16"},
        features=FEATURES,
        # JAX gives zeros for bias where cuDNN does not export its gradient.
        differentiable={"query", "key", "value"},
        cost=Cost.FUSED,
    )

    @classmethod
    def get_impl_name(cls) -> str:
        """Returns "cudnn"."""
        return "cudnn"

    @classmethod
    def refusals(cls, request: Request, target: Target) -> Iterable[Refusal]:
        """Refuses what cuDNN's fused attention cannot do on the target."""
        assert isinstance(request, AttentionRequest)  # narrows the type
        symbols = [axis for axis, n in request.sizes.items() if not isinstance(n, int)]
        if symbols:
            return list(map(functools.partial(_symbolic, request), symbols))
        return cudnn_refusals(
            target,
            dtype=request.dtype,
            q_len=request.q_len,
            kv_len=request.kv_len,
            head_dim=request.head_dim,
            causal=request.causal,
            window=request.window,
            has_mask=bool({"mask", "bias"} & request.features),
        )

    def forward_cuda(
        self,
        query: Array,
        key: Array,
        value: Array,
        *,
        softmax_scale: float,
        bias: Array | None,
        mask: Array | None,
        causal: bool,
        window: tuple[int | None, int | None] | None,
    ) -> Any:
        """Computes attention by cuDNN; see `switchax.attention` for the arguments."""
        if problem := cudnn_problem():
            rule, got = "a JAX that can call cuDNN", f"one that says: {problem}"
            todo = "install JAX for CUDA, or choose 'sdpa'"
            raise UnsupportedError(house_message("cudnn", rule, got, todo))
        return _attend(
            "cudnn",
            query,
            key,
            value,
            softmax_scale=softmax_scale,
            bias=bias,
            mask=mask,
            causal=causal,
            window=window,
            return_lse=False,
        )


def symbolic_refusals(request: Request) -> Iterable[Refusal]:
    """Refuses symbolic lengths where it depends on them what a position hides."""
    if {"causal", "window"} & request.features:
        for axis in ("q_len", "kv_len"):
            if not isinstance(request.sizes[axis], int):
                yield _symbolic(request, axis)


def _bfloat16_refusals(request: Request, target: Target) -> Iterable[Refusal]:
    """Refuses what XLA makes of products in bfloat16 on a CPU.

    Measured with JAX 0.12.0.1: where a program transposes query, key or value before
    `jax.nn.dot_product_attention`, as a layout or a model's heads do, XLA sums the
    second product in bfloat16 (R8). With 2048 keys and values near 1 the output is off
    by up to 36 * 2**-8, where it should be by 2**-8. 0.10.2 sums in float32, but does
    not compile the products of one batch and kv head with one key or head_dim.
    """
    if request.dtype != "bfloat16" or target.platform != "cpu":
        return
    if jax.__version_info__ >= (0, 11):
        hint = "XLA of JAX 0.11 and later may sum in bfloat16: cast to float32"
        yield Refusal("rule", "dtype", "bfloat16", "float32 on a CPU", hint)
    elif request.sizes["batch"] == request.sizes["kv_heads"] == 1 and 1 in (
        request.sizes["kv_len"],
        request.sizes["head_dim"],
    ):
        axis = "kv_len" if request.sizes["kv_len"] == 1 else "head_dim"
        hint = "JAX before 0.12 cannot compile it on a CPU: cast to float32"
        yield Refusal("rule", axis, "1", "at least 2 in bfloat16", hint)


def _strict_refusals(request: Request) -> Iterable[Refusal]:
    """Refuses what JAX does not lower under strict promotion of dtypes.

    Measured with 0.10.2 and 0.12.0.1: the gradient of `jax.nn.dot_product_attention`
    in bfloat16 holds products of float32 and bfloat16, and lowering those raises
    TypePromotionError. A request does not say whether it will be differentiated.
    """
    promotion = jax.config.jax_numpy_dtype_promotion
    if promotion == "strict" and request.dtype in ("bfloat16", "float16"):
        hint = "JAX cannot lower its gradient: set it to 'standard', or cast to float32"
        rule, actual = "jax_numpy_dtype_promotion", "'strict'"
        yield Refusal("rule", rule, actual, f"'standard' for {request.dtype}", hint)


def _symbolic(request: Request, axis: str) -> Refusal:
    hint = "it is a symbol of jax.export; choose another operation, such as 'vanilla'"
    return Refusal("rule", axis, str(request.sizes[axis]), "a number", hint)


@functools.cache
def cudnn_problem() -> str:
    """Returns why JAX cannot call cuDNN here, or "".

    A program for CUDA may be made on a machine without it, so no refusal can tell.
    """
    x = jax.ShapeDtypeStruct((1, 64, 1, 64), "bfloat16")
    attend = functools.partial(jax.nn.dot_product_attention, implementation="cudnn")
    try:
        jax.eval_shape(attend, x, x, x)
    except RuntimeError as error:
        return str(error).strip().rstrip(".")
    return ""


def cudnn_refusals(
    target: Target,
    *,
    dtype: str,
    q_len: int,
    kv_len: int,
    head_dim: int,
    causal: bool,
    window: tuple[int | None, int | None] | None,
    has_mask: bool,
) -> list[Refusal]:
    """Returns what JAX's call of cuDNN would raise for, before anything runs.

    Args:
        target: Its generation sets the largest head_dim.
        dtype: Of query, key and value.
        q_len: Query rows.
        kv_len: Keys.
        head_dim: Of query, key and value.
        causal: Whether the call is causal.
        window: Its window.
        has_mask: Whether it has a mask or bias.

    References:
        JAX, `jax/_src/cudnn/fused_attention_stablehlo.py`, the checks of shapes.
    """
    reasons = []
    digits = target.generation.removeprefix("sm")
    capability = int(digits) if digits.isdecimal() else None
    if capability is not None and capability < 80:
        reasons.append(
            Refusal("rule", "generation", target.generation, "sm80 or later")
        )
    largest = 256 if capability is not None and capability >= 90 else 128
    if head_dim % 8 or not 0 < head_dim <= largest:
        allowed = f"a multiple of 8 up to {largest}"
        reasons.append(Refusal("rule", "head_dim", str(head_dim), allowed))
    # A position mask that leaves rows empty is added to the mask, so lengths count.
    masked = has_mask or not sees_everything(q_len, kv_len, causal, window)
    if masked and dtype == "float16":
        hint = "JAX masks by adding -45853, which such logits reach; use bfloat16"
        reasons.append(Refusal("rule", "dtype with a mask", dtype, "bfloat16", hint))
    if masked and (q_len % 2 or kv_len % 2):
        lengths = f"{q_len}, {kv_len}"
        reasons.append(Refusal("rule", "q_len, kv_len with a mask", lengths, "even"))
    if window is not None and not causal and not masked:
        hint = "pass causal=True, or the window as a mask"
        reasons.append(Refusal("rule", "window", str(window), "with causal only", hint))
    return reasons
