"""Attacks on shard files: headers that lie, entries that overlap, tables that do not fit, files with holes."""

import json
import os
import struct
from pathlib import Path
from typing import Any

from attacks.forge import (
    Attack,
    Corpus,
    forge_header,
    make_good,
    nested,
    read_manifest,
    read_shard,
    seal_shard,
    set_layout,
    shard_path,
    table_of,
    write_manifest,
    write_shard,
)

corpus = Corpus()
WEIGHT = "model.weight[0:32,0:32]"
BIAS = "model.bias"

_ENTRIES: dict[str, tuple[str, dict[str, Any]]] = {
    "that_overlaps": (BIAS, {"data_offsets": [4000, 4096]}),
    "behind_a_gap": (BIAS, {"data_offsets": [4120, 4216]}),
    "that_ends_before_it_starts": (BIAS, {"data_offsets": [4212, 4116]}),
    "at_a_negative_offset": (WEIGHT, {"data_offsets": [-4096, 0]}),
    "that_is_too_short_for_its_shape": (BIAS, {"shape": [49]}),
    "of_negative_shape": (BIAS, {"shape": [-48]}),
    "of_two_negative_sizes": (BIAS, {"shape": [-6, -8]}),
    "of_2_to_the_62_elements": (BIAS, {"shape": [2**62]}),
    "of_nothing_times_2_to_the_62": (BIAS, {"shape": [0, 2**62]}),
    "of_a_thousand_dimensions": (BIAS, {"shape": [1] * 999 + [48]}),
    "past_the_end_of_the_file": (BIAS, {"data_offsets": [4116, 2**62], "shape": [2**61 - 2058]}),
    "at_10_to_the_4000": (BIAS, {"data_offsets": [10**4000, 10**4000 + 96]}),
    "of_an_unknown_type": (BIAS, {"dtype": "OBJECT"}),
    "of_another_type_of_one_size": (BIAS, {"dtype": "F16"}),
    "of_another_shape_of_one_size": (BIAS, {"shape": [6, 8]}),
    "with_one_offset": (BIAS, {"data_offsets": [4116]}),
    "without_a_type": (BIAS, {"dtype": None}),
}


def _add_entries() -> None:
    for name, (entry, fields) in _ENTRIES.items():

        def make(folder: Path, entry: str = entry, fields: dict[str, Any] = fields) -> None:
            forge_header(folder, lambda header: header[entry].update(fields))

        corpus.append(Attack(f"entry_{name}", "Entries must tile the data exactly, and fit.", "verify", make))


_add_entries()


@corpus.attack("verify")
def entry_that_is_missing(folder: Path) -> None:
    """The manifest promises a tensor that the file does not hold under that name."""
    forge_header(folder, lambda h: json.dumps(h).replace(f'"{BIAS}"', '"model.other"').encode())


@corpus.attack("nothing")
def entry_twice_with_one_meaning(folder: Path) -> None:
    """One name twice, with the same meaning both times."""

    def change(header: dict[str, Any]) -> bytes:
        entry = f'"{BIAS}": {json.dumps(header[BIAS])}'
        return json.dumps(header).replace(entry, f"{entry}, {entry}").encode()

    forge_header(folder, change)


@corpus.attack("verify")
def entry_twice_with_two_meanings(folder: Path) -> None:
    """One name twice: two readers could see two tensors."""

    def change(header: dict[str, Any]) -> bytes:
        other = {**header[BIAS], "data_offsets": [0, 96]}
        text = json.dumps(header)
        return (text[:-1] + f', "{BIAS}": {json.dumps(other)}}}').encode()

    forge_header(folder, change)


def _header_text(folder: Path, text: bytes) -> None:
    make_good(folder)
    _, data = read_shard(folder)
    write_shard(folder, text, data)


_HEADERS: dict[str, bytes] = {
    "nothing": b"",
    "no_entries": b"{}",
    "a_list": b"[1, 2]",
    "null": b"null",
    "no_json": b"\xff\xfe{not json",
    "nan": b'{"a": NaN}',
    "zeros": bytes(100),
    "depth_100000": b'{"__metadata__": ' + nested(100_000).encode() + b"}",
    "entries_of_depth_100000": b'{"a": ' + nested(100_000).encode() + b"}",
    "notes_that_are_numbers": b'{"__metadata__": {"rank": 0}}',
}


def _add_headers() -> None:
    for name, text in _HEADERS.items():

        def make(folder: Path, text: bytes = text) -> None:
            _header_text(folder, text)

        corpus.append(Attack(f"header_of_{name}", "Not a header, under a valid seal.", "verify", make))


_add_headers()


@corpus.attack("verify")
def header_with_text_behind_it(folder: Path) -> None:
    """Only spaces may follow."""
    forge_header(folder, lambda h: json.dumps(h).encode() + b' {"more": 1}')


@corpus.attack("nothing")
def header_with_an_unknown_field_in_an_entry(folder: Path) -> None:
    """Other writers of safetensors may add fields. Milepost ignores them."""
    forge_header(folder, lambda h: h[BIAS].update(callback="os.system"))


