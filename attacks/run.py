"""Try every attack in one process with little memory, and print the outcome: one line of JSON for each.

    python -m attacks.run [name ...]

Every use of a hostile checkpoint must end in a `CheckpointError` or with the right data, within a few seconds and
little memory. Nothing from it may be executed, and nothing outside its folder may be opened.
"""

import json
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import milepost
from attacks.corpus import ATTACKS
from attacks.forge import BIAS, KNOWN_TYPES, WEIGHT, Attack, make_good
from attacks.on_values import canary
from milepost.view import collect, make_page

MEMORY_BYTES = 4 << 30
"""The memory that the process may take beyond what it has after importing torch."""
CPU_S = 20
"""The CPU time that one use of one checkpoint may take; ordinary uses take milliseconds."""
MESSAGE_LETTERS = 200_000
"""The longest allowed message: a longer one floods the logs."""
FORBIDDEN = ("pickle.find_class", "os.system", "os.exec", "os.posix_spawn", "subprocess.Popen", "marshal.loads")


class Stuck(BaseException):
    """One use took too long."""


class Bag:
    """A stateful object: the checkpoint decides what it gets."""

    def __init__(self) -> None:
        self.got: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        """Nothing yet."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Keep the state."""
        self.got = state


class Watch:
    """Records forbidden events: code that is run, and files outside the folder that are opened."""

    def __init__(self) -> None:
        self.folder: Path | None = None
        self.seen: list[str] = []
        sys.addaudithook(self.notice)

    def notice(self, event: str, args: tuple[Any, ...]) -> None:
        """Called by Python for every event that can be audited."""
        if self.folder is None:
            return
        if event in FORBIDDEN:
            self.seen.append(f"{event} {str(args)[:200]}")
        elif event in ("open", "os.scandir", "os.listdir", "os.remove", "os.rename", "os.link"):
            outside = str(self.folder.parent / "outside")
            paths = [_place(event, a) for a in args[:2] if isinstance(a, str) and a.startswith("/")]
            if any(path.startswith(outside) or path == "/dev/zero" for path in paths):
                self.seen.append(f"{event} {paths}")
            # A relative name is opened inside an open folder. It must not follow links.
            elif event == "open" and not str(args[0]).startswith("/") and not args[2] & os.O_NOFOLLOW:
                self.seen.append(f"{event} {args[0]!r} follows links")


def _place(event: str, path: str) -> str:
    """The file that a path leads to. Removing or renaming a link does not follow it."""
    if event in ("os.remove", "os.rename", "os.link"):
        return os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path))
    return os.path.realpath(path)


# ---------------------------------------------------------------- uses of a checkpoint


def _opened(folder: Path) -> milepost.Checkpoint:
    return milepost.open(folder, types=KNOWN_TYPES)


def use_open(folder: Path) -> str | None:
    """Open it, and look at what is known without reading more."""
    with _opened(folder) as ckpt:
        repr(ckpt)
        return None if ckpt.world >= 1 else "no ranks"


def use_metadata(folder: Path) -> str | None:
    """Read the metadata."""
    with _opened(folder) as ckpt:
        return None if isinstance(ckpt.metadata, dict) else "metadata is not a dict"


def use_list(folder: Path) -> str | None:
    """List keys, shapes and layouts without reading."""
    with _opened(folder) as ckpt:
        keys = list(ckpt)
        if len(keys) != len(ckpt):
            return "the number of keys is wrong"
        for tensor in list(ckpt.tensors.values())[:10]:
            repr((tensor, tensor.layout, tensor.size_bytes))
        return None


def use_tree(folder: Path) -> str | None:
    """Rebuild the containers without reading tensors."""
    with _opened(folder) as ckpt:
        ckpt.tree()
    return None


def use_verify(folder: Path) -> str | None:
    """Read and check every byte. Damage counts as refused."""
    with _opened(folder) as ckpt:
        ckpt.verify().raise_if_damaged()
    return None


