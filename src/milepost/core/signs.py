"""The names of notes and signs: by them, saves in an object store tell which files of other saves they use. Pure.

A *note* lies in the folder of the save that uses files, among its own data. A *sign* lies in the folder of the file
that is used, beside the data of the save that wrote it. Where the note of a sign lies follows from the sign's name.

    step-2/data/<save id of 2>/uses/<rank>                                                  the note
    step-1/data/<save id of 1>.used/<writer>/step-2/<save id of 2>/<rank>                   the sign
    step-1/data/<save id of 1>/<writer>.safetensors                                         the file
"""

import re
from typing import NamedTuple

from milepost.core.reuse import FileId
from milepost.core.shardfile import is_name

_USED = ".used"
_NOTE = re.compile(r"data/[^/]+/uses/[0-9]{5,}")
_FILE = re.compile(r"data/[^/]+/([0-9]{5,})\.safetensors(-[0-9]+)?")
_SIGN = re.compile(r"data/([^/]+)\.used/([0-9]{5,})/([^/]+)/([^/]+)/([0-9]{5,})")


class User(NamedTuple):
    """A save that uses files of others, and the folder that it saves into, beside theirs."""

    folder: str
    save_id: str


class Sign(NamedTuple):
    """One rank of a save uses this file."""

    file: FileId
    user: User
    rank: int

    @property
    def name(self) -> str:
        """The name of the sign, in the folder of the file."""
        return f"data/{self.file.save_id}{_USED}/{self.file.writer:05d}/{'/'.join(self.user)}/{self.rank:05d}"


def note_name(save_id: str, rank: int) -> str:
    """The name of the note of a rank, in the folder that it saves into."""
    return f"{notes_of(save_id)}{rank:05d}"


def notes_of(save_id: str) -> str:
    """What the names of all notes of a save begin with."""
    return f"data/{save_id}/uses/"


def signs_of(save_id: str) -> str:
    """What the names of all signs at the files of a save begin with."""
    return f"data/{save_id}{_USED}/"


def signs_of_rank(save_id: str, writer: int) -> str:
    """What the names of all signs at the file of a rank begin with."""
    return f"{signs_of(save_id)}{writer:05d}/"


def is_note(name: str) -> bool:
    """Whether this is the name of a note."""
    return _NOTE.fullmatch(name) is not None


def sign_at(name: str) -> Sign | None:
    """The sign of this name; None for any other name."""
    found = _SIGN.fullmatch(name)
    if found is None or not is_name(found[3]):
        return None
    return Sign(FileId(found[1], int(found[2])), User(found[3], found[4]), int(found[5]))


def file_at(name: str) -> FileId | None:
    """The shard file that an object is, or is a part of; None for one that only the save itself can use."""
    found = _FILE.fullmatch(name)
    return FileId(save_at(name), int(found[1])) if found is not None else None


def save_at(name: str) -> str:
    """The save that a name below `data/` belongs to, with its data or with signs at it: what should be its id."""
    return name.split("/")[1].removesuffix(_USED)
