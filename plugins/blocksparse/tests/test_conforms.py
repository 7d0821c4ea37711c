"""It conforms, the kernels being interpreted: quickly here, fully by `tox -e conform`.

`pallas_flash` has the same kernels, and declares less.
"""

import jax
import pytest

from switchax.testing.conformance import cases_of
from switchax.testing.run import Run

PARTS = 4  # so that the workers of a run share them


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.usefixtures("quick_compilation")
def test_it_conforms(part):
    operation, cases = cases_of("blocksparse")
    run = Run(operation)
    with jax.default_matmul_precision("highest"):
        run.all(list(enumerate(cases))[part::PARTS])
    assert run.outcome.complete
    assert not run.outcome.failures, "\n".join(map(str, run.outcome.failures))
    assert not any(result.refused for result in run.outcome.results.values())
