"""How long a bf16 model takes to get into one GPU: Milepost beside the loaders that inference servers use.

All contenders load the same bytes: one shard file that Milepost wrote, which is a safetensors file. Each makes new
tensors on the device and fills them. *raw* only moves bytes: threads read 8 MiB into pinned memory and copy that on a
stream of their own, with and without XXH3 over each MiB; the fastest number of threads counts. Contenders that are not
installed, or fail, are named and left out. Each load of another library is compared once with what was saved.
"""

import argparse
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import torch
import xxhash
from harness import DROP_CACHES
from machine import machine
from showing import Row, at_least, bars_table, format_table, positive, write_rows

import milepost

RAW, RAW_HASHED = "raw", "raw, hashed"
MILEPOST, UNVERIFIED = "Milepost", "Milepost, unverified"
OTHERS = ("safetensors", "fastsafetensors", "Run:ai", "InstantTensor")
RAW_THREADS = (1, 4, 8, 16)
BLOCK, MIB = 8 << 20, 1 << 20
Tensors = dict[str, torch.Tensor]


@dataclass(slots=True)
class Model:
    """A model that is saved, the file that holds it, and where new tensors go."""

    tensors: Tensors
    folder: Path
    device: torch.device

    @property
    def file(self) -> Path:
        """The one shard file."""
        [found] = self.folder.glob("data/*/*.safetensors")
        return found

    @property
    def size_bytes(self) -> int:
        """The bytes of its tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def check(self, who: str, loaded: Tensors) -> None:
        """Raise ValueError unless these are its tensors."""
        for key, tensor in self.tensors.items():
            if not torch.equal(loaded[key].view(torch.int16).to(self.device), tensor.view(torch.int16)):
                raise ValueError(f"{who} loaded something else as {key}")


def make_model(size_bytes: int, folder: Path, device: torch.device) -> Model:
    """Layers of 2 to 128 MiB of random bf16, saved to the folder."""
    tensors: Tensors = {}
    left = size_bytes
    for layer in count():
        for name, rows in {"q": 4096, "k": 1024, "v": 1024, "o": 4096, "up": 16384, "down": 16384, "norm": 1}.items():
            shape = (rows, min(4096, max(size_bytes // 2**17, 64)))
            if left <= 0:
                milepost.save(tensors, folder)
                return Model(tensors, folder, device)
            bits = torch.randint(-(2**15), 2**15, shape, dtype=torch.int16, device=device)
            tensors[f"layers.{layer}.{name}.weight"] = bits.view(torch.bfloat16)
            left -= bits.nbytes
    raise AssertionError


# Contenders


def milepost_load(model: Model, **options: Any) -> Tensors:
    """Into new tensors, by `milepost.load`."""
    new = {key: torch.empty_like(tensor) for key, tensor in model.tensors.items()}
    milepost.load(new, model.folder, **options)
    return new


def safetensors_load(model: Model) -> Tensors:
    """By `safetensors.torch.load_file`."""
    from safetensors.torch import load_file

    return load_file(model.file, device=str(model.device))


def fastsafetensors_load(model: Model) -> Tensors:
    """By `fastsafetensors`, without GPUDirect."""
    from fastsafetensors import fastsafe_open

    with fastsafe_open(filenames=[str(model.file)], nogds=True, device=str(model.device)) as file:
        return {key: file.get_tensor(key).clone().detach() for key in file.keys() if key in model.tensors}  # noqa: SIM118


def runai_load(model: Model) -> Tensors:
    """By Run:ai's model streamer."""
    from runai_model_streamer import SafetensorsStreamer

    with SafetensorsStreamer() as streamer:
        streamer.stream_file(str(model.file))
        return {key: tensor.to(model.device) for key, tensor in streamer.get_tensors() if key in model.tensors}


def instanttensor_load(model: Model) -> Tensors:
    """By InstantTensor."""
    from instanttensor import safe_open

    with safe_open(str(model.file), framework="pt", device=model.device.index or 0) as file:
        return {key: tensor for key, tensor in file.tensors() if key in model.tensors}


