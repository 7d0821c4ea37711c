"""Sizes of tiles by generation and class of shapes.

Written by `benchmarks/tpu_sizes.py`, not by hand. Beside each are the cycles of a head
of 8192 keys under a causal mask, and the registers that a hot block spills, of how many
bundles (libtpu 0.0.52).
"""

from __future__ import annotations

from .sizes import Entry, Sizes

__all__ = ["TABLE"]

TABLE: dict[tuple[str, str], Entry] = {
    ("v5e", "bfloat16 128"): Entry(
        # 143616 cycles, spills 402 of 2112
        Sizes(512, 512, 16, 512, 256, 2),
        # 303824 cycles, spills 1274 of 2234
        Sizes(512, 512, 8, 512),
    ),
    ("v5e", "bfloat16 256"): Entry(
        # 261460 cycles, spills 925 of 3845
        Sizes(512, 512, 16, 512, 256, 2),
        # 631856 cycles, spills 1721 of 4646
        Sizes(512, 512, 8, 256),
    ),
    ("v5e", "float32 128"): Entry(
        # 824160 cycles, spills 2755 of 6060
        Sizes(512, 512, 16, 128, 256, 1),
        # 2042176 cycles, spills 10525 of 15016
        Sizes(512, 512, 8, 256),
    ),
    ("v5e", "float32 256"): Entry(
        # 1628600 cycles, spills 7275 of 11975
        Sizes(512, 512, 16, 128, 256, 1),
        # 3844584 cycles, spills 20315 of 28269
        Sizes(512, 512, 8, 256),
    ),
    ("v5p", "bfloat16 128"): Entry(
        # 143548 cycles, spills 412 of 2111
        Sizes(512, 512, 16, 512, 256, 2),
        # 305184 cycles, spills 1270 of 2244
        Sizes(512, 512, 8, 512),
    ),
    ("v5p", "bfloat16 256"): Entry(
        # 268464 cycles, spills 931 of 3948
        Sizes(512, 512, 16, 512, 256, 2),
        # 615944 cycles, spills 2285 of 4529
        Sizes(512, 512, 8, 512),
    ),
    ("v5p", "float32 128"): Entry(
        # 823072 cycles, spills 3010 of 6052
        Sizes(512, 512, 16, 128, 256, 1),
        # 2039728 cycles, spills 10508 of 14998
        Sizes(512, 512, 8, 256),
    ),
    ("v5p", "float32 256"): Entry(
        # 1638120 cycles, spills 7533 of 12045
        Sizes(512, 512, 16, 128, 256, 1),
        # 3904424 cycles, spills 20269 of 28709
        Sizes(512, 512, 8, 256),
    ),
    ("v6e", "bfloat16 128"): Entry(
        # 83360 cycles, spills 122 of 2084
        Sizes(2048, 512, 16, 128, 256, 1),
        # 160992 cycles, spills 2828 of 2236
        Sizes(1024, 512, 8, 512),
    ),
    ("v6e", "bfloat16 256"): Entry(
        # 97164 cycles, spills 1900 of 2699
        Sizes(1024, 512, 16, 512, 256, 2),
        # 198792 cycles, spills 2887 of 2761
        Sizes(1024, 512, 8, 512),
    ),
    ("v6e", "float32 128"): Entry(
        # 422008 cycles, spills 4357 of 3103
        Sizes(512, 512, 16, 128, 256, 1),
        # 1040672 cycles, spills 12470 of 7652
        Sizes(512, 512, 8, 256),
    ),
    ("v6e", "float32 256"): Entry(
        # 670208 cycles, spills 7439 of 4928
        Sizes(512, 512, 16, 128, 256, 1),
        # 1197888 cycles, spills 19774 of 8808
        Sizes(512, 512, 8, 256),
    ),
    ("7x", "bfloat16 128"): Entry(
        # 82200 cycles, spills 548 of 2055
        Sizes(2048, 512, 16, 128, 256, 1),
        # 151560 cycles, spills 2971 of 2105
        Sizes(1024, 512, 8, 512),
    ),
    ("7x", "bfloat16 256"): Entry(
        # 94572 cycles, spills 1171 of 2627
        Sizes(1024, 512, 16, 512, 256, 2),
        # 177616 cycles, spills 1392 of 1306
        Sizes(512, 512, 8, 256),
    ),
    ("7x", "float32 128"): Entry(
        # 389016 cycles, spills 6970 of 5403
        Sizes(1024, 512, 16, 128, 256, 1),
        # 906984 cycles, spills 10650 of 6669
        Sizes(512, 512, 8, 256),
    ),
    ("7x", "float32 256"): Entry(
        # 564536 cycles, spills 6614 of 4151
        Sizes(512, 512, 16, 128, 256, 1),
        # 1113024 cycles, spills 14060 of 8184
        Sizes(512, 512, 8, 256),
    ),
}
