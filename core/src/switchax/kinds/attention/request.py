"""The request of one attention call."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from switchax.request import ArraySpec, Request

from .pattern import MaskPattern

__all__ = ["AttentionRequest"]

Window = tuple[int | None, int | None]


# The arguments of those features that are not named as theirs.
_ARGUMENTS = {
    "segment_ids": "q_segment_ids",
    "dropout": "dropout_prob",
    "lse": "return_lse",
    "weights": "return_weights",
    "q_offset_per_batch": "q_offset",
}


@dataclasses.dataclass(frozen=True)
class AttentionRequest(Request):
    """One attention call without its values.

    Attributes:
        batch: Batch size; 1 in layout "thd".
        q_len: Query rows (tokens in "thd").
        kv_len: Keys (tokens in "thd").
        heads: Query heads.
        kv_heads: Key and value heads.
        head_dim: Of query and key.
        v_head_dim: Of value and output.
        output_dtype: Dtype of the result, that of the query as it was passed.
        arrays: Shape and dtype of every array argument, by name, sorted.
        causal: Row i sees keys up to i + q_offset.
        window: Keys seen to the (left, right) of the row's own; None is unlimited.
        mask_pattern: Which keys are seen, known beforehand, or None.
        q_offset: A static offset; None where it is an array, or nothing needs one.
        softmax_scale: Factor of the logits.
        logits_soft_cap: Soft cap of the logits, or None.
        dropout_prob: Probability to drop.
        return_lse: The log-sum-exp was asked for.
        return_weights: The probabilities were asked for.
    """

    batch: int
    q_len: int
    kv_len: int
    heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    output_dtype: str
    arrays: tuple[tuple[str, ArraySpec], ...]
    causal: bool = False
    window: Window | None = None
    mask_pattern: MaskPattern | None = None
    q_offset: int | None = None
    softmax_scale: float = 1.0
    logits_soft_cap: float | None = None
    dropout_prob: float = 0.0
    return_lse: bool = False
    return_weights: bool = False

    @property
    def sizes(self) -> Mapping[str, int]:
        """batch, q_len, kv_len, heads, kv_heads, head_dim, v_head_dim."""
        return {
            "batch": self.batch,
            "q_len": self.q_len,
            "kv_len": self.kv_len,
            "heads": self.heads,
            "kv_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "v_head_dim": self.v_head_dim,
        }

    @property
    def is_empty(self) -> bool:
        """No query row sees any key, whatever the values: core answers by itself."""
        return 0 in (self.batch, self.q_len, self.heads, self.kv_len)

    def value_of(self, feature: str) -> str:
        """The arrays or the value that make the call use a feature, for messages."""
        if feature == "gqa":
            return f"{self.heads} heads on {self.kv_heads}"
        if feature == "mask_pattern":  # whose text is made of all pairs
            return f"{self.q_len}x{self.kv_len}"
        name = _ARGUMENTS.get(feature, feature)
        return str(self.array(name) or super().value_of(name))

    def array(self, name: str) -> ArraySpec | None:
        """The spec of one array argument, or None if it was not passed."""
        return dict(self.arrays).get(name)

    def describe(self) -> str:
        """One line for messages and tables; sizes in the order of bthd or thd."""
        batch = "" if self.layout == "thd" else f"{self.batch}x"
        query = f"{batch}{self.q_len}x{self.heads}x{self.head_dim}"
        keys = f"{batch}{self.kv_len}x{self.kv_heads}x{self.head_dim}"
        used = ", ".join(sorted(self.features)) or "none"
        return (
            f"attention {self.dtype} query {query} key {keys} layout {self.layout}; "
            f"features: {used}"
        )
