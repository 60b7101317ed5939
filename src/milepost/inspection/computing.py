"""Computing the statistics of tensors from their data: every byte is verified, and few are in memory at once.

Where most of the files is wanted, each file is read once from its start to its end, by several threads. Else the
tensors are read one by one, in pieces. What is counted is the same that a save would have recorded.
"""

from collections.abc import Sequence

from milepost.checkpoint import LazyTensor
from milepost.core.box import Box
from milepost.core.division import read_plan
from milepost.core.dtypes import DTYPES
from milepost.core.limits import MIB
from milepost.core.manifest import Tensor
from milepost.core.partial_statistics import PartialStatistics, statistics_of
from milepost.core.shardfile import CHECKSUMS
from milepost.core.statistics import TensorStatistics
from milepost.data.memory import view_of
from milepost.data.read import Files, VerifiedFile
from milepost.data.tally import TalliedEntry, Tally
from milepost.data.transfer import Meter, Watcher, limited_transfer

_PIECE_BYTES = 8 * MIB
_MOSTLY = 2
"""Files are read as a whole if that is at most so many times as much as is wanted."""

_Wanted = dict[int, dict[str, int]]
"""For each file, by its number, the entries that are wanted, with the number of the tensor of each."""


def compute_statistics(
    files: Files, tensors: Sequence[Tensor], progress: Watcher | None = None, *, histogram: bool = False
) -> dict[str, TensorStatistics]:
    """The statistics of these tensors, by key. Raises CheckpointDamaged for what is not as it was saved."""
    meter = Meter("stats", files.url, progress)
    wanted, size_bytes = _whole_entries(files, tensors), sum(tensor.size_bytes for tensor in tensors)
    if wanted is not None and _data_bytes(files, wanted) <= _MOSTLY * size_bytes:
        partial = _of_files(files, tensors, wanted, meter, histogram)
    else:
        meter.expect(size_bytes)
        partial = [_of_tensor(files, tensor, number, meter, histogram) for number, tensor in enumerate(tensors)]
    meter.finish()
    summed = PartialStatistics.sum_of([one.rows for one in partial], [one.bins for one in partial])
    return {row.key: row for row in statistics_of(summed.named([t.key for t in tensors]), tensors)}


def _whole_entries(files: Files, tensors: Sequence[Tensor]) -> _Wanted | None:
    """The entries that the tensors are in; None where it takes more than looking at bytes of files to find numbers."""
    if not files.manifest.generation:
        return None  # another library's files
    wanted: _Wanted = {}
    for number, tensor in enumerate(tensors):
        for item in map(files.locate, read_plan(files.manifest, tensor, Box.whole(tensor.shape))):
            if tensor.transforms or item.box != item.source:
                return None
            wanted.setdefault(item.rank, {})[item.name] = number
    return wanted


def _data_bytes(files: Files, wanted: _Wanted) -> int:
    return sum(files.manifest.parts_of(files.record(number)).data_bytes for number in wanted)


def _of_files(
    files: Files, tensors: Sequence[Tensor], wanted: _Wanted, meter: Meter, histogram: bool
) -> list[PartialStatistics]:
    meter.expect(_data_bytes(files, wanted))
    found, transfer = [], limited_transfer(None)
    for rank, entries in wanted.items():
        _refuse_missing(files, rank, tensors, set(entries.values()))
        file = files.of(rank)
        tally = Tally("histogram" if histogram else "numbers")
        tally.begin(_spans(file, tensors, entries), file.header.data_bytes)
        file.read_through(lambda start, block: tally.add(start, [block]), transfer, meter)  # noqa: B023  # called here
        found.append(tally.result())
    return found


def _refuse_missing(files: Files, file: int, tensors: Sequence[Tensor], numbers: set[int]) -> None:
    """Raise CheckpointDamaged unless the file holds what the manifest says, as it says."""
    for tensor in (tensors[number] for number in numbers):
        for item in read_plan(files.manifest, tensor, Box.whole(tensor.shape)):
            if files.number_of(item.rank, item.name) == file:
                files.of(file).entry(item, tensor.dtype)


def _spans(file: VerifiedFile, tensors: Sequence[Tensor], entries: dict[str, int]) -> list[TalliedEntry]:
    """What lies where in the data of a file."""
    spans = []
    for name, entry in file.header.entries.items():
        number = entries.get(name, -1)
        if name != CHECKSUMS and entry.data_offsets[0] < entry.data_offsets[1]:
            dtype = tensors[number].dtype if number >= 0 else "uint8"
            spans.append(TalliedEntry(entry.data_offsets[0], dtype, number))
    return sorted(spans)


def _of_tensor(files: Files, tensor: Tensor, number: int, meter: Meter, histogram: bool) -> PartialStatistics:
    """The sums of one tensor, which is read in pieces along the boxes that it was saved in."""
    tally, at = Tally("histogram" if histogram else "numbers"), 0
    tally.begin([TalliedEntry(0, tensor.dtype, number)], tensor.size_bytes)
    lazy, most = LazyTensor(files, tensor), max(_PIECE_BYTES // DTYPES[tensor.dtype].size_bytes, 1)
    for item in read_plan(files.manifest, tensor, Box.whole(tensor.shape)):
        for region in [item.box] if tensor.transforms else item.box.slabs(most):
            block = view_of(lazy[region.slices].contiguous())
            tally.add(at, [block])
            at += len(block)
            meter.add(len(block))
            meter.report()
    return tally.result()
