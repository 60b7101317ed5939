"""`milepost.convert`: write a checkpoint in another format, as a stream, on any number of ranks.

The layout of every format is known before the first byte is read. So memory is bounded by the blocks in flight, and
ranks share the work without further messages.
"""

import logging
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from milepost.checkpoint import open_checkpoint
from milepost.comm import TIMEOUT_S, Call, Comm, calling, operating_on, together
from milepost.comm.distributed import ranks_of
from milepost.commit.beside import indices_beside
from milepost.commit.find import generations
from milepost.commit.nesting import refuse_file, refuse_run, relation
from milepost.core.limits import BLOCK_BYTES, KIB
from milepost.core.option_values import check_values, items_of
from milepost.core.printable import printable
from milepost.data.transfer import HOST_MEMORY_BYTES, Meter, Transfer, Watcher, limited_transfer
from milepost.errors import InvalidRequest
from milepost.formats.read.names import SINGLE
from milepost.formats.write.chosen import Chosen, Rename
from milepost.formats.write.converted import Converted
from milepost.formats.write.dcp import dcp_plan
from milepost.formats.write.files import FolderAttempt, FolderPlan, write_together
from milepost.formats.write.huggingface import MODEL, HfNames
from milepost.formats.write.milepost import SourceContents, write_milepost
from milepost.formats.write.source import reading
from milepost.formats.write.torchfile import torch_plan
from milepost.saving.options import one_of
from milepost.state.tensors import refuse_fake_mode
from milepost.state.values import Codec
from milepost.store import LocalStore, Location, Store, store_at
from milepost.store.read_only import refuse_read_only

if TYPE_CHECKING:
    import torch.distributed as dist

Format = Literal["milepost", "dcp", "torch", "safetensors"]
_log = logging.getLogger("milepost")
MAX_SHARD_BYTES = MODEL.max_shard_bytes
"""The size of a safetensors file, as Hugging Face cuts them."""


def convert(
    source: Location,
    target: Location,
    to: Format = "milepost",
    *,
    rename: Rename | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    file_name: str = SINGLE,
    drop_values: bool = False,
    overwrite: bool = False,
    types: Iterable[type] = (),
    allow_pickle: bool = False,
    host_memory_bytes: int = HOST_MEMORY_BYTES,
    transfer: Transfer | None = None,
    progress: Watcher | None = None,
    process_group: "dist.ProcessGroup | Comm | None" = None,
    timeout_s: float = TIMEOUT_S,
) -> Converted:
    """Write the checkpoint at `source` to `target`, in another format; from one process, or from every rank of a job.

    Returns once everything is whole and survives power loss; before that, nothing at `target` looks whole. An error on
    any rank is raised on every rank. Tensors keep their dtype and their bytes; no tensor is in memory as a whole.

    `to`: "milepost"; "dcp", a directory for `torch.distributed.checkpoint.load`; "torch", a file for `torch.load`;
    "safetensors", a folder as Hugging Face lays it out. All but the first need a path of a file system.
    `rename`: a function or dict that gives the new key of each key, or None to leave it out. If any key changes, the
    result is one flat dict; else the containers stay.
    `max_shard_bytes`: the size of a safetensors file. `file_name`: its name, for example "adapter_model.safetensors";
    several files get numbers, and an index. `drop_values`: leave out values that safetensors cannot hold.
    `overwrite=False`: refuse to replace what is at `target`.
    `types`, `allow_pickle`: as for `open`. `host_memory_bytes`, `transfer`, `progress`, `process_group`, `timeout_s`:
    as for `save`. Raises InvalidRequest, CheckpointNotFound, CheckpointDamaged, StorageError.

    >>> _ = milepost.save({"w": torch.ones(3)}, "memory://source")
    >>> milepost.convert("memory://source", "converted.pt", "torch").tensors
    1
    >>> torch.load("converted.pt")["w"]
    tensor([1., 1., 1.])
    """
    comm, store = ranks_of(process_group, timeout_s), store_at(target)
    kinds: list[type] = []

    def check() -> Transfer:
        refuse_fake_mode()
        one_of("to", to, get_args(Format))
        check_values({"max_shard_bytes": max_shard_bytes, "drop_values": drop_values, "overwrite": overwrite})
        check_values({"rename": rename, "progress": progress, "file_name": file_name})
        kinds.extend(items_of("types", types))
        Codec(kinds, allow_pickle)
        if to != "milepost":
            local_folder(store, to)
        refuse_read_only(store)
        moving = within(transfer, host_memory_bytes)
        if comm.rank == comm.coordinator:
            _refuse_to_hide(store_at(source), store, to)
        return moving

    target_call = Call("converting to", store.url)
    with calling(comm, target_call) as call, operating_on(comm, "convert", store.url, wraps=True) as operation:
        limited = together(comm, call, "checking the options", check)
        meter = Meter("save", store.url, progress if comm.rank == comm.coordinator else None)
        opened = _Origin(source, tuple(kinds), allow_pickle, rename, limited)
        try:
            if to == "milepost":
                write_milepost(store, opened.contents, comm, limited, meter, overwrite=overwrite)
            else:
                named = HfNames(max_shard_bytes, file_name)
                root, plan = _foreign(opened, to, local_folder(store, to), comm.size, named, drop_values)
                write_together(FolderAttempt(root, comm, limited, overwrite), plan, meter)
                _warn_of_lost_verdict(opened.chosen, store, to, comm)
        finally:
            opened.close()
        sizes = [saved.size_bytes for _, saved in opened.chosen.tensors]
        if to != "milepost":
            operation.commit(0, sum(sizes))
        return Converted(store.url, to, len(sizes), sum(sizes))


