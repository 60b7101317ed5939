"""Reading once, however the tensors are cut: each rank reads a part of the files and sends the others what they want.

The ranks agree on what all of them want: by digests where they want the same, else by one table for each digest. Then
each rank works out by itself what it reads, sends and gets (`core/swap_plan.py`). Reading and sending take turns, in
memory that keeps to `host_memory_bytes`.

A rank that cannot read goes on with the others to the end, and sends them empty messages, so none waits in vain. A rank
that dies ends the swap for all, and the meeting that follows names it. Each message has a checksum: a program that uses
the process group in another thread at the same time can mix its own messages with these.
"""

import itertools
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import NamedTuple

import msgspec
import torch
import torch.distributed as dist
import xxhash

from milepost.comm import Call, Comm, Deferred, Meeting, defer, meet
from milepost.core.box import Box
from milepost.core.division import PlannedRead
from milepost.core.dtypes import size_bytes
from milepost.core.manifest import Manifest, Tensor
from milepost.core.ranks import pack_ranks, unpack_ranks
from milepost.core.swap_plan import Chunk, Fragment, Message, Rounds, SwapPlan, WantRow, merge_wants, packed
from milepost.core.wire import Wire
from milepost.data.memory import view_of
from milepost.data.pieces import Placement, copy_box, placement_of
from milepost.data.transfer import Meter
from milepost.errors import CheckpointError
from milepost.state.tensors import Part, can_send, torch_dtype

_MOST_TABLES = 64
"""With more different wishes than this, each rank reads for itself: every rank would have to learn all of them."""
_HEAD = 16
"""The bytes before each message: whether its sender could read it, and its checksum."""


class Swapped(NamedTuple):
    """A tensor that is swapped: how it was saved, and what this rank wants of it."""

    saved: Tensor
    row: WantRow
    parts: tuple[Part, ...]


class _Offer(msgspec.Struct, frozen=True, array_like=True):
    """What a rank brings: the digest of its wishes, the kinds of device it can send from, and its memory."""

    digest: bytes
    sends_from: tuple[str, ...]
    on_device: str
    memory_bytes: int


class _SwapTerms(msgspec.Struct, frozen=True, array_like=True):
    """The groups of ranks with equal wishes (none: there is no swap), and the device that messages lie on.

    `memory_bytes`: what the rank with the least memory may use.
    """

    groups: tuple[str, ...] = ()
    device: str = "cpu"
    memory_bytes: int = 0


class _WantTable(msgspec.Struct, frozen=True, array_like=True):
    """The wishes of some ranks."""

    ranks: str
    rows: tuple[WantRow, ...]


_TABLES = Wire(tuple[_WantTable, ...])
_ROWS = Wire(tuple[WantRow, ...])
_OFFERING = Meeting("offering", Wire(_Offer), Wire(_SwapTerms), "sharing")
_COLLECTING = Meeting("collecting wishes", _TABLES, _TABLES, "sharing")
_COUNTING = Meeting("counting rounds", Wire(int), Wire(int), "sharing")


def agree_to_swap(
    found: Callable[[], Mapping[str, Swapped]], manifest: Manifest, comm: Comm, call: Call, memory_bytes: int
) -> "Deferred[BoxSwap] | None":
    """Agree on a swap with all ranks; None if there is none, since the ranks cannot send, or want too many things."""
    wishes = defer(comm, lambda: dict(found()))

    def offer() -> _Offer:
        mine = wishes.get()
        devices = {part.data.device.type for one in mine.values() for part in one.parts}
        sends = tuple(kind for kind in ("cpu", *sorted(devices - {"cpu"})) if can_send(comm.group, kind))
        rows = tuple(one.row for one in mine.values())
        others = sorted(devices - {"cpu"})
        return _Offer(xxhash.xxh3_128_digest(_ROWS.pack(rows)), sends, others[0] if others else "", memory_bytes)

    terms = meet(comm, call, _OFFERING, offer, _judge)
    if not terms.groups:
        return None
    tables = _collect(wishes, comm, call, terms)
    swap = defer(comm, lambda: BoxSwap(manifest, tables, wishes.get(), comm, terms))
    rounds = meet(comm, call, _COUNTING, lambda: swap.get().own_rounds, max)
    if swap.result is not None:
        swap.result.rounds = rounds
    return swap


