"""Attacks on the text of the manifest: no JSON, no UTF-8, no seal, another version, a file of holes."""

import json
import os
from pathlib import Path

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
