"""Where converted tensors come from: the files of a checkpoint, in Milepost's format or another."""

import contextlib
import threading
from collections.abc import Iterable, Iterator

import torch

from milepost.commit.find import told_if_gone
from milepost.core.box import Box
from milepost.core.division import read_plan
from milepost.core.limits import BLOCK_BYTES
from milepost.core.manifest import FORMAT
from milepost.data.late import Wanted
from milepost.data.memory import as_bits
from milepost.data.pieces import placement_of
from milepost.data.place import place_all
from milepost.data.read import Files, VerifiedFile
from milepost.data.transfer import Transfer
from milepost.errors import CheckpointError, StorageError
from milepost.state.tensors import new_tensor
from milepost.store import Store, Traits


@contextlib.contextmanager
def reading(url: str) -> Iterator[None]:
    """Turn a plain error of the system into one that names the source: whoever writes would take it for their own."""
    try:
        yield
    except CheckpointError:
        raise
    except OSError as error:
        raise StorageError(f"cannot read {url}: {error}", errno=error.errno) from error


class _OneAtATime(Files):
    """The same files for several threads, which open them one at a time."""

    def __init__(self, files: Files) -> None:
        self._files, self.manifest = files, files.manifest
        self._asking = threading.Lock()

    @property
    def url(self) -> str:
        """Where the checkpoint is, for messages."""
        return self._files.url

    @property
    def traits(self) -> Traits:
        """Those of the store that holds the files."""
        return self._files.traits

    def open_ahead(self, ranks: Iterable[int]) -> None:
        """Open the files of these ranks."""
        with self._asking:
            self._files.open_ahead(ranks)

    def of(self, rank: int) -> VerifiedFile:
        """The file that `rank` wrote."""
        with self._asking:
            return self._files.of(rank)

    def close(self) -> None:
        """Close all files."""
        self._files.close()


class FilesReader:
    """Reads boxes of tensors straight into their targets, and verifies them as a load does.

    One thread at a time reads files of other libraries. They look up entries as they read, and each lookup adds a
    checksum. One that were added between the read and the check of its neighbour would be compared with unread bytes.
    """

    def __init__(self, files: Files, store: Store, transfer: Transfer) -> None:
        self._store = store
        self._turn = contextlib.nullcontext() if files.manifest.format == FORMAT else threading.Lock()
        self._files, self._manifest = _OneAtATime(files), files.manifest
        self._tensors = {tensor.key: tensor for tensor in files.manifest.tensors}
        # One block more than a request asks for, because requests do not start at block boundaries.
        self._transfer = Transfer(1, transfer.block_bytes + BLOCK_BYTES, transfer.direct)
        self._restoring = threading.Lock()
        self._restored: tuple[str, torch.Tensor] | None = None

    def read(self, wanted: list[Wanted]) -> None:
        """Fill all targets. Raises StorageError, naming the source, if it cannot be read."""
        packed = self._files.transforms
        with reading(self._files.url), told_if_gone(self._store, self._manifest.generation, "converted"):
            for want in wanted:
                if want.key in packed:
                    self._copy_restored(want)
            self._place([want for want in wanted if want.key not in packed])

    def _place(self, wanted: list[Wanted]) -> None:
        placements = [
            placement_of(item, tensor.dtype, target[item.box.within(box).slices], alone=True)
            for key, box, target in wanted
            for tensor in [self._tensors[key]]
            for item in read_plan(self._manifest, tensor, box)
        ]
        with self._turn:
            place_all(self._files, placements, self._transfer)

    def _copy_restored(self, want: Wanted) -> None:
        """Copy a part of a transformed tensor. Such a tensor is restored as a whole, and kept until the next one."""
        with self._restoring:
            if self._restored is None or self._restored[0] != want.key:
                self._restored = None
                tensor = self._tensors[want.key]
                whole = new_tensor(tensor.dtype, tensor.shape)
                self._place([Wanted(want.key, Box.whole(tensor.shape), whole)])
                self._restored = want.key, whole
            as_bits(want.target).copy_(as_bits(self._restored[1][want.box.slices]))

    def close(self) -> None:
        """Close the files."""
        self._files.close()