def _judge(offers: list[_Offer]) -> _SwapTerms:
    groups: dict[bytes, list[int]] = {}
    for rank, offer in enumerate(offers):
        groups.setdefault(offer.digest, []).append(rank)
    device = next((offer.on_device for offer in offers if offer.on_device), "cpu")
    if len(groups) > _MOST_TABLES or any(device not in offer.sends_from for offer in offers):
        return _SwapTerms()
    ranks = tuple(pack_ranks(members) for members in groups.values())
    return _SwapTerms(ranks, device, min(offer.memory_bytes for offer in offers))


def _collect(
    wishes: "Deferred[dict[str, Swapped]]", comm: Comm, call: Call, terms: _SwapTerms
) -> "tuple[_WantTable, ...]":
    """The tables of all groups. Nothing is sent where all ranks want the same."""

    def own(ranks: str) -> _WantTable:
        return _WantTable(ranks, tuple(one.row for one in wishes.get().values()))

    if len(terms.groups) == 1:
        return (own(terms.groups[0]),)
    firsts = {unpack_ranks(ranks)[0]: ranks for ranks in terms.groups}
    return meet(
        comm,
        call,
        _COLLECTING,
        lambda: (own(firsts[comm.rank]),) if comm.rank in firsts else (),
        lambda found: tuple(table for tables in found for table in tables),
    )


