"""Ways of learning: reinforcement, diffusion, implicit models, distillation, evolution."""

import jax
import jax.numpy as jnp
from jax import lax

from tests.zoo.registry import descend, integers, normal, program, uniform


def network(p, x):
    return jnp.tanh(x @ p["a"] + p["b"]) @ p["c"]


def network_parameters(inputs=3, outputs=2, seed=0):
    return {
        "a": normal(inputs, 5, seed=seed, scale=0.5),
        "b": jnp.zeros(5),
        "c": normal(5, outputs, seed=seed + 1, scale=0.5),
    }


@program
def denoising_diffusion():
    betas = jnp.linspace(1e-4, 0.2, 10)
    kept = jnp.cumprod(1 - betas)

    def step(params, images, key):
        def loss(params):
            at, noise_key = jax.random.split(key)
            t = jax.random.randint(at, (4,), 0, 10)
            noise = jax.random.normal(noise_key, images.shape)
            noisy = jnp.sqrt(kept[t])[:, None] * images + jnp.sqrt(1 - kept[t])[:, None] * noise
            angles = t[:, None] * jnp.array([1.0, 0.1])
            features = jnp.concatenate([noisy, jnp.sin(angles), jnp.cos(angles)], -1)
            weight = jnp.minimum(kept[t] / (1 - kept[t]), 5.0)  # the signal-to-noise ratio, cut off
            return (weight[:, None] * (network(params, features) - noise) ** 2).mean()

        value, gradients = jax.value_and_grad(loss)(params)
        return descend(params, gradients), value

    return step, (network_parameters(7, 3), normal(4, 3, seed=2), jax.random.key(0)), {"donate_argnums": 0}


@program
def proximal_policy_optimisation():
    def returns(rewards, values, done):
        def back(later, item):
            reward, value, following, done = item
            error = reward + 0.99 * following * (1 - done) - value
            later = error + 0.99 * 0.95 * (1 - done) * later
            return later, later

        following = jnp.append(values[1:], 0.0)
        return lax.scan(back, jnp.float32(0), (rewards, values, following, done), reverse=True)[1]

    def step(params, observations, actions, old_log_p, rewards, done):
        values = lax.stop_gradient(network(params, observations)[:, -1])
        advantages = returns(rewards, values, done)
        normed = (advantages - advantages.mean()) / (advantages.std() + 1e-8)

        def loss(params):
            out = network(params, observations)
            log_p_all = jax.nn.log_softmax(out[:, :2])
            log_p = jnp.take_along_axis(log_p_all, actions[:, None], 1)[:, 0]
            ratio = jnp.exp(log_p - old_log_p)
            policy = -jnp.minimum(ratio * normed, jnp.clip(ratio, 0.8, 1.2) * normed).mean()
            value = ((out[:, -1] - (advantages + values)) ** 2).mean()
            entropy = -(jnp.exp(log_p_all) * log_p_all).sum(-1).mean()
            return policy + 0.5 * value - 0.01 * entropy, {"entropy": entropy, "clipped": (ratio > 1.2).mean()}

        def epoch(params, _):
            (value, more), gradients = jax.value_and_grad(loss, has_aux=True)(params)
            return descend(params, gradients), (value, more)

        return lax.scan(epoch, params, None, length=3)

    done = jnp.array([0.0, 0, 1, 0, 0, 1])
    args = normal(6, 3, seed=2), integers(6, below=2), jnp.full(6, -0.7), uniform(6), done
    return step, (network_parameters(3, 3), *args), {"donate_argnums": 0}


@program
def deep_q_learning():
    def step(params, target, batch):
        def loss(params):
            q = jnp.take_along_axis(network(params, batch["s"]), batch["a"][:, None], 1)[:, 0]
            best = network(params, batch["next"]).argmax(-1)
            later = jnp.take_along_axis(network(target, batch["next"]), best[:, None], 1)[:, 0]
            error = lax.stop_gradient(batch["r"] + 0.9 * (1 - batch["end"]) * later) - q
            return jnp.where(jnp.abs(error) < 1, 0.5 * error**2, jnp.abs(error) - 0.5).mean()

        value, gradients = jax.value_and_grad(loss)(params)
        return {"params": descend(params, gradients), "target": target}, value

    batch = {"s": normal(5, 3), "next": normal(5, 3, seed=1), "a": integers(5, below=2), "r": uniform(5)}
    return step, (network_parameters(), network_parameters(seed=5), batch | {"end": uniform(5, seed=3).round()})


