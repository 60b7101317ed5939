"""Checkpoints of DeepSpeed: the parts of ZeRO, whose ranks hold runs of flattened parameters, and universal folders.

A part of ZeRO holds, for each group of parameters, one flat tensor: all parameters one behind the other, of which the
rank has a run (stages 1 and 2), or the rank's run of each parameter, one behind the other (stage 3). A run of a
flattened parameter is a few boxes of it, and each lies in one piece in the file.
"""

import contextlib
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import xxhash

from milepost.core.box import Shape, boxes_of_run
from milepost.core.dtypes import DTYPES
from milepost.core.limits import KIB, MAX_DIMS
from milepost.data.read import read_small
from milepost.errors import CheckpointDamaged, CheckpointError, UnsupportedFormat
from milepost.formats.read.archive import Archive, Window
from milepost.formats.read.content import Strided, order_of, read_content
from milepost.formats.read.names import DEEPSPEED, is_deepspeed
from milepost.formats.read.spots import BackingStorage, Spot, spot_of
from milepost.formats.read.torchfile import placed_in
from milepost.formats.read.virtual import (
    Allowance,
    FileBox,
    ForeignState,
    PlacedTensor,
    StoredArchive,
    TensorReplacer,
    check_total,
)
from milepost.store import Store

_LATEST = ("latest", "latest_universal")
_STEP = re.compile(r"[\w.-]*[\w-][\w.-]*")
_MAX_NAMES = 1_000_000
_OPTIMIZER = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_([0-9]{1,6})_mp_rank_([0-9]{1,6})_optim_states\.pt")
_UNIVERSAL = "zero/"
_INTERNAL = {"module", "optimizer", "param_shapes", "frozen_param_shapes", "frozen_param_fragments", "shared_params"}
_PARTS = ("model_states.pt", "optim_states.pt")
_CONVERT = "DeepSpeed's own ds_to_universal makes a universal folder of it, which Milepost reads."
_BY_HAND = "Load it with DeepSpeed, and save the state of the module with Milepost."


def read_deepspeed(store: Store, names: set[str]) -> ForeignState | None:
    """The state that DeepSpeed saved: `module` in full precision, `optimizer` by name, and what the user added.

    `names`: those at the top of the folder, of one step, or of a run, in which `latest` names the step. None for other
    folders. Raises UnsupportedFormat for model parallelism, CheckpointDamaged for parts that do not fit together.
    """
    prefix = "" if is_deepspeed(names) else _latest(store, names)
    if prefix is None:
        return None
    inside = {name.removeprefix(prefix) for name in islice(store.list(prefix, shallow=True), _MAX_NAMES)}
    if _UNIVERSAL in inside:
        inside |= {name.removeprefix(prefix) for name in islice(store.list(prefix + _UNIVERSAL), _MAX_NAMES)}
    if not is_deepspeed(inside):
        return None
    folder = _Folder(store, prefix, inside)
    with contextlib.closing(folder):
        try:
            return folder.read()
        except CheckpointError:
            raise
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            shown = f"{type(error).__name__}: {str(error)[:200]}"
            raise UnsupportedFormat(
                f"{folder.where} is not laid out as DeepSpeed's checkpoints are ({shown})"
            ) from None


def _latest(store: Store, names: set[str]) -> str | None:
    """The folder of the newest step of a run, with a slash, or None."""
    pointer = next((name for name in _LATEST if name in names), None)
    if pointer is None:
        return None
    step = read_small(store.reader(pointer), f"{store.url}/{pointer}", 4 * KIB).decode(errors="replace").strip()
    return f"{step}/" if _STEP.fullmatch(step) else None


@dataclass(frozen=True, slots=True)
class _Run:
    """Elements of a flat tensor of a file: where they begin in it, and how many there are."""

    file: int
    spot: Spot
    dtype: str
    elements: int


