"""One attempt to commit a checkpoint: aim, write, publish; keep or discard the data. Every writer goes through here.

A save aims at the generation after the newest, writes its data under a name of its own, and then creates that
generation's manifest if it is absent. If the attempt fails, each rank removes what it wrote, but only where no manifest
can name it any more. Otherwise the data stays, and a later save sweeps it.
"""

import contextlib
import logging
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, NamedTuple

from msgspec import structs

from milepost.comm import is_undecided, leave_undecided
from milepost.commit.beside import indices_beside, names_at, retire
from milepost.commit.find import (
    REMOVED,
    generations,
    generations_in,
    is_there,
    newest_above,
    parse,
    read_manifest,
    was_overtaken,
)
from milepost.commit.publish import conflict, publish, sweep
from milepost.commit.signs import delete_unused
from milepost.core.history import PhaseTime
from milepost.core.layout import Layout
from milepost.core.manifest import (
    Manifest,
    OlderFile,
    PerRankValue,
    ShardFile,
    Tensor,
    Value,
    generation_of,
    new_manifest,
    shard_name,
)
from milepost.core.save_id import intended_generation, make_save_id
from milepost.core.signs import note_name, save_at, signs_of, signs_of_rank
from milepost.core.statistics import Health, TensorStatistics
from milepost.core.tree import Node
from milepost.data.transfer import Meter, Transfer
from milepost.errors import (
    CheckpointError,
    InvalidRequest,
    NoReply,
    NotDurable,
    RanksDisagree,
    SaveConflict,
    StorageError,
)
from milepost.events.operation import moved
from milepost.store import Store
from milepost.store.base import CLAIM
from milepost.version import __version__

if TYPE_CHECKING:
    from milepost.core.reuse import KeptEntry
    from milepost.data.tally import Tally
    from milepost.data.write import EntryToWrite, Written

_log = logging.getLogger("milepost")
MAX_GENERATION = 99_999_999


class Aim(NamedTuple):
    """What an attempt aims at: a generation, and the id under which its data is stored."""

    generation: int
    save_id: str


@dataclass(frozen=True, slots=True)
class Contents:
    """What a checkpoint holds: the part of a manifest that does not say who wrote it and when."""

    metadata: Any
    layouts: tuple[Layout, ...]
    tensors: tuple[Tensor, ...]
    tree: tuple[Node, ...]
    values: tuple[Value, ...]
    per_rank: tuple[PerRankValue, ...]
    files: tuple[ShardFile, ...]
    timings: tuple[PhaseTime, ...] = ()
    statistics: tuple[TensorStatistics, ...] = ()
    health: Health | None = None
    older: tuple[OlderFile, ...] = ()


def take_aim(store: Store, *, overwrite: bool = True) -> Aim:
    """What the next attempt at this store aims at. Raises InvalidRequest if it may not replace what is there.

    Numbers that were only claimed, and those that are being removed, are passed over. So are those that a listing does
    not show yet. Where requests can take effect late, those of unfinished saves are passed over, too; see
    `_newest_attempt`.
    """
    names = names_at(store)
    found = (generation_of(name.removesuffix(CLAIM).removesuffix(REMOVED)) for name in names)
    newest = max((number for number in found if number is not None), default=0)
    there = None
    if not store.traits.is_current:
        there = newest_above(store, newest, lambda number: is_there(store, number) or None)
        newest = max(newest, there[0] if there else 0)
    if not overwrite and (there or generations_in(store, names) or indices_beside(store, names)):
        raise InvalidRequest(f"Checkpoint already exists at {store.url}; pass overwrite=True to replace it")
    if overwrite and "data/" in names and store.traits.is_current:
        newest = max(newest, _newest_attempt(store))
    if newest >= MAX_GENERATION:
        raise InvalidRequest(f"{store.url} has reached generation {newest}, the last that has a name; save elsewhere")
    return Aim(newest + 1, make_save_id(newest + 1, secrets.token_hex(8)))


def _newest_attempt(store: Store) -> int:
    """The highest generation that data at this place aims at; 0 if there is none.

    A save without a manifest is under way, died, or got no reply to the creation of its manifest. That one may appear
    at any time, and then its number is taken. The next save goes above it, so that it need not matter when. (A save
    that may not overwrite does not: of those, one wins.)
    """
    aims = (intended_generation(save_at(name)) for name in store.list("data/", shallow=True))
    return max((aim for aim in aims if aim is not None), default=0)


