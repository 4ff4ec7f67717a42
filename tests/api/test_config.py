"""Where options come from, which wins, and what they may be."""

import os
import threading

import jax
import jax.numpy as jnp
import pytest

import autoguard


@pytest.fixture(autouse=True)
def _only_what_the_test_sets(monkeypatch):
    for name in [name for name in os.environ if name.startswith("AUTOGUARD")]:
        monkeypatch.delenv(name)
    autoguard.config.reset()
    yield
    autoguard.config.reset()


DEFAULTS = {
    "mode": "on",
    "signature": "enforce",
    "dynamic": None,
    "max_traces": 2,
    "max_variants": 8,
    "checks": "gradients",
    "allow_nonfinite": (),
    "loss": None,
    "state": None,
    "protect": "gradients",
    "on_failure": "raise",
    "strict": False,
    "max_skips": 10,
}


def test_the_defaults():
    assert {name: getattr(autoguard.config, name) for name in DEFAULTS} == DEFAULTS


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("signature", "record", "record"),
        ("max_traces", "5", 5),
        ("max_traces", "none", None),
        ("max_traces", " 7 ", 7),
        ("max_variants", "3", 3),
        ("checks", "all", "all"),
        ("allow_nonfinite", "metrics/a,out[1]", ("metrics/a", "out[1]")),
        ("loss", "out[1]", "out[1]"),
        ("protect", "off", "off"),
        ("on_failure", "warn", "warn"),
        ("strict", "1", True),
        ("strict", "False", False),
        ("max_skips", "2", 2),
        ("signature", "", "enforce"),
    ],
)
def test_each_option_has_a_variable(monkeypatch, name, text, value):
    monkeypatch.setenv(f"AUTOGUARD_{name.upper()}", text)
    assert getattr(autoguard.config, name) == value


def new_traces(function):
    """How many shapes it takes before its budget is spent."""
    for n in range(1, 8):
        try:
            function(jnp.ones(n))
        except autoguard.TraceBudgetError:
            return n - 1
    return None


def test_keyword_beats_override_beats_update_beats_environment_beats_default(monkeypatch):
    def function(**keywords):
        return autoguard.jit(lambda x: x + 1, signature="record", **keywords)

    assert new_traces(function()) == 2
    monkeypatch.setenv("AUTOGUARD_MAX_TRACES", "3")
    assert new_traces(function()) == 3
    autoguard.config.update(max_traces=4)
    assert new_traces(function()) == 4
    with autoguard.override(max_traces=5):
        assert new_traces(function()) == 5
        assert new_traces(function(max_traces=1)) == 1
        with autoguard.override(max_traces=6):
            assert new_traces(function()) == 6
        assert new_traces(function()) == 5
    assert new_traces(function()) == 4
    autoguard.config.reset()
    assert new_traces(function()) == 3


def test_a_keyword_of_the_default_value_still_wins():
    autoguard.config.update(max_traces=5)
    assert new_traces(autoguard.jit(lambda x: x + 1, signature="record", max_traces=2)) == 2
    with autoguard.override(max_traces=6):
        assert new_traces(autoguard.jit(lambda x: x + 1, signature="record", max_traces=None)) is None


def root(x):
    return jax.grad(jnp.sqrt)(x)


def fails(function):
    try:
        function(0.0)
    except autoguard.NonFiniteError:
        return True
    return False


def test_update_and_override_reach_functions_that_exist_already():
    function = autoguard.jit(root)
    assert fails(function)
    autoguard.config.update(checks="off")
    assert not fails(function)
    with autoguard.override(checks="gradients"):
        assert fails(function)
    assert not fails(function)
    autoguard.config.update(checks="outputs")
    assert fails(function)


def test_override_ends_with_its_block_also_after_an_error():
    function = autoguard.jit(root)

    def inside():
        with autoguard.override(checks="off"):
            assert not fails(function)
            raise KeyError

    with pytest.raises(KeyError):
        inside()
    assert fails(function)


def test_override_is_for_its_own_thread():
    function = autoguard.jit(root)
    found = []
    with autoguard.override(checks="off"):
        thread = threading.Thread(target=lambda: found.append(fails(function)))
        thread.start()
        thread.join()
        assert not fails(function)
    assert found == [True]


