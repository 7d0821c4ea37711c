"""`OperationMetadata.get_shardings`: the measured cases, and where we differ."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from switchax import OperationMetadata, UnsupportedError
from switchax.axes import (
    GENERATION_MODES,
    HEAD,
    MODE_DECODE,
    MODE_TRAIN,
    RUNTIME_MODES,
)
from switchax.metadata import AttnShardingRules
from switchax.partition import PartitionAxis, PartitionManager, axis_rules

P = PartitionSpec

# Measured on easydel 0.3.0 with eformer 0.0.99.12 and jax 0.9.2.
CASES = json.loads((Path(__file__).parent / "data" / "shardings.json").read_text())
CASES = CASES["cases"]

DISTINCT = PartitionAxis(
    batch_axis="B",
    query_sequence_axis="Q",
    key_sequence_axis="K",
    head_axis="H",
    kv_head_axis="KH",
    attention_dim_axis="D",
    attention_kv_dim_axis="KD",
    bias_head_sequence_axis="BH",
    bias_key_sequence_axis="BK",
    decode_batch_axis="dB",
    decode_query_sequence_axis="dQ",
    decode_key_sequence_axis="dK",
    decode_head_axis="dH",
    decode_kv_head_axis="dKH",
    decode_attention_dim_axis="dD",
    decode_attention_kv_dim_axis="dKD",
)


def as_spec(text):
    """A spec from its repr in our own data file."""
    return eval(text, {"__builtins__": {}}, {"PartitionSpec": P})


def sinks(rank):
    return None if rank is None else jnp.ones((4,) * rank)


def shardings(case):
    paxis = PartitionAxis(**case["paxis_kwargs"])
    metadata = OperationMetadata(partition_axis=paxis)
    return metadata.get_shardings(
        case["mode"],
        case["layout"],
        case["qkv_mni_sharding"],
        sinks(case["softmax_aux_ndim"]),
    )


def row(case):
    """Which rows of the table of differences a case is about."""
    rows = set()
    if case["layout"] == "thd":
        rows.add("thd raises: works")
    if case["softmax_aux_ndim"] in (0, 2):
        rows.add("sinks of rank 2 split the sinks, rank 0 gets (HEAD,)")
    return rows


@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case["id"]))
def test_measured_case(case):
    rank = case["softmax_aux_ndim"]
    if case["layout"] == "xyz":
        assert case["error"].startswith("NotImplementedError")
        with pytest.raises(NotImplementedError):
            shardings(case)
    elif rank == 0:
        assert row(case)
        with pytest.raises(ValueError, match="softmax_aux of rank 0"):
            shardings(case)
    elif case["layout"] == "thd":
        assert "error" in case, "a difference is one"
        ours = shardings(case)
        bthd = shardings({**case, "layout": "bthd"})
        for name in ("query", "key", "value", "output"):
            assert getattr(ours, name) == P(*getattr(bthd, name)[1:])
        for name in ("q_segment_ids", "kv_segment_ids"):
            assert getattr(ours, name) == P(*getattr(bthd, name)[1:])
        for name in ("bias", "mask", "query3d", "softmax_aux"):
            assert getattr(ours, name) == getattr(bthd, name)
    else:
        rules = {n: text and as_spec(text) for n, text in case["rules"].items()}
        if rank == 2:
            heads = shardings({**case, "softmax_aux_ndim": 1}).softmax_aux[0]
            assert rules["softmax_aux"] != P(heads, None), "a difference is one"
            rules["softmax_aux"] = P(heads, None)
        assert shardings(case)._asdict() == rules


def test_the_fields_of_the_rules():
    assert AttnShardingRules._fields == (
        "query3d",
        "query",
        "key",
        "value",
        "bias",
        "mask",
        "output",
        "q_segment_ids",
        "kv_segment_ids",
        "softmax_aux",
    )


def test_packed_tokens_have_a_layout_of_their_own():
    metadata = OperationMetadata(partition_axis=DISTINCT)
    rules = metadata.get_shardings(MODE_TRAIN, "thd", softmax_aux=jnp.ones(2))
    assert rules.query == rules.output == P("Q", "H", "D")
    assert rules.key == rules.value == P("K", "KH", "KD")
    assert rules.q_segment_ids == P("Q")
    assert rules.kv_segment_ids == P("K")
    assert rules.softmax_aux == P("H")
    like_query = metadata.get_shardings(MODE_DECODE, "thd", qkv_mni_sharding=True)
    assert like_query.key == P("dK", "dH", "dD")


@pytest.mark.parametrize("mode", RUNTIME_MODES)
@pytest.mark.parametrize("layout", ["bthd", "bhtd", "thd"])
def test_sinks_are_split_with_the_heads_of_query(mode, layout):
    metadata = OperationMetadata(partition_axis=DISTINCT)
    heads = "dH" if mode in GENERATION_MODES else "H"
    for array, spec in ((np.ones(4), P(heads)), (np.ones((4, 2)), P(heads, None))):
        rules = metadata.get_shardings(mode, layout, softmax_aux=array)
        assert rules.softmax_aux == spec
    described = jax.ShapeDtypeStruct((4, 2), jnp.float32)
    rules = metadata.get_shardings(mode, layout, softmax_aux=described)
    assert rules.softmax_aux == P(heads, None)


@pytest.mark.parametrize("rank", [0, 3, 4])
def test_sinks_of_another_rank_are_an_error(rank):
    with pytest.raises(ValueError, match=rf"^get_shardings: .*rank {rank}"):
        OperationMetadata().get_shardings(MODE_TRAIN, softmax_aux=sinks(rank))


@pytest.mark.parametrize("aux", [1.0, [1.0], "x"])
def test_sinks_that_are_no_array_are_a_type_error(aux):
    with pytest.raises(TypeError, match=r"^get_shardings: .*softmax_aux"):
        OperationMetadata().get_shardings(MODE_TRAIN, softmax_aux=aux)


@pytest.mark.parametrize("mode", [None, "train", "__trian__", 0])
def test_unknown_mode_is_a_value_error(mode):
    with pytest.raises(ValueError, match=r"^get_shardings: "):
        OperationMetadata().get_shardings(mode)


def test_unknown_layout_names_the_near_miss():
    with pytest.raises(UnsupportedError, match="did you mean 'bthd'") as caught:
        OperationMetadata().get_shardings(MODE_TRAIN, "bthdd")
    assert caught.value.refusals["get_shardings"][0].field == "layout"
    with pytest.raises(TypeError, match="layout to be a str"):
        OperationMetadata().get_shardings(MODE_TRAIN, ("b", "t"))


def test_qkv_mni_sharding_is_a_bool():
    with pytest.raises(TypeError, match="qkv_mni_sharding"):
        OperationMetadata().get_shardings(MODE_TRAIN, qkv_mni_sharding="yes")


def test_an_axis_that_would_split_two_dimensions_is_an_error():
    metadata = OperationMetadata(partition_axis=PartitionAxis(head_axis="sp"))
    with pytest.raises(ValueError, match=r"'sp' in dimension 1 .* and dimension 2"):
        metadata.get_shardings(MODE_TRAIN)


def test_the_current_manager_counts_where_nothing_is_given():
    metadata = OperationMetadata()
    with PartitionManager(DISTINCT):
        assert metadata.get_shardings(MODE_TRAIN).query == P("B", "Q", "H", "D")
    assert metadata.get_shardings(MODE_TRAIN).query == P(
        ("fsdp", "dp"), "sp", "tp", None
    )
    given = OperationMetadata(partition_axis=PartitionAxis(batch_axis="x"))
    with PartitionManager(DISTINCT):
        assert given.get_shardings(MODE_TRAIN).query == P("x", "sp", "tp", None)


def test_rules_in_scope_count_though_answers_are_kept():
    metadata = OperationMetadata(partition_axis=DISTINCT)
    before = metadata.get_shardings(MODE_TRAIN)
    with axis_rules({}):
        PartitionAxis.register(HEAD, "other", override=True)
        assert metadata.get_shardings(MODE_TRAIN).query == P("B", "Q", "other", "D")
    assert metadata.get_shardings(MODE_TRAIN) == before
