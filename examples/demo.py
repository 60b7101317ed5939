"""A training job is killed twice in the middle of a save, and resumes each time on another number of ranks.

    .venv/bin/python examples/demo.py --output demo-output
    .venv/bin/python examples/demo.py --store s3            in an object store, which the demo starts

First the job runs uninterrupted on 4 ranks. Then the same job is started on 4 ranks and killed, resumed on 2 and
killed, and resumed on 3 to the end. Every loss is compared with the uninterrupted run, and every loaded state with the
saved one. Exits with 1 and says why if anything is wrong.
"""

import argparse
import contextlib
import itertools
import math
import multiprocessing
import multiprocessing.connection
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import train
from demo_picture import Curve, draw
from demo_rank import Death, Job, digest, run_rank
from torch.distributed import TCPStore

import milepost
from milepost.store import store_at

TOLERANCE = 1e-12
"""The largest relative difference of a loss on another number of ranks, which adds float64 numbers in another order."""
PHASE_LIMIT_S = 300.0
PRELOADED = ["torch._dynamo", "torch.distributed.fsdp", "matplotlib.figure", "milepost.api"]
"""What the fork server imports once for all its processes: importing torch takes longer than the training."""
MARKER = ".milepost-demo"


class DemoFailed(Exception):
    """A check of the demo failed."""


@dataclass(frozen=True, slots=True)
class Phase:
    """One start of the job."""

    name: str
    ranks: int
    run: str
    logs: Path
    death: Death | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """What rank 0 of a phase printed. `saved` and `loaded` have a digest for the name of each checkpoint."""

    phase: Phase
    text: str
    losses: dict[int, float]
    saved: dict[str, str]
    loaded: dict[str, str]

    @property
    def resumed_from(self) -> str | None:
        """The name of the checkpoint that the phase resumed from."""
        return next(iter(self.loaded), None)


def demo(output: Path, place: str, steps: int) -> None:
    """Run all phases and all checks, with checkpoints at `place`: a folder or a URL. Raises DemoFailed."""
    every = steps // 10
    reference, run, logs = f"{place}/uninterrupted", f"{place}/interrupted", output / "logs"
    first, second = deaths(every, in_parts=store_at(place).traits.part_bytes > 0)
    whole = run_phase(Phase("uninterrupted", 4, reference, logs), steps, every)
    parts = [run_phase(Phase("first start", 4, run, logs, first), steps, every)]
    show_unfinished(run, first)
    parts.append(run_phase(Phase("second start", 2, run, logs, second), steps, every))
    show_unfinished(run, second)
    parts.append(run_phase(Phase("third start", 3, run, logs), steps, every))

    check_steps(whole, parts, steps, every)
    check_checkpoints(run, steps // every)
    for before, after in itertools.pairwise(parts):
        check_state(run, before, after)
    differences = [largest_difference(part, whole) for part in parts]
    print_table(whole, parts, differences)
    draw(output / "loss.png", whole.losses, [curve(part) for part in parts])
    check_losses(parts, differences)
    print(f"\nThe curves: {output / 'loss.png'}")


def deaths(every: int, *, in_parts: bool) -> list[Death]:
    """The two kills: one while data is written, one just before the commit."""
    writing = Death(2, 4 * every, "write", 3, "rank 2 is killed while it writes its file")
    if in_parts:
        words = "rank 2 is killed when the store has the second part of its file"
        writing = Death(2, 4 * every, "create data/", 2, words, after=True)
    words = "rank 0 is killed when all data is written, just before it commits"
    return [writing, Death(0, 7 * every, "create manifest", 1, words)]


def run_phase(phase: Phase, steps: int, every: int) -> Outcome:
    """Run the ranks of one phase until all are done, or until one dies and the others are killed with it."""
    print(f"{phase.name}: {phase.ranks} ranks ...", flush=True)
    logs = [phase.logs / f"{phase.name.replace(' ', '-')}-rank-{r}.log" for r in range(phase.ranks)]
    with started(Job(phase.run, steps, every, phase.death), logs) as ranks:
        codes = wait(ranks, phase)
    check_end(phase, codes, logs)
    outcome = parse(phase, logs[0].read_text())
    for line in outcome.text.splitlines():
        if line.startswith(("skipped", "resumed")):
            print(f"  {line}")
    return outcome


@contextlib.contextmanager
def started(job: Job, logs: list[Path]) -> Iterator[list[ForkServerProcess]]:
    """One process for each log, with the variables that torchrun sets. No process is left at the end, in any case."""
    # As under torchrun, the launcher holds the job's store: the system picks a free port, and no rank can take it.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    common = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "WORLD_SIZE": str(len(logs)),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0",
    }
    context = multiprocessing.get_context("forkserver")
    ranks: list[ForkServerProcess] = []
    try:
        for rank, log in enumerate(logs):
            log.parent.mkdir(exist_ok=True)
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            ranks.append(context.Process(target=run_rank, args=(job, common | own, log), name=f"rank-{rank}"))
            ranks[-1].start()
        yield ranks
    finally:
        for process in ranks:
            process.kill()
        for process in ranks:
            process.join()
        del store


