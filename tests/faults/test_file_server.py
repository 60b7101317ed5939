"""The rows about a network file system run, and would notice a library that breaks the promise."""

import pytest

from faults import file_server
from faults.file_server import Library, rows
from faults.netfs import why_not

pytestmark = pytest.mark.skipif(why_not() is not None, reason=f"no network file system: {why_not()}")


@pytest.mark.slow
def test_few_trials_keep_the_promise(tmp_path):
    found = list(rows(False, tmp_path))
    assert [row.number for row in found] == [34, 35]
    assert [row.ok for row in found] == [True, True], [row.milepost.text for row in found]
    assert found[0].milepost.trials > 40
    assert found[1].milepost.trials > 3
    assert found[0].dcp.of("raised, nothing loads") > 0, "DCP shows that the faults are real"


def test_save_that_syncs_nothing_is_noticed(tmp_path, monkeypatch):
    def save(state, place):
        place.mkdir(parents=True, exist_ok=True)
        (place / "number").write_text(str(int(state["first"][0])))

    def load(target, place):
        for tensor in target.values():
            tensor.fill_(int((place / "number").read_text()))

    monkeypatch.setattr(file_server, "CHANGES", ("link",))
    monkeypatch.setattr(file_server, "CALLS", ("open", "flush"))
    monkeypatch.setattr(file_server, "LIBRARIES", dict.fromkeys(("milepost", "dcp"), Library(save, load)))
    row = file_server.broken_calls(True, tmp_path)
    assert not row.ok
    assert row.milepost.trials > 0
