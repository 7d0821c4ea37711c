"""On meshes of TPUs that are not here: libtpu compiles, and there is no collective.

Core splits the call; what is compiled is what each chip would run.
"""

import os
import subprocess
import sys
import textwrap

import pytest

from switchax.inspection.chips import environment

pytest.importorskip("libtpu")
pytest.importorskip("switchax_blocksparse")  # and pallas_flash, which it is made of

OPERATIONS = ("pallas_flash", "blocksparse")
MESHES = (("v5e:2x4", 2, 4), ("v5e:16x16", 16, 16))

PROGRAM = """
    import re, sys
    import jax, numpy as np
    from jax.experimental import topologies
    from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P
    import switchax

    operation, topology, dp, tp, kv_heads, which = sys.argv[1:]
    dp, tp, kv_heads = int(dp), int(tp), int(kv_heads)
    there = topologies.get_topology_desc(platform="tpu", topology_name=topology)
    devices = np.array(there.devices).reshape(dp, tp)
    mesh = Mesh(devices, ("dp", "tp"), (AxisType.Auto,) * 2)

    def shape(heads, of_heads):
        here = NamedSharding(mesh, P("dp", None, of_heads))
        size = (2 * dp, 512, heads, 128)
        return jax.ShapeDtypeStruct(size, "bfloat16", sharding=here)

    more = {"causal": True}
    if operation == "blocksparse":
        more["mask_pattern"] = switchax.MaskPattern.chunked(200, 512, 512)

    def forward(q, k, v):
        return switchax.attention(q, k, v, operation=operation, **more)

    def gradients(q, k, v, d):
        return jax.vjp(forward, q, k, v)[1](d)

    query = shape(2 * tp, "tp")
    key = shape(kv_heads, "tp" if kv_heads % tp == 0 else None)
    given = (query, key, key) + ((query,) if which == "gradients" else ())
    with jax.set_mesh(mesh):
        program = {"forward": forward, "gradients": gradients}[which]
        text = jax.jit(program).lower(*given).compile().as_text()
    moved = r"all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter"
    print(text.count("tpu_custom_call"), sorted(set(re.findall(moved, text))))
"""


def compiled(tmp_path, *asked):
    script = tmp_path / "program.py"
    script.write_text(textwrap.dedent(PROGRAM))
    done = subprocess.run(
        [sys.executable, str(script), *map(str, asked)],
        env={**os.environ, **environment("v5e", str(tmp_path))},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.split(maxsplit=1)


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize(("topology", "dp", "tp"), MESHES)
@pytest.mark.parametrize("sharing", [1, 2], ids=["as_many_kv_heads", "fewer"])
def test_batch_and_heads_are_split_without_a_collective(
    tmp_path, operation, topology, dp, tp, sharing
):
    asked = operation, topology, dp, tp, tp // sharing
    kernels, collectives = compiled(tmp_path, *asked, "forward")
    assert int(kernels) == 1
    assert collectives.strip() == "[]"


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize(("topology", "dp", "tp"), MESHES)
def test_gradients_need_none_either(tmp_path, operation, topology, dp, tp):
    asked = operation, topology, dp, tp, tp
    kernels, collectives = compiled(tmp_path, *asked, "gradients")
    assert int(kernels) == 2
    assert collectives.strip() == "[]"
