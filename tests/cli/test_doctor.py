"""`milepost doctor`: what it prints and how it ends."""

import jsonschema

from tests.cli.running import fine, milepost


def test_each_check_is_one_line_and_the_verdict_the_last(tmp_path):
    lines = fine("doctor", tmp_path / "place", "--size", "64K").lines
    assert lines[-1].startswith(f"{tmp_path / 'place'}: fit for checkpoints")
    assert any(line.split()[:3] == ["ok", "atomic", "create"] for line in lines)


def test_place_that_is_not_fit_ends_with_1(tmp_path):
    (tmp_path / "file").write_bytes(b"1")
    done = milepost("doctor", "--json", tmp_path / "file")
    assert done.status == 1
    jsonschema.validate(done.json, fine("schema", "doctor").json)
    assert done.json["fit"] is False
    assert [check["name"] for check in done.json["checks"] if check["state"] == "fail"] == ["reachable"]
    assert "not fit for checkpoints (1 failed)" in milepost("doctor", tmp_path / "file").out
