"""The reply is lost: the request took effect and its repetition finds that, on every store and at every system call."""

import errno
import os

import pytest
import torch

import milepost
from milepost.commit import find
from milepost.errors import AlreadyExists, StorageError
from milepost.store import CloudStore, LocalStore, MemoryStore, Within, linux
from milepost.store.base import CLAIM, Traits, check_name, top_names
from milepost.store.memory import MemoryReader
from milepost.testing import ReplyLosingStore, UnsyncedStore

REQUESTS = ["create", "writer", "commit", "delete"]


class UsersOwnStore:
    """A store as a user may write it: an object is a list of parts that are joined on commit."""

    url = "mine://store"
    traits = Traits()

    def __init__(self):
        self.parts = {}

    def create(self, name, *data):
        writer = self.writer(name, sum(map(len, data)))
        writer.write(0, data)
        writer.commit()

    def writer(self, name, size_bytes, *, direct=True):
        check_name(name)
        if name in self.parts:
            raise AlreadyExists(name)
        return UsersWriter(self, name)

    def reader(self, name, *, size_bytes=None):
        if name not in self.parts:
            raise FileNotFoundError(name)
        return MemoryReader(name, b"".join(self.parts[name]))

    def list(self, prefix, *, shallow=False):
        found = iter([name for name in self.parts if name.startswith(prefix)])
        return top_names(found, prefix) if shallow else found

    def delete(self, *names, durable=False):
        for name in names:
            self.parts.pop(name, None)


class UsersWriter:
    aligned = False

    def __init__(self, store, name):
        self.store, self.name, self.ranges = store, name, {}

    def write(self, offset, views):
        self.ranges[offset] = b"".join(map(bytes, views))

    def commit(self):
        if (
            self.store.parts.setdefault(self.name, found := [self.ranges[at] for at in sorted(self.ranges)])
            is not found
        ):
            raise AlreadyExists(self.name)

    def abort(self):
        self.ranges.clear()


def no_links(*_args, **_options):
    raise PermissionError(errno.EPERM, "Operation not permitted")


STORES = ["local", "local without links", "memory", "within", "unsynced", "users own", "s3"]


@pytest.fixture(params=STORES)
def store(request, tmp_path, monkeypatch):
    if request.param == "s3":
        with request.getfixturevalue("seaweed").place() as url:
            yield CloudStore(url)
        return
    if request.param == "local without links":
        monkeypatch.setattr(os, "link", no_links)
    if request.param.startswith("local"):
        yield LocalStore(tmp_path / "folder")
        return
    made = {"memory": MemoryStore, "unsynced": UnsyncedStore, "users own": UsersOwnStore}
    yield made[request.param]() if request.param in made else Within(LocalStore(tmp_path / "outer"), "step/a")


def state(number):
    return {"w": torch.full((70_000,), float(number)), "n": number}


def read(store):
    with milepost.open(store) as checkpoint:
        checkpoint.verify().raise_if_damaged()
        assert (checkpoint["w"][:] == checkpoint["n"]).all()
        return checkpoint["n"]


def skip_unused(store, kind):
    if store.traits.part_bytes and kind in ("writer", "commit"):
        pytest.skip("a save to an object store makes no such request")


@pytest.mark.parametrize("kind", REQUESTS)
def test_a_repeated_request_that_finds_itself_is_success(store, kind):
    skip_unused(store, kind)
    losing = ReplyLosingStore(store, [kind], repeats=True)
    milepost.save(state(1), losing)
    milepost.save(state(2), losing)
    assert losing.lost > 0
    assert read(store) == 2
    assert len(list(store.list("data/"))) == 1
    assert len(list(store.list(""))) == 2


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("kind", REQUESTS)
def test_after_no_reply_the_old_or_the_new_is_whole(store, kind, after):
    skip_unused(store, kind)
    milepost.save(state(1), store)
    losing = ReplyLosingStore(store, [kind], after=after)
    try:
        milepost.save(state(2), losing)
        raised = False
    except StorageError as error:
        raised, text = True, str(error)
        assert "no reply" in text
    assert losing.lost > 0
    # A manifest that is there is looked at, and a sweep that fails is made up for by the next one.
    # In an object store a part of the data is created too, and its saver does not look whose it is.
    creates_data = store.traits.part_bytes > 0
    assert raised == (kind in ("writer", "commit") or (kind == "create" and (creates_data or not after)))
    assert read(store) == (1 if raised else 2)
    milepost.save(state(3), store)
    assert read(store) == 3
    assert len(list(store.list("data/"))) == 1


@pytest.mark.parametrize("store", ["local without links", "memory"], indirect=True)
@pytest.mark.parametrize("after", [False, True])
def test_a_removal_that_loses_replies_is_finished_by_the_next(store, after):
    keeper = milepost.Checkpointer(ReplyLosingStore(store, ["create", "delete"], after=after))
    for _ in range(4):
        try:
            if 1 not in keeper.steps():
                keeper.save(state(1), 1)
            keeper.remove(1)
        except milepost.CheckpointError:
            continue
        break
    assert milepost.Checkpointer(store).steps() == []
    milepost.Checkpointer(store).save(state(2), 2)
    assert milepost.Checkpointer(store).restore(state(0)) == 2


# --- each system call of a folder


