"""A picture of which units the hot block of each kernel occupies, bundle by bundle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from .outcome import Inspection
from .schedule import KernelSchedule

__all__ = ["UNITS", "write_chart"]

UNITS = {
    "MATMUL": "matrix",
    "VALU": "vector",
    "EUP": "transcendental",
    "XLU": "across lanes",
    "VLOAD": "load",
    "VSTORE": "store",
}
"""Units worth a column, by libtpu's names, and what they do."""
_SMOOTHED = 16  # bundles


def write_chart(found: Inspection, path: Path) -> None:
    """Writes a PNG: a row for each kernel and pass, a line for each unit.

    Args:
        found: What `inspect_operation` returned.
        path: The file.

    Raises:
        ModuleNotFoundError: If matplotlib is not installed.
        OSError: If the file cannot be written.
    """
    # Without a window, and with nothing global.
    from matplotlib.figure import Figure  # type: ignore[import-not-found]

    kernels = [(part.name, kernel) for part in found.passes for kernel in part.kernels]
    figure = Figure(figsize=(11, 1 + 2.6 * max(len(kernels), 1)), layout="constrained")
    figure.suptitle(f"{found.operation} on {found.target}")
    axes = figure.subplots(max(len(kernels), 1), 1, squeeze=False)[:, 0]
    for axis, (name, kernel) in zip(axes, kernels, strict=False):
        _draw(axis, f"{name}: {kernel.name}", kernel)
    figure.savefig(path, format="png", dpi=120)


def _draw(axis: Any, title: str, kernel: KernelSchedule) -> None:
    hot, rows = kernel.hot, np.asarray(kernel.rows, float)
    width = min(_SMOOTHED, len(rows))
    for unit, what in UNITS.items():
        if unit not in kernel.units:
            continue
        share = rows[:, kernel.units.index(unit)] / hot.capacity[unit]
        smooth = np.convolve(share, np.ones(width) / width, mode="same")
        axis.plot(100 * smooth, label=what, linewidth=1.2)
    axis.set_title(
        f"{title}: {hot.bundles} bundles, floor {hot.floor}, {hot.spills} spills",
        fontsize="medium",
    )
    axis.set(ylim=(0, 105), xlim=(0, len(rows) - 1), ylabel="slots used, %")
    axis.set_xlabel("bundle of the hot block")
    axis.legend(loc="upper right", ncols=len(UNITS), fontsize="x-small")
