"""Reading once, however the tensors are cut: each rank reads a part of the files and sends the others what they want.

The ranks agree on what all of them want: by digests where they want the same, else by one table for each digest. Then
each rank works out by itself what it reads, sends and gets (`core/swap_plan.py`). Reading and sending take turns, in
memory that keeps to `host_memory_bytes`.

A rank that cannot read goes on with the others to the end, and sends them empty messages, so none waits in vain. A rank
that dies ends the swap for all, and the meeting that follows names it. Each message has a checksum: a program that uses
the process group in another thread at the same time can mix its own messages with these.
"""

import contextlib
import itertools
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import NamedTuple, TypeVar

import msgspec
import torch
import torch.distributed as dist
import xxhash

from milepost.comm import Call, Comm, Deferred, Meeting, defer, meet
from milepost.core.box import Box
from milepost.core.division import PlannedRead
from milepost.core.dtypes import size_bytes
from milepost.core.limits import MIB
from milepost.core.manifest import Manifest, Tensor
from milepost.core.ranks import pack_ranks, unpack_ranks
from milepost.core.swap_plan import Chunk, Fragment, Message, Rounds, SwapPlan, WantRow, merge_wants, packed
from milepost.core.wire import Wire
from milepost.data.device import streams_of_this_thread
from milepost.data.memory import view_of
from milepost.data.pieces import Placement, copy_box, placement_of
from milepost.data.threads import Latch, run_apart
from milepost.data.transfer import Meter
from milepost.errors import CheckpointError
from milepost.events.operation import carried
from milepost.state.tensors import Part, can_send, torch_dtype

_MOST_TABLE_BYTES = 16 * MIB
"""If the different wishes take more than this, each rank reads for itself: every rank would have to learn all."""
_TRIES = 3
_REPORT_EVERY_S = 0.1
T = TypeVar("T")
Read = Callable[[list[Placement], Latch], None]
"""Fills placements. It may stop once the latch is set: then what it reads is in vain."""
_HEAD = 16
"""The bytes before each message: whether its sender could read it, and its checksum."""


class Swapped(NamedTuple):
    """A tensor that is swapped: how it was saved, and what this rank wants of it."""

    saved: Tensor
    row: WantRow
    parts: tuple[Part, ...]