class _Folder:
    """One step of DeepSpeed: its files are opened once, read, and noted with their sizes."""

    def __init__(self, store: Store, prefix: str, names: set[str]) -> None:
        self._store, self._prefix, self._names = store, prefix, names
        self._files: list[tuple[str, int]] = []
        self._archives: list[Archive] = []
        self._open_files = contextlib.ExitStack()
        self._seen: dict[int, tuple[Strided, PlacedTensor]] = {}
        self._allowance = Allowance()
        self._hasher = xxhash.xxh3_64()
        self.where = f"{store.url}/{prefix}".rstrip("/")

    def read(self) -> ForeignState:
        """The whole state."""
        models = sorted((int(m[2]), int(m[1] or 0), n) for n in self._names if (m := DEEPSPEED.fullmatch(n)))
        self._refuse_parallel({number for number, _, _ in models})
        opened = [self._open(name) for _, _, name in models]
        if not all(isinstance(content, dict) and isinstance(content.get("module"), dict) for content in opened):
            raise UnsupportedFormat(
                f"{self.where}/{models[0][2]} does not hold the states of a module as DeepSpeed's do"
            )
        first: dict[str, Any] = opened[0]
        rest = {name: self.placed(0, value) for name, value in first.items() if name not in _INTERNAL}
        module = {name: self.placed(0, value) for name, value in first["module"].items()}
        optimizer = self._universal() if self._is_universal else self._zero(opened)
        if optimizer is not None:
            module |= {name: kept.pop("fp32") for name, kept in optimizer["state"].items()}
            module |= _whole_frozen(self, opened)
            module |= {name: module[one] for name, one in (first.get("shared_params") or {}).items() if one in module}
        empty = [name for name, value in module.items() if isinstance(value, PlacedTensor) and value.shape == (0,)]
        if empty and (optimizer is not None or _are_shapes(first.get("param_shapes"))):
            raise CheckpointDamaged(f"{self.where}: the parts of {empty[:5]} are in no file")
        if optimizer is None:  # without ZeRO, the optimizer stands beside the module
            optimizer = self.placed(0, first.get("optimizer"))
        state = {"module": module, **({"optimizer": optimizer} if optimizer is not None else {}), **rest}
        self._check_size(state)
        rescue = StoredArchive(self._store, self._prefix + models[0][2]).rescue
        world = max(len(models), int(first.get("dp_world_size") or 1) if type(first.get("dp_world_size")) is int else 1)
        return ForeignState(
            "deepspeed", self._hasher.digest(), state, tuple(self._files), world, {}, rescue, self._store.reader
        )

    @property
    def _is_universal(self) -> bool:
        return any(name.startswith(_UNIVERSAL) for name in self._names)

    def _refuse_parallel(self, numbers: set[int]) -> None:
        """Raise UnsupportedFormat where the module is more than the files of data-parallel ranks hold."""
        advice = _BY_HAND if self._is_universal else _CONVERT
        if len(numbers) > 1:
            raise UnsupportedFormat(f"{self.where} was saved with tensor or pipeline parallelism. {advice}")
        other = sorted(
            name
            for name in self._names
            if "/" not in name
            and name.endswith(_PARTS)
            and not (DEEPSPEED.fullmatch(name) or _OPTIMIZER.fullmatch(name))
        )
        if other:
            raise UnsupportedFormat(
                f"{self.where} has {len(other)} files of layers or experts, first {other[0][:200]!r}, without which "
                f"the module is not whole, and which are not read. {_BY_HAND}"
            )

    def _check_size(self, state: dict[str, Any]) -> None:
        """Refuse tensors that are far larger than the files: those of the files, and those made up of runs."""
        made = [value for value in state["module"].values() if isinstance(value, PlacedTensor)]
        kept = state.get("optimizer")
        for moments in kept["state"].values() if isinstance(kept, dict) and isinstance(kept.get("state"), dict) else ():
            if isinstance(moments, dict):
                made += [value for value in moments.values() if isinstance(value, PlacedTensor)]
        tensors = {id(tensor): tensor for tensor in [*made, *(tensor for _, tensor in self._seen.values())]}
        check_total(self.where, tensors.values(), sum(size for _, size in self._files))

    def close(self) -> None:
        """Close the files that were looked into."""
        self._open_files.close()

    def _open(self, name: str) -> Any:
        """The content of a file of `torch.save`, which gets the next number."""
        what = f"{self.where}/{name}"
        try:
            reader = self._store.reader(self._prefix + name)
        except FileNotFoundError:
            raise CheckpointDamaged(f"{what} is missing") from None
        self._open_files.callback(reader.close)
        archive = Archive(Window(reader, self._store), 0, reader.size_bytes, what)
        content = read_content(archive, what)
        self._files.append((self._prefix + name, reader.size_bytes))
        self._archives.append(archive)
        self._allowance.grow(archive.records[f"{archive.prefix}data.pkl"].size_bytes)
        self._hasher.update(repr((name, sorted(archive.records.items()))).encode())
        return content

    def placed(self, file: int, value: Any) -> Any:
        """A value of a file with the places of its tensors."""
        what = f"{self._store.url}/{self._files[file][0]}"
        replacer = TensorReplacer(
            what, self._allowance, lambda v: placed_in(self._archives[file], v, file, what, self._seen)
        )
        return replacer.walk(value)

    def run(self, file: int, value: Any, what: str) -> _Run:
        """A flat tensor of a file."""
        if not isinstance(value, Strided) or len(value.shape) != 1 or order_of(value) is None:
            raise UnsupportedFormat(f"{self.where}: {what} is not a flat tensor, as ZeRO saves it")
        spot = spot_of(self._archives[file], value, f"{self._store.url}/{self._files[file][0]}")
        size = value.storage.elements * DTYPES[value.storage.dtype].size_bytes
        start = spot.at - value.offset * DTYPES[value.dtype].size_bytes
        storage = spot.storage or BackingStorage(start, size, spot.crc)
        return _Run(file, Spot(spot.at, storage=storage), value.dtype, value.shape[0])

    # ------------------------------------------------------------ ZeRO

    def _zero(self, models: list[Any]) -> dict[str, Any] | None:
        parts = sorted((int(m[1]), n) for n in self._names if (m := _OPTIMIZER.fullmatch(n)))
        shapes = models[0].get("param_shapes")
        if not parts:
            return None
        if not _are_shapes(shapes):
            raise UnsupportedFormat(f"{self.where} does not say the shapes of its parameters. {_CONVERT}")
        if [rank for rank, _ in parts] != list(range(len(parts))):
            raise CheckpointDamaged(f"{self.where} lacks parts of ZeRO: it has those of ranks {[r for r, _ in parts]}")
        before = len(self._files)
        saved = [self._open(name) for _, name in parts]
        states: list[Any] = [part.get("optimizer_state_dict") if isinstance(part, dict) else None for part in saved]
        if not all(isinstance(state, dict) for state in states):
            raise UnsupportedFormat(f"{self.where}/{parts[0][1]} holds no optimizer as ZeRO saves it")
        count = states[0].get("partition_count")
        count = count[0] if isinstance(count, list) and count else count
        if count != len(parts):
            raise CheckpointDamaged(f"{self.where} was saved by {count} ranks, and has the parts of {len(parts)}")
        stage_3 = "fp32_flat_groups" in states[0]
        return (_stage_3 if stage_3 else _stage_1)(self, before, states, shapes)

    # ------------------------------------------------------------ universal folders

    def _universal(self) -> dict[str, Any]:
        """A folder for each parameter, with a file for its values and one for each moment."""
        state: dict[str, dict[str, Any]] = {}
        for name in sorted(n for n in self._names if n.startswith(_UNIVERSAL) and n.endswith(".pt")):
            parameter, _, kind = name.removeprefix(_UNIVERSAL).removesuffix(".pt").rpartition("/")
            if not parameter:  # the settings of the optimizer
                continue
            content, file = self._open(name), len(self._files) - 1
            value = content.get("param") if isinstance(content, dict) else content
            state.setdefault(parameter, {})[kind] = self.placed(file, value)
            self.close()  # there may be more files than a process may have open
        lacking = [name for name, kept in state.items() if not isinstance(kept.get("fp32"), PlacedTensor)]
        if lacking:
            raise CheckpointDamaged(f"{self.where}/{_UNIVERSAL}{lacking[0]} has no fp32.pt")
        return {"state": state}