@corpus.attack("verify")
def header_whose_length_lies(folder: Path) -> None:
    """The file's first eight bytes and the manifest disagree."""
    make_good(folder)
    raw = shard_path(folder).read_bytes()
    head, table = struct.pack("<Q", 2**62) + raw[8:4096], raw[-8:]
    shard_path(folder).write_bytes(head + raw[4096:])
    seal_shard(folder, head, table, len(raw))


@corpus.attack("verify")
def notes_of_another_save(folder: Path) -> None:
    """A file of another save, sealed as if it belonged here."""
    forge_header(folder, lambda h: h["__metadata__"].update(save_id="00000001-ffffffffffffffff"))


@corpus.attack("verify")
def notes_of_another_rank(folder: Path) -> None:
    """A file of another rank."""
    forge_header(folder, lambda h: h["__metadata__"].update(rank="1"))


@corpus.attack("verify")
def no_notes(folder: Path) -> None:
    """A file that does not name its save and rank."""
    forge_header(folder, lambda h: h.pop("__metadata__"))


_TABLES: dict[str, dict[str, Any]] = {
    "too_long": {"shape": [2], "data_offsets": [4442, 4458]},
    "of_bytes": {"dtype": "U8", "shape": [8]},
    "of_two_dimensions": {"shape": [1, 1]},
    "of_nothing": {"shape": [0], "data_offsets": [4442, 4442]},
    "inside_the_data": {"data_offsets": [0, 8]},
}


def _add_tables() -> None:
    for name, fields in _TABLES.items():

        def make(folder: Path, fields: dict[str, Any] = fields) -> None:
            make_good(folder)
            header, data = read_shard(folder)
            header["@checksums"].update(fields)
            start, stop = header["@checksums"]["data_offsets"]
            table = (table_of(data) * 2)[: stop - start] if start else table_of(data)
            write_shard(folder, header, data, table)

        corpus.append(Attack(f"table_{name}", "A table of checksums that does not fit.", "verify", make))


_add_tables()


@corpus.attack("verify")
def table_that_is_missing(folder: Path) -> None:
    """A plain safetensors file, without checksums."""
    make_good(folder)
    header, data = read_shard(folder)
    del header["@checksums"]
    write_shard(folder, header, data, b"")


@corpus.attack("verify")
def table_that_is_not_last(folder: Path) -> None:
    """A table that is followed by data that it cannot cover."""

    def change(header: dict[str, Any]) -> bytes:
        table = header.pop("@checksums")
        return json.dumps({"@checksums": table, **header}).encode()

    forge_header(folder, change)


@corpus.attack("verify")
def table_of_wrong_sums(folder: Path) -> None:
    """A sealed table that does not belong to the data."""
    make_good(folder)
    header, data = read_shard(folder)
    write_shard(folder, header, data, bytes(8))


@corpus.attack("verify")
def data_that_was_changed(folder: Path) -> None:
    """Only the data was changed."""
    make_good(folder)
    with shard_path(folder).open("r+b") as file:
        file.seek(4096 + 100)
        file.write(b"\x55")


@corpus.attack("verify")
def file_that_is_empty(folder: Path) -> None:
    """A file without any bytes."""
    make_good(folder)
    os.truncate(shard_path(folder), 0)


def _holes(folder: Path, size_bytes: int, block_bytes: int, sealed: bool) -> None:
    """A file of zeros that takes no space on disk, and a manifest that fits it. `sealed`: with a valid seal."""
    make_good(folder)
    header, _ = read_shard(folder)
    rest = size_bytes - 4096
    blocks = -(-rest // (block_bytes + 8))
    data_bytes = rest - 8 * blocks
    entry = {"dtype": "U8", "shape": [data_bytes], "data_offsets": [0, data_bytes]}
    table = {"dtype": "U64", "shape": [blocks], "data_offsets": [data_bytes, rest]}
    text = json.dumps({"__metadata__": header["__metadata__"], "model.weight": entry, "@checksums": table}).encode()
    head = struct.pack("<Q", 4088) + text.ljust(4088)
    path = shard_path(folder)
    path.write_bytes(head)
    os.truncate(path, size_bytes)
    sums = b""
    if sealed:
        last = data_bytes - (blocks - 1) * block_bytes
        sums = table_of(bytes(block_bytes)) * (blocks - 1) + table_of(bytes(last), last)
        with path.open("r+b") as file:
            file.seek(4096 + data_bytes)
            file.write(sums)
    record = read_manifest(folder)
    record["block_bytes"] = block_bytes
    set_layout(record, {"kind": "whole", "ranks": "0"}, [data_bytes], "uint8")
    write_manifest(folder, record)
    seal_shard(folder, head, sums, size_bytes)


@corpus.attack("verify")
def file_of_8_tebibytes_of_holes(folder: Path) -> None:
    """A file with holes has the size that the manifest claims. Its table alone would take 16 GiB of memory."""
    _holes(folder, 2**43, 4096, sealed=False)


@corpus.attack("use")
def file_of_more_holes_than_memory(folder: Path) -> None:
    """The same with ordinary blocks and a valid seal: the table is small, and the tensor is larger than the memory."""
    _holes(folder, 9 * 2**29, 2**20, sealed=True)
