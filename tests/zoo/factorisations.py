"""Factorisations, solvers and transforms that the programs about covariances and spectra do not use."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.scipy import linalg

from tests.zoo.registry import descend, normal, program, uniform


def definite(a):
    return a @ a.T + 2 * jnp.eye(a.shape[0])


@program
def lu_with_pivots():
    def loss(a, b):
        factor, pivots = linalg.lu_factor(a + 3 * jnp.eye(3))
        _, lower, upper = linalg.lu(a)
        return (linalg.lu_solve((factor, pivots), b) ** 2).sum() + (lower * upper).sum()

    return jax.value_and_grad(loss, (0, 1)), (normal(3, 3), normal(3, seed=1))


@program
def singular_vectors():
    def loss(a):
        u, s, vt = jnp.linalg.svd(a, full_matrices=False)
        return (u[:, 0] ** 4).sum() + jnp.log(s).sum() + (vt[0] ** 4).sum()

    return jax.value_and_grad(loss), (normal(4, 3),)


@program
def general_eigenvalues():
    # No derivative of the vectors is taken; the values of a matrix that is not symmetric are complex.
    def loss(a):
        return (jnp.abs(jnp.linalg.eigvals(a)) ** 2).sum()

    return jax.value_and_grad(loss), (normal(3, 3),)


@program
def eigenvalues_of_a_batch():
    def loss(a):
        values = jnp.linalg.eigvalsh(jax.vmap(definite)(a))
        return jnp.log(values).sum()

    return jax.value_and_grad(loss), (normal(4, 3, 3),)


@program
def cholesky_update_and_preconditioner():
    def step(w, a, x):
        factor = lax.linalg.cholesky(definite(a))
        factor = lax.linalg.cholesky_update(factor.T, x[0]).T  # without a derivative
        value, gradient = jax.value_and_grad(lambda w: ((x @ w) ** 2).mean())(w)
        return descend(w, linalg.cho_solve((factor, True), gradient)), value

    return step, (normal(3), normal(3, 3, seed=1), normal(4, 3, seed=2))


@program
def schur_and_hessenberg_forms():
    def step(w, a):
        form, basis = lax.linalg.schur(a)
        lower, _ = lax.linalg.hessenberg(a)
        value, gradient = jax.value_and_grad(lambda w: ((form @ basis.T @ w) ** 2).sum() + lower[0] @ w)(w)
        return descend(w, gradient, 0.01), value

    return step, (normal(3), normal(3, 3, seed=1))


@program
def tridiagonal_system():
    def loss(d, b):
        lower, upper = jnp.zeros(4).at[1:].set(0.3), jnp.zeros(4).at[:-1].set(-0.2)
        return (lax.linalg.tridiagonal_solve(lower, d, upper, b[:, None]) ** 2).sum()

    return jax.value_and_grad(loss, (0, 1)), (uniform(4, low=2.0, high=3.0), normal(4, seed=1))


@program
def powers_and_condition_of_a_matrix():
    def loss(a):
        return jnp.linalg.matrix_power(a, 3).sum() + jnp.log(jnp.linalg.cond(definite(a)))

    return jax.value_and_grad(loss), (normal(3, 3, scale=0.5),)


@program
def least_squares_and_pseudo_inverse():
    def loss(a, b):
        return (jnp.linalg.lstsq(a, b)[0] ** 2).sum() + (jnp.linalg.pinv(a) ** 2).sum()

    return jax.value_and_grad(loss), (normal(4, 3), normal(4, seed=1))


@program
def polar_and_newton_schulz():
    # The orthogonal part of a gradient, as Muon takes it.
    def step(w, x):
        value, gradient = jax.value_and_grad(lambda w: (jnp.tanh(x @ w) ** 2).mean())(w)
        m = gradient / (jnp.linalg.norm(gradient) + 1e-7)
        for a, b, c in ((3.4445, -4.7750, 2.0315),) * 3:
            s = m @ m.T
            m = a * m + (b * s + c * s @ s) @ m
        return w - 0.1 * m, value

    return step, (normal(3, 4), normal(5, 3, seed=1)), {"donate_argnums": 0}


@program
def householder_products():
    def loss(a):
        packed, taus = lax.linalg.geqrf(a) if hasattr(lax.linalg, "geqrf") else (a, jnp.ones(3))
        q = lax.linalg.householder_product(lax.stop_gradient(packed), lax.stop_gradient(taus))
        return ((q.T @ a) ** 2).sum()

    return jax.value_and_grad(loss), (normal(4, 3),)


@program
def spectra_of_every_kind():
    def loss(w, x):
        half = jnp.fft.rfft2(x * w)
        back = jnp.fft.irfft2(half, x.shape)
        full = jnp.fft.ifft(jnp.fft.fft(x[0] + 1j * w))
        cosine = jax.scipy.fft.dct(x, norm="ortho")
        return (jnp.abs(half) ** 2).mean() + (back**2).sum() + jnp.real(full * full.conj()).sum() + (cosine**4).sum()

    return jax.value_and_grad(loss), (normal(6), normal(4, 6, seed=1))


@program
def short_time_spectrum():
    def loss(w, x):
        _, _, frames = jax.scipy.signal.stft(x * w, nperseg=8, noverlap=4)
        return jnp.log1p(jnp.abs(frames) ** 2).mean()

    return jax.value_and_grad(loss), (uniform(16, low=0.5), normal(16, seed=1))


@program
def spectral_neural_operator():
    def step(p, x):
        def loss(p):
            h = jnp.fft.rfft(x, axis=0)
            low = jnp.einsum("kc,kcd->kd", h[:3], p["modes"][0] + 1j * p["modes"][1])
            h = jnp.zeros_like(h).at[:3].set(low)
            return ((jax.nn.gelu(jnp.fft.irfft(h, 8, axis=0) + x @ p["skip"]) - x) ** 2).mean()

        value, gradients = jax.value_and_grad(loss)(p)
        return descend(p, gradients), value

    return (
        step,
        ({"modes": normal(2, 3, 2, 2), "skip": normal(2, 2, seed=1)}, normal(8, 2, seed=2)),
        {"donate_argnums": 0},
    )