def use_read(folder: Path) -> str | None:
    """Read the tensors one by one."""
    with _opened(folder) as ckpt:
        for key, right in (("model.weight", WEIGHT), ("model.bias", BIAS)):
            if not torch.equal(ckpt[key].read(), right):
                return f"{key} is wrong"
    return None


def use_slice(folder: Path) -> str | None:
    """Read a few rows of one tensor."""
    with _opened(folder) as ckpt:
        rows, forged = ckpt["model.weight"][:2], ckpt["model.weight"].shape != tuple(WEIGHT.shape)
        return None if forged or torch.equal(rows, WEIGHT[:2]) else "the rows are wrong"


def use_evil(folder: Path) -> str | None:
    """Read up to 1,000 keys, the forged ones included."""
    with _opened(folder) as ckpt:
        for key in list(ckpt)[:1000]:
            ckpt[key]
    return None


def use_state(folder: Path) -> str | None:
    """Read everything."""
    with _opened(folder) as ckpt:
        state = ckpt.state()
    mine = {rank: {"seed": rank, "noise": [float(rank)] * 5} for rank in range(2)}
    got = {r: {"seed": v["seed"], "noise": v["noise"].tolist()} for r, v in state["mine"].items()}
    return _compare(state["model"], state, None if got == mine else "the private values are wrong")


def use_load(folder: Path) -> str | None:
    """Load into a state that fits, including what the forger added."""
    target = _target()
    with _opened(folder) as ckpt:
        if "evil" in ckpt.manifest.tree[-1].key:
            target[_name(ckpt)] = None
    milepost.load(target, folder, types=KNOWN_TYPES)
    return _compare(target["model"], target, None)


def use_load_partly(folder: Path) -> str | None:
    """Load the good part into a state that lacks the rest."""
    target = _target()
    milepost.load(target, folder, types=KNOWN_TYPES, allow_unexpected=True)
    return _compare(target["model"], target, None)


def use_load_bytes(folder: Path) -> str | None:
    """Load into a state without tensors, so that the checkpoint decides how large they are."""
    target = {"model": {"weight": b""}}
    milepost.load(target, folder, types=KNOWN_TYPES, allow_unexpected=True)
    return "a tensor was loaded into bytes"


def use_stateful(folder: Path) -> str | None:
    """Load into a stateful object: the checkpoint decides what it gets."""
    target = {"model": Bag()}
    milepost.load(target, folder, types=KNOWN_TYPES, allow_unexpected=True)
    return _compare(target["model"].got, {"step": 7, "names": ["a", ("b", 3)]}, None)


def use_explain(folder: Path) -> str | None:
    """Ask what a load would find."""
    str(milepost.explain(_target(), folder, types=KNOWN_TYPES))
    return None


def use_notebook(folder: Path) -> str | None:
    """Let it show itself in a notebook."""
    with _opened(folder) as ckpt:
        blocks = [ckpt._repr_html_(), *(tensor._repr_html_() for tensor in list(ckpt.tensors.values())[:10])]
    wrong = [block for block in blocks if "<script" in block or "<img" in block]
    return f"HTML of the checkpoint: {wrong[0][:200]}" if wrong else None


def use_view(folder: Path) -> str | None:
    """Make its page. `tests/view/test_attacks.py` opens such pages in a browser."""
    page = make_page(collect(folder))
    return None if page.count(b"</script>") == 5 else "text of the checkpoint ends a script"


def use_copy(folder: Path) -> str | None:
    """Copy it to another place, and check the copy. What is not Milepost's own format is refused."""
    copy = folder.parent / "copy"
    shutil.rmtree(copy, ignore_errors=True)
    milepost.copy(folder, copy)
    with _opened(copy) as ckpt:
        changed = [damage for damage in ckpt.verify().damages if "are not what was saved" in damage.reason]
        return "the copy is damaged" if changed else None


def use_save(folder: Path) -> str | None:
    """Save over it, which sweeps the old files, and read the new checkpoint."""
    milepost.save({"x": WEIGHT}, folder)
    with milepost.open(folder) as ckpt:
        return None if torch.equal(ckpt["x"].read(), WEIGHT) else "what was saved over it is wrong"


