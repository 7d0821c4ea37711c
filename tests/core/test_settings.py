"""Settings: where they come from, when they count, and what is wrong with them."""

import asyncio
import os
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import pytest

import switchax
from switchax import SettingsError, current_settings, loading, settings

X = jnp.ones((1, 4, 2, 8))


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    """No settings but the test's own."""
    for variable, _ in settings._environment():
        monkeypatch.delenv(variable)
    monkeypatch.setattr(settings, "_configured", {})


def test_defaults():
    assert current_settings() == switchax.Settings()


def test_environment_then_configure_then_use(monkeypatch):
    monkeypatch.setenv("SWITCHAX_OPERATION", "first, second")
    monkeypatch.setenv("SWITCHAX_STRICT", "yes")
    assert current_settings().operation == ("first", "second")
    switchax.configure(operation="third")
    assert current_settings().operation == ("third",)
    with switchax.use("fourth") as inside:
        assert inside.operation == ("fourth",)
        assert inside.strict, "other settings stay"
    assert current_settings().operation == ("third",)
    switchax.configure(operation=None)
    assert current_settings().operation == ("first", "second")


def test_sources_say_where_each_setting_came_from(monkeypatch):
    monkeypatch.setenv("SWITCHAX_STRICT", "1")
    switchax.configure(force_native=True)
    with switchax.use("vanilla"):
        monkeypatch.setenv("SWITCHAX_STRCT", "1")
        sources = settings.setting_sources()
    assert sources["strict"] == (True, "environment SWITCHAX_STRICT")
    assert sources["force_native"] == (True, "configure")
    assert sources["operation"] == (("vanilla",), "use")
    assert sources["lock"] == (None, "default")
    assert isinstance(sources["SWITCHAX_STRCT"][0], SettingsError)


@pytest.mark.parametrize("name", ["sdpa", "nope"])
def test_an_error_says_that_the_name_is_a_setting_s(monkeypatch, name):
    monkeypatch.setenv("SWITCHAX_OPERATION", name)
    with pytest.raises((switchax.UnsupportedError, ValueError)) as raised:
        switchax.attention(X, X, X, logits_soft_cap=3.0)
    assert "that of environment SWITCHAX_OPERATION" in raised.value.__notes__[0]
    with pytest.raises((switchax.UnsupportedError, ValueError)) as raised:
        switchax.attention(X, X, X, logits_soft_cap=3.0, operation=name)
    assert not hasattr(raised.value, "__notes__")


def test_a_variable_may_vanish_while_all_are_read(monkeypatch):
    class Vanishing(dict):
        def get(self, name, default=None):
            self.pop(name, None)
            return default

        def items(self):
            raise KeyError("another thread has unset it")

    monkeypatch.setattr(os, "environ", Vanishing(SWITCHAX_STRICT="1", OTHER="1"))
    assert current_settings() == switchax.Settings()


