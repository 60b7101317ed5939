"""Attacks on the text of the manifest: no JSON, no UTF-8, no seal, another version, a file of holes."""

import json
import os
from pathlib import Path
from typing import Any

from attacks.forge import (
    Attack,
    Corpus,
    forge_manifest,
    make_good,
    manifest_path,
    nested,
    read_manifest,
    replace_text,
    set_fields,
    write_manifest_text,
)

corpus = Corpus()

_TEXTS: dict[str, bytes] = {
    "empty": b"",
    "one_byte": b"{",
    "only_a_brace": b"{}",
    "null": b"null",
    "zeros": bytes(10_000),
    "binary": bytes(range(256)) * 10,
}


def _add_texts() -> None:
    for name, text in _TEXTS.items():

        def make(folder: Path, text: bytes = text) -> None:
            make_good(folder)
            manifest_path(folder).write_bytes(text)

        corpus.append(Attack(f"manifest_of_{name}", "Not a manifest at all.", "open", make))


_add_texts()


@corpus.attack("open")
def manifest_without_a_seal(folder: Path) -> None:
    """A manifest that was not sealed."""
    make_good(folder)
    manifest_path(folder).write_text(json.dumps(read_manifest(folder)))


@corpus.attack("open")
def manifest_with_another_seal(folder: Path) -> None:
    """A seal that belongs to another text."""
    make_good(folder)
    text = manifest_path(folder).read_bytes()
    manifest_path(folder).write_bytes(text.replace(b'"step"', b'"stop"'))


@corpus.attack("open")
def manifest_with_text_behind_the_seal(folder: Path) -> None:
    """Text behind the end, which a lenient reader would skip."""
    make_good(folder)
    with manifest_path(folder).open("ab") as file:
        file.write(b"\n{}")


@corpus.attack("open")
def manifest_that_is_a_list(folder: Path) -> None:
    """Valid JSON, validly sealed, of another shape."""
    make_good(folder)
    write_manifest_text(folder, b"[1, 2, 3]")


@corpus.attack("open")
def manifest_that_is_not_utf8(folder: Path) -> None:
    """Bytes in a string that are not text."""
    replace_text(folder, b'"model.bias", "dtype"', b'"model.\xff\xfe", "dtype"')


@corpus.attack("open")
def manifest_with_half_a_surrogate(folder: Path) -> None:
    """Text that JSON can escape and Unicode does not know."""
    replace_text(folder, b'"model.bias", "dtype"', b'"model.\\ud800", "dtype"')


@corpus.attack("open")
def manifest_with_a_byte_order_mark(folder: Path) -> None:
    """A mark before the first brace."""
    replace_text(folder, b'{"format"', b'\xef\xbb\xbf{"format"')


@corpus.attack("open")
def manifest_with_nan(folder: Path) -> None:
    """NaN is not JSON."""
    replace_text(folder, b'"value": 7', b'"value": NaN')


@corpus.attack("open")
def manifest_with_infinity(folder: Path) -> None:
    """Infinity is not JSON either."""
    replace_text(folder, b'"value": 7', b'"value": -Infinity')


@corpus.attack("open")
def manifest_with_a_float_past_infinity(folder: Path) -> None:
    """A number that would silently become infinity."""
    replace_text(folder, b'"value": 7', b'"value": 1e999')


@corpus.attack("open")
def manifest_with_an_int_of_a_million_digits(folder: Path) -> None:
    """Reading a long decimal number takes quadratic time."""
    replace_text(folder, b'"value": 7', b'"value": ' + b"7" * 1_000_000)


@corpus.attack("nothing")
def manifest_with_a_field_twice(folder: Path) -> None:
    """Two parsers could disagree on which field counts. The reader takes one, and the data is right."""
    replace_text(folder, b'{"format"', b'{"world": 1, "format"')


@corpus.attack("open")
def manifest_with_an_unknown_field(folder: Path) -> None:
    """A field of a later version, whose meaning this version cannot know."""
    set_fields(folder, plugins=["os.system"])


@corpus.attack("open")
def manifest_with_an_unknown_field_nested_100000_deep(folder: Path) -> None:
    """Parsing must not recurse without bound, not even in a field that is skipped."""
    replace_text(folder, b'{"format"', b'{"x": ' + nested(100_000).encode() + b', "format"')


@corpus.attack("open")
def manifest_without_a_field(folder: Path) -> None:
    """A field that every manifest has is missing."""
    forge_manifest(folder, lambda r: r.pop("block_bytes"))


@corpus.attack("open")
def manifest_of_another_format(folder: Path) -> None:
    """A file of another program."""
    set_fields(folder, format="safetensors")


@corpus.attack("open")
def manifest_of_a_newer_version(folder: Path) -> None:
    """The meaning of a newer version cannot be guessed."""
    set_fields(folder, version=2)


@corpus.attack("open")
def manifest_of_version_minus_one(folder: Path) -> None:
    """Versions count from one."""
    set_fields(folder, version=-1)


@corpus.attack("open")
def manifest_whose_version_is_text(folder: Path) -> None:
    """The types of fields are checked, too."""
    set_fields(folder, version="1")