def _name(ckpt: milepost.Checkpoint) -> Any:
    name = ckpt.manifest.tree[-1].name
    return name if isinstance(name, str) else "evil"


def _target() -> dict[str, Any]:
    return {
        "model": {"weight": torch.zeros(64, 32), "bias": torch.zeros(48, dtype=torch.bfloat16)},
        "step": 0,
        "names": [],
        "mine": milepost.PerRank(None, remap=lambda old, _rank, _world: old),
    }


def _compare(model: dict[str, Any], state: dict[str, Any], problem: str | None) -> str | None:
    if not torch.equal(model["weight"], WEIGHT) or not torch.equal(model["bias"], BIAS):
        return "a tensor is wrong"
    if state["step"] != 7 or state["names"] != ["a", ("b", 3)]:
        return "a value is wrong"
    return problem


USES: dict[str, Callable[[Path], str | None]] = {
    name.removeprefix("use_"): use for name, use in list(globals().items()) if name.startswith("use_")
}

AT_THE_DOOR = ("open", "load", "explain", "view", "save")
"""The uses that are tried if opening must fail; all other uses open it in the same way."""

# ---------------------------------------------------------------- the trial


@contextmanager
def deadline(cpu_s: float) -> Iterator[None]:
    """Raise Stuck in the block after this much CPU time."""

    def stop(_signal: int, _frame: object) -> None:
        raise Stuck

    signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def outcome_of(use: Callable[[Path], str | None], folder: Path) -> str:
    """The outcome of one use: "right", "refused", or a description of what went wrong."""
    try:
        with deadline(CPU_S):
            problem = use(folder)
    except milepost.CheckpointError as error:
        if len(str(error)) > MESSAGE_LETTERS:
            return f"a message of {len(str(error))} letters: {str(error)[:200]}"
        return f"refused {type(error).__name__}: {str(error)[:300]}"
    except (Exception, Stuck) as error:  # noqa: BLE001  # reported, of any type
        return f"{type(error).__name__}: {str(error)[:300]}"
    return "right" if problem is None else f"wrong: {problem}"


def try_attack(attack: Attack, place: Path, watch: Watch) -> dict[str, Any]:
    """Make the checkpoint, use it in every way, and report."""
    folder = place / "checkpoint"
    attack.make(folder)
    outside = place / "outside"
    before = _contents(outside)
    outcomes, seconds = {}, {}
    for name, use in USES.items():
        if attack.stop == "open" and name not in AT_THE_DOOR:
            continue
        start = time.process_time()
        watch.folder = folder
        outcomes[name] = outcome_of(use, folder)
        watch.folder = None
        seconds[name] = round(time.process_time() - start, 3)
        if outcomes[name].startswith(Stuck.__name__):
            break
    seen, watch.seen = watch.seen, []
    if _contents(outside) != before:
        seen.append("something outside was changed")
    if canary(folder).exists():
        seen.append("the canary: code was executed")
    return {"name": attack.name, "stop": attack.stop, "outcomes": outcomes, "cpu_s": seconds, "seen": seen}


def _contents(place: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(place.rglob("*")) if path.is_file()}


def limit_memory() -> None:
    """Limit this process to MEMORY_BYTES more than it has."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def main(names: list[str]) -> None:
    """Run the attacks with these names, or all."""
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    "\x01".encode("unicode_escape")  # a module of its own
    with tempfile.TemporaryDirectory() as warm:
        make_good(Path(warm) / "a")  # import now what would be imported late
        for use in USES.values():
            use(Path(warm) / "a") if use is not use_load_bytes else None
    if Path("/proc/self/statm").exists():
        limit_memory()
    watch = Watch()
    for attack in ATTACKS:
        if attack.name not in names and (names or attack.gap):
            continue
        place = Path(tempfile.mkdtemp())
        try:
            print(json.dumps(try_attack(attack, place, watch)), flush=True)
        finally:
            shutil.rmtree(place)


if __name__ == "__main__":
    main(sys.argv[1:])
