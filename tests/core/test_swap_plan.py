"""Swaps against counting: every element is read by one rank, and comes to each rank that wants it, exactly once."""

from collections import Counter
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from milepost.core.box import Box
from milepost.core.division import share_out, written_by
from milepost.core.dtypes import DTYPES, size_bytes
from milepost.core.layout import Boxes, Held, Whole
from milepost.core.limits import KIB, MIB
from milepost.core.manifest import OlderFile, ShardFile, Tensor, new_manifest
from milepost.core.ranks import pack_ranks
from milepost.core.swap_plan import Rounds, SwapPlan, WantRow, Wish, copies_of, finder_of, merge_wants, packed
from milepost.core.table import TensorRow
from milepost.testing import on_mesh, simulate_save
from tests.strategies import count_cover, examples, layouts, shapes

DTYPE = st.sampled_from(["float32", "int8", "bfloat16", "complex128"])


def older_file(rank, used_bytes):
    """A file of an earlier save that holds this much for a rank."""
    return OlderFile(
        rank, used_bytes + 500, 100, "", save_id="00000001-00000000", writer=0, age=1, used_bytes=used_bytes
    )


@st.composite
def saved(draw, world):
    """A manifest of some tensors with layouts of every kind."""
    drawn = {f"{i}": draw(shapes(max_dims=3, max_size=9)) for i in range(draw(st.integers(1, 4)))}
    rows = [TensorRow(key, draw(DTYPE), shape, "tensor", None) for key, shape in drawn.items()]
    by_key = {key: draw(layouts(shape, range(world))) for key, shape in drawn.items()}
    tensors, found = share_out(rows, by_key, world, share_replicas=draw(st.booleans()))
    tensors = tuple(replace(t, parts=draw(st.sampled_from([t.parts, 3]))) for t in tensors)
    listed = [rank for rank in range(world) if draw(st.integers(0, 9))]  # whoever reads of another file is told so
    files = tuple(ShardFile(rank, draw(st.integers(1, 5000)), 1, "") for rank in listed)
    older = tuple(
        older_file(rank, draw(st.integers(1, 9000))) for rank in draw(st.lists(st.sampled_from(range(world))))
    )
    content = {"tensors": tensors, "layouts": found, "files": files, "tree": (), "values": (), "per_rank": ()}
    content["older"] = older
    return new_manifest(1, "00000001-00000000", "", "", world, metadata={}, **content)


