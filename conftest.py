"""What the tests of all distributions share, and none of them needs."""

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

CACHE = {
    "jax_persistent_cache_min_compile_time_secs": 0.0,
    "jax_persistent_cache_min_entry_size_bytes": -1,
}


@pytest.fixture(scope="session", autouse=True)
def compiled_once(tmp_path_factory, request):
    """Compiles once, in all workers of a run, what several tests have in common."""
    folder = tmp_path_factory.getbasetemp()
    folder = folder.parent if hasattr(request.config, "workerinput") else folder
    options = {"jax_compilation_cache_dir": str(folder / "compiled"), **CACHE}
    before = {name: getattr(jax.config, name) for name in options}
    _configure(options)
    yield
    _configure(before)


def _configure(options):
    for name, value in options.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
