"""Programs that keep clear of a bad point by a guard of their own."""

import jax
import jax.numpy as jnp
import optax
from jax import lax

from tests.zoo.registry import descend, normal, program, uniform


@program
def double_where_around_a_square_root():
    def loss(x):
        positive = x > 0
        return jnp.sum(jnp.where(positive, jnp.sqrt(jnp.where(positive, x, 1.0)), 0.0))

    return jax.value_and_grad(loss), (jnp.array([0.0, 4.0, -9.0]),)


@program
def double_where_around_a_division():
    def loss(a, b):
        zero = b == 0
        return jnp.sum(jnp.where(zero, 0.0, a / jnp.where(zero, 1.0, b)) ** 2)

    return jax.value_and_grad(loss, (0, 1)), (normal(3), jnp.array([0.0, 2.0, -1.0]))


@program
def forward_only_where_around_a_square_root():
    # The value that the where() throws away is NaN; no gradient goes through it.
    def loss(w, x):
        weights = lax.stop_gradient(jnp.where(x > 0, jnp.sqrt(x), 0.0))
        return jnp.sum(weights * w)

    return jax.value_and_grad(loss), (normal(3), jnp.array([-1.0, 4.0, 9.0]))


@program
def safe_norm_at_zero():
    def loss(x):
        return jnp.sum(optax.safe_norm(x, 1e-3, axis=-1))

    return jax.value_and_grad(loss), (jnp.array([[0.0, 0.0], [3.0, 4.0]]),)


@program
def guard_by_cond():
    def loss(x):
        return lax.cond(x > 0, jnp.sqrt, jnp.zeros_like, x)

    return jax.value_and_grad(loss), (jnp.float32(0.0),)


@program
def vmapped_guard_by_cond():
    # Under vmap the cond is a select, and both branches run: so the guard is inside the branch, too.
    def each(x):
        return lax.cond(x > 0, lambda x: jnp.sqrt(jnp.maximum(x, 1e-12)), lambda x: 0.0 * x, x)

    def loss(x):
        return jnp.sum(jax.vmap(each)(x))

    return jax.value_and_grad(loss), (jnp.array([0.0, 4.0, -9.0]),)


@program
def vmapped_forward_guard_by_cond():
    def each(x):
        return lax.cond(x > 0, jnp.log, jnp.zeros_like, x)

    def loss(w, x):
        return jnp.sum(w * lax.stop_gradient(jax.vmap(each)(x)))

    return jax.value_and_grad(loss), (normal(3), jnp.array([0.0, 4.0, -9.0]))


@program
def switch_with_a_bad_branch_not_taken():
    def loss(x, kind):
        branches = [lambda x: x**2, lambda x: jnp.log(x - 5), jnp.sin]
        return lax.switch(kind, branches, x).sum()

    return jax.value_and_grad(loss), (jnp.array([1.0, 2.0]), jnp.int32(2))


@program
def nan_to_num_of_data():
    def loss(w, x):
        return ((jnp.nan_to_num(x) @ w) ** 2).mean()

    return jax.value_and_grad(loss), (normal(3), normal(4, 3, seed=1).at[0, 0].set(jnp.nan))


@program
def missing_data_by_mask():
    # NaN marks what is missing: it is thrown away before anything is made of it.
    def loss(w, x):
        known = ~jnp.isnan(x)
        filled = jnp.where(known, x, 0.0)
        return ((filled @ w) ** 2).sum() / known.sum()

    return jax.value_and_grad(loss), (normal(3), normal(4, 3, seed=1).at[2, 1].set(jnp.nan))


@program
def angle_and_sinc_at_zero():
    def loss(x, y):
        return jnp.sum(jnp.arctan2(y, x + 1)) + jnp.sum(jnp.sinc(x)) + jnp.sum(jnp.hypot(x + 1, y))

    return jax.value_and_grad(loss, (0, 1)), (jnp.array([0.0, 1.0]), jnp.array([0.0, 0.0]))


@program
def clipped_before_the_logarithm():
    def loss(x):
        return -jnp.log(jnp.clip(x, 1e-7, 1.0)).mean() + jnp.log1p(jnp.maximum(x, 0.0)).mean()

    return jax.value_and_grad(loss), (jnp.array([-1.0, 0.0, 0.5, 2.0]),)