@program
def neural_differential_equation():
    # Forward by a while loop with as many steps as it takes; back by the adjoint equation.
    def rate(p, y):
        return jnp.tanh(p @ y)

    def integrate(f, y, until):
        def advance(state):
            t, y = state
            size = jnp.minimum(0.2 / (1 + jnp.abs(f(y)[0]).max()), until - t)
            half = jax.tree.map(lambda y, d: y + 0.5 * size * d, y, f(y))
            return t + size, jax.tree.map(lambda y, d: y + size * d, y, f(half))

        return lax.while_loop(lambda s: s[0] < until, advance, (jnp.float32(0), y))[1]

    @jax.custom_vjp
    def solve(p, y):
        return integrate(lambda s: (rate(p, s[0]),), (y,), 1.0)[0]

    def forward(p, y):
        out = solve(p, y)
        return out, (p, out)

    def backward(saved, g):
        p, y = saved

        def reversed_rate(state):
            y, adjoint, _ = state
            value, pull = jax.vjp(rate, p, y)
            on_p, on_y = pull(adjoint)
            return -value, on_y, on_p

        _, on_y, on_p = integrate(reversed_rate, (y, g, jnp.zeros_like(p)), 1.0)
        return on_p, on_y

    solve.defvjp(forward, backward)

    def step(p, y, target):
        value, gradient = jax.value_and_grad(lambda p: ((solve(p, y) - target) ** 2).sum())(p)
        return descend(p, gradient), value

    return step, (normal(3, 3, scale=0.5), normal(3, seed=1), normal(3, seed=2)), {"donate_argnums": 0}


@program
def equilibrium_model():
    @jax.custom_vjp
    def fixed(w, x):
        return iterate(lambda z: jnp.tanh(w @ z + x), jnp.zeros_like(x))

    def iterate(f, z):
        def go_on(state):
            count, old, new = state
            return (jnp.abs(new - old).max() > 1e-5) & (count < 50)

        return lax.while_loop(go_on, lambda s: (s[0] + 1, s[2], f(s[2])), (0, z, f(z)))[2]

    def backward(saved, g):
        w, x, z = saved
        _, pull_z = jax.vjp(lambda z: jnp.tanh(w @ z + x), z)
        u = iterate(lambda u: g + pull_z(u)[0], jnp.zeros_like(g))
        return jax.vjp(lambda w, x: jnp.tanh(w @ z + x), w, x)[1](u)

    def forward(w, x):
        z = fixed(w, x)
        return z, (w, x, z)

    fixed.defvjp(forward, backward)
    return jax.value_and_grad(lambda w, x: (fixed(w, x) ** 2).sum()), (normal(3, 3, scale=0.2), normal(3, seed=1))


@program
def adversarial_training():
    def step(params, x, labels):
        def loss(params, x):
            return -jnp.take_along_axis(jax.nn.log_softmax(network(params, x)), labels[:, None], 1).mean()

        def attack(moved, _):
            slope = jax.grad(loss, 1)(params, moved)
            return jnp.clip(moved + 0.05 * jnp.sign(slope), x - 0.1, x + 0.1), None

        moved, _ = lax.scan(attack, x, None, length=3)
        value, gradients = jax.value_and_grad(loss)(params, lax.stop_gradient(moved))
        return descend(params, gradients), value

    return step, (network_parameters(), normal(5, 3, seed=2), integers(5, below=2)), {"donate_argnums": 0}


@program
def distillation_at_a_temperature():
    def step(params, teacher, x):
        def loss(params):
            soft = lax.stop_gradient(jax.nn.softmax(network(teacher, x) / 4))
            return 16 * -(soft * jax.nn.log_softmax(network(params, x) / 4)).sum(-1).mean()

        value, gradients = jax.value_and_grad(loss)(params)
        return {"student": descend(params, gradients)}, value

    return step, (network_parameters(), network_parameters(seed=5), normal(5, 3, seed=2))


@program
def vector_quantised_autoencoder():
    def step(params, x):
        def loss(params):
            z = x @ params["encoder"]
            distances = ((z[:, None] - params["book"]) ** 2).sum(-1)
            code = params["book"][distances.argmin(-1)]
            through = z + lax.stop_gradient(code - z)
            pull = ((lax.stop_gradient(z) - code) ** 2).mean() + 0.25 * ((z - lax.stop_gradient(code)) ** 2).mean()
            return ((through @ params["decoder"] - x) ** 2).mean() + pull

        value, gradients = jax.value_and_grad(loss)(params)
        return descend(params, gradients), value

    params = {"encoder": normal(4, 2), "book": normal(5, 2, seed=1), "decoder": normal(2, 4, seed=2)}
    return step, (params, normal(6, 4, seed=3)), {"donate_argnums": 0}


