"""The device a program will run on: the present one, or any other by name."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from .errors import described, house_message, near_miss

__all__ = ["PLATFORMS", "Target", "current_target", "target_of_device"]

PLATFORMS = frozenset({"cpu", "cuda", "rocm", "tpu", "tt"})

# Spellings of TPU device kinds by generation. "TPU v5 lite" is JAX's name of v5e,
# "TPU v5" that of v5p, "TPU v6 lite" that of v6e.
_TPU_KINDS = {"v5 lite": "v5e", "v5": "v5p", "v6 lite": "v6e", "7x": "7x", "v7x": "7x"}
_TPU_GENERATIONS = ("v2", "v3", "v4", "v5e", "v5p", "v6e", "7x")
_CUDA_CARDS = {
    "v100": "sm70",
    "t4": "sm75",
    "a100": "sm80",
    "a10": "sm86",
    "l4": "sm89",
    "l40": "sm89",
    "h100": "sm90",
    "h200": "sm90",
    "b200": "sm100",
}


# Platforms of devices that JAX showed us, beside those above: nothing runs there, and
# every operation says so.
_others: set[str] = set()


@dataclasses.dataclass(frozen=True)
class Target:
    """A kind of device.

    Attributes:
        platform: "cpu", "cuda", "rocm", "tpu" or "tt".
        device_kind: The device's own name, "" if unknown.
        generation: Short name of the architecture: "v5e", "sm90", "gfx942", or "".

    Raises:
        TypeError: For what is no str.
        ValueError: For an unknown platform.

    Example:
        >>> Target.parse("tpu:v5e")
        Target(platform='tpu', device_kind='TPU v5e', generation='v5e')
    """

    platform: str
    device_kind: str = ""
    generation: str = ""

    def __post_init__(self) -> None:
        for field in ("platform", "device_kind", "generation"):
            value = getattr(self, field)
            if not isinstance(value, str):
                rule, got = f"{field} to be a str", f"{field}={value!r}"
                todo = "Target.parse reads a text such as 'tpu:v5e'"
                raise TypeError(house_message("Target", rule, got, todo))
        if self.platform not in PLATFORMS | _others:
            rule = f"platform of {', '.join(sorted(PLATFORMS))}"
            got = f"platform={self.platform!r}{near_miss(self.platform, PLATFORMS)}"
            todo = "Target.parse reads a text such as 'tpu:v5e' or 'gpu'"
            raise ValueError(house_message("Target", rule, got, todo))

    def __str__(self) -> str:
        return (
            f"{self.platform}:{self.generation}" if self.generation else self.platform
        )

    @staticmethod
    def parse(text: str | Target) -> Target:
        """Reads "cpu", "tpu:v5e", "cuda:h100", "cuda:sm90", "rocm:gfx942".

        Args:
            text: Platform, and after a colon a generation or card.

        Returns:
            The target; nothing is asked of any backend unless "gpu" must be resolved.

        Raises:
            ValueError: For an unknown platform or a generation it does not have.
        """
        if isinstance(text, Target):
            return text
        platform, _, kind = str(text).strip().lower().partition(":")
        if platform == "gpu":
            platform = gpu_vendor()
        if platform not in PLATFORMS:
            known = ", ".join(sorted(PLATFORMS))
            raise ValueError(
                f"target: expected one of {known}, optionally with "
                f"':generation', got target={text!r}"
                f"{near_miss(platform, PLATFORMS)}; for example 'tpu:v5e'"
            )
        return Target(platform, *_kind_and_generation(platform, kind, str(text)))


def _kind_and_generation(platform: str, kind: str, text: str) -> tuple[str, str]:
    if not kind:
        return "", ""
    if platform == "tpu":
        generation = {"v7x": "7x", "tpu7x": "7x"}.get(kind, kind)
        if generation in _TPU_GENERATIONS:
            return f"TPU {generation}", generation
        known: Iterable[str] = _TPU_GENERATIONS
    elif platform == "cuda":
        generation = _CUDA_CARDS.get(kind, kind.replace("sm_", "sm"))
        if re.fullmatch(r"sm\d{2,3}", generation):
            return (kind.upper() if kind in _CUDA_CARDS else ""), generation
        known = [*_CUDA_CARDS, "sm80", "sm90"]
    elif platform == "rocm":
        if re.fullmatch(r"gfx[0-9a-f]{3,4}", kind):
            return "", kind
        known = ("gfx90a", "gfx942", "gfx950")
    else:
        return kind, kind
    raise ValueError(
        f"target: expected a generation of {platform} such as {', '.join(known)}, "
        f"got target={text!r}{near_miss(kind, known)}; leave it out for any"
    )


def target_of_device(device: Any) -> Target:
    """Returns the target of a JAX device or abstract device.

    Args:
        device: Anything with `platform` and `device_kind`.

    Returns:
        Its target; "gpu" is resolved to cuda or rocm.
    """
    platform = str(device.platform).lower()
    kind = str(getattr(device, "device_kind", "") or "")
    if platform == "tpu":
        short = kind.removeprefix("TPU").strip()
        return Target("tpu", kind, _TPU_KINDS.get(short.lower(), short.lower()))
    if platform in ("gpu", "cuda", "rocm"):
        vendor = platform if platform != "gpu" else gpu_vendor(device)
        return Target(vendor, kind, _gpu_generation(device))
    if platform not in PLATFORMS:
        _others.add(platform)
    return Target(platform, kind if platform != "cpu" else "", "")


def _gpu_generation(device: Any) -> str:
    capability = str(getattr(device, "compute_capability", "") or "")
    if capability.startswith("gfx"):
        return capability.partition(":")[0]
    if capability:
        return "sm" + capability.replace(".", "")
    kind = str(getattr(device, "device_kind", "") or "").lower()
    return next((sm for card, sm in _CUDA_CARDS.items() if card in kind.split()), "")


def gpu_vendor(device: Any = None) -> str:
    """Resolves "gpu" to "cuda" or "rocm": by the device, else the backend at hand."""
    text = str(getattr(device, "device_kind", "") or "").lower()
    capability = str(getattr(device, "compute_capability", "") or "")
    if "amd" in text or "radeon" in text or capability.startswith("gfx"):
        return "rocm"
    if text:
        return "cuda"
    return _backend_vendor()


@functools.cache
def _backend_vendor() -> str:
    try:
        return "rocm" if jax.devices("rocm") else "cuda"
    except RuntimeError:  # no such backend here; CUDA is the usual meaning of "gpu"
        return "cuda"


# What would be iterated over as something else than arrays.
_NO_SEQUENCES = (str, bytes, Mapping, jax.Array, np.ndarray)


def target_of_mesh(mesh: Any) -> Target | None:
    """Returns the target of a mesh's devices, or None if it has none and says none.

    Args:
        mesh: A Mesh or AbstractMesh.
    """
    device = mesh.abstract_mesh.abstract_device
    if isinstance(mesh, Mesh) and not mesh.empty:
        device = mesh.devices.flat[0]
    return None if device is None else target_of_device(device)


def current_target(
    arrays: Iterable[Any] = (), backend: str | None = None, mesh: Any = None
) -> Target:
    """Returns what the program will run on.

    In this order: the devices of the mesh in force (concrete or abstract), the
    devices of the arguments, `backend`, JAX's default device.

    Args:
        arrays: The call's arrays; tracers carry no device and are passed over.
        backend: A platform name, or None.
        mesh: The mesh in force, if the caller knows it.

    Raises:
        TypeError: For arrays that are no sequence of arrays.
        ValueError: For an unknown backend.
    """
    if not isinstance(arrays, Iterable) or isinstance(arrays, _NO_SEQUENCES):
        rule, got = "arrays to be a sequence of arrays", f"a {type(arrays).__name__}"
        todo = "put arrays into a list, and pass a platform as backend="
        raise TypeError(house_message("current_target", rule, got, todo))
    for known in (mesh, jax.sharding.get_abstract_mesh()):
        target = None if known is None or known.empty else target_of_mesh(known)
        if target is not None:
            return target
    for array in arrays:
        if isinstance(array, jax.core.Tracer) or not isinstance(array, jax.Array):
            continue
        for device in array.devices():
            return target_of_device(device)
    if backend is not None:
        return Target.parse(backend)
    default = jax.config.jax_default_device  # type: ignore[attr-defined]
    if default is None:
        return _default_target()
    if isinstance(default, str):
        return Target.parse(default)
    return target_of_device(default)


def _default_target() -> Target:
    return target_of_device(first_device())


def first_device() -> Any:
    """Returns JAX's default device.

    Raises:
        RuntimeError: If JAX cannot start; it names damaged metadata on the path, one
            file of which suffices for that.
    """
    try:
        return jax.local_devices(backend=None)[0]
    except Exception as error:  # of a backend, or of a parser of metadata
        from .discovery import damaged_files

        damaged = [f"{path} ({problem})" for path, problem in damaged_files()]
        got = described(error)
        todo = f"reinstall or delete what holds {', '.join(damaged)}"
        if not damaged:
            todo = "see `switchax doctor`"
        rule = "a device to start on"
        raise RuntimeError(house_message("JAX", rule, got, todo)) from error
