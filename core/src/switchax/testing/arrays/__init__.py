"""A suite for kinds that map arrays to arrays, made of the kind's own calls.

A kind of one's own derives `ArrayCall`, which draws the values of a call, and
`ArraySuite`, which lists calls by rule. From these and the kind's float64 oracle come
the cases: what is declared must be right, under autodiff too, and the rest refused.

    @dataclasses.dataclass(frozen=True)
    class ScaleCall(ArrayCall):
        kind = SCALE
        dtype: str = "float32"
        seed: int = 0
        length: int = 5

        def arrays(self):
            x = np.random.default_rng(self.seed).normal(size=self.length)
            return {"x": x.astype(self.dtype)}

    class ScaleSuite(ArraySuite):
        rules = {"S1": "x is doubled", "S2": "gradients", "S3": "refusals", ...}
        roles = {"gradient": "S2", "refusal": "S3", ...}

        def calls(self, level):
            yield "S1", ScaleCall()
            yield "S1", ScaleCall(length=129)
"""

from .calls import ArrayCall
from .cases import ArrayCase
from .suite import ROLES, ArraySuite

__all__ = ["ROLES", "ArrayCall", "ArrayCase", "ArraySuite"]