def wait(ranks: list[ForkServerProcess], phase: Phase) -> list[int | None]:
    """The exit codes after all ranks have ended or the first one has failed; None for ranks that still run."""
    deadline = time.monotonic() + PHASE_LIMIT_S
    while time.monotonic() < deadline:
        codes = [rank.exitcode for rank in ranks]
        running = [rank.sentinel for rank, code in zip(ranks, codes, strict=True) if code is None]
        if any(codes) or not running:
            return codes
        multiprocessing.connection.wait(running, timeout=PHASE_LIMIT_S)
    raise DemoFailed(f"{phase.name} did not end within {PHASE_LIMIT_S:.0f} seconds")


def check_end(phase: Phase, codes: list[int | None], logs: list[Path]) -> None:
    """Check that the phase ended with success on all ranks, or with the death of the rank that was to die."""
    doomed = phase.death.rank if phase.death else None
    for rank, code in enumerate(codes):
        if code and not (rank == doomed and code == -signal.SIGKILL):
            tail = "\n  ".join(logs[rank].read_text().splitlines()[-20:])
            raise DemoFailed(f"{phase.name}: rank {rank} ended with {code}. The end of {logs[rank]}:\n  {tail}")
    if doomed is not None and not codes[doomed]:
        raise DemoFailed(f"{phase.name}: rank {doomed} was not killed in the middle of a save")


def parse(phase: Phase, text: str) -> Outcome:
    """The output of rank 0 as data."""
    losses = {int(step): float(loss) for step, loss in re.findall(r"^step (\d+)  loss (\S+)$", text, re.MULTILINE)}
    saved = dict(re.findall(r"^saving (\S+)  digest (\S+)$", text, re.MULTILINE))
    loaded = dict(re.findall(r"^loaded (\S+)  digest (\S+)$", text, re.MULTILINE))
    return Outcome(phase, text, losses, saved, loaded)


def show_unfinished(run: str, death: Death) -> None:
    """Print what the killed save left. Raises DemoFailed if it opens as a checkpoint."""
    before, newest = train.steps_of(run)[-2:]
    expected = {name.rpartition("/")[2]: size for name, size in files_of(run, before)}
    print(f"  {death.words}, and all other ranks with it. step-{newest:04d} now holds:")
    for name, size in files_of(run, newest):
        print(f"    {name}  {size:>9,} of {expected.get(name.rpartition('/')[2], 0):,} bytes")
    if newest != death.step:
        raise DemoFailed(f"the save of step {death.step} left nothing; it should have been killed in the middle")
    try:
        milepost.open(train.checkpoint_at(run, newest)).close()
    except milepost.CheckpointNotFound:
        print("    no manifest, so this is not a checkpoint")
    else:
        raise DemoFailed(f"step-{newest:04d} opens as a checkpoint, although its save was killed")


def files_of(run: str, step: int) -> list[tuple[str, int]]:
    """The files or objects of a checkpoint, with their sizes."""
    store = store_at(train.checkpoint_at(run, step))
    sizes = []
    for name in sorted(store.list("")):
        with contextlib.closing(store.reader(name)) as reader:
            sizes.append((name, reader.size_bytes))
    return sizes


def check_steps(whole: Outcome, parts: list[Outcome], steps: int, every: int) -> None:
    """Check the steps of every phase: from the checkpoint before the last kill to the next kill."""
    spans = [(1, 4 * every), (3 * every + 1, 7 * every), (6 * every + 1, steps)]
    for outcome, (start, end) in zip([whole, *parts], [(1, steps), *spans], strict=True):
        if list(outcome.losses) != list(range(start, end + 1)):
            raise DemoFailed(
                f"{outcome.phase.name} should do steps {start} to {end}, and did {span(outcome) or 'none'}"
            )
        if not all(map(math.isfinite, outcome.losses.values())):
            raise DemoFailed(f"{outcome.phase.name} has losses that are not finite: {outcome.losses}")


def check_checkpoints(run: str, count: int) -> None:
    """Check that all checkpoints are whole, also where a killed save was repeated, and that nothing else is left."""
    steps = train.steps_of(run)
    if len(steps) != count:
        raise DemoFailed(f"{run} holds {len(steps)} checkpoints instead of {count}")
    for path in [train.checkpoint_at(run, step) for step in steps]:
        with milepost.open(path) as checkpoint:
            checkpoint.verify().raise_if_damaged()
            save_id = checkpoint.manifest.save_id
        left = {name.split("/")[1] for name in store_at(path).list("data/")} - {save_id}
        if left:
            raise DemoFailed(f"{path} still holds data of a save that was killed: {', '.join(left)}")
    print(f"\nAll {count} checkpoints are whole, and nothing is left of the killed saves.")


