"""Factorisations, complex numbers and spectra."""

import jax
import jax.numpy as jnp
from jax.scipy.linalg import cho_solve, solve_triangular

from tests.zoo.registry import normal, program, uniform


def covariance(x, length):
    return jnp.exp(-((x[:, None] - x[None]) ** 2) / length**2) + 0.1 * jnp.eye(x.shape[0])


@program
def gaussian_process():
    def loss(length, x, y):
        factor = jnp.linalg.cholesky(covariance(x, length))
        solved = cho_solve((factor, True), y)
        return 0.5 * y @ solved + jnp.log(jnp.diagonal(factor)).sum()

    return jax.value_and_grad(loss), (jnp.float32(1.0), uniform(4), normal(4))


@program
def triangular_solve():
    def loss(a, b):
        lower = jnp.tril(a) + 3 * jnp.eye(3)
        return (solve_triangular(lower, b, lower=True) ** 2).sum()

    return jax.value_and_grad(loss, (0, 1)), (normal(3, 3), normal(3, seed=1))


@program
def determinant_and_inverse():
    def loss(a):
        matrix = a @ a.T + jnp.eye(3)
        return jnp.linalg.slogdet(matrix)[1] + jnp.trace(jnp.linalg.inv(matrix))

    return jax.value_and_grad(loss), (normal(3, 3),)


@program
def eigenvalues():
    def loss(a):
        values, vectors = jnp.linalg.eigh(a + a.T)
        return (values**2).sum() + (vectors[:, 0] ** 4).sum()

    return jax.value_and_grad(loss), (normal(3, 3),)


@program
def singular_values_and_norms():
    def loss(a):
        return jnp.linalg.svd(a, compute_uv=False).sum() + jnp.linalg.norm(a) + jnp.linalg.norm(a, axis=0).sum()

    return jax.value_and_grad(loss), (normal(4, 3),)


@program
def orthogonal_parameters():
    def loss(a):
        q, r = jnp.linalg.qr(a)
        return (q[:, 0] ** 3).sum() + jnp.abs(jnp.diagonal(r)).sum()

    return jax.value_and_grad(loss), (normal(3, 3),)


@program
def complex_spectrum():
    def loss(x, target):
        spectrum = jnp.fft.fft(x)
        return (jnp.abs(spectrum - target) ** 2).mean()

    return jax.value_and_grad(loss), (normal(8), normal(8, seed=1) + 1j * normal(8, seed=2))


@program
def filter_in_the_spectrum():
    def loss(weights, x):
        filtered = jnp.fft.irfft(jnp.fft.rfft(x) * weights, 8)
        return (filtered**2).mean()

    return jax.value_and_grad(loss), (normal(5), normal(2, 8, seed=1))


@program
def complex_parameters():
    def loss(w, x):
        return (jnp.abs(jnp.exp(1j * (x @ w))) ** 2).sum() + (jnp.real(w) ** 2).sum()

    return jax.value_and_grad(loss), (normal(3) + 0.1j * normal(3, seed=1), normal(4, 3, seed=2))


@program
def statistics_and_quantiles():
    def loss(x):
        return jnp.std(x) + jnp.median(x) + jnp.quantile(x, 0.9) + jnp.cumprod(jnp.sin(x)).sum() + jnp.ptp(x)

    return jax.value_and_grad(loss), (normal(7),)