@program
def saturation_in_the_forward_pass():
    # exp overflows, min() and tanh() swallow it: no gradient comes back through either.
    def loss(w, x):
        gate = lax.stop_gradient(jnp.tanh(jnp.exp(x * 100)))
        return jnp.sum(w * gate) + jnp.sum(jnp.minimum(w, lax.stop_gradient(jnp.exp(x * 100))))

    return jax.value_and_grad(loss), (normal(3), jnp.array([-1.0, 0.5, 2.0]))


@program
def sorted_with_padding():
    def loss(w, x):
        padded = jnp.sort(jnp.concatenate([x * w, jnp.full(2, jnp.inf)]))
        return jnp.sum(padded[:3] * jnp.arange(3.0))

    return jax.value_and_grad(loss), (uniform(3), normal(3, seed=1))


@program
def best_value_that_begins_infinite():
    # The schedule halves the rate when the loss has not been better than ever for three steps.
    def step(params, schedule, x, y):
        value, gradient = jax.value_and_grad(lambda w: ((x @ w - y) ** 2).mean())(params)
        better = value < schedule["best"]
        waited = jnp.where(better, 0, schedule["waited"] + 1)
        rate = jnp.where(waited >= 3, schedule["rate"] / 2, schedule["rate"])
        schedule = {"best": jnp.minimum(value, schedule["best"]), "waited": waited, "rate": rate}
        return descend(params, gradient, rate), schedule, value

    schedule = {"best": jnp.float32(jnp.inf), "waited": jnp.int32(0), "rate": jnp.float32(0.1)}
    return step, (normal(3), schedule, normal(4, 3, seed=1), normal(4, seed=2)), {"donate_argnums": (0, 1)}


@program
def record_that_stays_infinite():
    # The record of a class that has not come up yet is still Inf after the step.
    def step(params, best, x, label):
        value, gradient = jax.value_and_grad(lambda w: ((x @ w) ** 2).mean())(params)
        return descend(params, gradient), best.at[label].min(value), value

    args = (normal(3), jnp.full(2, jnp.inf), normal(4, 3, seed=1), jnp.int32(1))
    return step, args, {"donate_argnums": (0, 1)}


@program
def largest_gradient_of_the_active_layers():
    def step(w, x, active):
        gradient = jax.grad(lambda w: ((x @ w) ** 2).mean())(w)
        sizes = jnp.linalg.norm(gradient, axis=0)
        return descend(w, gradient / jnp.where(active, sizes, -jnp.inf).max())

    return step, (normal(2, 3), normal(4, 2, seed=1), jnp.array([True, False, True]))


@program
def limit_that_is_infinite_at_first():
    def step(w, x, count):
        gradient = jax.grad(lambda w: ((x @ w) ** 2).mean())(w)
        size = jnp.vdot(gradient, gradient)
        limit = jnp.where(count == 0, jnp.inf, 2 * size)
        return jnp.where(size < limit, descend(w, gradient), w)

    return step, (normal(3), normal(4, 3, seed=1), jnp.int32(0))


@program
def smallest_gradients_with_padding():
    def step(w, x):
        gradient = jax.grad(lambda w: ((x @ w) ** 2).mean())(w)
        return jnp.sort(jnp.concatenate([jnp.abs(gradient), jnp.full(2, jnp.inf)]))[:2]

    return step, (normal(3), normal(4, 3, seed=1))


@program
def history_of_gradients_that_is_not_full_yet():
    def step(w, history, x, count):
        gradient = jax.grad(lambda w: ((x @ w) ** 2).mean())(w)
        return descend(w, gradient), history.at[count].set(jnp.vdot(gradient, gradient))

    args = (normal(3), jnp.full(4, jnp.inf), normal(5, 3, seed=1), jnp.int32(0))
    return step, args, {"donate_argnums": (0, 1)}


@program
def best_parameters_that_are_not_known_yet():
    def epoch(w, best, xs):
        def step(carry, x):
            w, best = carry
            value, gradient = jax.value_and_grad(lambda w: ((x * w) ** 2).sum())(w)
            best = jax.tree.map(
                lambda new, old: jnp.where(value < best["value"], new, old), {"value": value, "w": w}, best
            )
            return (descend(w, gradient), best), value

        (w, best), values = lax.scan(step, (w, best), xs)
        return w, best, values

    best = {"value": jnp.float32(jnp.inf), "w": jnp.full(3, jnp.nan)}
    return epoch, (normal(3), best, normal(4, 3, seed=1)), {"donate_argnums": (0, 1)}
