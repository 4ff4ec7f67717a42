"""The README runs: its code is one script, and each failure it shows is the text that the code raises."""

import re
from pathlib import Path

import pytest

import autoguard

README = (Path(__file__).parents[2] / "README.md").read_text()
BLOCKS = re.findall(r"```(python|text)\n(.*?)```", README, flags=re.DOTALL)


def test_every_failure_is_the_text_that_is_raised(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "train.py"
    scope: dict = {}
    code, raised, shown = "", [], []
    for kind, text in BLOCKS:
        if kind == "text":
            shown.append(text)
            continue
        # Each block keeps its line numbers in one growing file, as if they had been written one below the other.
        start = code.count("\n")
        code += text
        script.write_text(code)
        try:
            exec(compile("\n" * start + text, str(script), "exec"), scope)
        except autoguard.AutoguardError as error:
            raised.append(str(error) + "\n")
    assert len(shown) == len(raised) == 4
    for expected, actual in zip(shown, raised, strict=True):
        assert _without_times(actual) == _without_times(expected)
    assert "params['w']  f32[4]" in capsys.readouterr().out


def _without_times(text: str) -> str:
    return re.sub(r"[\d.]+ (ms|s) of tracing", "<time> of tracing", text)


def test_the_options_table_names_every_keyword_and_value():
    table = README[README.index("## Options") : README.index("## Cost")]
    named = set(re.findall(r"^\| `(\w+)` \|", table, flags=re.MULTILINE))
    from autoguard.config import KEYWORDS

    assert named == set(KEYWORDS)


@pytest.mark.parametrize("mode", ["on", "off", "observe", "debug"])
def test_every_mode_is_explained(mode):
    assert f"`{mode}`" in README[README.index("## Options") : README.index("## Cost")]
