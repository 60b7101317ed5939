"""Shard files: headers that come back, names that never clash, and bytes that are refused."""

import json
import math
import struct

import msgspec
import pytest
import safetensors
from hypothesis import example, given
from hypothesis import strategies as st

from milepost.core.box import Box
from milepost.core.dtypes import DTYPES, STORED_SIZES
from milepost.core.limits import MAX_BLOCK_BYTES, MAX_DIMS, MAX_ENTRIES, MAX_HEADER_BYTES, PAGE_BYTES
from milepost.core.shardfile import (
    CHECKSUMS,
    PRIVATE,
    Header,
    NewEntry,
    block_count,
    check_block_bytes,
    entry_name,
    make_header,
    private_name,
    read_header,
    seal_of,
)
from tests.strategies import boxes_in, examples, shapes

BLOCK = PAGE_BYTES
# Keys that look like other keys with a box, or like the names that the file keeps for itself.
KEYS = ["a", "a[0:2]", "a[0:2][0:2]", "a[]", "]", "[", "[]", "[0:1]", "", "@", "@@", "@@a", "@@@checksums", CHECKSUMS]
KEYS += [PRIVATE, f"{PRIVATE}/a", f"@@{PRIVATE}", "__metadata__", "@@__metadata__", "__", "_", "@@__", "a,b", "0:1]"]

entries = st.lists(
    st.builds(NewEntry, st.text(max_size=5).map("n{}".format), st.sampled_from(list(DTYPES)), shapes(3, 5)),
    unique_by=lambda entry: entry.name,
    max_size=6,
)


# ---- names


@examples(120)
@given(st.dictionaries(st.sampled_from(KEYS) | st.text("ab[]0:1,2@_", max_size=8), shapes(2, 3), min_size=1), st.data())
def test_no_two_pairs_of_key_and_box_share_a_name_and_none_is_reserved(state, data):
    pairs = {(key, Box.whole(shape)) for key, shape in state.items()}
    for key, shape in state.items():
        pairs.update((key, data.draw(boxes_in(shape, min_size=1))) for _ in range(3))
    names = [entry_name(key, box, state[key]) for key, box in pairs]
    assert len(set(names)) == len(pairs)
    reserved = {CHECKSUMS, PRIVATE, "__metadata__", *(private_name(key) for key in state)}
    assert not reserved & set(names)


@pytest.mark.parametrize("key", ["layers.0.wq.weight", "a/b", "ä", "x_y"])
def test_a_tensor_that_one_rank_holds_whole_is_stored_under_its_own_key(key):
    assert entry_name(key, Box((0, 0), (4, 2)), (4, 2)) == key


# ---- headers


def read(data: bytes, header: Header) -> Header:
    return read_header(data, header.size_bytes, BLOCK)


@examples(120)
@given(entries, st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=3))
def test_a_header_comes_back_as_it_was_made(new, notes):
    data, header = make_header(new, notes, BLOCK)
    assert read(data, header) == header
    assert header.header_bytes == len(data)
    assert len(data) % PAGE_BYTES == 0
    assert header.data_bytes == sum(entry.size_bytes for entry in new)
    assert header.table_bytes == 8 * block_count(header.data_bytes, BLOCK)


@examples(100)
@given(entries)
def test_the_safetensors_library_reads_the_file_and_sees_the_same_entries(new):
    data, header = make_header(new, {"format": "milepost"}, BLOCK)
    content = bytes(i % 251 for i in range(header.size_bytes - len(data)))
    seen = dict(safetensors.deserialize(data + content))
    assert set(seen) == set(header.entries)
    for name, entry in header.entries.items():
        assert (seen[name]["dtype"], tuple(seen[name]["shape"])) == (entry.dtype, entry.shape)
        assert bytes(seen[name]["data"]) == content[entry.data_offsets[0] : entry.data_offsets[1]]


def test_two_entries_of_one_name_are_refused():
    with pytest.raises(ValueError, match="one name"):
        make_header([NewEntry("a", "int8", (1,)), NewEntry("a", "int8", (2,))], {}, BLOCK)


