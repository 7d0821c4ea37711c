"""Our own operations conform: quickly here, fully by `tox -e conform`."""

import jax
import pytest

from switchax.testing.conformance import Run, cases_of

pytestmark = pytest.mark.heavy

PARTS = 2  # so that the workers of a run share them


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.usefixtures("quick_compilation")
def test_vanilla_conforms(part):
    conforms("vanilla", part)


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.usefixtures("quick_compilation")
def test_sdpa_conforms(part):
    conforms("sdpa", part)


@pytest.mark.further  # minutes, since its loops compile long
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.usefixtures("quick_compilation")
def test_chunked_conforms(part):
    conforms("chunked", part)


def conforms(name, part):
    # sdpa refuses half precision under "strict", which the other tests set.
    with (
        jax.numpy_dtype_promotion("standard" if name == "sdpa" else "strict"),
        jax.default_matmul_precision("highest"),
    ):
        operation, cases = cases_of(name)
        run = Run(operation)
        assert run.all(cases[part::PARTS], None)
    assert not run.failures, "\n".join(map(str, run.failures.values()))
    refused = {result.dtype for result in run.results.values() if result.refused}
    assert refused <= ({"bfloat16", "float16"} if name == "sdpa" else set())