def test_each_combination_of_options_is_compiled_once():
    function = autoguard.jit(root, max_traces=1)
    for _ in range(3):
        function(1.0)
        with autoguard.override(checks="off"):
            function(1.0)
        with autoguard.override(checks="all"):
            function(1.0)
    assert [trace.cause for trace in function.traces] == ["first call", *["configuration context"] * 2]


@pytest.mark.parametrize(
    "options",
    [{"max_traces": 5}, {"max_variants": 5}, {"checks": "off"}, {"on_failure": "warn"}, {"protect": "all"}],
    ids=str,
)
def test_other_options_do_not_make_it_forget_its_signature(options):
    function = autoguard.jit(lambda x: x + 1)
    function(jnp.ones(2))
    with autoguard.override(**options), pytest.raises(autoguard.SignatureError):
        function(jnp.ones(3))
    assert len(function.signatures) == 1


def test_observing_for_a_while_holds_against_the_same_signature(caplog):
    function = autoguard.jit(lambda x: x + 1)
    function(jnp.ones(2))
    with autoguard.override(mode="observe"):
        function(jnp.ones(3))
    assert "call signature differs from the recorded one" in caplog.text
    with pytest.raises(autoguard.SignatureError):
        function(jnp.ones(3))


def test_a_wrong_update_changes_nothing():
    autoguard.config.update(max_traces=5)
    with pytest.raises(autoguard.ConfigError):
        autoguard.config.update(max_traces=7, checks="some")
    assert autoguard.config.max_traces == 5


def test_config_can_be_read_inside_an_override():
    with autoguard.override(protect="all"):
        assert autoguard.config.protect == "all"
    assert autoguard.config.protect == "gradients"


VALID = {
    "mode": "'off', 'observe', 'on', 'debug'",
    "signature": "'enforce', 'record', 'off'",
    "checks": "'gradients', 'all', 'outputs', 'off'",
    "protect": "'gradients', 'all', 'off'",
    "on_failure": "'raise', 'skip', 'warn'",
}


@pytest.mark.parametrize("value", ["nothing", "", None, 1, 0, "true"])
def test_a_flag_is_true_or_false(value):
    for way in ways("strict", value):
        with pytest.raises(autoguard.ConfigError, match="valid values are True and False"):
            way()


def ways(name, value):
    yield lambda: autoguard.config.update(**{name: value})

    def enter():
        with autoguard.override(**{name: value}):
            pass

    yield enter
    if name not in ("mode", "max_variants", "max_skips"):
        yield lambda: autoguard.jit(root, **{name: value})
        yield lambda: autoguard.jit(**{name: value})


@pytest.mark.parametrize("name", VALID)
@pytest.mark.parametrize("value", ["nothing", "", None, 1, True, ["off"], {}])
def test_a_wrong_choice_names_the_valid_ones(name, value):
    for way in ways(name, value):
        with pytest.raises(autoguard.ConfigError) as caught:
            way()
        assert str(caught.value) == f"{name}={value!r}: valid values are {VALID[name]}."


WRONG_NUMBERS = [0, -1, 2.0, "two", "2", True, [1]]
COUNTS = [("max_traces", WRONG_NUMBERS), *((name, [*WRONG_NUMBERS, None]) for name in ("max_variants", "max_skips"))]


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in COUNTS for value in values])
def test_a_wrong_number_names_the_valid_ones(name, value):
    or_none = " or None" if name == "max_traces" else ""
    for way in ways(name, value):
        with pytest.raises(autoguard.ConfigError) as caught:
            way()
        assert str(caught.value) == f"{name}={value!r}: valid values are whole numbers from 1{or_none}."


