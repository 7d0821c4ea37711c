"""The command line: in process where that is enough, as a process where it is not."""

import ctypes
import importlib.metadata
import json
import os
import re
import subprocess
import sys

import click
import jax
import jax.numpy as jnp
import pytest
from click.testing import CliRunner

import switchax
from switchax import (
    ATTENTION,
    BaseOperation,
    Capabilities,
    Cost,
    MaskPattern,
    OperationRegistry,
    hookimpl,
    loading,
    registrations,
)
from switchax.cli import diagnosis, make_group, targets
from switchax.cli.output import stdout_kept
from switchax.discovery import FoundPlugin
from switchax.loading import PluginRecord

EXPLAIN = sys.modules["switchax.cli.explain"]
FAILED = PluginRecord(
    FoundPlugin("weak", "switchax-weak", "2.1", "weak.plugin"),
    "failed",
    "ModuleNotFoundError: No module named 'weak_kernels'",
    "install what provides weak_kernels",
    "Traceback (most recent call last):\n  of weak",
)
HOUSE_FORM = re.compile(r"[^\n]+: expected [^\n]+, got [^\n]+; [^\n]+\n")


@pytest.fixture
def run(monkeypatch):
    """Calls `switchax` in process; stdout is no terminal unless FORCE_COLOR says so."""
    for name in [name for name in os.environ if name.startswith("SWITCHAX_")]:
        monkeypatch.delenv(name)

    def call(*arguments, **environment):
        environment = {"COLUMNS": "80", "FORCE_COLOR": None, **environment}
        return CliRunner().invoke(
            make_group(), arguments, prog_name="switchax", env=environment
        )

    return call


@pytest.fixture
def register():
    """Registers an operation of given names for one test."""
    registered = []

    def add(*names, unavailable=lambda: "", **capabilities):
        class Operation(BaseOperation):
            kind = ATTENTION

            @classmethod
            def get_impl_name(cls):
                return names

            def forward_native(self, query, key, value, *, softmax_scale):
                return query

        Operation.__qualname__ = f"Operation_{names[0]}"
        Operation.capabilities = Capabilities(**capabilities)
        Operation.unavailable = staticmethod(unavailable)
        registered.append(OperationRegistry.register(Operation))
        return Operation

    yield add
    for cls in registered:
        OperationRegistry.unregister(cls)


@pytest.fixture
def plugin(monkeypatch):
    """Registers an object with hooks as a loaded plugin for one test."""
    added = []

    def add(name, provider):
        found = FoundPlugin(name, f"switchax-{name}", "1.0", name)
        record = PluginRecord(found, "loaded")
        loading.ensure_loaded()
        loading.hooks.register(provider, name=found.key)
        monkeypatch.setitem(loading._records, found.key, record)
        added.append(found.key)
        return record

    yield add
    for key in added:
        loading.hooks.unregister(name=key)