def _stage_1(folder: _Folder, before: int, states: list[Any], shapes: list[Any]) -> dict[str, Any]:
    """Stages 1 and 2: all parameters of a group one behind the other, cut into one run for each rank."""
    base = [state.get("base_optimizer_state") for state in states]
    if any(not isinstance(one, dict) or not isinstance(one.get("state"), dict) for one in base):
        raise UnsupportedFormat(f"{folder.where} has an optimizer of a kind that is not read. {_CONVERT}")
    result: dict[str, dict[str, Any]] = {}
    for group, parameters in enumerate(shapes):
        if any(_has_gaps(state, group) for state in states):
            raise UnsupportedFormat(f"{folder.where} has gaps between its parameters. {_CONVERT}")
        masters = [
            folder.run(before + rank, _at(state, "single_partition_of_fp32_groups", group), "a partition")
            for rank, state in enumerate(states)
        ]
        _check_masters(folder.where, masters, sum(map(math.prod, parameters.values())))
        runs = {"fp32": masters}
        moments = [one["state"].get(group, {}) for one in base]
        for name in _moments(moments):
            moment = [folder.run(before + rank, one[name], name) for rank, one in enumerate(moments)]
            # Masters are saved without the padding at the end, moments with it.
            if any(one.elements < kept.elements for one, kept in zip(moment, masters, strict=True)):
                raise CheckpointDamaged(f"{folder.where}: {name[:200]!r} is shorter than the parameters it belongs to")
            runs[name] = [replace(one, elements=kept.elements) for one, kept in zip(moment, masters, strict=True)]
        offset = 0
        for parameter, shape in parameters.items():
            size = math.prod(shape)
            result[parameter] = {
                name: _tensor(tuple(shape), _cuts(found, offset, size), folder.where, parameter)
                for name, found in runs.items()
            } | _scalars(folder, before, moments[0])
            offset += size
    return {"state": result, "param_groups": folder.placed(before, _groups(base[0], shapes))}


