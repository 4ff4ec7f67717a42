"""Convolutions and windows of all kinds."""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from tests.zoo.registry import descend, normal, program, register, uniform

IMAGES = ("NHWC", "HWIO", "NHWC")
KINDS = {
    "dilated": {"rhs_dilation": (2, 2), "padding": "SAME"},
    "transposed_by_dilated_input": {"lhs_dilation": (2, 2), "padding": ((1, 1), (1, 1))},
    "strided_with_negative_padding": {"window_strides": (2, 1), "padding": ((-1, 0), (2, -1))},
    "grouped": {"feature_group_count": 2, "padding": "VALID"},
    "depthwise": {"feature_group_count": 4, "padding": "SAME"},
    "grouped_by_batch": {"batch_group_count": 2, "padding": "SAME"},
}


def convolved(kind):
    options = {"window_strides": (1, 1), **KINDS[kind]}
    features = 4 // options.get("feature_group_count", 1)

    def step(kernel, images):
        def loss(kernel, images):
            return (lax.conv_general_dilated(images, kernel, dimension_numbers=IMAGES, **options) ** 2).mean()

        value, (gradient, _) = jax.value_and_grad(loss, (0, 1))(kernel, images)
        return descend(kernel, gradient), value

    return step, (normal(3, 3, features, 4), normal(2, 6, 5, 4, seed=1)), {"donate_argnums": 0}


for _kind in KINDS:
    register(f"convolution_{_kind}", functools.partial(convolved, _kind))


@program
def convolution_in_one_dimension():
    def loss(kernel, signal):
        h = lax.conv_general_dilated(signal, kernel, (2,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"))
        return (h**2).mean() + jnp.convolve(signal[0, :, 0], kernel[:, 0, 0]).sum()

    return jax.value_and_grad(loss, (0, 1)), (normal(3, 2, 4), normal(2, 7, 2, seed=1))


@program
def convolution_in_three_dimensions():
    def loss(kernel, volume):
        numbers = ("NDHWC", "DHWIO", "NDHWC")
        return (lax.conv_general_dilated(volume, kernel, (1, 2, 1), "SAME", dimension_numbers=numbers) ** 2).mean()

    return jax.value_and_grad(loss, (0, 1)), (normal(2, 2, 2, 1, 3), normal(1, 3, 4, 3, 1, seed=1))


@program
def transposed_convolution():
    def loss(kernel, images):
        return (lax.conv_transpose(images, kernel, (2, 2), "SAME", dimension_numbers=IMAGES) ** 2).mean()

    return jax.value_and_grad(loss, (0, 1)), (normal(3, 3, 2, 3), normal(1, 3, 3, 2, seed=1))


@program
def convolution_with_a_kernel_for_each_example():
    def one(kernel, image):
        return lax.conv_general_dilated(image[None], kernel, (1, 1), "SAME", dimension_numbers=IMAGES)

    def loss(kernels, images):
        return (jax.vmap(one)(kernels, images) ** 2).mean()

    return jax.value_and_grad(loss), (normal(2, 3, 3, 1, 2), normal(2, 4, 4, 1, seed=1))


@program
def patches_and_local_convolution():
    def loss(kernel, images):
        patches = lax.conv_general_dilated_patches(images, (2, 2), (1, 1), "VALID", dimension_numbers=IMAGES)
        return (jnp.einsum("nhwk,hwkf->nhwf", patches, kernel) ** 2).mean()

    return jax.value_and_grad(loss), (normal(3, 3, 4, 2), normal(2, 4, 4, 1, seed=1))


@program
def pooling_of_every_kind():
    def loss(w, x):
        h = x * w
        window = ((1, 2, 2, 1), (1, 2, 1, 1), "SAME")
        most = lax.reduce_window(h, -jnp.inf, lax.max, *window)
        least = lax.reduce_window(h, jnp.inf, lax.min, *window)
        total = lax.reduce_window(h, 0.0, lax.add, *window)
        return (most**2).mean() + (least**2).mean() + (total**2).mean()

    return jax.value_and_grad(loss), (uniform(2, low=0.5), normal(1, 4, 5, 2, seed=1))


@program
def downsampled_and_resized():
    def loss(w, x):
        up = jax.image.resize(x * w, (1, 6, 6, 2), "bilinear")
        down = jax.image.resize(up, (1, 2, 3, 2), "cubic")
        return (down**2).mean() + jnp.abs(jax.image.resize(up, (1, 3, 3, 2), "nearest")).mean()

    return jax.value_and_grad(loss), (normal(2), normal(1, 4, 4, 2, seed=1))


@program
def small_u_net():
    def convolve(x, kernel, stride=1):
        return lax.conv_general_dilated(x, kernel, (stride, stride), "SAME", dimension_numbers=IMAGES)

    def step(p, x):
        def loss(p):
            down = jax.nn.silu(convolve(x, p["down"], 2))
            normed = (down - down.mean((1, 2), keepdims=True)) * lax.rsqrt(down.var((1, 2), keepdims=True) + 1e-5)
            up = lax.conv_transpose(normed, p["up"], (2, 2), "SAME", dimension_numbers=IMAGES)
            return ((jnp.concatenate([up, x], -1) @ p["out"] - x) ** 2).mean()

        value, gradients = jax.value_and_grad(loss)(p)
        return descend(p, gradients), value

    params = {"down": normal(3, 3, 1, 2), "up": normal(3, 3, 2, 2, seed=1), "out": normal(3, 1, seed=2)}
    return step, (params, normal(1, 4, 4, 1, seed=3)), {"donate_argnums": 0}