def process(*arguments, **environment):
    """Runs `python -m switchax`, both outputs piped."""
    return subprocess.run(
        [sys.executable, "-m", "switchax", *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


def operations(result):
    return {row["qualified"]: row for row in json.loads(result.stdout)["operations"]}


# list


def test_list_says_what_can_be_used_on_the_target(run):
    here, there = run("list", "--json"), run("list", "--json", "--target", "cuda:h100")
    assert here.exit_code == there.exit_code == 0
    cudnn = operations(here)["sdpa:cudnn"]
    assert (cudnn["status"], cudnn["usable"]) == ("platform", False)
    assert cudnn["reasons"][0]["allowed"] == "cuda"
    assert operations(there)["sdpa:cudnn"]["status"] == "available"
    assert operations(here)["vanilla:vanilla"] == {
        "operation": "vanilla",
        "qualified": "vanilla:vanilla",
        "other_names": [],
        "kind": "attention",
        "plugin": "vanilla",
        "distribution": "switchax-vanilla",
        "version": switchax.__version__,
        "platforms": ["cpu", "cuda", "rocm", "tpu", "tt"],
        "cost": "materialises",
        "experimental": [],
        "contested_names": [],
        "conformance": "full on cpu x 8",
        "status": "available",
        "usable": True,
        "note": "",
        "reasons": [],
    }


def test_a_pipe_gets_columns_and_nothing_is_cut_off(run, register):
    register("an_operation_of_a_very_long_name_indeed", "and_a_shared_name_as_long")
    lines = run("list").stdout.splitlines()
    columns = [re.split(r"  +", line) for line in lines]
    assert columns[0][0] == "operation"
    assert {len(row) for row in columns} == {9}
    assert ["cudnn", "-", "attention", "sdpa"] in [row[:4] for row in columns]
    rows = {row[0]: row for row in columns}
    assert "an_operation_of_a_very_long_name_indeed" in rows
    assert rows["cudnn"][-1] == "platform: needs cuda, not cpu"
    assert all(line.isascii() for line in lines)


TERMINAL = {
    "list": "operation cudnn attention switchax-vanilla materialises available",
    "doctor": "jaxlib switchax-vanilla loaded SWITCHAX_STRICT all well",
    "explain --q 1,8,8,64 --lse --operation vanilla": "bfloat16 chosen dtype refuses",
}


@pytest.mark.parametrize("width", [100, 79, 50])
@pytest.mark.parametrize("command", TERMINAL)
def test_a_terminal_gets_no_line_wider_than_itself(run, command, width):
    environment = {"FORCE_COLOR": "1", "COLUMNS": str(width), "SWITCHAX_STRICT": "1"}
    result = run(*command.split(), **environment)
    assert "\x1b[" in result.stdout
    text = re.sub(r"\x1b\[[\d;]*m", "", result.stdout)
    assert max(map(len, text.splitlines())) <= width
    for word in TERMINAL[command].split():
        assert word in text  # none was broken


def test_list_marks_contested_names_and_how_to_call_them(run, register):
    mine = register("vanilla", "twice")
    register("other", "twice")
    result = run("list", "--json")
    rows = [r for r in operations(result).values() if r["operation"] == "vanilla"]
    assert {row["status"] for row in rows} == {"contested"}
    classes = {OperationRegistry.get(row["qualified"]) for row in rows}
    assert len(classes) == 2
    assert mine in classes
    assert all(row["usable"] for row in rows)
    assert "twice (contested)" in run("list").stdout


def test_list_says_which_library_is_missing(run, register):
    register("needy", unavailable=lambda: "pip install needed")
    rows = operations(run("list", "--json")).values()
    (row,) = (row for row in rows if row["operation"] == "needy")
    assert row["status"] == "unavailable"
    assert row["note"] == "pip install needed"


def test_list_outlives_an_operation_that_raises_or_prints_when_asked(run, register):
    def speak():
        sys.stdout.write("noise")
        os.write(1, b"noise of a native library")
        raise RuntimeError("no luck")

    register("noisy", "shared_noise", unavailable=speak)
    result = run("list", "--json")
    row = {r["operation"]: r for r in operations(result).values()}["noisy"]
    assert (row["status"], row["usable"]) == ("unavailable", False)
    assert "RuntimeError: no luck" in row["note"]
    assert "noise" in result.stderr


def test_what_native_code_prints_is_kept_out_of_json(capfd):
    with stdout_kept():
        os.write(1, b"unbuffered")
        ctypes.CDLL(None).printf(b"buffered")
    os.write(1, b"{}")
    found = capfd.readouterr()
    assert (found.out, found.err) == ("{}", "unbufferedbuffered")


def test_a_plugin_that_closes_stdout_closes_nothing(run, register):
    def close():
        sys.stdout.close()
        sys.stderr.close()
        sys.stdout = sys.stderr = None

    register("closing", unavailable=close)
    result = run("explain", "--q", "1,8,4,64", "--operation", "closing")
    assert "closing" in result.stdout
    with stdout_kept():
        close()
    assert not sys.stdout.closed
    assert not sys.stderr.closed


NOISE = """
import os
from switchax.cli.output import stdout_kept
with stdout_kept():
    os.write(1 if {is_open} else 2, b"noise")
    print("more")
print("text")
"""


@pytest.mark.parametrize(
    ("closed", "stdout", "stderr"),
    [(">&-", "", "noisemore\n"), ("2>&-", "text\n", ""), ("", "text\n", "noisemore\n")],
)
def test_a_closed_descriptor_is_no_place_to_print_to(closed, stdout, stderr):
    noise = NOISE.format(is_open=closed != ">&-")
    call = ["bash", "-c", f'exec "$0" -c "$1" {closed}', sys.executable, noise]
    done = subprocess.run(call, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, stdout, stderr)


def test_list_shows_plugins_that_failed_below(run, monkeypatch):
    monkeypatch.setitem(loading._records, "switchax-weak:weak", FAILED)
    result = run("list")
    assert result.exit_code == 0
    assert "switchax-weak:weak 2.1: failed" in result.stdout.splitlines()[-1]
    (row,) = json.loads(run("list", "--json").stdout)["not_loaded"]
    assert (row["reason"], row["fix"]) == (FAILED.reason, FAILED.fix)


def test_list_exits_1_if_nothing_can_be_used(run, monkeypatch):
    monkeypatch.setattr(registrations, "entries", list)
    result = run("list")
    assert result.exit_code == 1
    assert "pip install switchax-vanilla" in result.stdout


def test_list_without_a_device_still_lists(run, monkeypatch):
    monkeypatch.setattr(targets, "current_target", lambda: json.loads("damaged"))
    result = run("list", "--json")
    assert result.exit_code == 1
    assert {row["status"] for row in operations(result).values()} == {"unknown"}
    assert HOUSE_FORM.fullmatch(result.stderr)
    assert run("list", "--target", "tpu").exit_code == 0


# doctor


def test_doctor_is_content(run):
    result = run("doctor", "--json")
    findings = json.loads(result.stdout)
    assert result.exit_code == 0
    assert findings["healthy"]
    assert findings["versions"]["jax"] == jax.__version__
    statuses = {p["plugin"]: p["status"] for p in findings["plugins"]}
    assert statuses["sdpa"] == statuses["vanilla"] == "loaded"
    (device,) = findings["devices"]["found"]
    assert device == {"target": "cpu", "device_kind": "cpu", "count": 8}
    assert run("doctor").stdout.splitlines()[-1] == "all well"


def test_doctor_shows_why_a_plugin_failed(run, monkeypatch):
    monkeypatch.setitem(loading._records, "switchax-weak:weak", FAILED)
    result, verbose = run("doctor"), run("doctor", "--verbose")
    assert result.exit_code == verbose.exit_code == 1
    assert FAILED.reason in result.stdout
    assert FAILED.fix in result.stdout
    assert "Traceback" not in result.stdout
    assert FAILED.details in verbose.stdout
    assert "plugins failed 1" in result.stdout.splitlines()[-1]


def test_doctor_names_both_claimants_of_a_contested_name(run, register):
    register("vanilla", "twice")
    register("other", "twice")
    register("elsewhere", "twice", platforms={"tpu"})
    result = run("doctor", "--json")
    contested = {row["name"]: row for row in json.loads(result.stdout)["contested"]}
    assert result.exit_code == 1
    assert set(contested) == {"vanilla", "twice"}
    assert len(contested["twice"]["qualified"]) == 2  # "elsewhere" does not answer here
    assert "vanilla:vanilla" in contested["vanilla"]["qualified"]
    for row in contested.values():
        for name in row["qualified"]:
            assert name in row["problem"]
            OperationRegistry.get(name)


def test_doctor_runs_under_wrong_settings(run, monkeypatch):
    monkeypatch.setenv("SWITCHAX_STRIT", "1")
    monkeypatch.setenv("SWITCHAX_FORCE_NATIVE", "perhaps")
    monkeypatch.setenv("SWITCHAX_OPERATION", "vanila")
    monkeypatch.setenv("SWITCHAX_LOCK", "no/such/file")
    result = run("doctor", "--json")
    findings = json.loads(result.stdout)
    assert result.exit_code == 1
    wrong = {row["setting"]: row["problem"] for row in findings["wrong_settings"]}
    assert "did you mean 'SWITCHAX_STRICT'" in wrong["SWITCHAX_STRIT"]
    assert "perhaps" in wrong["SWITCHAX_FORCE_NATIVE"]
    assert "did you mean 'vanilla'" in wrong["operation"]
    assert "no/such/file" in wrong["lock"]
    assert "settings wrong 4" in run("doctor").stdout


def test_doctor_says_where_settings_come_from(run, monkeypatch):
    monkeypatch.setenv("SWITCHAX_OPERATION", "sdpa,vanilla")
    monkeypatch.setenv("SWITCHAX_BLOCK", "vanila")
    findings = json.loads(run("doctor", "--json").stdout)
    settings = {row["setting"]: row for row in findings["settings"]}
    assert settings["operation"]["value"] == ["sdpa", "vanilla"]
    assert settings["operation"]["source"] == "environment SWITCHAX_OPERATION"
    assert settings["strict"] == {
        "setting": "strict",
        "value": False,
        "source": "default",
    }
    assert "'vanila' (did you mean 'vanilla'?)" in findings["notes"][0]
    assert run("doctor").stdout.endswith("all well, but see the notes (1)\n")


def test_doctor_shows_that_jax_cannot_start(run, monkeypatch):
    def fail():
        raise TypeError("of some\nbackend")

    monkeypatch.setattr(diagnosis.jax, "devices", fail)
    result = run("doctor")
    assert result.exit_code == 1
    assert "JAX cannot start: TypeError: of some backend" in result.stdout
    assert "all well" not in result.stdout


def test_doctor_finds_damaged_metadata_of_anybody(run, monkeypatch, tmp_path):
    for name, content in (("odd", b"[x]\nno entry\n"), ("bytes", b"[x]\n\xff\xfe")):
        folder = tmp_path / f"{name}-1.0.dist-info"
        folder.mkdir()
        (folder / "entry_points.txt").write_bytes(content)
    monkeypatch.syspath_prepend(tmp_path)
    damaged = json.loads(run("doctor", "--json").stdout)["damaged_files"]
    paths = {os.path.relpath(row["path"], tmp_path): row["problem"] for row in damaged}
    assert set(paths) == {
        f"{name}-1.0.dist-info{os.sep}entry_points.txt" for name in ("odd", "bytes")
    }
    assert all(paths.values())


def test_doctor_finds_hooks_that_nobody_calls(run, plugin):
    class Provider:
        @hookimpl
        def switchax_rnk(self):
            """Misspelt."""

    plugin("misspelt", Provider())
    (note,) = json.loads(run("doctor", "--json").stdout)["notes"]
    assert "did you mean 'switchax_rank'" in note


def test_doctor_finds_hooks_that_were_not_marked(run, plugin, monkeypatch):
    class Provider:
        def switchax_kinds(self):
            """Never asked."""

        @hookimpl
        def switchax_decision(self, decision):
            """Asked."""

    provider = Provider()
    found = plugin("unmarked", provider).plugin
    marked = type(sys)("marked")
    marked.switchax_decision = provider.switchax_decision
    known = loading._Provider(provider, marked)
    monkeypatch.setitem(loading._providers, found.key, known)
    (note,) = json.loads(run("doctor", "--json").stdout)["notes"]
    assert "switchax_kinds is no hook without @switchax.hookimpl" in note


def test_doctor_notes_what_an_import_changed(run, plugin):
    class Provider:
        @hookimpl
        def switchax_decision(self, decision):
            """Asked."""

    plugin("changing", Provider()).changes = ("jax_enable_x64 from False to True",)
    shown = run("doctor").stdout
    assert "its import changed jax_enable_x64" in shown
    assert shown.endswith("all well, but see the notes (1)\n")


def test_doctor_finds_damaged_reports(run, monkeypatch):
    monkeypatch.setattr(diagnosis, "shipped_level", lambda entry: diagnosis.DAMAGED)
    notes = json.loads(run("doctor", "--json").stdout)["notes"]
    assert len(notes) == len(registrations.entries())
    assert "switchax conform vanilla --report" in " ".join(notes)


def test_doctor_finds_a_plugin_that_brings_nothing(run, plugin):
    plugin("forgetful", type(sys)("forgetful"))
    result = run("doctor", "--json")
    assert json.loads(result.stdout)["empty_plugins"] == [
        "switchax-forgetful:forgetful"
    ]
    assert result.exit_code == 1
    last = run("doctor").stdout.splitlines()[-1]
    assert last == "not well: plugins that bring nothing 1"


def test_doctor_is_not_content_without_an_operation(run, monkeypatch):
    monkeypatch.setattr(registrations, "entries", list)
    result = run("doctor")
    assert "operations none" in result.stdout.splitlines()[-1]
    assert result.exit_code == 1


# explain


def shape(*sizes, dtype="bfloat16"):
    return jax.ShapeDtypeStruct(sizes, dtype)


Q, KV = shape(2, 32, 8, 64), shape(2, 48, 2, 64)
LENGTHS = shape(2, dtype="int32")
A_KEY = jax.eval_shape(jax.random.key, 0)
CALLS = {
    "--kv 2,48,2,64": {"key": KV, "value": KV},
    "--kv 2x48x2x64 --v 2,48,2,32": {"key": KV, "value": shape(2, 48, 2, 32)},
    "--causal": {"causal": True},
    "--causal --mode prefill": {"causal": True, "mode": "__prefill__"},
    "--arg query=bfloat16[2,32,8,64] --mode insert": {"mode": "__insert__"},
    "--mode decode": {"mode": "__autoregressive__"},
    "--window 5,0": {"window": (5, 0)},
    "--window ,0": {"window": (None, 0)},
    "--window none,3": {"window": (None, 3)},
    "--causal --q-offset 16": {"causal": True, "q_offset": 16},
    "--causal --q-offset scalar": {"causal": True, "q_offset": shape(dtype="int32")},
    "--causal --q-offset batch": {"causal": True, "q_offset": LENGTHS},
    "--bias 8,32,32": {"bias": shape(8, 32, 32)},
    "--mask 32,32": {"mask": shape(32, 32, dtype="bool")},
    "--mask-pattern chunked:8": {"mask_pattern": MaskPattern.chunked(8, 32, 32)},
    "--mask-pattern prefix:8 --kv 2,48,2,64 --q-offset 16 --window 9,0": {
        "key": KV,
        "value": KV,
        "q_offset": 16,
        "window": (9, 0),
        "mask_pattern": MaskPattern.prefix(8, 32, 48, 16),
    },
    "--segment-ids --kv 2,48,2,64": {
        "key": KV,
        "value": KV,
        "q_segment_ids": shape(2, 32, dtype="int32"),
        "kv_segment_ids": shape(2, 48, dtype="int32"),
    },
    "--q-lengths --kv-lengths": {"q_lengths": LENGTHS, "kv_lengths": LENGTHS},
    "--softmax-scale 0.5 --soft-cap 30": {
        "softmax_scale": 0.5,
        "logits_soft_cap": 30.0,
    },
    "--sinks 1": {"softmax_aux": shape(8)},
    "--sinks 3": {"softmax_aux": shape(8, 3)},
    "--dropout 0.1": {"dropout_prob": 0.1, "dropout_key": A_KEY},
    "--lse --weights": {"return_lse": True, "return_weights": True},
    "--layout bhtd": {"layout": "bhtd"},
    "--arg return_lse=True --arg window=(1,2) --arg mask=bool[32,32]": {
        "return_lse": True,
        "window": (1, 2),
        "mask": shape(32, 32, dtype="bool"),
    },
}


@pytest.mark.parametrize("flags", CALLS)
def test_flags_describe_the_call(run, monkeypatch, flags):
    asked = []

    def record(request, **options):
        asked.append(request)
        return switchax.explain(request, **options)

    monkeypatch.setattr(EXPLAIN, "explain_request", record)
    query = () if "query" in flags else ("--q", "2,32,8,64")
    assert run("explain", *query, *flags.split()).exit_code == 0
    call = {"query": Q, "key": Q, "value": Q, **CALLS[flags]}
    assert asked == [ATTENTION.request(**call)]


def test_packed_and_wide_calls_are_described(run):
    result = run("explain", "--q", "9,4,8", "--layout", "thd", "--segment-ids")
    assert "layout thd; features: segment_ids" in result.stdout
    result = run("explain", "--q", "1,4,2,8", "--dtype", "float64", "--target", "tpu")
    assert "attention float64" in result.stdout
    assert jnp.ones(1, float).dtype == jnp.float32  # it was for that call alone


def test_explain_prints_the_data_of_the_function(run):
    flags = ("--q", "1,32,4,64", "--causal", "--lse", "--target", "cuda:h100")
    result = run("explain", *flags, "--json")
    query = shape(1, 32, 4, 64)
    answer = switchax.explain(
        query=query,
        key=query,
        value=query,
        causal=True,
        return_lse=True,
        target="cuda:h100",
    )
    assert json.loads(result.stdout) == json.loads(json.dumps(answer.to_dict()))
    assert result.exit_code == 0


def test_explain_shows_choice_adaptations_and_refusals(run, register):
    register("tiled", multiples={"q_len": 128}, cost=Cost.CHUNKED, platforms={"tpu"})
    register("trial", platforms={"tpu"}, experimental=True)
    flags = ("--q", "1,100,4,64", "--target", "tpu:v5e")
    result = run("explain", *flags, "--operation", "tiled")
    rows = [re.split(r"  +", line) for line in result.stdout.splitlines()]
    assert result.exit_code == 0
    assert re.search(r"on tpu:v5e: \w+:tiled \(chunked\)", result.stdout)
    assert ["pad", "q_len 100 to 128"] in [row[1:3] for row in rows]
    assert ["sdpa:cudnn", "fused", "refuses", "platform", "tpu", "cuda"] in [
        row[:6] for row in rows
    ]
    (trial,) = (row for row in rows if row[0].endswith(":trial"))
    assert trial[-1].startswith("experimental")


def test_what_every_candidate_refuses_is_said_once_on_top(run, register, monkeypatch):
    register("simple")
    entries = [e for e in registrations.entries() if e.name in ("cudnn", "simple")]
    monkeypatch.setattr(registrations, "entries", lambda: entries)
    monkeypatch.setattr(registrations, "generation", lambda: -1)
    result = run("explain", "--q", "1,8,4,64", "--sinks", "2")
    assert result.exit_code == 1
    lines = result.stdout.splitlines()
    assert sum("'softmax_aux' is not" in line for line in lines) == 1
    assert lines[1] == "on cpu: no operation"
    assert lines[3].startswith("every candidate refuses softmax_aux=bfloat16[4,2]")


@pytest.mark.usefixtures("standard_promotion")
def test_explain_of_a_named_operation_gives_its_reasons(run):
    flags = ("--q", "1,8,4,64", "--target", "tpu")
    result = run("explain", *flags, "--operation", "cudnn")
    assert result.exit_code == 1
    assert "cudnn: expected platform cuda, got platform=tpu" in result.stdout
    listed = run("explain", *flags, "--operation", "cudnn,sdpa", "--json")
    assert json.loads(listed.stdout)["chosen"] == "sdpa:sdpa"
    unknown = run("explain", *flags, "--operation", "spda", "--json")
    assert unknown.exit_code == 1
    assert "did you mean 'sdpa'" in json.loads(unknown.stdout)["error"]


def test_explain_survives_an_operation_that_raises(run, register, monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("no luck")

    monkeypatch.setattr(EXPLAIN, "explain_request", fail)
    result = run("explain", "--q", "1,8,4,64")
    assert result.exit_code == 1
    assert HOUSE_FORM.fullmatch(result.stderr)
    assert "RuntimeError: no luck (line " in result.stderr


WRONG = {
    "explain": "--q SHAPE, got no --q",
    "explain --q 1,8": "got query of shape (1, 8)",
    "explain --q 1,a,8,64": "got --q=1,a,8,64",
    "explain --q 1,8,8,64 --kv 1,16,8,64 --causal": "q_offset=kv_len - q_len=8",
    "explain --q 1,8,8,64 --window 4": "here (3, 0)",
    "explain --q 1,8,8,64 --window 1,2,3": "window=(1, 2, 3)",
    "explain --q 1,8,8,64 --window -1,0": "window=(-1, 0)",
    "explain --q 1,8,8,64 --window a,0": "--window=a,0",
    "explain --q 1,8,8,64 --q-offset some": "--q-offset=some",
    "explain --q 1,8,8,64 --mask-pattern chunked": "--mask-pattern=chunked",
    "explain --q 1,8,8,64 --mask-pattern chunked:0": "--mask-pattern=chunked:0",
    "explain --q 1,8,8,64 --mask-pattern prefix:2 --causal --q-offset batch": (
        "--q-offset=batch"
    ),
    "explain --mask-pattern prefix:2 --arg query=float32[2]": "with --mask-pattern",
    "explain --q 1,8,8,64 --dtype bfloat": "--dtype=bfloat",
    "explain --q 1,8,8,64 --dtype int32": "query of dtype int32",
    "explain --q 1,8,8,64 --layout bdht": "did you mean 'bhtd'",
    "explain --q 1,8,8,64 --mode training": "(did you mean 'train'?)",
    "explain --q 1,8,8,64 --soft-cap x": "'x' is not a valid float",
    "explain --q 1,8,8,64 --soft-cap 0": "logits_soft_cap=0.0",
    "explain --q 1,8,8,64 --kind atention": "did you mean 'attention'",
    "explain --q 1,8,8,64 --arg causal": "--arg causal",
    "explain --q 1,8,8,64 --arg bias=bflot16[8]": "did you mean 'bfloat16'",
    "explain --q 1,8,8,64 --arg casual=True": "did you mean 'causal'",
    f"explain --q 1,8,8,64 --arg causal={'-' * 5000}1": "got causal='---",
    "explain --q 1,8,8,64 --sinks -1": "--sinks=-1",
    "explain --q 1,8,8,64 --operation=": "got --operation=''",
    "explain --q 1,8,8,64 --operation ,": "got --operation=','",
    "explain --q 1,8,8,64 --operation auto,sdpa": "got --operation='auto,sdpa'",
    "explain --q 1,8,8,64 --causal --arg causal=False": "got causal twice",
    "explain --q 1,8,8,64 --arg query=float32[2]": "got query twice",
    "explain --arg mode=1 --arg mode=2": "got mode twice",
    "explain --kv 1,8,8,64 --arg query=float32[2]": "--q SHAPE with --kv, got no --q",
    "explain --dtype float64 --arg query=float32[2]": "--q SHAPE with --dtype",
    "explain --q 1,8,8,64 --target tpu:v9": "target='tpu:v9'",
    "list --target gtu": "target='gtu'",
    "list --jsn": "--json",
    "lst": "did you mean 'list'",
    "--versio": "--version",
}


@pytest.mark.parametrize("call", WRONG)
def test_a_wrong_call_is_one_line_in_the_house_form(run, call):
    result = run(*call.split())
    assert result.exit_code == 2
    assert result.stdout == ""
    assert HOUSE_FORM.fullmatch(result.stderr)
    assert WRONG[call] in result.stderr


# commands of plugins


def test_a_plugin_adds_a_command(run, plugin):
    class Provider:
        @hookimpl
        def switchax_commands(self, group):
            @group.command()
            def greet():
                """Greet."""
                click.echo("hello")

    plugin("polite", Provider())
    assert run("greet").stdout == "hello\n"
    assert re.search(r"^  greet +Greet\.$", run("--help").stdout, re.MULTILINE)
    assert run("greet", "--help").exit_code == 0


@pytest.mark.parametrize("error", [RuntimeError("boom"), SystemExit(3)])
def test_a_plugin_that_fails_to_add_commands_breaks_nothing(run, plugin, error):
    class Provider:
        @hookimpl
        def switchax_commands(self, group):
            sys.stdout.write("noise")
            raise error

    record = plugin("rude", Provider())
    result = run("doctor", "--json")
    assert json.loads(result.stdout)["healthy"]
    assert "switchax_commands raised" in record.hook_problems[0]
    (problem,) = (
        plugin["hook_problems"]
        for plugin in json.loads(result.stdout)["plugins"]
        if plugin["plugin"] == "rude"
    )
    assert problem == record.hook_problems
    assert run("--help").exit_code == 0
    assert run("list").exit_code == 0


def test_a_plugin_cannot_replace_a_command(run, plugin):
    class Provider:
        @hookimpl
        def switchax_commands(self, group):
            group.add_command(click.Command("doctor", callback=click.Abort))

    record = plugin("usurper", Provider())
    assert run("doctor").exit_code == 0
    assert "expected a new command, got 'doctor'" in record.hook_problems[0]


# as a process


def test_version_and_script():
    (script,) = importlib.metadata.entry_points(
        group="console_scripts", name="switchax"
    )
    assert script.value == "switchax.cli:main"
    result = process("--version")
    assert result.stdout == f"switchax {switchax.__version__}\n"


def test_import_switchax_loads_neither_click_nor_rich():
    code = "import sys, switchax; sys.exit(bool({'click', 'rich'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0


def test_a_wrong_variable_stops_all_but_doctor():
    result = process("list", SWITCHAX_FOO="1")
    assert (result.returncode, result.stdout) == (1, "")
    assert HOUSE_FORM.fullmatch(result.stderr)
    assert "SWITCHAX_FOO" in result.stderr
    result = process("doctor", "--json", SWITCHAX_FOO="1", SWITCHAX_BLOCK="sdpa")
    findings = json.loads(result.stdout)
    assert result.returncode == 1
    assert findings["wrong_settings"][0]["setting"] == "SWITCHAX_FOO"
    statuses = {p["plugin"]: p["status"] for p in findings["plugins"]}
    assert (statuses["sdpa"], statuses["vanilla"]) == ("blocked", "loaded")


def test_explain_needs_no_device_of_any_kind():
    flags = ("--q", "1,8,8,64", "--target", "tpu:v5e", "--json")
    result = process("explain", *flags, JAX_PLATFORMS="no_such_platform")
    assert json.loads(result.stdout)["target"] == "tpu:v5e"
    assert result.returncode == 0
    here = process("explain", "--q", "1,8,8,64", JAX_PLATFORMS="no_such_platform")
    assert here.returncode == 1
    assert HOUSE_FORM.fullmatch(here.stderr)
