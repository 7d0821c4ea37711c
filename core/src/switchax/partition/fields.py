"""How the fields of PartitionAxis hang together, as tables."""

from __future__ import annotations

import types
from collections.abc import Mapping

from switchax import axes as tokens

TOKEN_FIELDS: Mapping[str, str] = types.MappingProxyType(
    {
        tokens.BATCH: "batch_axis",
        tokens.LENGTH: "sequence_axis",
        tokens.QUERY_LENGTH: "query_sequence_axis",
        tokens.KV_LENGTH: "key_sequence_axis",
        tokens.EMBED: "hidden_state_axis",
        tokens.HEAD: "head_axis",
        tokens.HEAD_DIM: "attention_dim_axis",
        tokens.KV_HEAD: "kv_head_axis",
        tokens.KV_HEAD_DIM: "attention_kv_dim_axis",
        tokens.MLP_INTERMEDIATE: "mlp_intermediate_axis",
        tokens.VOCAB: "vocab_axis",
        tokens.EXPERT: "expert_axis",
        tokens.EXPERT_GATE: "expert_gate_axis",
        tokens.BIAS_HEAD_SEQ: "bias_head_sequence_axis",
        tokens.BIAS_KV_SEQ: "bias_key_sequence_axis",
        tokens.DATA_PARALLEL: "data_parallel_axis",
        tokens.FULLY_SHARDED_DATA_PARALLEL: "fully_sharded_data_parallel_axis",
        tokens.TENSOR_PARALLEL: "tensor_parallel_axis",
        tokens.SEQUENCE_PARALLEL: "sequence_parallel_axis",
        tokens.EXPERT_PARALLEL: "expert_parallel_axis",
    }
)
"""The field of PartitionAxis that each token reads."""

DERIVED_FROM: Mapping[str, tuple[str, ...]] = types.MappingProxyType(
    {
        "batch_axis": ("fully_sharded_data_parallel_axis", "data_parallel_axis"),
        "sequence_axis": ("sequence_parallel_axis",),
        "query_sequence_axis": ("sequence_parallel_axis",),
        "head_axis": ("tensor_parallel_axis",),
        "kv_head_axis": ("tensor_parallel_axis",),
        "key_sequence_axis": ("sequence_parallel_axis",),
        "hidden_state_axis": ("tensor_parallel_axis",),
        "mlp_intermediate_axis": ("tensor_parallel_axis",),
        "vocab_axis": ("tensor_parallel_axis",),
        "expert_axis": ("expert_parallel_axis",),
        "decode_batch_axis": ("batch_axis",),
        "decode_query_sequence_axis": ("query_sequence_axis",),
        "decode_head_axis": ("head_axis",),
        "decode_kv_head_axis": ("kv_head_axis",),
        "decode_key_sequence_axis": ("key_sequence_axis",),
        "decode_attention_dim_axis": ("attention_dim_axis",),
        "decode_attention_kv_dim_axis": ("attention_kv_dim_axis",),
    }
)
"""What a field that is left out reads as; sources stand above what needs them."""

DECODE_FIELDS: Mapping[str, str] = types.MappingProxyType(
    {
        field.removeprefix("decode_"): field
        for field in DERIVED_FROM
        if field.startswith("decode_")
    }
)
"""The field that holds while generating, for those that have one."""