def test_an_unknown_variable_is_an_error_at_first_use_only():
    program = """
import jax.numpy as jnp
import switchax

print("imported")
x = jnp.ones((1, 2, 1, 8))
switchax.attention(x, x, x)
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"SWITCHAX_OPERATON": "sdpa", "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "imported\n"
    assert done.returncode == 1
    assert "SettingsError: environment: expected a variable of" in done.stderr
    got = "got SWITCHAX_OPERATON (did you mean 'SWITCHAX_OPERATION'?)"
    assert f"{got}; correct or unset it" in done.stderr


@pytest.mark.parametrize(
    ("variable", "text", "part"),
    [
        ("SWITCHAX_STRICT", "maybe", "strict='maybe'; write True or False, or 1 or 0"),
        ("SWITCHAX_OPERATION", ",", "at least one name"),
        ("SWITCHAX_OPERATION", "sdpa,auto", "'auto' alone"),
        ("SWITCHAX_AUTOLOAD", "2", "autoload='2'"),
    ],
)
def test_a_bad_variable_is_an_error_that_names_it(monkeypatch, variable, text, part):
    monkeypatch.setenv(variable, text)
    with pytest.raises(SettingsError) as caught:
        switchax.attention(X, X, X)
    assert f"environment {variable}: expected" in str(caught.value)
    assert part in str(caught.value)
    monkeypatch.delenv(variable)
    assert switchax.attention(X, X, X).shape == X.shape


def test_an_empty_variable_is_as_good_as_none(monkeypatch):
    monkeypatch.setenv("SWITCHAX_STRICT", " ")
    assert current_settings() == switchax.Settings()


@pytest.mark.parametrize("text", ["1", "true", "YES", " on "])
def test_bools_are_read_in_several_spellings(monkeypatch, text):
    monkeypatch.setenv("SWITCHAX_FORCE_NATIVE", text)
    assert current_settings().force_native


def test_lists_of_plugins_are_normalised(monkeypatch):
    monkeypatch.setenv("SWITCHAX_BLOCK", "My_Plugin, switchax.other , ,a__b")
    assert current_settings().block == {"my-plugin", "switchax-other", "a-b"}


@pytest.mark.parametrize(
    ("values", "part"),
    [
        ({"oparation": "sdpa"}, "'oparation' (did you mean 'operation'?)"),
        ({"operation": 3}, "operation=3; give a list of names"),
        ({"operation": [3]}, "names are str"),
        ({"operation": []}, "at least one name"),
        ({"operation": {"vanilla", "sdpa"}}, "tried in its order"),
        ({"operation": frozenset({"sdpa"})}, "tried in its order"),
        ({"operation": "auto,sdpa"}, "'auto' alone"),
        ({"strict": 1}, "strict=1; write True or False, or 1 or 0"),
        ({"cache_dir": 3}, "cache_dir=3; give a file system path"),
        ({"lock": ""}, "lock=''"),
        ({"lock": "a\0b"}, "lock to be a path"),
        ({"lock": b"a"}, "lock=b'a'"),
    ],
)
def test_a_bad_value_is_an_error_and_changes_nothing(values, part):
    before = current_settings()
    with pytest.raises(SettingsError, match=r"^configure: expected") as caught:
        switchax.configure(force_native=True, **values)
    assert part in str(caught.value)
    assert current_settings() == before
    with (
        pytest.raises(SettingsError, match=r"^use: expected") as caught,
        switchax.use(force_native=True, **values),
    ):
        pass
    assert part in str(caught.value)
    assert current_settings() == before


def test_names_are_a_comma_list_or_a_sequence():
    for names in ("a, b", ["a", "b"], ("a", "b", "a")):
        with switchax.use(names) as inside:
            assert inside.operation == ("a", "b")
    with switchax.use("a"), switchax.use("auto") as inside:
        assert inside.operation == ()


def test_use_names_the_settings_that_it_takes():
    with (
        pytest.raises(SettingsError, match=r"lock, got 'blok' .*mean 'block'"),
        switchax.use(blok="sdpa"),
    ):
        pass


def test_use_takes_one_operation():
    says = "^use: expected operation once, got 'a' and operation='b'"
    with pytest.raises(SettingsError, match=says), switchax.use("a", operation="b"):
        pass


def test_use_nests_and_ends_with_an_error():
    with switchax.use("outer", strict=True):
        with pytest.raises(KeyError), switchax.use("inner", strict=False):
            raise KeyError
        assert current_settings().operation == ("outer",)
        assert current_settings().strict
    assert current_settings() == switchax.Settings()


def test_use_may_be_left_in_any_order():
    def block(**values):
        with switchax.use(**values):
            yield
            yield

    first, second = block(operation="vanilla", strict=True), block(operation="sdpa")
    next(first)
    next(second)
    list(first)
    assert current_settings().operation == ("sdpa",)
    assert not current_settings().strict
    list(second)
    assert current_settings().operation == ()


def test_use_decorates_a_function():
    @switchax.use("decorated", force_native=True)
    def inside():
        return current_settings()

    for _ in range(2):
        assert (inside().operation, inside().force_native) == (("decorated",), True)
    assert current_settings() == switchax.Settings()


def test_use_is_of_one_thread():
    seen = []
    with switchax.use("here"):
        thread = threading.Thread(target=lambda: seen.append(current_settings()))
        thread.start()
        thread.join()
    assert seen == [switchax.Settings()]


def test_use_is_of_one_task_and_leaves_nothing_behind():
    async def work(name, start, stop):
        await asyncio.sleep(start)
        with switchax.use(name):
            await asyncio.sleep(stop)
            return current_settings().operation

    async def both():
        return await asyncio.gather(work("a", 0, 0.02), work("b", 0.01, 0.03))

    traced = jax.jit(lambda x: (seen.append(current_settings().operation), x)[1])
    seen = []
    traced(1)
    assert asyncio.run(both()) == [("a",), ("b",)]
    assert current_settings() == switchax.Settings()
    traced(1)
    assert set(seen) == {()}


def test_use_holds_in_a_copied_context_but_not_for_its_traces():
    async def elsewhere(function):
        with switchax.use("here"):
            return await asyncio.to_thread(function)

    def look():
        return current_settings().operation

    assert asyncio.run(elsewhere(look)) == ("here",)
    with pytest.raises(RuntimeError, match=r"^use: expected the settings of this thr"):
        asyncio.run(elsewhere(jax.jit(lambda: (look(), 1)[1])))


def test_configure_is_of_all_threads():
    seen = []
    switchax.configure(operation="everywhere")
    thread = threading.Thread(target=lambda: seen.append(current_settings().operation))
    thread.start()
    thread.join()
    assert seen == [("everywhere",)]


def test_a_jitted_function_follows_use():
    chosen = []

    @jax.jit
    def attend(x):
        output = switchax.attention(x, x, x)
        chosen.append(switchax.decisions.recorded()[-1].chosen.entry.name)
        return output

    switchax.decisions.clear()
    x = jnp.ones((1, 5, 3, 8))
    attend(x)
    with switchax.use("vanilla"):
        attend(x)
        attend(x)
    attend(x)
    assert chosen == ["chunked", "vanilla"], "and what was traced once is not again"
    scoped = []
    for name in ("sdpa", "vanilla"):
        with switchax.use(name):
            text = attend.lower(x).as_text(debug_info=True)
        scoped.append([n for n in ("sdpa", "vanilla") if f"switchax.{n}" in text])
    assert scoped == [["sdpa"], ["vanilla"]]


@pytest.mark.parametrize("name", ["plugins", "block", "autoload"])
def test_discovery_settings_are_fixed_after_discovery(name):
    loading.ensure_loaded()
    value = True if name == "autoload" else "vanilla"
    for given in (value, None):
        with pytest.raises(SettingsError, match=f"SWITCHAX_{name.upper()}"):
            switchax.configure(**{name: given})
    with (
        pytest.raises(SettingsError, match="use configure"),
        switchax.use(**{name: value}),
    ):
        pass


def test_force_native_runs_the_native_method():
    with switchax.use(force_native=True):
        assert switchax.attention(X, X, X, operation="vanilla").shape == X.shape
        with pytest.raises(switchax.UnsupportedError):
            switchax.attention(X, X, X, operation="cudnn")
