"""flax is optional: loaded when it is used, and asked for by name when it is missing."""

import subprocess
import sys
import textwrap

import pytest


def run(code):
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_flax_is_not_loaded_before_it_is_used():
    assert (
        run(
            """
            import sys
            import autoguard

            loaded = lambda: sorted({"flax", "optax", "pytest"} & {name.partition(".")[0] for name in sys.modules})
            assert loaded() == [], loaded()
            import jax

            step = autoguard.jit(lambda w, x: jax.value_and_grad(lambda w: ((w * x) ** 2).sum())(w))
            step(1.0, 2.0)
            try:
                step(1.0, float("nan"))
            except autoguard.NonFiniteError:
                pass
            try:
                autoguard.jit(lambda x: x + 1)("text")
            except TypeError:
                pass
            assert loaded() == [], loaded()
            assert callable(autoguard.nnx.jit)
            assert "flax" in loaded()
            print("fine")
            """
        )
        == "fine"
    )


@pytest.mark.parametrize("use", ["autoguard.nnx.jit", "import autoguard.nnx", "from autoguard.nnx import jit"])
def test_without_flax(use):
    said = run(
        f"""
        import sys
        sys.modules["flax"] = None
        import autoguard

        assert autoguard.jit(lambda x: x * 2)(2) == 4
        try:
            {use}
        except ImportError as error:
            print(error)
        """
    )
    assert "flax" in said
    assert "pip install 'jax-autoguard[nnx]'" in said


def test_autoguard_jit_works_without_flax_on_every_path():
    run(
        """
        import os, sys
        sys.modules["flax"] = None
        import jax, jax.numpy as jnp
        import autoguard

        class NotAnArray:
            pass

        for argument in (NotAnArray(), "text", [NotAnArray()]):
            try:
                autoguard.jit(lambda x: x)(argument)
            except TypeError as error:
                assert "flax" not in str(error)
            else:
                raise AssertionError
        assert jax.grad(autoguard.jit(jnp.sin))(0.0) == 1
        """
    )