def _refuse_to_hide(source: Store, target: Store, to: str) -> None:
    """Raise InvalidRequest for a target in the folder of the source, and for a run, whose steps would be hidden."""
    if relation(source, target) == "inside":
        raise InvalidRequest(
            f"{target.url} lies in the checkpoint that is converted, {source.url}, whose folder is its own. Convert to "
            "another folder"
        )
    if to != "torch":
        refuse_file(target, "convert to another place")
        refuse_run(target, "conversion")


def _warn_of_lost_verdict(chosen: Chosen, target: Store, to: str, comm: Comm) -> None:
    """Log, once for all ranks, that the new files do not say that their source is unhealthy."""
    health = chosen.health
    if health is not None and not health.ok and comm.rank == comm.coordinator:
        _log.warning(
            "%s was unhealthy when it was saved: %s. %s is of the format %s, which does not say so",
            printable(chosen.checkpoint.url),
            printable(health.reason),
            printable(target.url),
            to,
        )


def within(transfer: Transfer | None, host_memory_bytes: int) -> Transfer:
    """How bytes move: half of the memory is for reading, and half for writing."""
    check_values({"host_memory_bytes": host_memory_bytes})
    if host_memory_bytes < 2 * BLOCK_BYTES:
        raise InvalidRequest(
            f"host_memory_bytes is {host_memory_bytes}, and nothing is converted with less than "
            f"{2 * BLOCK_BYTES // KIB} KiB"
        )
    return limited_transfer(transfer, host_memory_bytes // 2)


def local_folder(store: Store, to: str) -> Path:
    """The path behind a store. Raises InvalidRequest where it is no file system."""
    if not isinstance(store, LocalStore):
        raise InvalidRequest(
            f"{to} is written to a path, not to {store.url}: its files are written in place by all ranks. Convert to a "
            "folder, and copy that (the index last); the other way round, every format is read at a URL"
        )
    return store.root


def _foreign(
    source: "_Origin", to: str, target: Path, world: int, named: HfNames, drop_values: bool
) -> tuple[Path, Callable[[], FolderPlan]]:
    """The folder to write files into, and a function that gives the plan for them."""
    if to == "torch":
        if os.path.isdir(target):
            raise InvalidRequest(f"{target} is a folder; torch.save makes one file")
        return target.parent, lambda: torch_plan(target.name, source.chosen.torch_state())
    if to == "dcp":
        return target, lambda: dcp_plan(*source.chosen.dcp_state(), world, str(target))
    return target, lambda: _beside(source, target).hf_plan(named, drop_values)


def _beside(source: "_Origin", target: Path) -> "Chosen":
    """The source of safetensors files. Raises InvalidRequest where they would lie unread beside another checkpoint."""
    there = LocalStore(target)
    if not source.is_at(target) and (generations(there) or indices_beside(there)):
        raise InvalidRequest(
            f"{target} holds a checkpoint of Milepost or of torch.distributed.checkpoint. Loads from there would go on "
            "reading that one, not the safetensors files. Convert to another folder, or remove it first"
        )
    return source.chosen


class _Origin:
    """The source. It is opened on first use: in a meeting, so that an error on one rank reaches all ranks."""

    def __init__(
        self, where: Location, types: tuple[type, ...], allow_pickle: bool, rename: Rename | None, transfer: Transfer
    ) -> None:
        self._where, self._types, self._allow_pickle = where, types, allow_pickle
        self._rename, self._transfer = rename, transfer
        self._chosen: Chosen | None = None

    def is_at(self, path: Path) -> bool:
        """Whether the source is in this folder."""
        return os.path.realpath(store_at(self._where).url) == os.path.realpath(path)

    @property
    def chosen(self) -> "Chosen":
        """The part of the source that is converted."""
        if self._chosen is None:
            store, codec = store_at(self._where), Codec(self._types, self._allow_pickle)
            with reading(store.url):
                checkpoint = open_checkpoint(store, types=self._types, allow_pickle=self._allow_pickle)
                self._chosen = Chosen(checkpoint, store, codec, self._rename, self._transfer)
        return self._chosen

    def contents(self) -> SourceContents:
        """For Milepost's own format."""
        return self.chosen.contents()

    def close(self) -> None:
        """Close its files."""
        if self._chosen is not None:
            self._chosen.reader.close()
            self._chosen.checkpoint.close()
