"""Attacks on the folder: names that lead out of it, links, and things that are not files."""

import contextlib
import os
import shutil
import socket
import stat
from pathlib import Path

from attacks.forge import (
    Attack,
    Corpus,
    make_good,
    manifest_path,
    read_manifest,
    set_fields,
    shard_path,
    write_manifest,
)

corpus = Corpus()

_ARABIC_1 = "\N{ARABIC-INDIC DIGIT ZERO}" * 7 + "\N{ARABIC-INDIC DIGIT ONE}"
_ARABIC_9 = "\N{ARABIC-INDIC DIGIT ZERO}" * 7 + "\N{ARABIC-INDIC DIGIT NINE}"


def outside(folder: Path) -> Path:
    """A folder beside the checkpoint. A reader of the checkpoint must not open anything in it."""
    place = folder.parent / "outside"
    place.mkdir(exist_ok=True)
    return place


_NAMES: dict[str, str] = {
    "dots": "../../outside",
    "dots_after_a_good_start": "00000001-0123456789abcdef/../../../outside",
    "absolute": "/outside",
    "backslashes": "..\\..\\outside",
    "nul": "00000001-0123456789abcdef\0",
    "newline": "00000001-0123456789abcdef\n",
    "empty": "",
    "one_dot": ".",
    "digits_of_another_script": f"{_ARABIC_1}-0123456789abcdef",
    "capitals": "00000001-0123456789ABCDEF",
    "another_generation": "00000002-0123456789abcdef",
    "megabyte": "00000001-" + "0" * 1_000_000,
}


def _add_names() -> None:
    for name, save_id in _NAMES.items():

        def make(folder: Path, save_id: str = save_id) -> None:
            set_fields(folder, save_id=save_id)

        corpus.append(Attack(f"save_id_with_{name}", "The save id is part of a path.", "open", make))


_add_names()


@corpus.attack("open")
def file_with_a_name_of_its_own(folder: Path) -> None:
    """Files have numbers, not names. A field that gives a name must not be used."""
    make_good(folder)
    record = read_manifest(folder)
    record["files"][0]["name"] = "../../outside/secret"
    write_manifest(folder, record)


@corpus.attack("open")
def file_of_a_negative_rank(folder: Path) -> None:
    """A file's number is part of its name."""
    make_good(folder)
    record = read_manifest(folder)
    record["files"][0]["rank"] = -1
    write_manifest(folder, record)


def _replace_by_link(path: Path, target: Path) -> None:
    """Move something out of the folder and put a link to it in its place. A reader that follows it finds good data."""
    shutil.move(path, target)
    path.symlink_to(target)


@corpus.attack("open")
def manifest_that_is_a_link(folder: Path) -> None:
    """A link may lead to any file that the reader can read."""
    make_good(folder)
    _replace_by_link(manifest_path(folder), outside(folder) / "manifest")


@corpus.attack("verify")
def shard_file_that_is_a_link(folder: Path) -> None:
    """The same for a shard file. The link leads to good data, so only a refusal shows that it was not followed."""
    make_good(folder)
    _replace_by_link(shard_path(folder), outside(folder) / "shard")


@corpus.attack("verify")
def save_folder_that_is_a_link(folder: Path) -> None:
    """The same for the folder of the shard files."""
    make_good(folder)
    _replace_by_link(shard_path(folder).parent, outside(folder) / "save")


@corpus.attack("verify")
def data_folder_that_is_a_link(folder: Path) -> None:
    """The same one level up. Saving over such a checkpoint must not sweep what lies behind the link."""
    make_good(folder)
    _replace_by_link(folder / "data", outside(folder) / "data")


@corpus.attack("verify")
def relative_link_out_of_the_folder(folder: Path) -> None:
    """The same with dots in the link."""
    make_good(folder)
    path = shard_path(folder)
    shutil.move(path, outside(folder) / "shard")
    path.symlink_to("../../../outside/shard")


@corpus.attack("verify")
def link_to_itself(folder: Path) -> None:
    """A link that never ends."""
    make_good(folder)
    path = shard_path(folder)
    path.unlink()
    path.symlink_to(path.name)


@corpus.attack("verify")
def link_to_nothing(folder: Path) -> None:
    """A link to a missing file. A program that writes through it would create that file."""
    make_good(folder)
    path = shard_path(folder)
    path.unlink()
    path.symlink_to(outside(folder) / "new")


@corpus.attack("verify")
def link_to_zeros_without_end(folder: Path) -> None:
    """A device behind a link."""
    make_good(folder)
    path = shard_path(folder)
    path.unlink()
    path.symlink_to("/dev/zero")


@corpus.attack("verify")
def shard_file_that_is_a_pipe(folder: Path) -> None:
    """Opening a pipe waits for a writer, forever."""
    make_good(folder)
    path = shard_path(folder)
    path.unlink()
    os.mkfifo(path)


@corpus.attack("open")
def manifest_that_is_a_pipe(folder: Path) -> None:
    """The same for the manifest."""
    make_good(folder)
    manifest_path(folder).unlink()
    os.mkfifo(manifest_path(folder))


@corpus.attack("verify")
def shard_file_that_is_a_folder(folder: Path) -> None:
    """A folder can be opened like a file, and cannot be read."""
    make_good(folder)
    path = shard_path(folder)
    path.unlink()
    path.mkdir()


@corpus.attack("open")
def manifest_that_is_a_folder(folder: Path) -> None:
    """The same for the manifest."""
    make_good(folder)
    manifest_path(folder).unlink()
    manifest_path(folder).mkdir()


@corpus.attack("verify")
def data_folder_that_is_a_file(folder: Path) -> None:
    """A file where a folder should be."""
    make_good(folder)
    shutil.rmtree(folder / "data")
    (folder / "data").write_bytes(b"")


@corpus.attack("verify")
def shard_file_that_is_a_socket(folder: Path) -> None:
    """Opening a socket fails with another error than opening a file."""
    make_good(folder)
    path = shard_path(folder)
    path.unlink()
    with contextlib.chdir(path.parent), socket.socket(socket.AF_UNIX) as server:  # the path may be too long for one
        server.bind(path.name)


@corpus.attack("verify")
def shard_file_that_is_a_device(folder: Path) -> None:
    """A device itself, where the forger (and this test) has the right to make one; otherwise the file is missing."""
    make_good(folder)
    path = shard_path(folder)
    path.unlink()
    with contextlib.suppress(PermissionError):
        os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 5))


@corpus.attack("open")
def newer_manifest_that_is_a_link(folder: Path) -> None:
    """A later generation behind a link. A reader must open neither it nor an older one in its place."""
    make_good(folder)
    secret = outside(folder) / "secret"
    secret.write_text("secret")
    (folder / "manifest-00000002.json").symlink_to(secret)


@corpus.attack("nothing")
def manifest_named_in_digits_of_another_script(folder: Path) -> None:
    """A name that only looks like a newer generation must not hide the real one."""
    make_good(folder)
    (folder / f"manifest-{_ARABIC_9}.json").write_bytes(b"{}")


@corpus.attack("nothing")
def folders_100_deep_beside_the_data(folder: Path) -> None:
    """Listing leftovers must not run out of memory, stack or open files."""
    make_good(folder)
    place = folder / "data"
    for _ in range(100):
        place /= "d" * 20
    place.mkdir(parents=True)
