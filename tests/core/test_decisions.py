"""Choices: ranked, refused, named, recorded, and held to a lock file."""

import json
import os
import threading
import warnings

import jax
import jax.numpy as jnp
import pytest

import switchax
from switchax import (
    Cost,
    DecisionLockError,
    DegradedChoiceError,
    DegradedChoiceWarning,
    Refusal,
    UnknownOperationError,
    UnsupportedError,
    decisions,
)

from .standins import registration, stand_in

WHY = Refusal("rule", "q_len", "4", "even more", "pass a longer query")


@pytest.fixture
def register():
    decisions.clear()
    with registration() as register:
        yield register
    decisions.clear()


@pytest.fixture
def picky(register):
    """A fused operation that refuses everything."""
    return register(stand_in("picky", cost=Cost.FUSED, reasons=(WHY,)))


def attend(operation="auto", length=4, **options):
    x = jnp.ones((1, length, 2, 8))
    return switchax.attention(x, x, x, operation=operation, **options)


def last():
    return decisions.recorded()[-1].chosen.entry.name


def test_each_choice_is_recorded_once(register):
    for _ in range(2):
        attend("vanilla")
        attend("sdpa")
        attend("vanilla", length=6)
    first, second, third = decisions.recorded()
    assert [d.chosen.entry.name for d in (first, second, third)] == [
        "vanilla",
        "sdpa",
        "vanilla",
    ]
    assert (first.request.q_len, third.request.q_len) == (4, 6)
    assert (first.how, str(first.target)) == ("named", "cpu")
    assert {"vanilla", "sdpa"} <= {c.entry.name for c in first.candidates}


def test_auto_ranks_by_cost_class_then_priority_then_name(register):
    register(stand_in("b_chunked", cost=Cost.CHUNKED, priority=99))
    attend(length=1)
    assert last() == "b_chunked"
    register(stand_in("b_fused", cost=Cost.FUSED))
    attend(length=2)
    assert last() == "b_fused"
    register(stand_in("a_fused", cost=Cost.FUSED))
    attend(length=3)
    assert last() == "a_fused"
    register(stand_in("c_fused", cost=Cost.FUSED, priority=1))
    attend(length=4)
    assert last() == "c_fused"
    assert decisions.recorded()[-1].how == "auto"


@pytest.mark.parametrize("where", [True, {"cpu"}])
def test_auto_never_takes_an_experimental_operation(register, where):
    register(stand_in("trial", cost=Cost.FUSED, experimental=where))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nor does it count as passed over
        attend()
    assert last() == "chunked"
    attend("trial")
    assert last() == "trial"


def test_a_worse_cost_class_is_said_once_with_the_reasons(picky):
    length = 11  # of no other test: what was said is not said again
    with pytest.warns(DegradedChoiceWarning) as caught:
        attend(length=length)
    attend(length=length)  # where a warning would be an error
    (warning,) = caught
    assert warning.filename == __file__
    text = str(warning.message)
    assert "auto: took chunked:chunked, cost class chunked" in text
    assert "picky (fused) refused q_len=4 (allowed: even more); pass a longer" in text
    assert last() == "chunked"
    assert [c.entry.name for c in decisions.recorded()[-1].degraded] == ["picky"]


def test_an_operation_for_another_platform_is_not_passed_over(register):
    register(stand_in("elsewhere", platforms={"tpu"}, cost=Cost.FUSED))
    attend()
    assert decisions.recorded()[-1].degraded == ()


def test_strict_raises_with_the_reasons_as_data(picky):
    with switchax.use(strict=True):
        with pytest.raises(DegradedChoiceError, match="strict is set") as caught:
            attend()
        ((name, refusals),) = caught.value.refusals.items()
        assert name.endswith(":picky")
        assert refusals == (WHY,)
        assert decisions.recorded() == ()
        attend("vanilla")
    assert last() == "vanilla"


def test_a_name_runs_that_operation_or_raises(picky):
    with pytest.raises(UnsupportedError) as caught:
        attend("picky")
    ((name, (refusal,)),) = caught.value.refusals.items()
    assert name.endswith(":picky")
    assert (refusal.code, refusal.field, refusal.actual) == ("rule", "q_len", "4")
    assert (refusal.allowed, refusal.hint) == ("even more", "pass a longer query")
    text = str(caught.value)
    assert text.startswith(
        "picky: expected q_len even more, got q_len=4; pass a longer"
    )
    assert "honoured here by: chunked, sdpa, vanilla" in text
    assert decisions.recorded() == ()