def raw_load(model: Model, threads: int, *, hashed: bool) -> Tensors:
    """All bytes of the file, in blocks, into one tensor."""
    size, on_gpu = model.file.stat().st_size, model.device.type == "cuda"
    target = torch.empty(size, dtype=torch.uint8, device=model.device)
    handle, blocks, lock = os.open(model.file, os.O_RDONLY), iter(range(0, size, BLOCK)), threading.Lock()

    def work() -> None:
        pinned = [torch.empty(BLOCK, dtype=torch.uint8, pin_memory=on_gpu) for _ in range(2)]
        views = [memoryview(block.numpy()) for block in pinned]
        stream = torch.cuda.Stream(model.device) if on_gpu else None
        marks: list[Any] = [None, None]
        for turn in count():
            with lock:
                start = next(blocks, None)
            if start is None:
                break
            slot, length = turn % 2, min(BLOCK, size - start)
            if marks[slot] is not None:
                marks[slot].synchronize()
            for at in range(0, length, MIB if hashed else BLOCK):
                part = views[slot][at : min(at + (MIB if hashed else BLOCK), length)]
                os.preadv(handle, [part], start + at)
                if hashed:
                    xxhash.xxh3_64_intdigest(part)
            with torch.cuda.stream(stream):
                target[start : start + length].copy_(pinned[slot][:length], non_blocking=True)
                marks[slot] = stream.record_event() if stream is not None else None
        if stream is not None:
            stream.synchronize()

    workers = [threading.Thread(target=work) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    os.close(handle)
    return {}


def contenders(sweep: bool) -> Iterator[tuple[str, Callable[[Model], Tensors]]]:
    """All of them by name."""
    yield MILEPOST, milepost_load
    yield UNVERIFIED, lambda model: milepost_load(model, verify=False)
    yield "safetensors", safetensors_load
    yield "fastsafetensors", fastsafetensors_load
    yield "Run:ai", runai_load
    yield "InstantTensor", instanttensor_load
    for threads in RAW_THREADS:
        yield f"{RAW}, {threads} threads", lambda model, n=threads: raw_load(model, n, hashed=False)
        yield f"{RAW_HASHED}, {threads} threads", lambda model, n=threads: raw_load(model, n, hashed=True)
    for threads in (8, 12, 16) if sweep else ():
        for block in (2, 4, 8, 16):
            transfer = milepost.Transfer(threads, block << 20)
            for verify in (True, False):
                name = f"{MILEPOST if verify else UNVERIFIED}, {threads} threads of {block} MiB"
                yield name, lambda model, t=transfer, v=verify: milepost_load(model, transfer=t, verify=v)


# Measuring


@dataclass(slots=True)
class Place:
    """Where the file lies, and the seconds of each contender there."""

    name: str
    folder: Path
    cold: bool = False
    seconds: dict[str, list[float]] = field(default_factory=dict)
    size_bytes: int = 0

    def rate(self, who: str) -> float:
        """GB/s of a contender."""
        return self.size_bytes / statistics.median(self.seconds[who]) / 1e9

    def ratio(self, who: str, other: str) -> float:
        """How many times as fast as another one, in the median over the rounds."""
        pairs = zip(self.seconds[who], self.seconds[other], strict=True)
        return statistics.median(theirs / mine for mine, theirs in pairs)

    def best(self, prefix: str) -> str:
        """The fastest of the contenders whose names begin so, and go on with a number of threads."""
        return max((who for who in self.seconds if who.startswith(f"{prefix}, ")), key=self.rate)


def measure(place: Place, model: Model, rounds: int, sweep: bool, notes: list[str]) -> None:
    """Let all contenders take turns. The first round is not counted, and checks what they load."""
    usable = dict(contenders(sweep))
    place.size_bytes = model.size_bytes
    for turn in range(rounds + 1):
        for who, load in list(usable.items()):
            if place.cold:
                _drop(model.file)
            try:
                seconds, loaded = _timed(load, model)
                if turn == 0 and loaded:
                    model.check(who, loaded)
            except Exception as error:  # another library is missing, or does not work here
                if who.startswith((MILEPOST, RAW)):
                    raise
                notes.append(
                    f"{place.name}: {who} is left out: {str(error).splitlines()[0] if str(error) else error!r}"
                )
                del usable[who]
                place.seconds.pop(who, None)
                continue
            if turn:
                place.seconds.setdefault(who, []).append(seconds)
            del loaded


def _timed(load: Callable[[Model], Tensors], model: Model) -> tuple[float, Tensors]:
    began = time.perf_counter()
    loaded = load(model)
    if model.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began, loaded


def _drop(file: Path) -> None:
    """Take the file out of the page cache."""
    with file.open("rb") as handle:
        os.fsync(handle.fileno())
        os.posix_fadvise(handle.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if os.access(DROP_CACHES, os.W_OK):
        DROP_CACHES.write_text("1")


def rows_of(place: Place, *, on_gpu: bool) -> Iterator[Row]:
    """The results at one place. Bars are for a GPU: on a CPU, other libraries map the file and read nothing."""
    raw, hashed = place.best(RAW), place.best(RAW_HASHED)
    if on_gpu and not place.cold:
        yield at_least(f"{place.name}: verified, of raw with XXH3", place.ratio(MILEPOST, hashed), "x", 0.9)
        yield at_least(f"{place.name}: unverified, of raw", place.ratio(UNVERIFIED, raw), "x", 0.9)
        most = {"tmpfs": (30, 36)}.get(place.name, (20, 26))
        yield at_least(f"{place.name}: verified", place.rate(MILEPOST), "GB/s", most[0])
        yield at_least(f"{place.name}: unverified", place.rate(UNVERIFIED), "GB/s", most[1])
    for other in OTHERS:
        if on_gpu and other in place.seconds:
            yield at_least(f"{place.name}: Milepost, times as fast as {other}", place.ratio(MILEPOST, other), "x", 1)
    for who, seconds in place.seconds.items():
        yield Row(f"{place.name}: {who}, median", statistics.median(seconds), "s")
        yield Row(f"{place.name}: {who}, fastest", min(seconds), "s")
        yield Row(f"{place.name}: {who}, slowest", max(seconds), "s")


def table_of(places: list[Place]) -> str:
    """All places and contenders."""
    lines = []
    for place in places:
        for who in sorted(place.seconds, key=place.rate, reverse=True):
            seconds = place.seconds[who]
            spread = f"{min(seconds):.3f}..{max(seconds):.3f}"
            lines.append([place.name, who, f"{statistics.median(seconds):.3f}", spread, f"{place.rate(who):.1f}"])
    return format_table(["file", "contender", "s", "min..max", "GB/s"], lines)


def main() -> None:
    """Measure, print and clean up."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size-gb", type=float, default=8.0, help="size of the model in GB (default 8)")
    parser.add_argument("--rounds", type=positive, default=5, help="rounds that count (default 5)")
    parser.add_argument("--disk", type=Path, default=Path(tempfile.gettempdir()), help="a folder on a disk")
    parser.add_argument("--shm", type=Path, default=Path("/dev/shm"), help="a folder in memory")
    parser.add_argument("--only", nargs="*", choices=["cache", "tmpfs", "cold"], default=["cache", "tmpfs", "cold"])
    parser.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu", help="default: a GPU if any"
    )
    parser.add_argument("--sweep", action="store_true", help="also other numbers of threads and sizes of blocks")
    parser.add_argument("--quick", action="store_true", help="a small model, one round: does it all work?")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    arguments = parser.parse_args()
    size_gb, rounds = (0.05, 1) if arguments.quick else (arguments.size_gb, arguments.rounds)
    device = torch.device(arguments.device)
    print(f"Loading a bf16 model of {size_gb} GB into {device}\n{machine(arguments.disk, arguments.shm)}\n")
    places, notes = [], list[str]()
    for key, name, parent in (
        ("cache", "page cache", arguments.disk), ("tmpfs", "tmpfs", arguments.shm), ("cold", "cold", arguments.disk),
    ):  # fmt: skip
        if key not in arguments.only:
            continue
        with tempfile.TemporaryDirectory(prefix="milepost-model-", dir=parent) as folder:
            place = Place(name, Path(folder), cold=key == "cold")
            model = make_model(int(size_gb * 1e9), Path(folder) / "model", device)
            measure(place, model, rounds, arguments.sweep, notes)
            places.append(place)
            print(table_of([place]), flush=True)
            print(flush=True)
    on_gpu = device.type == "cuda"
    rows = [row for place in places for row in rows_of(place, on_gpu=on_gpu)]
    print(bars_table(rows) if on_gpu else "The bars are for a GPU, and the tensors of this run are in main memory.")
    for note in notes:
        print(note)
    if arguments.json:
        write_rows(arguments.json, rows)


if __name__ == "__main__":
    main()