@corpus.attack("open")
def manifest_of_a_quarter_gibibyte_of_holes(folder: Path) -> None:
    """A file with holes takes no space on disk and all of it in memory."""
    make_good(folder)
    os.truncate(manifest_path(folder), 2**28)


@corpus.attack("open")
def manifest_of_a_tebibyte_of_holes(folder: Path) -> None:
    """The same past the limit."""
    make_good(folder)
    os.truncate(manifest_path(folder), 2**40)


@corpus.attack("open")
def parts_that_cut_blocks(folder: Path) -> None:
    """A block in two objects could not be checked by one read."""
    forge_manifest(folder, lambda record: record["files"][0].update(part_bytes=1000))


@corpus.attack("open")
def parts_of_negative_size(folder: Path) -> None:
    """Arithmetic with it would name objects for ever."""
    forge_manifest(folder, lambda record: record["files"][0].update(part_bytes=-(2**16)))


@corpus.attack("load")
def file_in_more_parts_than_there_are_names(folder: Path) -> None:
    """A petabyte in parts of 64 KiB: nothing may be listed or allocated for them."""
    forge_manifest(folder, lambda record: record["files"][0].update(size_bytes=2**50, part_bytes=2**16))


@corpus.attack("open")
def generation_of_another_file_name(folder: Path) -> None:
    """An old manifest under a newer name would bring back an old state."""
    make_good(folder)
    manifest_path(folder).rename(folder / "manifest-00000009.json")


_STATISTICS: dict[str, list[dict[str, Any]]] = {
    "of_another_tensor": [{"key": "evil"}],
    "that_stand_twice": [{}, {}],
    "that_count_too_much": [{"count": 2**62, "nan": 2**61}],
    "that_count_below_zero": [{"nan": -(2**62), "inf": 2**62}],
    "past_an_integer_of_64_bits": [{"count": 10**30}],
    "with_extremes_the_wrong_way_round": [{"min": 1e308, "max": -1e308}],
    "with_a_negative_rms": [{"rms": -1.0}],
    "of_text": [{"min": "1.0"}],
    "of_nan": [{"mean": "NAN"}],
    "past_infinity": [{"max": "PAST"}],
    "with_an_unknown_field": [{"plugins": ["os.system"]}],
    "with_a_bin_past_a_float": [{"histogram": [[2**40, 2048]]}],
    "with_bins_in_no_order": [{"histogram": [[1, 1024], [0, 1024]]}],
    "with_a_million_bins": [{"histogram": [[0, 1]] * 1_000_000}],
    "with_bins_of_three": [{"histogram": [[0, 1, 2]]}],
    "with_bins_nested_without_end": [{"histogram": "DEEP"}],
}


def _add_statistics() -> None:
    usual = {"key": "model.weight", "count": 2048, "min": -1.0, "max": 1.0, "mean": 0.0, "rms": 0.5}
    for name, rows in _STATISTICS.items():

        def make(folder: Path, rows: list[dict[str, Any]] = rows) -> None:
            make_good(folder)
            record = read_manifest(folder) | {"statistics": [{**usual, **row} for row in rows]}
            text = json.dumps(record).replace('"NAN"', "NaN").replace('"PAST"', "1e999")
            write_manifest_text(folder, text.replace('"DEEP"', nested(100_000)).encode())

        corpus.append(Attack(f"statistics_{name}", "Numbers that no save can have recorded.", "open", make))


_add_statistics()

_TIMES: dict[str, list[Any]] = {
    "below_zero": [{"median_s": -1.0}],
    "the_wrong_way_round": [{"median_s": 3.0}],
    "of_a_rank_that_does_not_exist": [{"slowest_rank": 10**6}],
    "of_text": [{"slowest_s": "1"}],
    "of_a_hundred_thousand_phases": [{}] * 100_000,
    "that_are_no_records": [None],
    "with_an_unknown_field": [{"who": "me"}],
}


def _add_times() -> None:
    usual = {"phase": "writing", "median_s": 1.0, "slowest_s": 2.0, "slowest_rank": 0}
    for name, rows in _TIMES.items():

        def make(folder: Path, rows: list[Any] = rows) -> None:
            set_fields(folder, timings=[None if row is None else {**usual, **row} for row in rows])

        corpus.append(Attack(f"times_{name}", "Times that no save can have taken.", "open", make))


_add_times()

_VERDICTS: dict[str, Any] = {
    "of_text": "ok",
    "without_a_verdict": {"reason": "none"},
    "of_another_type": {"ok": "false"},
    "with_an_unknown_field": {"ok": False, "then": "os.system"},
}


def _add_verdicts() -> None:
    for name, verdict in _VERDICTS.items():

        def make(folder: Path, verdict: Any = verdict) -> None:
            set_fields(folder, health=verdict)

        corpus.append(Attack(f"health_{name}", "A verdict that is none.", "open", make))


_add_verdicts()


@corpus.attack("nothing")
def health_with_a_long_reason_of_control_characters(folder: Path) -> None:
    """Whoever shows the reason must not act on it, and a load that was asked for goes on."""
    set_fields(folder, health={"ok": False, "reason": "\x1b[2J\u202e\r\n" * 100_000})
