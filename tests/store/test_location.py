"""Places as users write them."""

import getpass
import os
import pwd
from pathlib import Path

import pytest

import milepost
from milepost.store import store_at


class Spelled:
    """A path as an object."""

    def __init__(self, path):
        self.path = path

    def __fspath__(self):
        return self.path


def test_paths_are_bytes_objects_and_home_folders(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    here = str(tmp_path / "runs" / "a")
    same = ["runs/a", "runs/a/", "./runs//a", "~/runs/a", "~/runs/a//", f"file://{here}/", "runs/b/../a"]
    for path in [*same, b"runs/a", b"~/runs/a", Path("~/runs/a"), Spelled("~/runs/a/"), Spelled(os.fsencode(here))]:
        assert store_at(path).url == here, path
    assert store_at("~").url == str(tmp_path) == store_at(Path()).url
    assert store_at(f"~{getpass.getuser()}/x").url == f"{pwd.getpwuid(os.getuid()).pw_dir}/x"
    assert store_at("./~/a").url == f"{tmp_path}/~/a"
    assert store_at("a~/~").url == f"{tmp_path}/a~/~"
    assert store_at("file:///~/a").url == "/~/a", "no home in a URL"
    assert store_at(b"\xff\xfe").url == f"{tmp_path}/\udcff\udcfe"
    milepost.save({"n": 1}, b"~/runs/bytes")
    assert milepost.open(Path("~/runs/bytes"))["n"] == milepost.load({"n": 0}, tmp_path / "runs" / "bytes")["n"] == 1
    assert sorted(os.listdir(tmp_path)) == ["runs"], "no folder named ~"


class Universal:
    """A path as universal_pathlib has it: no `__fspath__`, and a URL as its text."""

    def __init__(self, url, **options):
        self.protocol, self.url_, self.storage_options = url.partition("://")[0], url, options

    def __str__(self):
        return self.url_


def test_urls_are_spelled_in_many_ways(tmp_path):
    milepost.save({"n": 1}, tmp_path / "a")
    here = f"file://{tmp_path}/a"
    for url in (here, here + "/", here.encode(), Spelled(here), Spelled(here.encode()), type("Text", (str,), {})(here)):
        assert milepost.open(url)["n"] == 1, url
    assert store_at("HTTPS://host/a/").url == store_at(Universal("https://host/a")).url == "https://host/a"
    with pytest.raises(milepost.InvalidRequest, match="storage options"):
        store_at(Universal("https://me:secret@host/a", token="secret"))
    for lost in (
        "s3:/bucket/x",
        Path("s3://bucket/x"),
        b"s3:/bucket/x",
        Path("gs://b/x"),
        "https:/host/x",
        Path("hf://a/b"),
    ):
        with pytest.raises(milepost.InvalidRequest, match=r"two slashes|string.*://"):
            store_at(lost)
    assert store_at("./s3:/bucket/x").url.endswith("/s3:/bucket/x")


def test_places_that_mean_nothing_are_refused(monkeypatch):
    empty = ["", b"", Spelled(""), Spelled(b""), b"a\0b", Spelled("a\0b"), Spelled(7), None, 7, ["a"]]
    for bad in [*empty, "~nobody-of-this-name/a", Path("~nobody-of-this-name"), "file://~/a"]:
        with pytest.raises(milepost.InvalidRequest, match=r"path|place|folder"):
            store_at(bad)
    for home in ("", "relative"):
        monkeypatch.setenv("HOME", home)
        with pytest.raises(milepost.InvalidRequest, match=r"home folder ~.*\./~"):
            store_at("~/a")
