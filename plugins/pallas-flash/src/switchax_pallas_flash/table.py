from __future__ import annotations

from .sizes import Entry, Sizes

__all__ = ["TABLE"]
_NARROW = Entry(Sizes(1024, 512, 8, 128, 256), Sizes(1024, 512, 8, 256))
_WIDE = Entry(Sizes(512, 512, 4, 128, 256), Sizes(512, 512, 4, 256))
TABLE: dict[tuple[str, str], Entry] = {
    (generation, shape): _WIDE if "256" in shape else _NARROW
    for generation in ("v5e", "v5p", "v6e", "7x")
    for shape in ("bfloat16 128", "bfloat16 256", "float32 128", "float32 256")
}