@dataclass(frozen=True, slots=True)
class Attempt:
    """One rank's part of an attempt by `world` ranks. All ranks write; the coordinator, which `decides`, commits.

    `files_of`: the ranks whose files this process writes, where it is not only its own: in a copy. `keeps`: it may
    keep files of earlier saves, under names of its own.
    """

    store: Store
    aim: Aim
    rank: int
    world: int
    decides: bool = False
    files_of: tuple[int, ...] = ()
    keeps: bool = False

    def again(self) -> "Attempt":
        """The same attempt under another id, for data that is written once more.

        No name is used twice: a request of the first time may still be under way, and take effect late.
        """
        save_id = self.aim.save_id
        other = f"{save_id[:-1]}{(int(save_id[-1], 16) + 1) % 16:x}"  # as long: the same state makes the same sizes
        return replace(self, aim=Aim(self.aim.generation, other))

    def write(
        self,
        entries: "list[EntryToWrite]",
        transfer: Transfer,
        meter: Meter,
        released: Callable[[], None] = lambda: None,
        tally: "Tally | None" = None,
        kept: "Mapping[str, KeptEntry] | None" = None,
    ) -> "Written":
        """Write this rank's shard file and make it durable; see `write_shard`. Raises SaveConflict or StorageError."""
        from milepost.data.write import write_shard  # noqa: PLC0415  # imports torch, which a copy does without

        with self.writing():
            name = self.store, self.aim.save_id, self.rank
            written = write_shard(*name, entries, transfer, meter, released, tally, kept)
            moved(written.data_bytes)
            return written

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Inside, files of this attempt are written. Turns errors of the store into SaveConflict or StorageError."""
        try:
            yield
        except CheckpointError:
            raise
        except FileNotFoundError as error:
            # A job that committed this generation first may have swept our files away.
            if was_overtaken(self.store, self.aim.generation):
                raise conflict(self.store, self.aim.generation) from error
            raise self._cannot_write(error, ". Was it removed, renamed or unmounted meanwhile?") from error
        except OSError as error:
            raise self._cannot_write(error) from error

    def _cannot_write(self, error: OSError, hint: str = "") -> StorageError:
        return StorageError(f"cannot write to {self.store.url}: {error}{hint}", errno=error.errno)

    def commit(self, contents: Contents) -> None:
        """On the coordinator, when all ranks have written: make the checkpoint exist, and sweep what it replaces.

        An error after which the checkpoint may exist all the same is marked, so that no rank removes its data.
        """
        manifest = new_manifest(
            *self.aim,
            datetime.now(UTC).isoformat(timespec="seconds"),
            f"milepost {__version__}",
            self.world,
            metadata=contents.metadata,
            layouts=contents.layouts,
            tensors=contents.tensors,
            tree=contents.tree,
            values=contents.values,
            per_rank=contents.per_rank,
            files=contents.files,
            replaced=indices_beside(self.store),
            timings=contents.timings,
            statistics=contents.statistics,
            health=contents.health,
            older=contents.older,
        )
        self._publish(manifest)

    def commit_copy(self, original: Manifest, files: tuple[ShardFile, ...]) -> None:
        """Like `commit`, of all that another manifest says: a copy was made when, and by whom, its original was."""
        self._publish(
            structs.replace(
                original,
                generation=self.aim.generation,
                save_id=self.aim.save_id,
                files=tuple(file for file in files if not isinstance(file, OlderFile)),
                older=tuple(file for file in files if isinstance(file, OlderFile)),
                replaced=indices_beside(self.store),
            )
        )

    def _publish(self, manifest: Manifest) -> None:
        try:
            names = publish(self.store, manifest)
            retire(self.store, manifest)
            sweep(self.store, manifest, names)
        except BaseException as error:
            # After NotDurable, a power cut may bring the manifest back. After NoReply, or where Ctrl-C or an error that
            # no store should raise came between a request and its reply, the request may still arrive.
            late = isinstance(error, (NotDurable, NoReply))
            late = late or (self.store.traits.is_current and not isinstance(error, (CheckpointError, OSError)))
            if late or self._may_be_committed():
                leave_undecided(error)
            raise

    def fail(self, error: BaseException) -> None:
        """After an error: remove what this rank wrote, unless a manifest may name it. Never raises."""
        if self._is_dead(error):
            self.discard()

    def _is_dead(self, error: BaseException) -> bool:
        """Whether the commit did not happen, and can no longer happen after this error.

        The coordinator's verdict says it: what this rank sees may be old. It only looks in order to keep more.
        """
        decided = bool(getattr(error, "failures", {})) or isinstance(error, (SaveConflict, RanksDisagree))
        if self.world > 1 and not decided and not self.decides:
            return False  # the coordinator did not answer; it may still commit
        return not is_undecided(error) and not self._may_be_committed()

    def _may_be_committed(self) -> bool:
        """Whether the manifest of this attempt is there, or one that cannot be read."""
        try:
            data = read_manifest(self.store, self.aim.generation)
            if data is None:
                return self.aim.generation in generations(self.store)
            return parse(self.store.url, self.aim.generation, data).save_id == self.aim.save_id
        except (OSError, CheckpointError):
            return True

    def _own_names(self) -> Iterator[str]:
        """The names under which this process has stored something, and the signs at its files."""
        save_id = self.aim.save_id
        if self.files_of:
            yield from self.store.list(f"data/{save_id}/")
            yield from self.store.list(signs_of(save_id))
            return
        yield from self.store.list(f"data/{save_id}/{self.rank:05d}")
        if self.store.traits.is_current:  # there files can have signs, of saves that saw the manifest before it went
            yield from self.store.list(signs_of_rank(save_id, self.rank))
            yield note_name(save_id, self.rank)

    def discard(self) -> None:
        """Remove what this rank wrote. A failure is logged, never raised: the next save sweeps."""
        names: Iterable[str] = [shard_name(self.aim.save_id, rank) for rank in self.files_of or (self.rank,)]
        try:
            if self.store.traits.part_bytes or self.keeps:
                names = self._own_names()
            delete_unused(self.store, names)
        except (OSError, CheckpointError) as error:
            _log.warning(
                "could not remove what an unfinished save left at %s; a later save will: %s", self.store.url, error
            )
