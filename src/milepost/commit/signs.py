"""Data that several steps share in an object store: who uses a file says so beside it, and who deletes looks first.

A folder gives an older file a second name. An object store cannot, so there a manifest names a file where it lies, in
the folder of another step. This keeps it there. The rank of a save that wants to use files of its base

    1. creates a *note* in its own folder, among its own data: it goes with that data, once the save is dead
    2. creates a *sign* beside each file, which says where the note is
    3. looks: the base is still the newest checkpoint of its place. If not, or if any request failed, it uses nothing

A sign is *live* for as long as its note is there. Whoever deletes data of a save has established that the save is dead.
Then he

    a. lists the signs at its files
    b. looks for the note of each. A file with a live sign stays, and so do its live signs
    c. lists the signs again, if there were any: another may have come while he looked
    d. deletes a file when the last listing showed no sign that was not found dead before it

What stays is deleted by whoever looks again: the next save at the place, or, by the marker of a removal, the next pass
over the steps. `docs/explanation/commit.md` has the proof, and `tests/commit/test_signs_model.py` tries all orders.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from milepost.core.manifest import Manifest, OlderFile, ShardFile
from milepost.core.reuse import FileId, older_file
from milepost.core.save_id import intended_generation
from milepost.core.shardfile import is_name
from milepost.core.signs import Sign, User, file_at, is_note, note_name, notes_of, save_at, sign_at, signs_of
from milepost.errors import AlreadyExists
from milepost.store import Store, Within
from milepost.store.siblings import are_one, beside, parent_of
from milepost.store.stopping import side_by_side

_LOOKS = 4
"""How often signs are listed before a file stays because new ones go on coming."""


# The saver


@dataclass(frozen=True, slots=True)
class SignTarget:
    """A save that goes on using files of its base where they lie. `is_base`: whether the base is still committed there.

    It gets the place of the base, as others see it.
    """

    store: Store
    save_id: str
    rank: int
    is_base: Callable[[Store], bool]

    def keep(self, source: Store, base: Manifest, files: Sequence[tuple[ShardFile, int]]) -> Sequence[OlderFile | None]:
        """See `KeepTarget`. All of them, or none."""
        found, nothing = self._beside(source), [None] * len(files)
        if found is None:
            return nothing
        folder, base_folder = found
        rows = [_row(base, record, self.rank, used_bytes, base_folder) for record, used_bytes in files]
        user = User(folder, self.save_id)
        signs = [(row.folder, Sign(FileId(row.save_id, row.writer), user, self.rank)) for row in rows if row]
        if not signs:
            return nothing
        _create(self.store, note_name(self.save_id, self.rank))
        side_by_side(lambda one: _create(beside(self.store, one[0]), one[1].name), signs, self.store.traits.requests)
        return rows if self.is_base(beside(self.store, base_folder)) else nothing

    def _beside(self, source: Store) -> tuple[str, str] | None:
        """The names of the folder of this save, and of that of its base; None where they are not beside each other."""
        here, there = parent_of(self.store), parent_of(source)
        if here is None or there is None or not are_one(here[0], there[0]):
            return None
        return (here[1], there[1]) if is_name(here[1]) and is_name(there[1]) else None


def _row(base: Manifest, record: ShardFile, rank: int, used_bytes: int, base_folder: str) -> OlderFile | None:
    """The row of a file of the base. None for one that is there under a name of its own: a copy made it so."""
    folder = record.folder if isinstance(record, OlderFile) else base_folder
    return older_file(record, base, rank, used_bytes, folder) if folder else None


def _create(store: Store, name: str) -> None:
    with suppress(AlreadyExists):  # nobody else uses this name: a reply was lost
        store.create(name, b"")


# Those who delete


class Notes:
    """Looks for notes. It remembers those that were there, for one pass: a file stays rather too long than not.

    It never remembers that there was none: a note may come with a sign that is seen later. `around`: the place in which
    the folders are; None where it cannot be told.
    """

    def __init__(self, around: Store | None) -> None:
        self._around = around
        self._there: set[tuple[User, int]] = set()

    def live(self, signs: Iterable[Sign]) -> set[Sign]:
        """Those of the signs that are live. They were seen before this call. All, where that cannot be told."""
        signs = set(signs)
        if self._around is None:
            return signs
        users = list({sign.user for sign in signs if (sign.user, sign.rank) not in self._there})
        for found in side_by_side(self._list, users, self._around.traits.requests):
            self._there |= found
        return {sign for sign in signs if (sign.user, sign.rank) in self._there}

    def _list(self, user: User) -> set[tuple[User, int]]:
        assert self._around is not None
        prefix = notes_of(user.save_id)
        names = Within(self._around, user.folder).list(prefix)
        return {(user, int(name.removeprefix(prefix))) for name in names if is_note(name)}


def notes_beside(place: Store) -> Notes:
    """For one look at one place."""
    found = parent_of(place)
    return Notes(found[0] if found is not None else None)


def delete_unused(place: Store, names: Iterable[str], notes: Notes | None = None) -> list[str]:
    """Delete data of saves that are dead, but for files that other steps use. Gives the names that stay.

    `names`: all that lies below `data/` of these saves, with the signs at it; listed after they were known to be dead.
    """
    names = list(names)
    signs = {sign for name in names if (sign := sign_at(name)) is not None}
    if not signs:
        place.delete(*names)
        return []
    # First, so that what these saves used in this very place is free.
    place.delete(*filter(is_note, names))
    used, dead = _used(place, signs, notes or notes_beside(place))
    gone = {sign.name for sign in dead}
    stays = {name for name in names if name not in gone and _file_of(name) in used}
    place.delete(*(name for name in names if name not in stays | gone and not is_note(name)), *gone)
    return sorted(stays)


def _used(place: Store, signs: set[Sign], notes: Notes) -> tuple[set[FileId], set[Sign]]:
    """The files that stay, because a live sign is at them, or new ones go on coming; and all signs that are dead."""
    dead: set[Sign] = set()
    for _ in range(_LOOKS):
        dead |= (signs - dead) - notes.live(signs - dead)
        used = {sign.file for sign in signs - dead}
        doubtful = {sign.file for sign in signs} - used
        if not doubtful:
            return used, dead
        # A sign may have come after the first listing, and its base may have died before its note was looked for.
        signs = signs | {sign for save_id in {file.save_id for file in doubtful} for sign in _list(place, save_id)}
        used |= {sign.file for sign in signs - dead}
        if not used & doubtful:
            return used, dead
    return used, dead


def _list(place: Store, save_id: str) -> set[Sign]:
    return {sign for name in place.list(signs_of(save_id)) if (sign := sign_at(name)) is not None}


def _file_of(name: str) -> FileId | None:
    sign = sign_at(name)
    return sign.file if sign is not None else file_at(name)


def delete_ended(place: Store, generation: int, notes: Notes | None = None) -> bool:
    """Delete the data of all saves that aimed at this generation or less, which are dead. Whether some of it stays.

    That is what other steps use.
    """
    return bool(delete_unused(place, ended_data(place, generation), notes))


def ended_data(place: Store, generation: int) -> list[str]:
    """What lies below `data/` of saves that aimed at this generation or less."""
    aims = {name: intended_generation(save_at(name)) for name in place.list("data/")}
    return [name for name, aim in aims.items() if aim is not None and aim <= generation]


def users_of(place: Store, names: Iterable[str]) -> list[str]:
    """The folders of the steps that use what lies at a place. `names`: what is below `data/` there."""
    signs = {sign for name in names if (sign := sign_at(name)) is not None}
    return sorted({sign.user.folder for sign in notes_beside(place).live(signs)})
