"""`switchax doctor`: what is installed, in force, and wrong."""

from __future__ import annotations

from typing import Any

import click

from switchax.registry import HOW_TO_INSTALL

from .diagnosis import diagnose, load
from .output import show_json, show_line, show_table, stdout_kept

__all__ = ["doctor"]

NEUTRAL = {"operation": "auto", "plugins": "all", "cache_dir": "user's cache folder"}


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Write JSON.")
@click.option("--verbose", "-v", is_flag=True, help="Show tracebacks of failures.")
@click.pass_context
def doctor(ctx: click.Context, as_json: bool, verbose: bool) -> None:
    """Check plugins, names, settings and devices.

    Exits 1 if a plugin failed or brings nothing, a name is contested, a setting is
    wrong, no operation is installed, or JAX cannot start.
    """
    with stdout_kept():
        load()
        root = ctx.find_root().command
        if isinstance(root, click.Group):
            root.list_commands(ctx)  # a hook that raises is noted with its plugin
        findings = diagnose()
    if as_json:
        show_json(findings)
    else:
        _show(findings, verbose)
    ctx.exit(0 if findings["healthy"] else 1)


def _show(findings: dict[str, Any], verbose: bool) -> None:
    versions = findings["versions"].items()
    show_line(", ".join(f"{name} {version}" for name, version in versions))
    _show_plugins(findings["plugins"], verbose)
    for key in findings["empty_plugins"]:
        text = f"{key}: expected an operation, kind or hook, got none; decorate the "
        show_line(text + "class with @OperationRegistry.register", "red")
    if findings["contested"]:
        _heading("contested names")
        for name in findings["contested"]:
            show_line(name["problem"], "red")
    _show_settings(findings["settings"], findings["wrong_settings"])
    if findings["notes"]:
        _heading("notes")
        for note in findings["notes"]:
            show_line(note)
    _show_devices(findings["devices"], findings["damaged_files"])
    _heading(_verdict(findings))


def _heading(text: str) -> None:
    show_line()
    show_line(text, "bold")


def _show_plugins(plugins: list[dict[str, Any]], verbose: bool) -> None:
    _heading("plugins")
    if not plugins:
        show_line(f"none is installed; {HOW_TO_INSTALL}")
        return
    keys = ("plugin", "distribution", "version", "status", "reason", "fix")
    shown = [key for key in keys if any(plugin[key] for plugin in plugins)]
    show_table(shown, [[plugin[key] for key in shown] for plugin in plugins])
    for plugin in plugins:
        for problem in plugin["hook_problems"]:
            show_line(f"plugin {plugin['plugin']}: {problem}", "yellow")
        for change in plugin["changes"]:
            text = f"its import changed {change}, for everything in the process"
            show_line(f"plugin {plugin['plugin']}: {text}", "yellow")
        if verbose and plugin["traceback"]:
            show_line()
            show_line(plugin["traceback"].rstrip())


def _show_settings(settings: list[dict[str, Any]], wrong: list[dict[str, str]]) -> None:
    _heading("settings")
    rows = [(s["setting"], _value_text(s), s["source"]) for s in settings]
    show_table(("setting", "value", "from"), rows)
    for setting in wrong:
        show_line(f"wrong: {setting['problem']}", "red")


def _value_text(setting: dict[str, Any]) -> str:
    value = setting["value"]
    if value is None or value == []:
        return NEUTRAL.get(setting["setting"], "none")
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ", ".join(value) if isinstance(value, list) else str(value)


def _show_devices(devices: dict[str, Any], damaged: list[dict[str, str]]) -> None:
    _heading("devices")
    if devices["problem"]:
        show_line(f"JAX cannot start: {devices['problem']}", "red")
    else:
        keys = ("target", "device_kind", "count")
        rows = [[str(kind[key]) for key in keys] for kind in devices["found"]]
        show_table(("target", "device kind", "count"), rows)
    if damaged:
        _heading("damaged files")
        show_table(
            ("path", "problem", "fix"),
            [(file["path"], file["problem"], file["fix"]) for file in damaged],
        )


def _verdict(findings: dict[str, Any]) -> str:
    failed = sum(plugin["status"] == "failed" for plugin in findings["plugins"])
    counts: dict[str, int | str] = {
        "plugins failed": failed,
        "plugins that bring nothing": len(findings["empty_plugins"]),
        "names contested": len(findings["contested"]),
        "settings wrong": len(findings["wrong_settings"]),
    }
    if not findings["operations"]:
        counts["operations"] = "none"
    if findings["devices"]["problem"]:
        counts["devices JAX starts on"] = "none"
    if not any(counts.values()):
        changes = [c for plugin in findings["plugins"] for c in plugin["changes"]]
        notes = len(findings["notes"]) + len(changes)
        return f"all well, but see the notes ({notes})" if notes else "all well"
    return "not well: " + ", ".join(f"{what} {n}" for what, n in counts.items() if n)