def ways_to_group(world):
    """All ranks want the same; or each half does; or each rank wants something else."""
    return [[range(world)], [range(world // 2), range(world // 2, world)][world < 2 :], [[r] for r in range(world)]]


@st.composite
def own_boxes(draw, shape, ranks):
    """Some boxes for each rank, as ranks list them that cut tensors themselves: they may overlap."""
    held = {}
    for rank in ranks:
        for _ in range(draw(st.integers(0, 3))):
            starts = tuple(draw(st.integers(0, n)) for n in shape)
            held[Box(starts, tuple(draw(st.integers(0, n - a)) for a, n in zip(starts, shape, strict=True)))] = rank
    return Boxes(tuple(Held(box, f"{rank}") for box, rank in held.items()))


@st.composite
def wishes(draw, manifest, world):
    """What the ranks want: some of the tensors, cut in other ways, by one group of ranks or by several."""
    tensors = [t for t in manifest.tensors if draw(st.integers(0, 4))]
    halves = draw(st.sampled_from(ways_to_group(world)))
    groups = []
    for ranks in halves:
        rows = []
        for tensor in tensors:
            layout = draw(st.one_of(layouts(tensor.shape, ranks), own_boxes(tensor.shape, ranks)))
            rows.append(WantRow(tensor.key, None if isinstance(layout, Whole) else layout))
        groups.append((pack_ranks(ranks), rows))
    return merge_wants(groups)


def boxes_of(wants, tensor, rank):
    return [
        piece.box
        for wanted in wants[tensor.key]
        if rank in wanted.ranks
        for piece in wanted.layout.pieces(tensor.shape, rank)
        if piece.box.elements
    ]


@examples(150)
@given(st.data(), st.integers(1, 5), st.integers(1, 6), st.sampled_from([64, 300, 10_000]), st.sampled_from([0, 200]))
def test_every_element_is_read_once_and_comes_once_to_who_wants_it(data, before, after, room, unit):
    manifest = data.draw(saved(before))
    wants = data.draw(wishes(manifest, after))
    plan = SwapPlan(manifest, wants, after, room, unit)
    tensors = {t.key: t for t in manifest.tensors}
    read = {key: [] for key in wants}
    came = {(rank, key): [] for rank in range(after) for key in wants}
    for sender in range(after):
        sent = {}
        for chunk in plan.chunks_of(sender):
            written = written_by(chunk.tensor, manifest.layout_of(chunk.tensor), chunk.file)
            assert (chunk.read_of(chunk.box).name, chunk.source) in {(item.name, item.box) for item in written}
            assert chunk.source.contains(chunk.box)
            read[chunk.tensor.key].append(chunk.box)
            for rank, box in plan.wishes_for(chunk):
                sent.setdefault((rank, chunk.round), []).append((chunk.tensor, box))
                came[rank, chunk.tensor.key].append(box)
        for number in {number for _, number in sent}:
            boxes = [pair for (_, of), found in sent.items() if of == number for pair in found]
            size = sum(size_bytes(tensor.dtype, box.shape) for tensor, box in boxes)
            assert size <= room or len({(t.key, b.offset) for t, b in boxes if b.elements}) == 1
        for rank in range(after):
            expected = [(number, packed(boxes)) for (to, number), boxes in sent.items() if to == rank]
            assert list(plan.messages(sender, rank)) == expected, "both sides see the same messages"
            assert not expected or sender in plan.senders_to(rank)
    for key, boxes in read.items():
        whole = Box.whole(tensors[key].shape)
        assert (count_cover(boxes, whole.shape) == 1).all(), key
    for (rank, key), boxes in came.items():
        expected = boxes_of(wants, tensors[key], rank)
        assert (count_cover(boxes, tensors[key].shape) == count_cover(expected, tensors[key].shape)).all()


@examples(50)
@given(st.data(), st.integers(1, 40))
def test_fragments_of_a_message_lie_aligned_with_nothing_between(data, count):
    tensors = [Tensor(f"{i}", data.draw(DTYPE), (data.draw(st.integers(0, 40)),), 0) for i in range(count)]
    message = packed((t, Box.whole(t.shape)) for t in tensors)
    sizes = [size_bytes(t.dtype, t.shape) for t in tensors]
    assert [f.key for f in message.fragments] == [t.key for t in tensors], "in the order in which they were given"
    assert all(f.at % DTYPES[t.dtype].size_bytes == 0 for f, t in zip(message.fragments, tensors, strict=True))
    used = sorted((f.at, f.at + size) for f, size in zip(message.fragments, sizes, strict=True) if size)
    assert all(end == start for (_, end), (start, _) in pairwise(used))
    assert message.size_bytes % 16 == 0
    assert 0 <= message.size_bytes - sum(sizes) < 16


def plan_of(before, after, rows, room=MIB):
    """A save by `before` ranks, and the swap of `after` ranks that want it otherwise."""
    save = simulate_save(before, rows[0])
    wants = merge_wants([(pack_ranks(range(after)), [WantRow(row.key, row.layout) for row in rows[1]])])
    return save, SwapPlan(save.manifest, wants, after, room)


def columns(before, after):
    shape = (4096, 1024)
    return [
        [TensorRow(f"w{i}", "bfloat16", shape, "tensor", on_mesh((world,), [dim])) for i in range(8)]
        for world, dim in ((before, 0), (after, 1))
    ]


def test_all_ranks_read_about_equally_much():
    for before, after in ((4, 4), (4, 6), (6, 4), (3, 1), (1, 3)):
        save, plan = plan_of(before, after, columns(before, after))
        total = sum(t.size_bytes for t in save.manifest.tensors)
        shares = Counter()
        for sender in range(after):
            for chunk in plan.chunks_of(sender):
                shares[sender] += size_bytes(chunk.tensor.dtype, chunk.box.shape)
        assert sum(shares.values()) == total
        assert max(shares.values()) <= 1.02 * total / after


def test_all_ranks_read_about_equally_much_of_an_incremental_save():
    save, _ = plan_of(4, 3, columns(4, 3))
    files = tuple(replace(file, size_bytes=4096) if file.rank < 2 else file for file in save.manifest.files)
    held = save.manifest.data_bytes // 4
    older = (older_file(0, held), older_file(1, held // 2), older_file(1, held // 2))
    manifest = replace(save.manifest, files=files, older=older)
    wants = merge_wants([("0-2", [WantRow(row.key, row.layout) for row in columns(4, 3)[1]])])
    plan, total = SwapPlan(manifest, wants, 3, MIB), sum(t.size_bytes for t in manifest.tensors)
    for sender in range(3):
        share = sum(size_bytes(chunk.tensor.dtype, chunk.box.shape) for chunk in plan.chunks_of(sender))
        assert share <= 1.02 * total / 3


def test_rounds_take_little_memory_on_many_ranks():
    assert Rounds.within(512 * MIB, 4) == Rounds(4 * MIB, 32, 65536)
    assert Rounds.within(512 * MIB, 1024) == Rounds(128 * KIB, 1024, 65536)
    assert Rounds.within(512 * MIB, 16384) == Rounds(64 * KIB, 2048, 65536)
    assert Rounds.within(64 * KIB, 4) == Rounds(64 * KIB, 1, 8)


@given(st.data(), st.integers(1, 4), st.integers(1, 6), st.integers(1, 3))
def test_messages_fit_the_memory_that_is_taken_first(data, before, after, at_once):
    manifest = data.draw(saved(before))
    rounds = Rounds(64, at_once, 10)
    plan = SwapPlan(manifest, data.draw(wishes(manifest, after)), after, rounds.size_bytes, 0)
    coming = [Counter() for _ in range(after)]
    for sender in range(after):
        chunks, first = list(plan.chunks_of(sender)), 0
        while chunks and first <= chunks[-1].round:
            portion, messages = plan.portion([c for c in chunks if c.round >= first], first, rounds), {}
            for chunk, to, box in portion.wishes:
                messages.setdefault((to, chunk.round), []).append((chunk.tensor, box))
            sizes = {which: 16 + packed(boxes).size_bytes for which, boxes in messages.items()}
            assert sum(sizes.values()) <= rounds.sent_bytes(after, 16)
            for (to, number), size in sizes.items():
                coming[to][number] += size
            first = portion.stop
    for rounds_of_one in coming:
        assert max(rounds_of_one.values(), default=0) <= rounds.received_bytes(after, 2**60, 16)


def test_a_rank_reads_for_fewer_rounds_where_they_are_of_many_boxes():
    _, plan = plan_of(4, 512, columns(4, 512), 64 * KIB)
    chunks, rounds = list(plan.chunks_of(3)), Rounds(64 * KIB, 4, 700)
    portion = plan.portion(chunks, 0, rounds)
    assert portion.stop == 1, "512 boxes in a round, and 700 at once are the most"
    assert portion.wishes == [(chunk, *wish) for chunk in chunks if chunk.round < 1 for wish in plan.wishes_for(chunk)]
    _, plan = plan_of(4, 4, columns(4, 4))
    chunks = list(plan.chunks_of(3))
    assert plan.portion(chunks, 0, rounds).stop == 4
    last = chunks[-1].round
    left = [chunk for chunk in chunks if chunk.round == last]
    assert {chunk.round for chunk, *_ in plan.portion(left, last, rounds).wishes} == {last}


def test_layouts_of_every_kind_say_how_often_a_tensor_is_wanted():
    everybody = frozenset(range(6))
    one, two, both = Held(Box((0,), (2,)), "0,3,4"), Held(Box((2,), (2,)), "1"), Held(Box((1,), (2,)), "2")
    for layout, ranks, copies in (
        (on_mesh((2, 3), [None, 0]), everybody, 2),
        (Whole("0-5"), frozenset({1, 2}), 2),
        (Boxes((one, two)), everybody, 3),
        (Boxes((two, both, one)), everybody, 5),  # at most: the last one meets both
        (Boxes(()), everybody, 1),
        (Boxes((Held(Box((), ()), "0,1"),)), everybody, 2),
    ):
        assert copies_of(Wish(layout, ranks), finder_of(layout)) == copies


def test_wishes_of_ranks_that_list_their_own_boxes_become_one():
    tables = [(f"{rank}", [WantRow("w", Boxes((Held(Box((rank // 2,), (1,)), f"{rank}"),)))]) for rank in range(8)]
    [wish] = merge_wants(tables)["w"]
    assert [(held.box.offset[0], held.ranks) for held in wish.layout.held] == [
        (i, f"{2 * i}-{2 * i + 1}") for i in range(4)
    ]
    assert wish.ranks == frozenset(range(8))
    assert len(merge_wants([*tables, ("8", [WantRow("w", None)])])["w"]) == 9
