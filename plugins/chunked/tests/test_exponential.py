"""The exponential for logits: near enough, and NaN stays NaN."""

import jax
import jax.numpy as jnp
import numpy as np

from switchax_chunked.exponential import _COEFFICIENTS, exp_of_logits


def minimax(degree):
    """Coefficients for 2**f on [-1/2, 1/2], from the constant, and their error.

    By least squares whose weights grow where the error is large (Lawson's method).
    """
    f = np.cos(np.pi * (np.arange(4000) + 0.5) / 4000) / 2
    relative = np.vander(f, degree + 1, increasing=True) * np.exp2(-f)[:, None]
    weight = np.full(f.shape, 1 / f.size)
    for _ in range(300):
        root = np.sqrt(weight)
        found = np.linalg.lstsq(relative * root[:, None], root, rcond=None)[0]
        error = np.abs(relative @ found - 1)
        weight = weight * error / (weight * error).sum()
    return found, error.max()


def test_the_coefficients_are_those_of_the_minimax_polynomial():
    found, error = minimax(6)
    np.testing.assert_allclose(_COEFFICIENTS, found, rtol=1e-6)
    assert error < 2e-9


def test_it_is_off_by_what_its_docstring_says():
    x = np.concatenate([np.linspace(-87, 0, 100_001), np.linspace(0, 88, 20_001)])
    x = x.astype(np.float32)
    exact = np.exp(x.astype(np.float64))
    error = np.abs(np.asarray(jax.jit(exp_of_logits)(x), np.float64) / exact - 1)
    assert (error <= 2e-7 + 1.2e-7 * np.abs(x)).all()


def test_the_ends():
    x = jnp.asarray([0, -0.0, -1e-9, -1e-40, -89, -1e9, -3e38, -jnp.inf], jnp.float32)
    found = np.asarray(jax.jit(exp_of_logits)(x))
    np.testing.assert_array_equal(found, [1, 1, 1, 1, 0, 0, 0, 0])
    payloads = np.asarray([0x7FC00000, 0x7FC00001, 0x7FFFFFFF, 0xFFC00123], np.uint32)
    assert np.isnan(jax.jit(exp_of_logits)(payloads.view(np.float32))).all()


def test_float64_is_not_rounded():
    with jax.enable_x64(True):
        x = jnp.linspace(-700.0, 700.0, 1001, dtype=jnp.float64)
        np.testing.assert_allclose(exp_of_logits(x), np.exp(x), rtol=1e-15)