@program
def hinge_losses_of_two_networks_in_turn():
    def step(state, noise, real):
        def judge(critic, x):
            return network(critic, x)[:, 0]

        def critic_loss(critic):
            fake = lax.stop_gradient(network(state["generator"], noise))
            return jax.nn.relu(1 - judge(critic, real)).mean() + jax.nn.relu(1 + judge(critic, fake)).mean()

        loss_c, grads_c = jax.value_and_grad(critic_loss)(state["critic"])
        critic = descend(state["critic"], grads_c)
        loss_g, grads_g = jax.value_and_grad(lambda g: -judge(critic, network(g, noise)).mean())(state["generator"])
        return {"generator": descend(state["generator"], grads_g), "critic": critic}, loss_c, loss_g

    state = {"generator": network_parameters(2, 3), "critic": network_parameters(3, 1, seed=4)}
    return step, (state, normal(5, 2, seed=2), normal(5, 3, seed=3)), {"donate_argnums": 0}


@program
def normalizing_flow():
    def step(params, x):
        def loss(params):
            log_det, h = 0.0, x
            for p in params:
                left, right = h[:, :2], h[:, 2:]
                scale, shift = jnp.split(network(p, left), 2, -1)
                scale = jnp.tanh(scale)
                h = jnp.concatenate([right * jnp.exp(scale) + shift, left], -1)
                log_det = log_det + scale.sum(-1)
            return -(jax.scipy.stats.norm.logpdf(h).sum(-1) + log_det).mean()

        value, gradients = jax.value_and_grad(loss)(params)
        return descend(params, gradients), value

    params = [network_parameters(2, 4), network_parameters(2, 4, seed=3)]
    return step, (params, normal(5, 4, seed=2)), {"donate_argnums": 0}


@program
def langevin_sampling_of_an_energy():
    def step(params, x, key):
        def energy(params, x):
            return network(params, x).sum()

        def walk(state, key):
            slope = jax.grad(energy, 1)(params, state)
            return state - 0.05 * slope + 0.1 * jax.random.normal(key, state.shape), None

        fake, _ = lax.scan(walk, x[::-1], jax.random.split(key, 4))

        def loss(params):
            return (energy(params, x) - energy(params, lax.stop_gradient(fake))) / len(x)

        value, gradients = jax.value_and_grad(loss)(params)
        return descend(params, gradients), value

    return step, (network_parameters(), normal(5, 3, seed=2), jax.random.key(0)), {"donate_argnums": 0}


@program
def state_space_model():
    def loss(p, u):
        decay = jax.nn.sigmoid(p["decay"])

        def combine(left, right):
            return left[0] * right[0], left[1] * right[0] + right[1]

        driven = u[:, None] * p["in"]
        states = lax.associative_scan(combine, (jnp.broadcast_to(decay, driven.shape), driven))[1]
        return ((states @ p["out"] - jnp.cumsum(u)) ** 2).mean()

    return jax.value_and_grad(loss), (
        {"decay": normal(3), "in": normal(3, seed=1), "out": normal(3, seed=2)},
        normal(6),
    )


@program
def blockwise_attention_with_running_maximum():
    # The maximum begins at -Inf, and a block that is masked as a whole leaves it there.
    def attend(q, k, v, lengths):
        def body(state, block):
            most, total, out = state
            number, keys, values = block
            scores = q @ keys.T
            legal = number * 2 + jnp.arange(2) < lengths[:, None]
            scores = jnp.where(legal, scores, -jnp.inf)
            new = jnp.maximum(most, scores.max(-1))
            safe = jnp.where(jnp.isfinite(new), new, 0.0)
            old = jnp.where(jnp.isfinite(most), jnp.exp(most - safe), 0.0)
            p = jnp.where(legal, jnp.exp(scores - safe[:, None]), 0.0)
            return (new, total * old + p.sum(-1), out * old[:, None] + p @ values), None

        start = jnp.full(4, -jnp.inf), jnp.zeros(4), jnp.zeros((4, 3))
        (_, total, out), _ = lax.scan(body, start, (jnp.arange(3), k.reshape(3, 2, 3), v.reshape(3, 2, 3)))
        return (out / total[:, None]).sum()

    args = tuple(normal(n, 3, seed=n) for n in (4, 6, 6))
    return jax.value_and_grad(attend, (0, 1, 2)), (*args, jnp.array([1, 2, 4, 6]))
