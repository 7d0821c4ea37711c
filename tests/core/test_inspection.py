"""`switchax inspect`: what is read of libtpu's files, and what is refused before it.

Compiling for TPU generations is asked by `tox -e tpu`: plugins/pallas-flash/tests.
"""

import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from click.testing import CliRunner
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from switchax.cli import make_group
from switchax.inspection import inspect_operation
from switchax.inspection.schedule import read_schedules
from switchax.inspection.traffic import traffic_of

# The form of libtpu 0.0.52's files, of a kernel with a loop of two blocks.
BUNDLES = """= control target key start
LB: loop body
     0   :  { %s1 = smov.u32 0 } /* entry bundle: %switchax.k.1 = custom-call(%q) */
   0x1 LB: > { %v1 = vmatmul.f32 %v0 }
   0x2   : > { %v2 = vmatmul.f32 %v1 ;; %5 = sbr.rel (%p6) target = $region56 }
   0x3   : > { %v3 = vmatmul.f32 %v2 }
   0x4   : > { %v3 = vmatmul.f32 %v2 }
   0x5   : > { %v3 = vadd.f32 %v2 }
   0x6 LE: > { %30 = sbr.rel target = $region121 }
   0x7   :  { %v4 = vadd.f32 %v2 }
"""
UTILISATION = """== CAPACTIY:
MATMUL, VALU, VLOAD:FILL, VSTORE:SPILL
     2     4      3            2
== UTILIZATION:
0 0 0 0
2 0 0 0
2 3 0 0
2 0 0 1
1 4 2 0
1 4 0 0
0 0 0 0
0 1 0 0
"""
ALLOCATIONS = """ #allocation1 [shape = 's32[1]{0}', space=sflag, size = 0x4, scoped]
  #allocation2 [shape = 'f32[8,128]{1,0}', space=vmem, size = 0x1000, scoped]
    #allocation8 [shape = 'u8[4096]{0}', space=vmem, size = 0x2000, scoped]
"""


@pytest.fixture
def dumps(tmp_path):
    for number, stage, text in (
        (54, "post-ra", ALLOCATIONS),
        (66, "packed-bundles-post-ra", "space=vmem, size = 0xfff"),
        (70, "final_hlo-static-per-bundle-utilization", UTILISATION),
        (71, "schedule-analysis_final_bundles", ""),
        (72, "final_bundles", BUNDLES),
    ):
        (tmp_path / f"17-switchax.k.1-{number}-{stage}.txt").write_text(text)
    (tmp_path / "17-TLP-73-final_bundles.txt").write_text("     0   :  { %s1 = x }\n")
    return tmp_path


def test_the_hot_block_is_the_shortest_of_those_with_most_matrix_work(dumps):
    (kernel,) = read_schedules(dumps)
    assert (kernel.name, kernel.bundles, kernel.vmem) == ("switchax.k.1", 8, 0x3000)
    # Of four slots there are two blocks, and the first is shorter.
    assert (kernel.hot.first, kernel.hot.bundles) == (1, 2)
    assert kernel.hot.used == {
        "MATMUL": 4,
        "VALU": 3,
        "VLOAD:FILL": 0,
        "VSTORE:SPILL": 0,
    }
    assert kernel.hot.floor == 2
    assert kernel.hot.occupancy["VALU"] == 3 / 8
    assert kernel.rows == ((2, 0, 0, 0), (2, 3, 0, 0))
    assert kernel.to_dict()["hot"]["share_of_floor"] == 1.0
    assert kernel.to_dict()["blocks"] == [
        {"first": 1, "bundles": 2, "depth": 1, "matrix": 4, "spills": 0},
        {"first": 3, "bundles": 3, "depth": 1, "matrix": 4, "spills": 3},
    ]


def test_spills_of_the_hot_block_are_counted(dumps):
    path = dumps / "17-switchax.k.1-70-final_hlo-static-per-bundle-utilization.txt"
    path.write_text(UTILISATION.replace("2 0 0 0\n2 3", "0 0 0 0\n0 3"))
    (kernel,) = read_schedules(dumps)
    assert (kernel.hot.first, kernel.hot.spills, kernel.hot.floor) == (3, 3, 2)


def test_a_loop_within_is_hotter_than_what_has_more_work_around_it(dumps):
    path = dumps / "17-switchax.k.1-72-final_bundles.txt"
    path.write_text(BUNDLES.replace("0x5   : > {", "0x5 LB: >> {"))
    units = dumps / "17-switchax.k.1-70-final_hlo-static-per-bundle-utilization.txt"
    (kernel,) = read_schedules(dumps)  # that of a loop with little of it is not
    assert (kernel.hot.first, kernel.hot.bundles, kernel.hot.depth) == (1, 2, 1)
    units.write_text(UTILISATION.replace("1 4 0 0", "2 4 0 0"))
    (kernel,) = read_schedules(dumps)
    assert (kernel.hot.first, kernel.hot.bundles, kernel.hot.depth) == (5, 1, 2)