def test_names_are_tried_in_order(picky):
    attend(("picky", "vanilla", "sdpa"))
    assert last() == "vanilla"
    assert decisions.recorded()[-1].how == "listed"
    with pytest.raises(UnsupportedError) as caught:
        attend(("picky", "cudnn"))
    assert [name.partition(":")[2] for name in caught.value.refusals] == [
        "picky",
        "cudnn",
    ]
    with pytest.raises(UnknownOperationError, match="did you mean 'vanilla'"):
        attend(("picky", "vanila", "sdpa"))


@pytest.mark.parametrize("operation", [3, (), None, ("vanilla", 3)], ids=repr)
def test_an_operation_that_is_no_name_is_a_type_error(operation):
    with pytest.raises(TypeError, match="operation to be a name or names"):
        attend(operation)


def test_the_setting_stands_in_for_auto_only(register):
    with switchax.use(operation="cudnn, vanilla"):
        attend()
        assert last() == "vanilla"
        attend("sdpa")
        assert last() == "sdpa"
    with (
        switchax.use("cudnn"),
        pytest.raises(UnsupportedError, match="cudnn: expected"),
    ):
        attend()


def test_a_run_matches_the_lock_file_it_wrote(register, tmp_path):
    path = tmp_path / "lock.json"
    for operation in ("auto", "vanilla"):  # two operations for one request
        attend(operation)
    decisions.save(path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["lock.json"]
    rows = json.loads(path.read_text())["decisions"]
    assert {row["operation"] for row in rows} == {"chunked:chunked", "vanilla:vanilla"}
    assert {row["distribution"] for row in rows} == {
        "switchax-chunked",
        "switchax-vanilla",
    }
    decisions.clear()
    with switchax.use(lock=path):
        attend()
        attend("vanilla")
    assert len(decisions.recorded()) == 2
    first = path.read_text()
    decisions.save(path)
    assert path.read_text() == first


def test_a_lock_file_keeps_its_mode_and_a_link_stays_one(tmp_path):
    link, real = tmp_path / "link.json", tmp_path / "lock.json"
    link.symlink_to(real)
    decisions.save(link)
    umask = os.umask(0)
    os.umask(umask)
    assert real.stat().st_mode & 0o777 == 0o666 & ~umask
    real.chmod(0o640)
    decisions.save(link)
    assert link.is_symlink()
    assert real.stat().st_mode & 0o777 == 0o640
    assert sorted(path.name for path in tmp_path.iterdir()) == [link.name, real.name]


def test_a_long_name_is_written_and_a_link_to_itself_is_not(tmp_path):
    decisions.save(tmp_path / ("n" * 250))
    loop = tmp_path / "loop"
    loop.symlink_to("loop")
    with pytest.raises(DecisionLockError, match="a file that can be written"):
        decisions.save(loop)
    assert loop.is_symlink()


def test_nothing_but_a_file_is_written_over(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path in (pipe, tmp_path):
        with pytest.raises(DecisionLockError, match="a file that can be written"):
            decisions.save(path)
    assert pipe.is_fifo()
    assert list(tmp_path.iterdir()) == [pipe]


def test_explain_refuses_what_a_call_or_its_request_would(tmp_path):
    x = jax.ShapeDtypeStruct((1, 4, 2, 8), "float32")
    arrays = {"query": x, "key": x, "value": x}
    request = switchax.explain(**arrays).request
    metadata = switchax.OperationMetadata
    assert switchax.explain(request, kind="attention").chosen
    assert switchax.explain(request, metadata=metadata("float32")).chosen
    with pytest.raises(ValueError, match="a kind of"):
        switchax.explain(request, kind="nope")
    with pytest.raises(ValueError, match="runtime_dtype=float16"):
        switchax.explain(request, metadata=metadata("float16"))
    wide = metadata(runtime_softmax_dtype="float64")
    with pytest.raises(UnsupportedError, match="softmax"):
        switchax.explain(request, metadata=wide)
    for configs in ({"nope": 1}, {"vanilla": 1}, {"chunked": 5}):
        given = metadata(operation_configs=configs)
        with pytest.raises((ValueError, TypeError), match="operation_configs"):
            switchax.explain(**arrays, metadata=given)
    with switchax.use(lock=tmp_path / "none.json"):
        answer = switchax.explain(request)
    assert answer.chosen is None
    assert "expected a readable file" in answer.error


def test_another_choice_or_request_does_not_match_the_lock(register, tmp_path):
    path = tmp_path / "lock.json"
    attend()
    decisions.save(path)
    decisions.clear()
    with switchax.use(lock=path):
        with pytest.raises(DecisionLockError) as caught:
            attend("vanilla")
        text = str(caught.value)
        assert (
            f"expected chunked:chunked 0.1.0 by {path}, got vanilla:vanilla 0.1.0"
            in text
        )
        assert "install what was locked, or write the file again" in text
        with pytest.raises(DecisionLockError, match="a request that the file knows"):
            attend(length=5)
        with pytest.raises(DecisionLockError, match="a request that the file knows"):
            attend(softmax_scale=0.5)
    assert decisions.recorded() == (), "what did not match did not run"


def test_a_newer_operation_does_not_match_the_lock(register, tmp_path):
    path = tmp_path / "lock.json"
    attend()
    decisions.save(path)
    register(stand_in("newer", cost=Cost.FUSED))
    with switchax.use(lock=path), pytest.raises(DecisionLockError, match=":newer"):
        attend()


ROW = {
    "request": "r",
    "target": "t",
    "operation": "o",
    "distribution": "d",
    "version": "v",
}


def lock_text(rows, form=1):
    return json.dumps({"switchax_decisions": form, "decisions": rows})


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"[]",
        b"3",
        b"{}",
        b"[" * 100_000,
        lock_text(3).encode(),
        lock_text([3]).encode(),
        lock_text(["row"]).encode(),
        lock_text([{**ROW, "request": ["r"]}]).encode()[:-9],
        lock_text([{"request": "r", "target": "t"}]).encode(),
        lock_text([ROW], form=2).encode(),
        lock_text({}).encode(),
        lock_text("").encode(),
        None,
    ],
    ids=[
        "empty",
        "torn",
        "binary",
        "list",
        "number",
        "no_rows",
        "deep",
        "rows_number",
        "row_number",
        "row_text",
        "torn_row",
        "short_row",
        "other_format",
        "rows_mapping",
        "rows_text",
        "folder",
    ],
)
def test_a_damaged_lock_file_gives_one_clear_error(register, tmp_path, content):
    path = tmp_path / "lock.json"
    if content is None:
        path.mkdir()
    else:
        path.write_bytes(content)
    with switchax.use(lock=path), pytest.raises(DecisionLockError) as caught:
        attend()
    text = str(caught.value)
    assert text.startswith("lock: expected a file written by switchax.decisions.save")
    assert str(path) in text
    assert text.endswith("write it again")