def check_state(run: str, before: Outcome, after: Outcome) -> None:
    """Check that the state after a resume is bit for bit what was saved, and what a single process reads."""
    name = after.resumed_from
    if name is None or name not in before.saved:
        raise DemoFailed(f"{after.phase.name} should resume from a checkpoint of {before.phase.name}, not from {name}")
    with milepost.open(f"{run}/{name}") as checkpoint:
        read = digest(checkpoint.state())
    if len({before.saved[name], read, after.loaded[name]}) != 1:
        raise DemoFailed(
            f"the state of {name} changed on the way: sha256 {before.saved[name]} when {before.phase.ranks} ranks "
            f"saved it, {read} in the checkpoint, {after.loaded[name]} when {after.phase.ranks} ranks had loaded it"
        )
    print(
        f"{name}: saved by {before.phase.ranks} ranks = in the checkpoint = loaded by {after.phase.ranks} ranks, "
        f"bit for bit (sha256 {read[:16]}...)"
    )


def largest_difference(part: Outcome, whole: Outcome) -> float:
    """The largest relative difference of a loss from the uninterrupted run."""
    return max(abs(loss - whole.losses[step]) / whole.losses[step] for step, loss in part.losses.items())


def check_losses(parts: list[Outcome], differences: list[float]) -> None:
    """Check the losses: bit-equal to the uninterrupted run before the first kill, within TOLERANCE after it."""
    for part, difference, limit in zip(parts, differences, [0.0, TOLERANCE, TOLERANCE], strict=True):
        if difference > limit:
            raise DemoFailed(
                f"{part.phase.name}: losses differ from the uninterrupted run by {difference:.1e} > {limit}"
            )
    print(f"\nBefore the first kill all losses are bit-equal; after it they agree to {max(differences):.0e}")
    print(f"(limit {TOLERANCE:.0e}: another number of ranks adds the same float64 numbers in another order).")


def print_table(whole: Outcome, parts: list[Outcome], differences: list[float]) -> None:
    """Print one line for each phase."""
    row = "{:<15}{:>5}  {:<8}{:<14}{:<20}{}"
    print("\n" + row.format("phase", "ranks", "steps", "resumed from", "ended by", "largest difference of loss"))
    for outcome, difference in zip([whole, *parts], [None, *differences], strict=True):
        phase = outcome.phase
        end = f"SIGKILL in save {phase.death.step}" if phase.death else "reaching the end"
        shown = "-" if difference is None else f"{difference:.1e} relative" if difference else "0, bit-equal"
        print(row.format(phase.name, phase.ranks, span(outcome), outcome.resumed_from or "-", end, shown))


def span(outcome: Outcome) -> str:
    """The steps of a phase, such as 1-24."""
    return f"{min(outcome.losses)}-{max(outcome.losses)}" if outcome.losses else ""


def curve(outcome: Outcome) -> Curve:
    """The curve of a phase, for the picture."""
    return Curve(outcome.phase.ranks, outcome.losses, killed=outcome.phase.death is not None)


def prepare(output: Path) -> None:
    """Make an empty folder. Removes only what an earlier demo made."""
    if output.exists() and any(output.iterdir()) and not (output / MARKER).exists():
        raise DemoFailed(f"{output} holds files that the demo did not make; choose another --output")
    if output.exists():
        shutil.rmtree(output)
    output.mkdir(parents=True)
    (output / MARKER).touch()


@contextlib.contextmanager
def place_in(store: str, output: Path) -> Iterator[str]:
    """Where the checkpoints go: the output folder, or a bucket of an S3 server that runs for as long as the demo."""
    if store == "folder":
        yield str(output)
        return
    sys.path.insert(0, str(Path(__file__).parents[1]))  # for the servers of the tests
    from faults.servers import SeaweedFS  # noqa: PLC0415  # needed here only

    reason = SeaweedFS.why_not()
    if reason:
        raise DemoFailed(reason)
    with SeaweedFS() as server:
        os.environ.update(server.environment)  # the ranks get it from here
        os.environ["AWS_ENDPOINT_URL"] = server.endpoint
        print(f"an object store: SeaweedFS at {server.endpoint}")
        yield "s3://my-bucket/demo"


def main() -> int:
    """Run the demo. The exit code is 0 if all checks pass."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output", type=Path, default=Path("demo-output"), help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=40, help="a multiple of 10; default: %(default)s")
    parser.add_argument("--store", choices=["folder", "s3"], default="folder", help="default: %(default)s")
    options = parser.parse_args()
    if options.steps < 10 or options.steps % 10:
        parser.error("--steps is a multiple of 10")
    os.environ["OMP_NUM_THREADS"] = "1"
    multiprocessing.set_forkserver_preload(PRELOADED)
    start = time.monotonic()
    try:
        prepare(options.output)
        with place_in(options.store, options.output) as place:
            demo(options.output, place, options.steps)
    except (DemoFailed, milepost.CheckpointError) as error:
        print(f"\nThe demo failed: {error}", file=sys.stderr)
        return 1
    print(f"The demo took {time.monotonic() - start:.0f} seconds.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