def test_what_was_there_before_is_left_out(dumps):
    assert read_schedules(dumps, frozenset(dumps.iterdir())) == []


def test_files_of_another_form_are_an_error(dumps):
    path = dumps / "17-switchax.k.1-70-final_hlo-static-per-bundle-utilization.txt"
    path.write_text("MATMUL, VALU\n1 2\n1 2 3\n")
    with pytest.raises(ValueError, match="another libtpu may write it otherwise"):
        read_schedules(dumps)
    path.unlink()
    with pytest.raises(ValueError, match="expected libtpu to write final_hlo"):
        read_schedules(dumps)


def test_a_block_that_stays_is_copied_once():
    def kernel(x_ref, y_ref, z_ref):
        z_ref[...] = x_ref[...] + y_ref[...]

    def both(x, y):
        return pl.pallas_call(
            kernel,
            grid=(4, 3),
            in_specs=[
                pl.BlockSpec((8, 128), lambda i, j: (i, 0)),
                pl.BlockSpec((8, 128), lambda i, j: (j, 0)),
            ],
            out_specs=pl.BlockSpec((8, 128), lambda i, j: (i, 0)),
            out_shape=jax.ShapeDtypeStruct((32, 128), jnp.float32),
            interpret=True,
        )(x, y)

    x, y = jnp.zeros((32, 128)), jnp.zeros((24, 128))
    traffic = traffic_of(jax.make_jaxpr(jax.jit(both))(x, y))
    assert (traffic.bytes, traffic.exact) == ((4 + 12 + 4) * 8 * 128 * 4, True)


def test_where_an_array_decides_each_step_counts_as_a_copy():
    def kernel(order_ref, x_ref, y_ref):
        y_ref[...] = x_ref[...]

    def ordered(order, x):
        return pl.pallas_call(
            kernel,
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=1,
                grid=(4,),
                in_specs=[pl.BlockSpec((8, 128), lambda i, order: (order[i], 0))],
                out_specs=pl.BlockSpec((8, 128), lambda i, order: (0, 0)),
            ),
            out_shape=jax.ShapeDtypeStruct((8, 128), jnp.float32),
            interpret=True,
        )(order, x)

    order = np.zeros(4, np.int32)
    traffic = traffic_of(jax.make_jaxpr(ordered)(order, jnp.zeros((32, 128))))
    assert (traffic.bytes, traffic.exact) == ((4 + 1) * 8 * 128 * 4, False)


def run(*arguments):
    return CliRunner().invoke(make_group(), ["inspect", *arguments])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--q", "1,8,1,64"], "for example --target tpu:v6e"),
        (["--target", "tpu:v3", "--q", "1,8,1,64"], "tpu:v5e, tpu:v5p, tpu:v6e"),
        (["--target", "cuda:h100", "--q", "1,8,1,64"], "tpu:v5e, tpu:v5p, tpu:v6e"),
        (["--target", "tpu:v6e"], "switchax inspect: expected --q SHAPE"),
        (["--target", "tpu:v6e", "--q", "1,a"], "inspect: expected sizes such as"),
    ],
)
def test_a_wrong_call_is_said_before_anything_is_compiled(arguments, said):
    result = run("vanilla", *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert said in result.stderr


@pytest.mark.parametrize("library", ["libtpu", "matplotlib"])
def test_what_is_not_installed_is_said_with_how_to(monkeypatch, tmp_path, library):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name: None if name == library else find(name),
    )
    chart = str(tmp_path / "chart.png")
    flags = ("--chart", chart) if library == "matplotlib" else ()
    result = run("vanilla", "--target", "tpu:v6e", "--q", "1,8,1,64", *flags)
    assert result.exit_code == 1
    assert "pip install 'switchax[inspect]'" in result.stderr


def test_passes_are_checked():
    with pytest.raises(ValueError, match="expected passes of forward, gradients"):
        inspect_operation("vanilla", {}, "tpu:v6e", passes=["backward"])


@pytest.mark.parametrize(
    ("configs", "said"),
    [
        (["block_q"], "expected FIELD=VALUE, each field once, got --config='block_q'"),
        (["block_q=1", "block_q=2"], "got --config='block_q=2'"),
        (["block_q=many"], "block_q='many'"),
        (["blocks=128"], "unexpected keyword argument 'blocks'"),
    ],
)
def test_a_wrong_config_is_said_before_anything_is_compiled(configs, said):
    flags = [text for config in configs for text in ("--config", config)]
    result = run("chunked", "--target", "tpu:v6e", "--q", "1,128,2,64", *flags)
    assert result.exit_code == 2
    assert said in result.stderr


def test_an_operation_without_a_config_says_so():
    flags = "--target", "tpu:v6e", "--q", "1,128,2,64", "--config", "block_q=128"
    result = run("vanilla", *flags)
    assert result.exit_code == 2
    assert "vanilla: expected no config, having none, got --config=" in result.stderr
