"""`mypy --strict` of a user's program: right options pass, a wrong one is found on its line."""

import re
from pathlib import Path

import pytest
from mypy import api

TYPED = Path(__file__).parents[1] / "typed"


@pytest.mark.slow
def test_mypy_finds_wrong_options_and_no_others(tmp_path):
    wrong = {n for n, line in enumerate((TYPED / "wrong.py").read_text().splitlines(), 1) if line.endswith("# wrong")}
    command = ["--strict", "--no-error-summary", "--cache-dir", str(tmp_path)]
    out, err, _ = api.run([*command, str(TYPED / "right.py"), str(TYPED / "wrong.py")])
    assert not err
    found = {(m[1], int(m[2])) for m in re.finditer(r"(\w+)\.py:(\d+): error", out)}
    assert found == {("wrong", number) for number in wrong}, out
