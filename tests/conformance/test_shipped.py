"""Our own operations conform: quickly here, fully by `tox -e conform`."""

import jax
import pytest

from switchax.testing.conformance import cases_of
from switchax.testing.run import Run

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
        run.all(list(enumerate(cases))[part::PARTS])
    outcome = run.outcome
    assert outcome.complete
    assert not outcome.failures, "\n".join(map(str, outcome.failures))
    refused = {result.dtype for result in outcome.results.values() if result.refused}
    assert refused <= ({"bfloat16", "float16"} if name == "sdpa" else set())