@pytest.mark.parametrize(
    ("name", "value", "valid"),
    [
        ("dynamic", 3, 'None or a dict from argument names or key paths to axes, such as {"batch": 0}'),
        ("dynamic", "x", 'None or a dict from argument names or key paths to axes, such as {"batch": 0}'),
        ("dynamic", {"x": "0"}, 'None or a dict from argument names or key paths to axes, such as {"batch": 0}'),
        ("dynamic", {"x": True}, 'None or a dict from argument names or key paths to axes, such as {"batch": 0}'),
        ("dynamic", {"x": None}, 'None or a dict from argument names or key paths to axes, such as {"batch": 0}'),
        ("dynamic", {0: 0}, 'None or a dict from argument names or key paths to axes, such as {"batch": 0}'),
        ("state", "params", 'None or a dict from argument names to outputs, such as {"params": "out[0]"}'),
        ("state", {"params": 0}, 'None or a dict from argument names to outputs, such as {"params": "out[0]"}'),
        ("state", ["params"], 'None or a dict from argument names to outputs, such as {"params": "out[0]"}'),
        ("loss", 1, "None or an output path such as 'out[2]'"),
        ("loss", ["out[1]"], "None or an output path such as 'out[2]'"),
        ("allow_nonfinite", 1, "output paths such as 'metrics/accuracy'"),
        ("allow_nonfinite", ("a", 1), "output paths such as 'metrics/accuracy'"),
        ("allow_nonfinite", {"a"}, "output paths such as 'metrics/accuracy'"),
    ],
)
def test_a_wrong_form_shows_the_right_one(name, value, valid):
    for way in ways(name, value):
        with pytest.raises(autoguard.ConfigError) as caught:
            way()
        assert str(caught.value) == f"{name}={value!r}: valid values are {valid}."


@pytest.mark.parametrize(
    ("variable", "text", "message"),
    [
        ("AUTOGUARD", "yes", "AUTOGUARD='yes': valid values are 'off', 'observe', 'on', 'debug'."),
        ("AUTOGUARD_CHECKS", "grad", "AUTOGUARD_CHECKS='grad': valid values are 'gradients', 'all', 'outputs', 'off'."),
        ("AUTOGUARD_MAX_TRACES", "0", "AUTOGUARD_MAX_TRACES=0: valid values are whole numbers from 1 or None."),
        ("AUTOGUARD_MAX_TRACES", "2.5", "AUTOGUARD_MAX_TRACES='2.5': valid values are whole numbers from 1 or None."),
        ("AUTOGUARD_MAX_SKIPS", "none", "AUTOGUARD_MAX_SKIPS=None: valid values are whole numbers from 1."),
        ("AUTOGUARD_MAX_SKIPS", "-3", "AUTOGUARD_MAX_SKIPS=-3: valid values are whole numbers from 1."),
        ("AUTOGUARD_ON_FAILURE", "Raise", "AUTOGUARD_ON_FAILURE='Raise': valid values are 'raise', 'skip', 'warn'."),
        (
            "AUTOGUARD_CHECK",
            "all",
            (
                "unknown variable AUTOGUARD_CHECK: valid variables are AUTOGUARD, AUTOGUARD_SIGNATURE, "
                "AUTOGUARD_MAX_TRACES, AUTOGUARD_MAX_VARIANTS, AUTOGUARD_CHECKS, AUTOGUARD_ALLOW_NONFINITE, "
                "AUTOGUARD_LOSS, AUTOGUARD_PROTECT, AUTOGUARD_ON_FAILURE, AUTOGUARD_STRICT, AUTOGUARD_MAX_SKIPS."
            ),
        ),
    ],
)
def test_a_wrong_variable_is_named(monkeypatch, variable, text, message):
    monkeypatch.setenv(variable, text)
    with pytest.raises(autoguard.ConfigError) as caught:
        autoguard.jit(root)
    assert str(caught.value) == message


OPTIONS = ", ".join(DEFAULTS)


def test_an_unknown_option_lists_the_known_ones():
    for way in list(ways("mode", "on"))[:2]:
        way()
    for way in list(ways("max_trace", 1))[:2]:
        with pytest.raises(autoguard.ConfigError) as caught:
            way()
        assert str(caught.value) == f"unknown option 'max_trace': valid options are {OPTIONS}."
    with pytest.raises(AttributeError) as missing:
        autoguard.config.max_trace  # noqa: B018
    assert str(missing.value) == f"autoguard.config has no option 'max_trace'; valid options are {OPTIONS}"


def test_options_given_as_lists_and_dicts_can_be_given_again():
    for options in ({"dynamic": {"x": [0, 1]}}, {"allow_nonfinite": ["a"]}, {"allow_nonfinite": "a"}, {"dynamic": {}}):
        autoguard.config.update(**options)
        [name] = options
        assert hash(getattr(autoguard.config, name)) is not None
    assert autoguard.config.allow_nonfinite == ("a",)
