"""TPU generations that can be compiled for, and how libtpu is asked for them."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["GENERATIONS", "Chip", "environment"]


class Chip(NamedTuple):
    """How a generation is asked for.

    Attributes:
        topology: Name of its smallest topology, as
            `jax.experimental.topologies.get_topology_desc` takes it.
        accelerator: What libtpu reads from TPU_ACCELERATOR_TYPE.
    """

    topology: str
    accelerator: str


GENERATIONS = {
    "v5e": Chip("v5e:2x2", "v5litepod-4"),
    "v5p": Chip("v5p:2x2x1", "v5p-8"),
    "v6e": Chip("v6e:2x2", "v6e-4"),
    "7x": Chip("tpu7x:2x2x1", "tpu7x-4"),
}


def environment(generation: str, dumps: str) -> dict[str, str]:
    """Returns what a process needs to compile for a TPU that is not there.

    Args:
        generation: One of `GENERATIONS`.
        dumps: Folder that libtpu writes schedules to.
    """
    flags = f"--xla_jf_dump_to={dumps} --xla_jf_dump_llo_text=true"
    return {
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # or a second process would be aborted
        "TPU_ACCELERATOR_TYPE": GENERATIONS[generation].accelerator,
        "TPU_WORKER_HOSTNAMES": "localhost",
        "LIBTPU_INIT_ARGS": flags,
    }