def _check_masters(where: str, masters: list[_Run], elements: int) -> None:
    """Raise CheckpointDamaged unless ranks have equal runs, one behind the other, and padding only at the end."""
    sizes = [run.elements for run in masters]
    last = max((rank for rank, size in enumerate(sizes) if size), default=0)
    align = 2 * len(sizes)
    if any(size != sizes[0] for size in sizes[:last]) or sizes[last] > sizes[0] or sum(sizes) - elements >= align:
        raise CheckpointDamaged(
            f"{where}: the ranks have {sizes[:20]} elements of a group of parameters, which has {elements}. Are these "
            "the files of one save?"
        )


def _stage_3(folder: _Folder, before: int, states: list[Any], shapes: list[Any]) -> dict[str, Any]:
    """Stage 3: each rank has its run of each parameter; the runs of all groups stand one behind the other."""
    base = [state.get("optimizer_state_dict") for state in states]
    if any(not isinstance(one, dict) or not isinstance(one.get("state"), dict) for one in base):
        raise UnsupportedFormat(f"{folder.where} has an optimizer of a kind that is not read. {_CONVERT}")
    kept = [one["state"] for one in base]
    flat: dict[str, list[list[_Run]]] = {"fp32": []}
    for rank, state in enumerate(states):
        flat["fp32"].append([folder.run(before + rank, value, "a partition") for value in state["fp32_flat_groups"]])
        for name in _moments([kept[rank].get(0, {})]):
            groups = [folder.run(before + rank, kept[rank][n][name], name) for n in range(len(kept[rank]))]
            flat.setdefault(name, []).append(groups)
    result: dict[str, dict[str, Any]] = {}
    world, offset = len(states), 0
    for parameters in shapes:
        for parameter, shape in parameters.items():
            size, part = math.prod(shape), -(-math.prod(shape) // world)
            found: dict[str, Any] = {}
            for name, ranks in flat.items():
                cuts = [
                    cut
                    for rank, runs in enumerate(ranks)
                    for cut in _cuts(runs, offset, max(min(part, size - rank * part), 0))
                ]
                found[name] = _tensor(tuple(shape), cuts, folder.where, parameter)
            result[parameter] = found | _scalars(folder, before, kept[0].get(0, {}))
            offset += part
    return {"state": result, "param_groups": folder.placed(before, _groups(base[0], shapes))}


def _whole_frozen(folder: _Folder, models: list[Any]) -> dict[str, PlacedTensor]:
    """Parameters that were not trained: with stage 3, each rank has its run of each of them, else all have them."""
    shapes, result = models[0].get("frozen_param_shapes"), {}
    for parameter, shape in shapes.items() if _are_shapes([shapes]) else ():
        there = models[0]["module"].get(parameter)
        if isinstance(there, Strided) and there.shape == tuple(shape):
            continue
        size, part = math.prod(shape), -(-math.prod(shape) // len(models))
        cuts = []
        for rank, model in enumerate(models):
            fragment = (model.get("frozen_param_fragments") or {}).get(parameter)
            run = folder.run(rank, fragment, "a frozen parameter") if fragment is not None else None
            cuts += list(_cuts([run], 0, max(min(part, size - rank * part), 0))) if run is not None else []
        if cuts:
            result[parameter] = _tensor(tuple(shape), cuts, folder.where, parameter)
    return result


def _cuts(runs: Sequence[_Run], offset: int, elements: int) -> Iterator[_Run]:
    """Elements offset..offset+elements of several flat tensors, one behind the other."""
    for run in runs:
        low, high = max(offset, 0), min(offset + elements, run.elements)
        if low < high:
            size = DTYPES[run.dtype].size_bytes
            yield _Run(run.file, Spot(run.spot.at + low * size, storage=run.spot.storage), run.dtype, high - low)
        offset -= run.elements


def _tensor(shape: Shape, cuts: Any, where: str, parameter: str) -> PlacedTensor:
    """The parameter that consecutive runs of its elements make up."""
    pieces, start, dtype = [], 0, ""
    for cut in cuts:
        if dtype and cut.dtype != dtype:
            raise CheckpointDamaged(f"{where}: the parts of {parameter[:200]!r} are {dtype} and {cut.dtype}")
        at, dtype = cut.spot.at, cut.dtype
        if start + cut.elements > math.prod(shape):
            raise CheckpointDamaged(f"{where}: the parts of {parameter[:200]!r} are larger than its shape {shape}")
        for box in boxes_of_run(shape, start, start + cut.elements):
            pieces.append(FileBox(box, cut.file, Spot(at, storage=cut.spot.storage)))
            at += box.elements * DTYPES[dtype].size_bytes
        start += cut.elements
    if start != math.prod(shape):
        raise CheckpointDamaged(f"{where}: {start} of {math.prod(shape)} elements of {parameter[:200]!r} are there")
    return PlacedTensor(dtype or "float32", shape, tuple(pieces))


def _are_shapes(shapes: Any) -> bool:
    def right(shape: Any) -> bool:
        sizes = isinstance(shape, tuple) and len(shape) <= MAX_DIMS and all(type(n) is int and n >= 0 for n in shape)
        return sizes and math.prod(shape) < 2**60

    return isinstance(shapes, list) and all(isinstance(g, dict) and all(map(right, g.values())) for g in shapes)


def _at(state: Any, name: str, group: int) -> Any:
    found = state.get(name)
    return found[group] if isinstance(found, list) and group < len(found) else None


def _has_gaps(state: Any, group: int) -> bool:
    gaps = _at(state, "param_alignment_paddings", group)
    return isinstance(gaps, list) and any(gaps)


def _moments(kept: list[Any]) -> list[str]:
    """The names of the flat tensors that an optimizer keeps for a group."""
    first = kept[0] if isinstance(kept[0], dict) else {}
    return [n for n, v in first.items() if isinstance(v, Strided) and len(v.shape) == 1 and all(n in k for k in kept)]


def _scalars(folder: _Folder, file: int, kept: Any) -> dict[str, Any]:
    """What an optimizer keeps for a whole group: the number of its steps."""
    known = {n: v for n, v in kept.items() if not isinstance(v, Strided) or not v.shape}
    found: dict[str, Any] = folder.placed(file, known)
    return found


def _groups(base: Any, shapes: list[Any]) -> list[Any]:
    """The groups of the optimizer, with the names of their parameters."""
    groups = base.get("param_groups")
    if not isinstance(groups, list) or len(groups) != len(shapes) or not all(isinstance(g, dict) for g in groups):
        return [{"params": list(names)} for names in shapes]
    return [{**group, "params": list(names)} for group, names in zip(groups, shapes, strict=True)]