def test_oversized_header_is_refused_before_it_is_written():
    name = "x" * 1000
    new = [NewEntry(f"{name}{i}", "int8", (0,)) for i in range(MAX_HEADER_BYTES // 1000)]
    with pytest.raises(ValueError, match="fewer tensors"):
        make_header(new, {}, BLOCK)


@pytest.mark.slow
def test_two_hundred_thousand_tensors_are_far_from_the_limit():
    new = [NewEntry(f"model.layers.{i}.{{weight}}[0:1,0:7]", "float32", (1, 7)) for i in range(200_000)]
    data, header = make_header(new, {"format": "milepost"}, BLOCK)
    assert read(data, header) == header


def test_writer_and_reader_have_one_limit_on_the_number_of_entries(monkeypatch):
    notes = {"format": "milepost"}
    most = [NewEntry(f"n{i}", "int8", (1,)) for i in range(8)]
    one_more, braced = [*most, NewEntry("n8", "int8", (1,))], [*most[1:], NewEntry("{", "int8", (1,))]
    too_many = [make_header(new, notes, BLOCK) for new in (one_more, braced)]
    monkeypatch.setattr("milepost.core.shardfile.MAX_ENTRIES", len(most) + 2)  # the notes and the table count too
    data, header = make_header(most, notes, BLOCK)
    assert read(data, header) == header
    for new, (data, header) in zip((one_more, braced), too_many, strict=True):
        with pytest.raises(ValueError, match=r"11 entries.*fewer tensors a rank"):
            make_header(new, notes, BLOCK)
        with pytest.raises(ValueError, match="11 entries is over the limit of 10"):
            read(data, header)


# ---- refusals


def packed(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def sample() -> tuple[bytes, Header]:
    new = [NewEntry("a", "float32", (2, 3)), NewEntry("b", "bfloat16", (0,)), NewEntry("c[0:1]", "int64", (1,))]
    return make_header([*new, NewEntry("d", "complex128", (700,))], {"save_id": "s", "rank": "0"}, BLOCK)


CHANGES = {
    "a gap": ("a", "data_offsets", [8, 32]),
    "a gap behind": ("a", "data_offsets", [0, 23]),
    "an overlap": ("c[0:1]", "data_offsets", [16, 24]),
    "a reversed range": ("a", "data_offsets", [24, 0]),
    "a negative offset": ("a", "data_offsets", [-24, 0]),
    "three offsets": ("a", "data_offsets", [0, 12, 24]),
    "an offset that is no integer": ("a", "data_offsets", [0.0, 24]),
    "a huge offset": ("a", "data_offsets", [0, 2**70]),
    "a shape that does not fit": ("a", "shape", [2, 4]),
    "another shape of other size": ("a", "shape", []),
    "a negative size": ("a", "shape", [-2, -3]),
    "a size that is text": ("a", "shape", ["2", "3"]),
    "too many dimensions": ("a", "shape", [2, 3] + [1] * MAX_DIMS),
    "an absurd shape": ("b", "shape", [0, 2**62]),
    "an overflowing shape": ("a", "shape", [2**32, 2**32]),
    "an unknown type": ("a", "dtype", "F33"),
    "a type of another size": ("a", "dtype", "F64"),
    "a type that is no text": ("a", "dtype", 4),
    "a table of another type": (CHECKSUMS, "dtype", "I64"),
    "a table of another shape": (CHECKSUMS, "shape", [1, 3]),
    "a table that is too short": (CHECKSUMS, "shape", [2]),
    "notes that are not text": ("__metadata__", "save_id", 7),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_header_that_contradicts_itself_is_refused(change):
    name, field, value = CHANGES[change]
    data, header = sample()
    record = json.loads(data[8:])
    record[name][field] = value
    changed = packed(json.dumps(record).encode())
    with pytest.raises(ValueError):
        read_header(changed, len(changed) + header.data_bytes + header.table_bytes, BLOCK)


@pytest.mark.parametrize("missing", ["a", "c[0:1]", "d", CHECKSUMS])
def test_a_header_that_lacks_an_entry_is_refused(missing):
    data, header = sample()
    record = json.loads(data[8:])
    del record[missing]
    changed = packed(json.dumps(record).encode())
    for size in {len(changed) + header.data_bytes + header.table_bytes, len(changed) + header.data_bytes}:
        with pytest.raises(ValueError):
            read_header(changed, size, BLOCK)


@pytest.mark.parametrize("more", [-1, 1, PAGE_BYTES])
def test_a_file_of_another_size_than_its_header_says_is_refused(more):
    data, header = sample()
    with pytest.raises(ValueError, match="bytes"):
        read_header(data, header.size_bytes + more, BLOCK)


def test_a_header_whose_own_length_is_wrong_is_refused():
    data, header = sample()
    for wrong in (0, len(data), len(data) - 9, 2**64 - 1):
        with pytest.raises(ValueError, match="length"):
            read(struct.pack("<Q", wrong) + data[8:], header)
    for cut in range(9):
        with pytest.raises(ValueError):
            read(data[:cut], header)


HOSTILE = {
    "no JSON": b"{",
    "a list": b"[]",
    "nothing": b"",
    "an empty object": b"{}",
    "not UTF-8": b'{"\xff\xfe": 1}',
    "an entry that is no object": b'{"a": 1, "@checksums": 2}',
    "deep nesting": b'{"a": ' + b"[" * 200_000 + b"]" * 200_000 + b"}",
    "deep nesting in the notes": b'{"__metadata__": ' + b'{"a":' * 200_000 + b"1" + b"}" * 200_000 + b"}",
    "a long number": b'{"a": {"dtype": "U8", "shape": [' + b"9" * 10_000 + b'], "data_offsets": [0, 1]}}',
    "an empty file with a table of negative length": (
        b'{"@checksums":{"dtype":"U64","shape":[-1],"data_offsets":[0,-8]}}'
    ),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_header_is_refused_with_a_value_error(kind):
    data = packed(HOSTILE[kind])
    with pytest.raises(ValueError):
        read_header(data, len(data), BLOCK)


@pytest.mark.parametrize("entry", [b'"%d":{}', b'"%d" : {"dtype":"U8","shape":[0],"data_offset\\u0073":[0,0]}'])
def test_more_entries_than_any_file_has_are_refused_before_they_are_parsed(entry, monkeypatch):
    for decoder in ("_NOTES", "_ENTRIES"):
        monkeypatch.setattr(f"milepost.core.shardfile.{decoder}", None)
    data = packed(b"{" + b",".join(entry % i for i in range(MAX_ENTRIES + 1)) + b"}")
    with pytest.raises(ValueError, match="over the limit"):
        read_header(data, len(data), BLOCK)


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    """The bytes of a valid header with a few of them changed, inserted or removed; the length is put right or not."""
    text = bytearray(sample()[0][8:].rstrip())
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(text) - 1))
        kind = draw(st.sampled_from(["set", "insert", "delete", "digit"]))
        if kind == "delete":
            del text[at : at + draw(st.integers(1, 3))]
        elif kind == "insert":
            text[at:at] = draw(
                st.sampled_from([b"0", b"1", b"-", b",", b'"', b"[", b"{", b"null", b"\xff", b"e9", b" "])
            )
        elif kind == "digit":
            digits = [i for i, byte in enumerate(text) if chr(byte).isdigit()]
            text[draw(st.sampled_from(digits))] = draw(st.sampled_from(b"0123456789"))
        else:
            text[at] = draw(st.integers(0, 255))
    return packed(bytes(text))


@examples(500)
@given(mutated())
@example(sample()[0])
def test_changed_header_is_refused_or_still_exact(data):
    _, header = sample()
    size = len(data) + header.data_bytes + header.table_bytes
    try:
        found = read_header(data, size, BLOCK)
    except ValueError:
        return
    position = 0
    for entry in found.entries.values():
        count = math.prod(entry.shape)
        assert entry.data_offsets == (position, position + count * STORED_SIZES[entry.dtype])
        position = entry.data_offsets[1]
    assert found.size_bytes == len(data) + position == size
    # Whatever we accept, the reference library accepts.
    assert set(dict(safetensors.deserialize(data + bytes(position)))) == set(found.entries)


def test_the_errors_of_the_json_library_are_value_errors():
    assert issubclass(msgspec.DecodeError, ValueError)
    assert issubclass(msgspec.ValidationError, ValueError)


@pytest.mark.parametrize(
    "size", [0, 1, PAGE_BYTES // 2, PAGE_BYTES + 1, 3 * PAGE_BYTES, 2 * MAX_BLOCK_BYTES, -PAGE_BYTES]
)
def test_a_block_size_that_is_no_power_of_two_in_range_is_refused(size):
    with pytest.raises(ValueError):
        check_block_bytes(size)


@examples(100)
@given(st.binary(max_size=40), st.binary(max_size=40), st.data())
def test_the_seal_changes_with_every_byte_of_header_and_table(header, table, data):
    assert seal_of(header, table) == seal_of(header + table, b"")
    both = bytearray(header + table)
    if both:
        at = data.draw(st.integers(0, len(both) - 1))
        both[at] ^= data.draw(st.integers(1, 255))
        assert seal_of(bytes(both), b"") != seal_of(header, table)