class BoxSwap:
    """What this rank reads for all, sends, and gets. `rounds`: how many all ranks take part in."""

    def __init__(
        self,
        manifest: Manifest,
        tables: tuple[_WantTable, ...],
        wishes: Mapping[str, Swapped],
        comm: Comm,
        terms: _SwapTerms,
    ) -> None:
        wants = merge_wants([(table.ranks, table.rows) for table in tables])
        self._sizes = Rounds.within(terms.memory_bytes, comm.size)
        self._plan = SwapPlan(manifest, wants, comm.size, self._sizes.size_bytes)
        self._wishes, self._me, self._world, self._group = wishes, comm.rank, comm.size, comm.group
        here = (part.data.device for one in wishes.values() for part in one.parts)
        device = next((device for device in here if device.type == terms.device), torch.device(terms.device))
        self._outgoing, self._incoming = _Room(device), _Room(device)
        self._inbox = _Inbox(self._plan, self._me)
        self._chunks = list(self._plan.chunks_of(self._me))
        self.own_rounds = self._chunks[-1].round + 1 if self._chunks else 0
        self.rounds = 0
        self.keys = frozenset(self._plan.keys & wishes.keys())
        # Taken while this rank can still fail alone: later, the others wait for what it sends.
        size, at_once = self._sizes.size_bytes, min(self._sizes.at_once, self.own_rounds)
        self._outgoing.take(at_once * size + min(at_once * comm.size, self._sizes.boxes) * _HEAD)
        self._incoming.take(min(comm.size * size, self.size_bytes) + comm.size * _HEAD)

    @property
    def size_bytes(self) -> int:
        """How much this rank gets of the others or reads for itself."""
        found = [self._wishes[key] for key in self.keys]
        return sum(size_bytes(one.saved.dtype, part.box.shape) for one in found for part in one.parts)

    def run(self, read: Callable[[list[Placement]], None], meter: Meter, timeout_s: float, *, lossy: bool) -> None:
        """Read, send and receive, round by round: a collective. `timeout_s` is for each round.

        `read` fills placements; `meter` counts what has come. The first error of this rank is raised when all rounds
        are through, Ctrl-C too, and nothing more is read. An error of the process group ends the swap.
        """
        troubles: list[BaseException] = []
        first = 0
        while first < self.rounds:
            try:
                batch = self._prepare(first)
            except KeyboardInterrupt as error:
                troubles.append(error)
                batch = self._prepare(first)  # the others wait for what it sends
            try:
                if not troubles:
                    read(batch.placements)
                    batch.seal()
            except BaseException as error:  # noqa: BLE001  # raised when all rounds are through
                troubles.append(error)
            if troubles:
                batch.spoil()
            meter.add(batch.own_bytes)
            for number, envelope in enumerate(batch.envelopes, first):
                came = self._receive(number, envelope, timeout_s, troubles)
                try:
                    meter.add(self._unpack(came, lossy))
                    meter.report()
                except BaseException as error:  # noqa: BLE001  # raised when all rounds are through
                    troubles.append(error)
            first += len(batch.envelopes)
        if troubles:
            raise next((one for one in troubles if not isinstance(one, Exception)), troubles[0])

    def _prepare(self, first: int) -> "_Batch":
        """What this rank reads at once, from this round on: into its own tensors, and into messages."""
        own: list[Placement] = []
        portion = self._plan.portion(self._read_for(first), first, self._sizes)
        rounds: list[dict[int, list[tuple[Chunk, Box]]]] = [{} for _ in range(first, min(portion.stop, self.rounds))]
        for chunk, to, box in portion.wishes:
            if to == self._me:
                own += self._into_own(chunk.read_of(box), chunk.tensor.dtype)
            else:
                rounds[chunk.round - first].setdefault(to, []).append((chunk, box))
        batch = _Batch(own)
        messages = [{to: packed([(c.tensor, box) for c, box in sent]) for to, sent in one.items()} for one in rounds]
        memory = self._outgoing.take(sum(_HEAD + m.size_bytes for one in messages for m in one.values()))
        at = 0
        for sent, one in zip(rounds, messages, strict=True):
            start, sizes = at, [0] * self._world
            for to in sorted(one):
                room = memory[at : at + _HEAD + one[to].size_bytes]
                batch.messages.append(room)
                for (chunk, box), fragment in zip(sent[to], one[to].fragments, strict=True):
                    target = _window(room, fragment, chunk.tensor)
                    batch.placements.append(placement_of(chunk.read_of(box), chunk.tensor.dtype, target))
                at, sizes[to] = at + len(room), len(room)
            batch.envelopes.append(_Envelope(memory[start:at], sizes))
        return batch

    def _read_for(self, first: int) -> Iterator[Chunk]:
        """What this rank reads for the rounds from `first` on."""
        low = bisect_left(self._chunks, first, key=lambda chunk: chunk.round)
        return (self._chunks[at] for at in range(low, len(self._chunks)))

    def _receive(
        self, number: int, sent: "_Envelope", timeout_s: float, troubles: list[BaseException]
    ) -> "list[_Received]":
        """One round: send, and receive. Ctrl-C is added to the troubles: the round is over when Python hears of it."""
        messages = self._inbox.take(number)
        sizes = [_HEAD + messages[sender].size_bytes if sender in messages else 0 for sender in range(self._world)]
        memory = self._incoming.take(sum(sizes))
        try:
            work = dist.all_to_all_single(memory, sent.data, sizes, sent.sizes, self._group, async_op=True)
            if work is not None:
                work.wait(timedelta(seconds=timeout_s))
        except KeyboardInterrupt as error:
            troubles.append(error)
        except RuntimeError as error:
            raise CheckpointError(
                f"the ranks could not send each other what they had read: {error}. Pass share_reads=False to let each "
                "rank read for itself"
            ) from error
        ends = list(itertools.accumulate(sizes))
        return [
            _Received(sender, message, memory[ends[sender] - sizes[sender] : ends[sender]])
            for sender, message in messages.items()
        ]

    def _unpack(self, came: "list[_Received]", lossy: bool) -> int:
        """Put what came in a round into the tensors. Gives how many bytes that were."""
        count = 0
        for one, (is_good, expected, found) in zip(came, _heads([one.data for one in came]), strict=True):
            if not is_good:
                continue  # its own error is raised on all ranks
            if expected != found:
                raise CheckpointError(
                    f"what rank {one.sender} sent is not what arrived; the state is partly filled. Does another thread "
                    "use the process group meanwhile? Pass share_reads=False, and each rank reads for itself"
                )
            for fragment in one.message.fragments:
                saved = self._wishes[fragment.key].saved
                read = PlannedRead(fragment.key, one.sender, "", fragment.box, fragment.box)
                for placement in self._into_own(read, saved.dtype):
                    copy_box(placement, _window(one.data, fragment, saved), lossy=lossy)
                count += size_bytes(saved.dtype, fragment.box.shape)
        return count

    def _into_own(self, read: PlannedRead, dtype: str) -> list[Placement]:
        """A read into this rank's own tensor: several where its parts overlap."""
        parts = [part for part in self._wishes[read.key].parts if part.box.contains(read.box)]
        return [placement_of(read, dtype, part.data[read.box.within(part.box).slices]) for part in parts]


