"""Hostile checkpoints, resource bombs and fuzzed bytes: rows 17, 19 and 20 of the table of faults.

17  The corpus in attacks/, in one process under an audit hook and with a canary file; and the ways in which DCP and
    `torch.load` execute what a checkpoint says, each in its own process, with the same input given to Milepost.
19  Checkpoints that claim far more than they hold. Each is read in its own process, which may map 1 GiB more than it
    has after importing torch (RLIMIT_AS; torch alone maps more than 1 GiB). CPU seconds are for opening and reading.
20  Inputs of seven decoders: valid inputs with changes to their JSON, opcodes and bytes. Most manifests are sealed
    again. Seeded, and guided by the lines of Milepost that each input reaches (`fuzz.py` says how).

Everything runs in forks of one child that has imported torch, so a crash is an ending like any other.
"""

import json
import logging
import multiprocessing
import os
import pickle
import re
import resource
import shutil
import struct
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import format_utils

import milepost
from attacks import corpus, forge, on_foreign, run
from attacks.on_values import canary
from faults.fuzz import ACCEPTED, REFUSED, Fuzzed, fuzz_all, reach
from faults.processes import command, environment
from faults.rows import Counting, FaultRow

MOST_BYTES, MOST_CPU_S, GIVE_UP_S = 1 << 30, 1.0, 10
READ, EXECUTED = "read without harm", "executed"
FULL_INPUTS, QUICK_INPUTS, COMPARED_INPUTS = 1_000_000, 5_000, 50_000
FORKS = multiprocessing.get_context("fork")
MORE_FORBIDDEN = ("socket.connect", "socket.bind", "os.fork", "os.spawn", "pty.spawn", "ctypes.dlopen")
Group = tuple[int, str, dict[str, int], str]
"""The row, the library, how trials ended, and a note."""


