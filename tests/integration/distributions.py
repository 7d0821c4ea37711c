"""Distributions written by hand: a folder on the path, and no install step."""

import dataclasses
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

_OPERATION = """
from switchax import ATTENTION, BaseOperation, Capabilities, Cost, OperationRegistry

{decorator}
class {class_name}(BaseOperation):
    kind = ATTENTION
    capabilities = Capabilities({capabilities})

    @classmethod
    def get_impl_name(cls):
        return {names!r}

    def forward_native(self, query, key, value, *, softmax_scale):
        return query
"""

_KIND = """
from switchax.kinds.attention import AttentionKind

class Kind(AttentionKind):
    name = {name!r}
"""

# What every script may use; `report` is how it answers.
_PROBE = """
import json
import jax.numpy as jnp
import switchax
from switchax import OperationRegistry, registrations
from switchax.loading import ensure_loaded

X = jnp.ones((1, 4, 2, 8)) if {arrays} else None

def attend(operation, length=4):
    return float(switchax.attention(*3 * [X[:, :length]], operation=operation).sum())

def explained(operation="auto", target="cpu"):
    from jax import ShapeDtypeStruct
    x = ShapeDtypeStruct((1, 4, 2, 8), "float32")
    return switchax.explain(query=x, key=x, value=x, operation=operation, target=target)

def error_of(question, *args):
    try:
        return f"no error: {{question(*args)}}"
    except Exception as error:
        return f"{{type(error).__name__}}: {{error}}"

def module_of(name):
    return OperationRegistry.get(name).__module__

def records():
    return {{
        key: {{
            "status": record.status, "reason": record.reason, "fix": record.fix,
            "details": record.details, "hook_problems": record.hook_problems,
        }}
        for key, record in ensure_loaded().items()
    }}

def owners():
    entries = registrations.entries()
    return {{entry.name: [entry.plugin, entry.distribution] for entry in entries}}

def ours():
    return {{name: attend(name) for name in ("vanilla", "sdpa")}}

def report(**answers):
    print(json.dumps(answers))
"""


def operation(*names, class_name="Operation", decorator=True, **capabilities):
    """Returns the source of a module that defines one operation."""
    return _OPERATION.format(
        names=names,
        class_name=class_name,
        decorator="@OperationRegistry.register" if decorator else "",
        capabilities=", ".join(
            f"{name}={value}" for name, value in capabilities.items()
        ),
    )


# What `ours()` reports where nothing is wrong with vanilla and sdpa.
OURS = {"vanilla": 64.0, "sdpa": 64.0}


def kind(name):
    """Returns the source of a class `Kind` of operations."""
    return _KIND.format(name=name)


@dataclasses.dataclass(frozen=True)
class Site:
    """A folder of distributions that a subprocess has on its path."""

    folder: Path

    def add(
        self, name, entry_points, version="1.0", metadata=None, files=(), **modules
    ):
        """Writes a distribution.

        `entry_points` is a mapping or the file's bytes; a module's name may hold
        "__" for a dot; `metadata` replaces METADATA, "" leaves it out; `files` are
        what RECORD lists.
        """
        info = self.folder / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True)
        if metadata is None:
            metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        if metadata:
            (info / "METADATA").write_text(metadata)
        if isinstance(entry_points, dict):
            lines = [f"{key} = {value}" for key, value in entry_points.items()]
            entry_points = "\n".join(["[switchax.plugins]", *lines, ""]).encode()
        (info / "entry_points.txt").write_bytes(entry_points)
        for module, source in modules.items():
            path = self.folder.joinpath(*module.split("__")).with_suffix(".py")
            path.parent.mkdir(exist_ok=True)
            path.write_text(textwrap.dedent(source))
        (info / "RECORD").write_text("".join(f"{file},,\n" for file in files))

    def run(self, script, *others, arrays=True, **environment):
        """Returns what a script reports in a process with this site on its path."""
        program = _PROBE.format(arrays=arrays) + textwrap.dedent(script)
        done = self.python("-c", program, others=others, **environment)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def doctor(self, *others, **environment):
        """Returns the exit code and the findings of `switchax doctor --json`."""
        done = self.command("doctor", "--json", others=others, **environment)
        assert done.stdout, done.stderr
        return done.returncode, json.loads(done.stdout)

    def command(self, *arguments, others=(), **environment):
        """Returns the process of a `switchax` command, when it has ended."""
        return self.python("-m", "switchax", *arguments, others=others, **environment)

    def python(self, *arguments, others=(), folder=None, **environment):
        """Returns the process of a Python, when it has ended; folder is its own."""
        return subprocess.run(
            [sys.executable, *arguments],
            cwd=folder or self.folder,
            env=self._environment(others) | environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )

    def start(self, *arguments):
        """Returns the process of a Python, which runs."""
        return subprocess.Popen(
            [sys.executable, *arguments],
            cwd=self.folder,
            env=self._environment(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )

    def _environment(self, others=()):
        path = [str(site.folder) for site in (self, *others)]
        path += filter(None, [os.environ.get("PYTHONPATH")])
        kept = {k: v for k, v in os.environ.items() if not k.startswith("SWITCHAX_")}
        kept |= {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(path)}
        return kept
