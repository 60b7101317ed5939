"""Places that are no checkpoint, or a damaged one."""

import os

import torch
import xxhash

import milepost as library
from milepost.core.manifest import manifest_name


def made(what, tmp_path):
    """A bad place of some kind."""
    place = tmp_path / "place"
    if what in ("nothing", "long name"):
        return place if what == "nothing" else tmp_path / ("x" * 300)
    if what == "below a file":
        place.write_bytes(b"")
        return place / "run"
    if what in ("text", "empty file", "half a torch file", "old torch file"):
        content = {"text": b"hello, this is no checkpoint", "old torch file": b"\x80\x02}q\x00.", "empty file": b""}
        if what not in content:
            torch.save({"w": torch.ones(1000)}, place)
            content[what] = place.read_bytes()[:700]
        place.write_bytes(content[what])
        return place
    if what in ("empty folder", "other folder"):
        place.mkdir()
        if what == "other folder":
            (place / "logs").mkdir()
            (place / "logs" / "events.txt").write_text("x")
        return place
    library.save({"w": torch.arange(50_000.0), "v": 1}, place)
    manifest = place / manifest_name(1)
    data = manifest.read_bytes()
    if what == "half a manifest":
        manifest.write_bytes(data[: len(data) // 2])
    elif what == "damaged manifest":
        manifest.write_bytes(data.replace(b"50000", b"50001"))
    elif what == "newer manifest":
        body = data[: data.rindex(b',\n"checksum"')].replace(b'"version": 1', b'"version": 99')
        manifest.write_bytes(body + f',\n"checksum": "{xxhash.xxh3_64(body).hexdigest()}"\n}}\n'.encode())
    elif what == "unfinished":
        manifest.unlink()
    elif what == "truncated shard":
        shard = next(place.rglob("*.safetensors"))
        os.truncate(shard, shard.stat().st_size // 2)
    return place


def flip(path, at):
    """Change one bit of the data at this place."""
    data = bytearray(path.read_bytes())
    data[int.from_bytes(data[:8], "little") + 8 + at] ^= 1
    path.write_bytes(data)