class LostOnce:
    """A function whose first reply for each path is lost: it is made, and then the repetition fails."""

    def __init__(self, inner, number):
        self.inner, self.number, self.lost, self.met = inner, number, 0, set()

    def __call__(self, *args, **options):
        result = self.inner(*args, **options)
        if args[:2] in self.met or not self.applies(args):
            return result
        self.met.add(args[:2])
        self.lost += 1
        if self.inner is OPEN:
            os.close(result)
        raise OSError(self.number, os.strerror(self.number))

    def applies(self, args):
        return self.inner is not OPEN or args[1] & os.O_EXCL


OPEN = os.open
CALLS = {
    "link": errno.EEXIST,
    "open": errno.EEXIST,
    "mkdir": errno.EEXIST,
    "unlink": errno.ENOENT,
    "rmdir": errno.ENOENT,
}


@pytest.mark.parametrize("call", CALLS)
def test_no_call_of_a_folder_is_misled_by_its_own_effect(tmp_path, monkeypatch, call):
    losing = LostOnce(getattr(os, call), CALLS[call])
    monkeypatch.setattr(os, call, losing)
    for number in (1, 2, 3):
        milepost.save(state(number), tmp_path / "runs" / "a")
        assert read(tmp_path / "runs" / "a") == number
    names = list(LocalStore(tmp_path / "runs" / "a").list(""))
    assert len(names) == 2, names
    assert losing.lost > 0


@pytest.mark.parametrize("links", [True, False])
@pytest.mark.parametrize("call", ["link", "rename", "unlink"])
@pytest.mark.parametrize("number", [errno.ENOENT, errno.EEXIST, errno.EIO])
def test_a_folder_knows_the_file_that_it_has_created(tmp_path, monkeypatch, call, number, links):
    where = linux if call == "rename" else os
    losing = LostOnce(getattr(where, "rename_to_free_name" if call == "rename" else call), number)
    if not links:
        monkeypatch.setattr(os, "link", no_links)
    if links or call != "link":
        monkeypatch.setattr(where, losing.inner.__name__, losing)
    store = LocalStore(tmp_path)
    store.create("name", b"content")
    assert losing.lost == ((call != "link") if not links else (call != "rename"))
    assert store.reader("name").size_bytes == 7
    assert list(store.list("")) == ["name"]
    with pytest.raises(AlreadyExists):
        store.create("name", b"other")


@pytest.mark.parametrize("number", [errno.ENOENT, errno.EEXIST, errno.EIO])
def test_a_rename_that_took_effect_is_a_commit(tmp_path, monkeypatch, number):
    losing = LostOnce(linux.rename_to_free_name, number)
    monkeypatch.setattr(os, "link", no_links)
    monkeypatch.setattr(linux, "rename_to_free_name", losing)
    milepost.save(state(1), tmp_path)
    milepost.save(state(2), tmp_path)
    assert read(tmp_path) == 2
    assert losing.lost == 2
    assert len(list(LocalStore(tmp_path).list(""))) == 2, "no claims are left"


def test_a_claim_says_whose_it_is(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "link", no_links)
    losing = LostOnce(os.symlink, errno.EEXIST)
    with monkeypatch.context() as patch:
        patch.setattr(os, "symlink", losing)
        milepost.save(state(1), tmp_path)
    assert losing.lost == 1
    assert read(tmp_path) == 1
    (tmp_path / f"manifest-00000002.json{CLAIM}").symlink_to("manifest-00000002.json.of-another-save.tmp")
    with pytest.raises(milepost.AlreadyExists):
        LocalStore(tmp_path).create("manifest-00000002.json", b"mine")
    assert milepost.save(state(3), tmp_path).generation == 3
    assert len(list(LocalStore(tmp_path).list(""))) == 2, "the claim is swept"


def test_a_lost_reply_to_a_claim_fails_and_the_next_save_works(tmp_path, monkeypatch):
    """Without links of any kind a claim is an empty file. Nobody can tell whose, so its number is passed over."""
    milepost.save(state(1), tmp_path)
    monkeypatch.setattr(os, "link", no_links)
    monkeypatch.setattr(os, "symlink", no_links)
    monkeypatch.setattr(find, "PATIENCE_S", 0.1)
    losing = LostOnce(os.open, errno.EEXIST)
    losing.applies = lambda args: str(args[0]).endswith(CLAIM) and not losing.lost
    monkeypatch.setattr(os, "open", losing)
    with pytest.raises(milepost.SaveConflict, match=r"has claimed generation 2.*Save again"):
        milepost.save(state(2), tmp_path)
    assert losing.lost == 1
    assert read(tmp_path) == 1
    assert milepost.save(state(3), tmp_path).generation == 3
    assert read(tmp_path) == 3


@pytest.mark.parametrize("knows_flag", [True, False])
def test_without_links_a_remembered_free_name_is_not_overwritten(tmp_path, monkeypatch, knows_flag):
    """A file system may remember that a name was free after another machine has taken it."""
    monkeypatch.setattr(os, "link", no_links)
    (tmp_path / "name").write_bytes(b"of another machine")
    monkeypatch.setattr(os.path, "lexists", lambda _: False)
    if knows_flag:  # then the listing may be old as well
        monkeypatch.setattr(os, "listdir", lambda _: [])
    else:
        monkeypatch.setattr(linux, "rename_to_free_name", os.rename)
    with pytest.raises(milepost.AlreadyExists):
        LocalStore(tmp_path).create("name", b"mine")
    assert (tmp_path / "name").read_bytes() == b"of another machine"
