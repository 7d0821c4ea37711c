"""What is fixed when a call is traced, and how logits are computed from products."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from switchax import MaskPattern

__all__ = [
    "LOG2E",
    "Blocks",
    "Operands",
    "Static",
    "bias_of",
    "logits_of",
    "product",
    "unit_of",
    "visible_of",
]

LOG2E = math.log2(math.e)
_LANES = 128


class Blocks(NamedTuple):
    """Sizes of one kernel's tiles.

    Attributes:
        block: Rows (forward) or keys (backward) of a block, which stays in the kernel.
        chunk: Keys or rows that are computed at once.
        chunks: How many of them are copied at once.
        piece: Keys of a product, a divisor of `chunk` or `block`.
        lanes: Rows that are treated at once, a divisor of `block`; of the forward
            kernel alone, as is the next.
        unroll: Chunks of one turn of its loop, 1 or 2.
    """

    block: int
    chunk: int
    chunks: int
    piece: int
    lanes: int = _LANES
    unroll: int = 1

    @property
    def span(self) -> int:
        """Keys or rows that are copied at once."""
        return self.chunk * self.chunks


@dataclasses.dataclass(frozen=True)
class Static:
    """Static options of one call.

    Attributes:
        scale: Factor of the products, from 0.
        cap: The soft cap, or None.
        forward: Sizes of the forward kernel's tiles.
        backward: Of the backward kernel's.
        q_len: Rows that are somebody's.
        kv_len: Keys that are.
        pattern: Hides keys beside `Hidden`, of these lengths; or None.
        output: Dtype of the output.
        operation: Who is asked, for messages.
        generation: Of the chip.
        interpret: As `pl.pallas_call` takes it.
    """

    scale: float
    cap: float | None
    forward: Blocks
    backward: Blocks
    q_len: int
    kv_len: int
    pattern: MaskPattern | None = None
    output: str = "float32"
    operation: str = "pallas_flash"
    generation: str = "v6e"
    interpret: Any = False


class Operands(NamedTuple):
    """What has gradients, padded to whole blocks.

    Attributes:
        q: `[batch, heads, q_len, head_dim]`.
        k: `[batch, kv_heads, kv_len, head_dim]`.
        v: `[batch, kv_heads, kv_len, v_head_dim]`.
        bias: `[batch | 1, heads | 1, q_len | 1, kv_len | 1]`, or None.
    """

    q: Array
    k: Array
    v: Array
    bias: Array | None


def product(a: Any, b: Any, axis_a: int, axis_b: int) -> Any:
    """Returns a product over one axis of each, accumulated in float32."""
    # A TPU would round float32 operands to bfloat16; other operands allow no choice.
    is_float32 = a.dtype == jnp.float32
    precision = lax.Precision.HIGHEST if is_float32 else lax.Precision.DEFAULT
    return lax.dot_general(
        a,
        b,
        (((axis_a,), (axis_b,)), ((), ())),
        precision,
        preferred_element_type=jnp.float32,
    )


def unit_of(static: Static, has_bias: bool) -> float:
    """Returns what a logit of the kernels is in natural units.

    Without bias and cap the scale is left to the exponential, which multiplies anyway.
    """
    return static.scale if _is_plain(static, has_bias) else 1.0


def _is_plain(static: Static, has_bias: bool) -> bool:
    return not has_bias and static.cap is None and static.scale != 0


def logits_of(static: Static, x: Any, bias: Any) -> tuple[Any, Any]:
    """Returns logits from products, and their derivative by scaled products.

    Args:
        static: As given.
        x: `[keys, rows]` float32.
        bias: Float32, broadcastable to it, or None.

    Returns:
        Logits in units of `unit_of`, and None where the derivative is 1.
    """
    if _is_plain(static, bias is not None):
        return x, None
    x = x * static.scale if static.scale != 0 else jnp.zeros_like(x)
    if bias is not None:
        x = x + bias
    if static.cap is None:
        return x, None
    tanh = jnp.tanh(x / static.cap)
    return static.cap * tanh, 1 - tanh * tanh


def column(x: Any, rows: int) -> Any:
    """Turns `[1, keys]` into `[keys, rows]`, the same for each row."""
    turned = jnp.broadcast_to(x, (_LANES, x.shape[1])).T
    return jnp.concatenate([turned] * (rows // _LANES), axis=1)


def _size(part: Any) -> int:
    size: int = part.stop - part.start if isinstance(part, slice) else part.size
    return size


def visible_of(refs: dict[str, Any], key: Any, keys: Any, rows: Any) -> Any:
    """Returns which keys each row sees, bool `[keys, rows]`, or None.

    Args:
        refs: Of one step, by name.
        key: The number of the first of these keys.
        keys: Where they are among those of the step, a slice or `pl.ds`.
        rows: Where the rows are, likewise.
    """
    size, width = _size(keys), _size(rows)
    parts = []
    if "end" in refs:
        number = lax.broadcasted_iota(jnp.int32, (size, width), 0)
        parts += [number < refs["end"][:, rows] - key]
    if "first" in refs:
        parts += [number >= refs["first"][:, rows] - key]
    if "q_ids" in refs:
        ids = column(refs["kv_ids"][:, keys], width)
        parts.append(ids == refs["q_ids"][:, rows])
    if "table" in refs:
        parts.append(refs["table"][rows, keys].astype(jnp.float32).T > 0)
    if "mask" in refs:
        parts.append(refs["mask"][rows, keys].astype(jnp.float32).T > 0)
    visible = None
    for part in parts:
        visible = part if visible is None else visible & part
    return visible


def bias_of(refs: dict[str, Any], keys: Any, rows: Any) -> Any:
    """Returns a bias, float32, broadcastable to `[keys, rows]`, or None.

    It is one of three: of each row and key, `[rows, keys]`; the same for all rows,
    `[1, keys]`; the same for all keys, `[1, rows]`.
    """
    if "bias" in refs:
        return refs["bias"][rows, keys].astype(jnp.float32).T
    if "key_bias" in refs:
        bias = refs["key_bias"][:, keys].astype(jnp.float32)
        return column(bias, _size(rows))
    if "row_bias" in refs:
        return refs["row_bias"][:, rows].astype(jnp.float32)
    return None
