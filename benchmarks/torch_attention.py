"""PyTorch's half of `chunked_cpu.py`: answers lines of JSON, one for each.

Runs in an environment of its own, with torch and nothing of ours:

    {"prepare": {"q": [b, h, t, d], "kv": [b, k, s, d], "causal": false, ...}}  ->  {}
    {"run": 3}  ->  {"seconds": of one of three calls in a row}
"""

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention


def prepared(
    q: list[int], kv: list[int], causal: bool, backward: bool, dtype: str
) -> Callable[[], Any]:
    """Return a call of PyTorch's attention, in the layout that it likes best."""
    torch.manual_seed(0)
    of = {"dtype": getattr(torch, dtype), "requires_grad": backward}
    query, key, value = (torch.randn(shape, **of) for shape in (q, kv, kv))
    cotangent = torch.randn(q, dtype=of["dtype"])
    grouped = q[1] != kv[1]

    def call() -> Any:
        out = scaled_dot_product_attention(
            query, key, value, is_causal=causal, enable_gqa=grouped
        )
        if backward:
            return torch.autograd.grad(out, (query, key, value), cotangent)
        return out

    return call


def main() -> None:
    """Answer until there is no more."""
    call: Callable[[], Any] | None = None
    print(json.dumps({"torch": torch.__version__}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        answer: dict[str, Any] = {}
        if "prepare" in asked:
            call = prepared(**asked["prepare"])
            call()
        else:
            assert call is not None
            call()
            start = time.perf_counter()
            for _ in range(asked["run"]):
                call()
            answer = {"seconds": (time.perf_counter() - start) / asked["run"]}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