class _Inbox:
    """The messages that others send this rank, round after round."""

    def __init__(self, plan: SwapPlan, me: int) -> None:
        senders = [sender for sender in plan.senders_to(me) if sender != me]
        self._coming = {sender: plan.messages(sender, me) for sender in senders}
        self._next = {sender: next(messages, None) for sender, messages in self._coming.items()}

    def take(self, number: int) -> dict[int, Message]:
        """The messages of a round, by sender. To be called for one round after the other."""
        found = {}
        for sender, coming in list(self._next.items()):
            if coming is None:
                del self._next[sender]
            elif coming[0] == number:
                found[sender] = coming[1]
                self._next[sender] = next(self._coming[sender], None)
        return found


class _Envelope(NamedTuple):
    """What a rank sends in a round: the messages one after the other, and the size of that to each rank."""

    data: torch.Tensor
    sizes: list[int]


class _Received(NamedTuple):
    """A message that came, and the rank that sent it."""

    sender: int
    message: Message
    data: torch.Tensor


class _Batch:
    """What a rank reads at once for some rounds."""

    def __init__(self, own: list[Placement]) -> None:
        self.own_bytes = sum(placement.size_bytes for placement in own)
        self.placements = own
        self.messages: list[torch.Tensor] = []
        self.envelopes: list[_Envelope] = []

    def seal(self) -> None:
        """Mark all messages as good, with their checksums."""
        for message in self.messages:
            message[:_HEAD].view(torch.int64).copy_(torch.stack([torch.ones_like(total := _sum(message)), total]))

    def spoil(self) -> None:
        """Mark all messages as empty."""
        for message in self.messages:
            message[:_HEAD] = 0


class _Room:
    """Memory of one device that is used again and again."""

    def __init__(self, device: torch.device) -> None:
        self._data = torch.empty(0, dtype=torch.uint8, device=device)

    def take(self, size_bytes: int) -> torch.Tensor:
        """So many bytes of it. What was taken before is gone."""
        if len(self._data) < size_bytes:
            self._data = torch.empty(0, dtype=torch.uint8, device=self._data.device)  # not both at once
            self._data = torch.empty(size_bytes, dtype=torch.uint8, device=self._data.device)
        return self._data[:size_bytes]


def _sum(message: torch.Tensor) -> torch.Tensor:
    """A checksum of a message without its head: of all bytes on the CPU; the sum of its words on a device."""
    body = message[_HEAD:]
    if body.is_cpu:
        digest = xxhash.xxh3_64_intdigest(view_of(body)) - 2**63
        return torch.tensor(digest, dtype=torch.int64, device="cpu")
    return body.view(torch.int64).sum()


def _heads(messages: list[torch.Tensor]) -> list[list[int]]:
    """Of each message: whether it is good, its checksum, and that of what arrived."""
    if not messages:
        return []
    rows = [torch.cat([message[:_HEAD].view(torch.int64), _sum(message).view(1)]) for message in messages]
    found: list[list[int]] = torch.stack(rows).tolist()
    return found


def _window(message: torch.Tensor, fragment: Fragment, tensor: Tensor) -> torch.Tensor:
    """The memory of a fragment in a message, as a tensor of the saved type."""
    start = _HEAD + fragment.at
    data = message[start : start + size_bytes(tensor.dtype, fragment.box.shape)]
    return data.view(torch_dtype(tensor.dtype)).view(fragment.box.shape)
