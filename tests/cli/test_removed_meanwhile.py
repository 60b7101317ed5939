"""A checkpoint that is removed while a command reads it is not damaged: it is not there any more."""

import shutil

import pytest
import torch

import milepost as library
from milepost.store import MemoryStore
from milepost.testing import CountingStore
from tests.cli.running import refused
from tests.web import Web

GONE = "was replaced or removed while it was"
LINES = [
    ["stats", "{}/a", "--compute"],
    ["show", "{}/a", "w", "--slice", "0:3"],
    ["diff", "{}/a", "{}/b"],
    ["convert", "{}/a", "{out}/folder"],
    ["convert", "{}/a", "{out}/file.pt"],
]


@pytest.mark.parametrize("line", LINES)
def test_checkpoint_that_is_removed_meanwhile_is_not_found(tmp_path, line):
    for name in "ab":
        library.save({"w": torch.full((300_000,), float(ord(name)))}, tmp_path / "web" / name)

    def remove(handler):
        if handler.path.startswith("/a/data/"):
            shutil.rmtree(tmp_path / "web" / "a", ignore_errors=True)
        return False

    with Web(tmp_path / "web") as web:
        web.faults = [remove] * 1000
        told = refused(3, *(part.format(web.url, out=tmp_path / "out") for part in line))
    assert f"{web.url}/a {GONE}" in told
    assert not [path for path in (tmp_path / "out").rglob("*") if path.is_file()]


class Removes(CountingStore):
    """Its checkpoint is removed as soon as the data is to be opened."""

    def before(self, number, call):
        if call.startswith("reader data/"):
            self.inner.delete(*self.inner.list(""))


def test_conversion_of_what_is_removed_meanwhile_finds_none(tmp_path):
    source = MemoryStore()
    library.save({"w": torch.ones(300)}, source)
    with pytest.raises(library.CheckpointNotFound, match=f"{GONE} converted"):
        library.convert(Removes(source), tmp_path / "out")
    assert not list((tmp_path / "out").glob("manifest-*"))