def rows(full: bool, folder: Path) -> Iterator[FaultRow]:
    """Rows 17, 19 and 20. Takes some seconds, or minutes if `full`."""
    counts = {(number, who): Counting() for number in (17, 19, 20) for who in ("Milepost", "DCP")}
    notes: dict[int, list[str]] = {17: [], 19: [], 20: []}
    done = subprocess.run(
        command("hostile", "full" if full else "quick", str(folder)),
        env=environment(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo", PYTHONHASHSEED="0"),
        stdout=subprocess.PIPE,
        text=True,
        timeout=900,
        check=True,
    )
    for number, who, endings, note in map(json.loads, done.stdout.splitlines()):
        counts[number, who].counts.update(endings)
        notes[number].extend([note] if note else [])

    def row(number: int, fault: str, how: str, good: Iterable[str]) -> FaultRow:
        mine, other = counts[number, "Milepost"].tally, counts[number, "DCP"].tally
        note = "; ".join(notes[number])
        return FaultRow(number, fault, how, mine, frozenset(good), other if other.trials else None, note)

    how = "attacks/ under an audit hook and with a canary; DCP's ways to execute code, one process each"
    yield row(17, "hostile manifest, header, value, DCP metadata, torch file", how, (REFUSED, READ))
    keys = "10^6 keys, " if full else ""
    how = f"2^45 elements, headers of 1 GB, nesting 10^5, {keys}also in zip and pickle; 1 GiB of memory and 1 s of CPU"
    yield row(19, "resource bombs", how, (REFUSED, READ))
    how = (
        "changes to JSON, opcodes and bytes of valid inputs of seven decoders. Every input is traced. An input that "
        "takes a new step between lines of Milepost, or is accepted on a new path, is changed further and mixed with "
        "others. C code is not traced. Seeded"
    )
    yield row(20, "fuzzed input", how, (REFUSED, ACCEPTED))


def main(full: bool, folder: Path) -> None:
    """The child: one line of JSON for each group of trials."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable()
    tempfile.tempdir = str(folder)
    for groups in (hostile(full, folder), bombs(full, folder), fuzzing(full)):
        for group in groups:
            print(json.dumps(group), flush=True)


def in_a_fork(work: Callable[[], Any], limit_s: float = GIVE_UP_S) -> Any:
    """What `work` returns, run in its own process; "no end ..." or "died ..." if it returns nothing."""
    reader, writer = FORKS.Pipe(duplex=False)
    process = FORKS.Process(target=lambda: writer.send(work()))
    process.start()
    writer.close()
    try:
        return reader.recv() if reader.poll(limit_s) else f"no end in {limit_s:g} s"
    except EOFError:
        process.join(GIVE_UP_S)
        return f"died with {process.exitcode}"
    finally:
        process.kill()
        process.join()


def ending_of(use: Callable[[], Any]) -> str:
    """How a use ended: read, refused by Milepost, out of memory, or with another exception."""
    try:
        use()
    except milepost.CheckpointError:
        return REFUSED
    except (Exception, dcp.api.CheckpointException) as error:  # DCP raises a BaseException
        memory = isinstance(error, MemoryError) or "allocate memory" in str(error)
        return "tried to allocate it" if memory else type(error).__name__
    return READ


def read_all(path: Path) -> None:
    """Read everything that a checkpoint claims to hold."""
    with milepost.open(path, types=forge.KNOWN_TYPES) as ckpt:
        repr(ckpt.metadata)
        ckpt.state()


# ---------------------------------------------------------------- 17: hostile


class Strict(run.Watch):
    """Also sees files outside the checkpoint that are opened for writing."""

    def notice(self, event: str, args: tuple[Any, ...]) -> None:
        """Called by Python for everything that can be audited."""
        super().notice(event, args)
        if event == "open" and self.folder is not None and isinstance(args[2], int):
            path, writes = str(args[0]), args[2] & (os.O_WRONLY | os.O_RDWR)
            if writes and path.startswith("/") and not path.startswith((str(self.folder.parent), os.devnull)):
                self.seen.append(f"open for writing {path}")


def hostile(full: bool, folder: Path) -> Iterator[Group]:
    """The corpus, and DCP's ways to execute."""
    names = [attack.name for attack in corpus.ATTACKS if not attack.gap]
    names = names if full else names[::16]
    ended = corpus_endings(names, folder / "corpus")
    bad = [f"{name}: {ending}" for name, ending in ended.items() if ending not in (REFUSED, READ)]
    yield 17, "Milepost", Counter(ended.values()), "; ".join([f"{len(names)} attacks, {len(WAYS)} ways of DCP", *bad])
    for number, (make, use) in enumerate(WAYS.values()):
        for who, read in (("DCP", use), ("Milepost", read_all)):
            path = folder / f"way-{number}-{who}" / "x"
            yield 17, who, {in_a_fork(lambda m=make, r=read, p=path: way_ending(m, r, p)): 1}, ""


def corpus_endings(names: list[str], folder: Path) -> dict[str, str]:
    """How each attack ended, by its name."""

    def work() -> None:
        run.Watch, run.FORBIDDEN = Strict, (*run.FORBIDDEN, *MORE_FORBIDDEN)
        tempfile.tempdir = str(folder)
        with (folder / "lines").open("w") as lines, redirect_stdout(lines):
            run.main(names)

    folder.mkdir()
    died = in_a_fork(work, 400)
    reports = map(json.loads, (folder / "lines").read_text().splitlines())
    ended = {report["name"]: corpus_ending(report) for report in reports}
    return {name: ended.get(name, f"not tried ({died})") for name in names}


def corpus_ending(report: dict[str, Any]) -> str:
    """How an attack ended; the worst outcome counts."""
    if report["seen"]:
        events = ("open", "os.scandir", "os.listdir", "os.remove", "os.rename", "os.link", "something")
        return "outside touched" if all(seen.startswith(events) for seen in report["seen"]) else EXECUTED
    outcomes = list(report["outcomes"].values())
    bad = [outcome for outcome in outcomes if outcome != "right" and not outcome.startswith("refused ")]
    if bad:
        return bad[0].split(":")[0]
    return READ if all(outcome == "right" for outcome in outcomes) else REFUSED


def way_ending(make: Callable[[Path], Any], use: Callable[[Path], Any], path: Path) -> str:
    """Make a hostile checkpoint, read it, and check whether the canary appeared."""
    path.parent.mkdir()
    make(path)
    assert not canary(path).exists(), "the maker ran its own payload"
    ending = ending_of(lambda: use(path))
    return EXECUTED if canary(path).exists() else ending


def _payload(path: Path) -> Any:
    return on_foreign.Call(os.system, f"touch {canary(path)}")


def _metadata(path: Path) -> None:
    on_foreign.forge_pickle(path, pickle.dumps(_payload(path)))


def _value(path: Path) -> None:
    dcp.save(on_foreign.good_state() | {"evil": _payload(path)}, checkpoint_id=path)


def _file(path: Path) -> None:
    on_foreign.make_torch(path, evil=_payload(path))


def _load(path: Path, **more: Any) -> None:
    dcp.load({"model": {"weight": torch.zeros(64, 32)}} | more, checkpoint_id=path)


def _convert(path: Path) -> None:
    if path.is_dir():
        dcp.FileSystemReader(path).read_metadata()  # the first step of a conversion, which hides why it failed
    convert = format_utils.dcp_to_torch_save if path.is_dir() else format_utils.torch_save_to_dcp
    convert(path, path.with_suffix(".converted"))


def _broadcast(path: Path) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    reader, planner = format_utils.BroadcastingTorchSaveReader(), format_utils.DynamicMetaLoadPlanner()
    target = {"model": {"weight": torch.zeros(64, 32)}}
    dcp.load(target, storage_reader=reader, planner=planner, checkpoint_id=path)


WAYS: dict[str, tuple[Callable[[Path], Any], Callable[[Path], Any]]] = {
    "metadata, load": (_metadata, _load),
    "metadata, list": (_metadata, lambda path: dcp.FileSystemReader(path).read_metadata()),
    "planner data, load": (
        lambda path: on_foreign.forge_dcp(path, lambda m: m.planner_data.update(evil=_payload(path))),
        _load,
    ),
    "value, load": (_value, lambda path: _load(path, evil=None)),
    "value where a tensor is wanted, load": (_value, lambda path: _load(path, evil=torch.zeros(2))),
    "value, dcp_to_torch_save": (_value, _convert),
    "torch file, torch_save_to_dcp": (_file, _convert),
    "torch file, BroadcastingTorchSaveReader": (_file, _broadcast),
}

# ---------------------------------------------------------------- 19: bombs

KEYS, PREFIX = 1_000_000, "model.layers.0."
BOMBS = re.compile(
    r"2_to_the_45|100000_deep|depth_100000|nested_|bytes?_of_holes|exabyte|4_gib|laughs|absurd_s|million_c"
)
"""The attacks that claim sizes or nest. DCP gets those on its own and on torch's format too."""


QUICK_BOMBS = re.compile(
    "^(tensor_of_2_to_|file_of_8|value_nested_100|header_of_depth|torch_file_nested_d|dcp_metadata_memo|dcp_tensor)"
)


def bombs(full: bool, folder: Path) -> Iterator[Group]:
    """Make each bomb in one process, and read it in another one that has limits."""
    names = BOMBS if full else QUICK_BOMBS
    makers = {attack.name: attack.make for attack in corpus.ATTACKS if names.search(attack.name)}
    makers |= {"header_of_1_gb": _header_of_1_gb, "safetensors_header_of_1_gb": _safetensors_header_of_1_gb}
    makers |= dict(_millions()) if full else {}
    for name, make in makers.items():
        path = folder / "bombs" / name
        path.parent.mkdir(exist_ok=True)
        made = in_a_fork(lambda m=make, p=path: m(p), 120)
        assert made is None, f"{name} was not made: {made}"
        foreign = name.startswith(("dcp", "torch"))
        for who, read in (("Milepost", read_all), *([("DCP", _convert)] if foreign else [])):
            yield 19, who, *bomb_ending(name, who, in_a_fork(lambda r=read, p=path: measured(r, p)))
        shutil.rmtree(path.parent)


def bomb_ending(name: str, who: str, found: Any) -> tuple[dict[str, int], str]:
    """How reading a bomb ended, as a count of one, and a note if it took more than half of a limit."""
    if not isinstance(found, tuple):
        return {found: 1}, f"{name} ({who}): {found}"
    ending, cpu_s, grown = found
    over = f"{ending}, over 1 s" if cpu_s > MOST_CPU_S else ending
    much = cpu_s > MOST_CPU_S / 2 or grown > MOST_BYTES / 2 or (who == "Milepost" and over not in (REFUSED, READ))
    return {over: 1}, f"{name} ({who}): {ending}, {cpu_s:.1f} s, {grown >> 20} MiB" if much else ""


def measured(read: Callable[[Path], Any], path: Path) -> tuple[str, float, int]:
    """How reading ended in a process with limits, with the CPU seconds and the memory that it took."""
    status = Path("/proc/self/status").read_text
    before = int(status().split("VmRSS:")[1].split()[0])
    most = int(status().split("VmSize:")[1].split()[0]) * 1024 + MOST_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    start = time.process_time()
    ending = ending_of(lambda: read(path))
    cpu_s = time.process_time() - start
    return ending, cpu_s, (int(status().split("VmHWM:")[1].split()[0]) - before) * 1024


def _header_of_1_gb(path: Path) -> None:
    forge.forge_manifest(path, lambda record: record["files"][0].update(header_bytes=10**9, size_bytes=10**9 + 4096))
    os.truncate(forge.shard_path(path), 10**9 + 4096)


def _safetensors_header_of_1_gb(path: Path) -> None:
    path.write_bytes(struct.pack("<Q", 10**9) + b"{")
    os.truncate(path, 10**9 + 8)


def _millions() -> Iterator[tuple[str, Callable[[Path], None]]]:
    """A million keys with one prefix, in each place that has keys; the last one is invalid."""

    def manifest(field: str, line: str, *first: Any) -> Callable[[Path], None]:
        def make(path: Path) -> None:
            forge.set_fields(path, **{field: [*first, "@"]})
            text = json.dumps(forge.read_manifest(path)).encode()
            forge.write_manifest_text(path, text.replace(b'"@"', ",".join(line % i for i in range(KEYS)).encode()))

        return make

    def entries() -> bytes:
        entry = '"' + PREFIX + '%d":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}'
        return ("{" + ",".join(entry % i for i in range(KEYS)) + "}").encode()

    def header(path: Path) -> None:
        forge.make_good(path)
        forge.write_shard(path, entries(), forge.read_shard(path)[1])

    def safetensors(path: Path) -> None:
        path.write_bytes(struct.pack("<Q", len(entries())) + entries())

    def keys() -> bytes:
        names = ((PREFIX + str(i)).encode() for i in range(KEYS))
        return b"\x80\4Nq\0](" + b"".join(b"\x8c" + bytes([len(n)]) + n + b"h\0" for n in names) + b"u."

    def directory(path: Path) -> None:
        central = struct.Struct("<4s4B4HL2L5H2L")
        names = ((PREFIX + str(i)).encode() for i in range(KEYS))
        data = b"".join(central.pack(b"PK\1\2", *[0] * 9, 0, 0, len(n), *[0] * 6) + n for n in names)
        end = struct.pack("<4sQ2H2L4Q", b"PK\6\6", 44, 0, 0, 0, 0, KEYS, KEYS, len(data), 0)
        end += struct.pack("<4sLQL", b"PK\6\7", 0, len(data), 1)
        path.write_bytes(data + end + struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 65535, 65535, 2**32 - 1, 2**32 - 1, 0))

    tensor = '{"key":"' + PREFIX + '%d","dtype":"float32","shape":[1048576],"layout":0}'
    yield "tensors_10_to_the_6", manifest("tensors", tensor)
    yield "nodes_10_to_the_6", manifest("tree", '[1,"%d","value","' + PREFIX + '"]', [0, None, "dict"])
    yield "values_10_to_the_6", manifest("values", '{"key":"' + PREFIX + '%d","value":0}')
    alike = {
        "dict": [[i * (2**61 - 1), 0] for i in range(1, 100_001)]
    }  # integers with equal hashes, which make dicts slow
    yield "value_of_keys_alike", lambda path: forge.forge_manifest(path, lambda record: forge.add_value(record, alike))
    yield "header_10_to_the_6", header
    yield "safetensors_header_10_to_the_6", safetensors
    yield "torch_pickle_10_to_the_6", lambda path: on_foreign.make_torch(path, keys())
    yield "dcp_metadata_10_to_the_6", lambda path: on_foreign.forge_pickle(path, keys())
    yield "torch_directory_10_to_the_6", directory


# ---------------------------------------------------------------- 20: fuzz


def fuzzing(full: bool) -> Iterator[Group]:
    """All decoders, in two processes for a full run; then also what a guided and an unguided run reach."""
    count, jobs = (FULL_INPUTS, 2) if full else (QUICK_INPUTS, 1)
    total = Fuzzed()
    with FORKS.Pool(jobs, maxtasksperchild=1) as pool:
        for found in pool.imap(fuzz_all, [(seed, count // jobs, True) for seed in range(jobs)], 1):
            total.add(found)
        yield 20, "Milepost", total.ended, "; ".join([f"reached {reach(total)} of the decoders", *total.bad])
        if full:
            guided, plain = pool.map(fuzz_all, [(0, COMPARED_INPUTS, True), (0, COMPARED_INPUTS, False)], 1)
            note = f"{COMPARED_INPUTS:,} inputs reach {reach(guided)}; not guided {reach(plain)}"
            yield 20, "Milepost", guided.ended + plain.ended, "; ".join([note, *guided.bad, *plain.bad])


if __name__ == "__main__":
    main(sys.argv[1] == "full", Path(sys.argv[2]))