class _Offer(msgspec.Struct, frozen=True, array_like=True):
    """What a rank brings: its wishes, as a digest and a size; the kinds of device it can send from; its memory."""

    digest: bytes
    table_bytes: int
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
        rows = _ROWS.pack(tuple(one.row for one in mine.values()))
        others = sorted(devices - {"cpu"})
        return _Offer(xxhash.xxh3_128_digest(rows), len(rows), sends, others[0] if others else "", memory_bytes)

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
    table_bytes = sum({offer.digest: offer.table_bytes for offer in offers}.values())
    is_long = len(groups) > 1 and table_bytes > _MOST_TABLE_BYTES
    if is_long or any(device not in offer.sends_from for offer in offers):
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
        here = {part.data.device: None for one in wishes.values() for part in one.parts}
        self._in_streams = streams_of_this_thread(here)
        device = next((device for device in here if device.type == terms.device), torch.device(terms.device))
        self._outgoing, self._incoming = _Room(device), _Room(device)
        self._inbox: _Inbox | None = _Inbox(self._plan, self._me)
        self._chunks = list(self._plan.chunks_of(self._me))
        self.own_rounds = self._chunks[-1].round + 1 if self._chunks else 0
        self.rounds = 0
        self.keys = frozenset(self._plan.keys & wishes.keys())
        # Taken while this rank can still fail alone: later, the others wait for what it sends.
        sizes = replace(self._sizes, at_once=min(self._sizes.at_once, self.own_rounds))
        self._outgoing.take(sizes.sent_bytes(comm.size, _HEAD))
        self._incoming.take(sizes.received_bytes(comm.size, self.size_bytes, _HEAD))

    @property
    def size_bytes(self) -> int:
        """How much this rank gets of the others or reads for itself."""
        found = [self._wishes[key] for key in self.keys]
        return sum(size_bytes(one.saved.dtype, part.box.shape) for one in found for part in one.parts)

    def run(self, read: Read, meter: Meter, timeout_s: float, *, lossy: bool) -> None:
        """Read, send and receive, round by round: a collective. `timeout_s` is for each round.

        `read` fills placements; `meter` counts what has come. The first error of this rank is raised when all rounds
        are through, Ctrl-C too, and nothing more is read. An error of the process group ends the swap. Another thread
        does all of it: a signal handler that raises cannot make this rank leave the others.
        """
        troubles = _Troubles()

        def work() -> None:
            with troubles.kept(), self._in_streams():
                self._swap(read, meter, timeout_s, troubles, lossy=lossy)

        run_apart(carried(work), meter.report, troubles.keep, _REPORT_EVERY_S)
        troubles.tell()

    def _swap(self, read: Read, meter: Meter, timeout_s: float, troubles: "_Troubles", *, lossy: bool) -> None:
        first = 0
        while first < self.rounds:
            batch = troubles.insist(partial(self._prepare, first, troubles))
            with troubles.kept():
                if not troubles.happened.is_set():
                    read(batch.placements, troubles.happened)
                    batch.seal()
                meter.add(batch.own_bytes)
            for number, envelope in enumerate(batch.envelopes, first):
                coming = troubles.insist(partial(self._expect, number))
                self._send(envelope, coming, timeout_s)
                with troubles.kept():
                    meter.add(self._unpack(coming.messages, lossy))
            first += len(batch.envelopes)

    def _prepare(self, first: int, troubles: "_Troubles") -> "_Batch":
        """What this rank reads at once, from this round on: into its own tensors, and into messages.

        After an error nothing is read: then it is one round, whose messages stay empty.
        """
        in_vain = troubles.happened.is_set()
        sizes = replace(self._sizes, at_once=1) if in_vain else self._sizes
        portion = self._plan.portion(self._read_for(first), first, sizes)
        own: list[tuple[Chunk, Box]] = []
        rounds: list[dict[int, list[tuple[Chunk, Box]]]] = [{} for _ in range(first, min(portion.stop, self.rounds))]
        for chunk, to, box in portion.wishes:
            (own if to == self._me else rounds[chunk.round - first].setdefault(to, [])).append((chunk, box))
        messages = [{to: packed([(c.tensor, box) for c, box in sent]) for to, sent in one.items()} for one in rounds]
        memory = self._outgoing.take(sum(_HEAD + m.size_bytes for one in messages for m in one.values()))
        batch = _Batch(rounds, messages, memory, self._world)
        if not in_vain:
            for chunk, box in own:
                batch.add_own(self._into_own(chunk.read_of(box), chunk.tensor.dtype))
            batch.place()
        return batch

    def _read_for(self, first: int) -> Iterator[Chunk]:
        """What this rank reads for the rounds from `first` on."""
        low = bisect_left(self._chunks, first, key=lambda chunk: chunk.round)
        return (self._chunks[at] for at in range(low, len(self._chunks)))

    def _expect(self, number: int) -> "_Coming":
        """What comes in a round, with memory for it. To be called for one round after the other, or again for one."""
        inbox, self._inbox = self._inbox or _Inbox(self._plan, self._me), None  # an error would end its generators
        messages = inbox.take(number)
        sizes = [_HEAD + messages[sender].size_bytes if sender in messages else 0 for sender in range(self._world)]
        memory, ends = self._incoming.take(sum(sizes)), list(itertools.accumulate(sizes))
        came = [_Received(of, message, memory[ends[of] - sizes[of] : ends[of]]) for of, message in messages.items()]
        self._inbox = inbox
        return _Coming(memory, sizes, came)

    def _send(self, sent: "_Envelope", coming: "_Coming", timeout_s: float) -> None:
        """One round: send, and receive."""
        try:
            work = dist.all_to_all_single(coming.data, sent.data, coming.sizes, sent.sizes, self._group, async_op=True)
            if work is not None:
                work.wait(timedelta(seconds=timeout_s))
        except RuntimeError as error:
            raise CheckpointError(
                f"the ranks could not send each other what they had read: {error}. Pass share_reads=False to let each "
                "rank read for itself"
            ) from error

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
        """The messages of a round, by sender. To be called for rounds in their order."""
        found = {}
        for sender, one in list(self._next.items()):
            following = one
            while following is not None and following[0] <= number:
                if following[0] == number:
                    found[sender] = following[1]
                following = next(self._coming[sender], None)
            if following is None:
                del self._next[sender]
            else:
                self._next[sender] = following
        return found