def test_a_missing_lock_file_says_how_to_write_it(register, tmp_path):
    path = tmp_path / "none.json"
    with switchax.use(lock=path), pytest.raises(DecisionLockError) as caught:
        attend()
    assert "write it with switchax.decisions.save" in str(caught.value)


def test_a_lock_file_is_read_again_when_it_changes(register, tmp_path):
    path = tmp_path / "lock.json"
    path.write_text(lock_text([]))
    with switchax.use(lock=path), pytest.raises(DecisionLockError):
        attend()
    attend()
    decisions.save(path)
    with switchax.use(lock=path):
        attend()


@pytest.mark.parametrize("path", [3, None, b"lock.json"], ids=repr)
def test_saving_to_no_path_is_a_type_error(path):
    with pytest.raises(TypeError, match=r"^decisions.save: expected path to be a fil"):
        decisions.save(path)


@pytest.mark.parametrize("path", ["gone/x", ".", "file/x", "a\0b", "a" * 300], ids=repr)
def test_saving_where_no_file_can_be_is_one_clear_error(tmp_path, path):
    (tmp_path / "file").write_text("")
    says = r"^decisions.save: expected a file that can be written, got path=.*\(.+\);"
    with pytest.raises(DecisionLockError, match=says):
        decisions.save(os.path.join(tmp_path, path))
    assert [found.name for found in tmp_path.iterdir()] == ["file"]


def test_saving_that_fails_leaves_no_file(register, tmp_path, monkeypatch):
    attend()
    monkeypatch.setattr(decisions.Path, "replace", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        decisions.save(tmp_path / "lock.json")
    assert list(tmp_path.iterdir()) == []


def test_decisions_of_every_thread_are_recorded(register):
    threads = [threading.Thread(target=attend, args=("auto", n)) for n in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(d.request.q_len for d in decisions.recorded()) == [1, 2, 3]


def test_a_pipe_as_lock_file_is_an_error_and_does_not_wait(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    x = jnp.ones((1, 2, 1, 4))
    with (
        switchax.use(lock=path),
        pytest.raises(switchax.DecisionLockError, match="expected a file"),
    ):
        switchax.attention(x, x, x)