class _Troubles:
    """The errors of this rank in a swap, which are raised when all rounds are through."""

    def __init__(self) -> None:
        self.happened = Latch()
        self._errors: list[BaseException] = []

    def keep(self, error: BaseException) -> None:
        """Add an error."""
        self._errors.append(error)
        self.happened.set()

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Keeps an error that is raised inside."""
        try:
            yield
        except BaseException as error:  # noqa: BLE001  # raised by `tell`
            self.keep(error)

    def insist(self, work: Callable[[], T]) -> T:
        """The result of what the others count on: after an error, which is kept, it is tried again."""
        for _ in range(_TRIES - 1):
            with self.kept():
                return work()
        return work()

    def tell(self) -> None:
        """Raise the first error, if there is any; one that ends the program, before others."""
        if self._errors:
            raise next((one for one in self._errors if not isinstance(one, Exception)), self._errors[0])


class _Envelope(NamedTuple):
    """What a rank sends in a round: the messages one after the other, and the size of that to each rank."""

    data: torch.Tensor
    sizes: list[int]


class _Received(NamedTuple):
    """A message that comes, and the rank that sends it."""

    sender: int
    message: Message
    data: torch.Tensor


class _Coming(NamedTuple):
    """What a rank gets in a round: memory for all of it, how much of it comes from each rank, and the messages."""

    data: torch.Tensor
    sizes: list[int]
    messages: list[_Received]


class _Batch:
    """What a rank reads at once for some rounds. Its messages count as empty until they are sealed."""

    def __init__(
        self,
        rounds: list[dict[int, list[tuple[Chunk, Box]]]],
        messages: list[dict[int, Message]],
        memory: torch.Tensor,
        world: int,
    ) -> None:
        self.own_bytes = 0
        self.placements: list[Placement] = []
        self.envelopes: list[_Envelope] = []
        self._sent: list[tuple[torch.Tensor, Message, list[tuple[Chunk, Box]]]] = []
        at = 0
        for sent, one in zip(rounds, messages, strict=True):
            start, sizes = at, [0] * world
            for to in sorted(one):
                sizes[to] = _HEAD + one[to].size_bytes
                room = memory[at : at + sizes[to]]
                room[:_HEAD] = 0
                self._sent.append((room, one[to], sent[to]))
                at += sizes[to]
            self.envelopes.append(_Envelope(memory[start:at], sizes))

    def add_own(self, placements: list[Placement]) -> None:
        """Add what goes into this rank's own tensors."""
        self.placements += placements
        self.own_bytes += sum(placement.size_bytes for placement in placements)

    def place(self) -> None:
        """Add what goes into the messages."""
        for room, message, sent in self._sent:
            for (chunk, box), fragment in zip(sent, message.fragments, strict=True):
                target = _window(room, fragment, chunk.tensor)
                self.placements.append(placement_of(chunk.read_of(box), chunk.tensor.dtype, target))

    def seal(self) -> None:
        """Mark all messages as good, with their checksums."""
        for room, *_ in self._sent:
            room[:_HEAD].view(torch.int64).copy_(torch.stack([torch.ones_like(total := _sum(room)), total]))


class _Room:
    """Memory of one device that is used again and again."""

    def __init__(self, device: torch.device) -> None:
        self._data = torch.empty(0, dtype=torch.uint8, device=device)

    def take(self, size_bytes: int) -> torch.Tensor:
        """So many bytes of it. What was taken before is gone."""
        if len(self._data) < size_bytes:
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
