"""Attacks on readers of other formats: DCP, DeepSpeed and Hugging Face folders, and files of torch.save."""

import io
import json
import os
import pickle
import struct
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from attacks.forge import BIAS, WEIGHT, Attack, Corpus
from attacks.on_values import canary

corpus = Corpus()


class Call:
    """An object whose pickle calls a given function."""

    def __init__(self, function: Any, *args: Any, state: Any = None) -> None:
        self._reduced = (function, args) if state is None else (function, args, state)

    def __reduce__(self) -> Any:
        return self._reduced


def good_state() -> dict[str, Any]:
    """The state of `forge.good_state`, as other libraries would hold it."""
    mine = {rank: {"seed": rank, "noise": torch.full((5,), float(rank))} for rank in range(2)}
    return {"model": {"weight": WEIGHT, "bias": BIAS}, "step": 7, "names": ["a", ("b", 3)], "mine": mine}


def make_dcp(folder: Path) -> None:
    """Save the good state with DCP."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(good_state(), checkpoint_id=folder)


def forge_dcp(folder: Path, change: Callable[[Any], Any]) -> None:
    """Save the good state with DCP, and change the metadata."""
    make_dcp(folder)
    path = folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    change(metadata)
    path.write_bytes(pickle.dumps(metadata))


def forge_pickle(folder: Path, data: bytes) -> None:
    """Save the good state with DCP, and replace the metadata by these bytes."""
    make_dcp(folder)
    (folder / ".metadata").write_bytes(data)


def make_torch(path: Path, content: bytes | None = None, **evil: Any) -> None:
    """Save the good state with torch.save; `content` replaces the pickle."""
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(good_state() | evil, path)
    if content is not None:
        replace_pickle(path, content)


def replace_pickle(path: Path, content: bytes) -> None:
    """Write the archive again with another pickle."""
    with zipfile.ZipFile(io.BytesIO(path.read_bytes())) as old, zipfile.ZipFile(path, "w") as new:
        for info in old.infolist():
            data = content if info.filename.endswith("/data.pkl") else old.read(info)
            new.writestr(info.filename, data)


def text_call(module: str, name: str, argument: str) -> bytes:
    """A pickle that calls a function with one text argument."""
    raw = argument.encode()
    return f"c{module}\n{name}\n".encode() + b"X" + struct.pack("<I", len(raw)) + raw + b"\x85R"


CALLS: dict[str, Callable[[str], bytes]] = {
    "os_system": lambda c: text_call("posix", "system", f"touch {c}"),
    "eval": lambda c: text_call("builtins", "eval", f"open({c!r}, 'w')"),
    "exec": lambda c: text_call("builtins", "exec", f"open({c!r}, 'w')"),
    "old_eval": lambda c: text_call("__builtin__", "eval", f"open({c!r}, 'w')"),
    "import_module": lambda _: text_call("importlib", "import_module", "antigravity"),
    "popen": lambda c: text_call("subprocess", "getoutput", f"touch {c}"),
    "operator": lambda _: text_call("operator", "attrgetter", "system"),
    "partial": lambda _: b"cfunctools\npartial\ncposix\nsystem\n\x85R(X\1\0\0\0atR",
    "torch_load": lambda c: text_call("torch.serialization", "load", c),
    "load_from_bytes": lambda _: b"ctorch.storage\n_load_from_bytes\nC\x01a\x85R",
    "jit": lambda c: text_call("torch.jit._serialization", "load", c),
    "getattr": lambda _: b"cbuiltins\ngetattr\ncposix\n__dict__\nX\x06\0\0\0system\x86R",
    "dotted_name": lambda c: text_call("torch", "os.system", f"touch {c}"),
    "hub": lambda c: text_call("torch.hub", "load", c),
    "pickle_loads": lambda _: b"c_pickle\nloads\nC\x01a\x85R",
    "our_own": lambda c: text_call("milepost.formats.read.virtual", "unpickled", c),
    "from_type_gadget": lambda c: (
        b"ctorch._tensor\n_rebuild_from_type_v2\n(cposix\nsystem\nctorch\nTensor\nX"
        + struct.pack("<I", len(f"touch {c}")) + f"touch {c}".encode() + b"\x85}tR"
    ),
}  # fmt: skip
"""Pieces of a pickle that leave one object on the stack. An unrestricted unpickler runs code for each."""


def _add_calls(name: str, piece: Callable[[str], bytes]) -> None:
    def in_metadata(folder: Path) -> None:
        forge_pickle(folder, b"\x80\2" + piece(str(canary(folder))) + b".")

    def as_a_field(folder: Path) -> None:
        make_dcp(folder)
        data = (folder / ".metadata").read_bytes()
        # Pushed and dropped before the real metadata: only the unpickler itself sees it.
        (folder / ".metadata").write_bytes(b"\x80\4" + piece(str(canary(folder))) + b"0" + data)

    def in_a_file(folder: Path) -> None:
        make_torch(folder)
        with zipfile.ZipFile(folder) as archive:
            data = archive.read(next(name for name in archive.namelist() if name.endswith("/data.pkl")))
        replace_pickle(folder, data[:-1] + b"X\4\0\0\0evil" + piece(str(canary(folder))) + b"s.")

    corpus.append(
        Attack(f"dcp_metadata_is_{name}", "The metadata is a pickle that calls a function.", "open", in_metadata)
    )
    corpus.append(Attack(f"dcp_metadata_drops_{name}", "The same in front of good metadata.", "open", as_a_field))
    corpus.append(Attack(f"torch_file_calls_{name}", "A value of the state is a call.", "use", in_a_file))


for _name, _piece in CALLS.items():
    _add_calls(_name, _piece)

LAUGHS = b"]q\0" + b"".join(b"](h%bh%beq%b" % (bytes([i]), bytes([i]), bytes([i + 1])) for i in range(60))
BOMBS: dict[str, bytes] = {
    "memo_of_4_gib": b"\x80\2Nr\xff\xff\xff\xff.",
    "bytes_of_an_exabyte": b"\x80\4\x8e" + struct.pack("<Q", 1 << 60) + b"abc.",
    "text_of_an_exabyte": b"\x80\4\x8d" + struct.pack("<Q", 1 << 60) + b"abc.",
    "frame_of_an_exabyte": b"\x80\4\x95" + struct.pack("<Q", 1 << 60) + b"N.",
    "huge_integer": b"\x80\2\x8b" + struct.pack("<I", 1 << 20) + b"\x7f" * (1 << 20) + b".",
    "laughs": b"\x80\2" + LAUGHS + b".",
    "list_in_itself": b"\x80\2]q\0h\0a.",
    "nested_lists": b"\x80\2" + b"]" * 100_000 + b"a" * 99_999 + b".",
    "nested_tuples_as_a_key": b"\x80\2}Nq\0" + b"".join(b"h\0h\0\x86q\0" for _ in range(100)) + b"Ns.",
    "nested_tuples_in_a_set": b"\x80\4\x8f(Nq\0" + b"".join(b"h\0h\0\x86q\0" for _ in range(100)) + b"\x90.",
    "no_stop": b"\x80\2N",
    "empty": b"",
    "stack_underflow": b"\x80\2R.",
    "no_mark": b"\x80\2t.",
    "pops_everything": b"\x80\2000000.",
    "persistent": b"\x80\2X\1\0\0\0aQ.",
    "extension_code": b"\x80\2\x82\x01.",
    "inst": b"(S'a'\niposix\nsystem\n.",
    "setstate_of_a_dict": b"\x80\2}}X\7\0\0\0__class__Nsb.",
    "setstate_of_a_text": b"\x80\2X\1\0\0\0a}b.",
    "call_of_a_dict": b"\x80\2})R.",
    "no_text_as_name": b"\x80\4KaKb\x93.",
    "buffers": b"\x80\5\x97.",
}


def _add_bomb(name: str, data: bytes) -> None:
    def in_metadata(folder: Path) -> None:
        forge_pickle(folder, data)

    corpus.append(
        Attack(f"dcp_metadata_{name}", "The metadata is a pickle that exhausts or confuses.", "open", in_metadata)
    )
    if name in ("memo_of_4_gib", "frame_of_an_exabyte", "list_in_itself", "nested_lists", "call_of_a_dict"):
        return  # harmless in a file, or tried below

    def in_a_file(folder: Path) -> None:
        make_torch(folder, data)

    corpus.append(Attack(f"torch_file_{name}", "The pickle of a file exhausts or confuses.", "open", in_a_file))


for _name, _data in BOMBS.items():
    _add_bomb(_name, _data)


@corpus.attack("open")
def torch_file_list_in_itself(folder: Path) -> None:
    """A list that contains itself never ends."""
    make_torch(folder, b"\x80\2}X\1\0\0\0a]q\0h\0as.")


@corpus.attack("open")
def torch_file_dict_in_itself(folder: Path) -> None:
    """The same for a dict."""
    make_torch(folder, b"\x80\2}q\0X\1\0\0\0ah\0s.")


@corpus.attack("open")
def torch_file_nested_dicts(folder: Path) -> None:
    """Dicts in dicts, deeper than any stack."""
    make_torch(folder, b"\x80\2" + b"}X\1\0\0\0a" * 100_000 + b"N" + b"s" * 100_000 + b".")


def _tensor_pickle(key: str, elements: int, offset: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> bytes:
    class Storage:
        pass

    buffer = io.BytesIO()
    pickler = pickle.Pickler(buffer, 2)
    storage = Storage()
    pickler.persistent_id = (  # type: ignore[method-assign]
        lambda x: ("storage", torch.FloatStorage, key, "cpu", elements) if x is storage else None
    )
    hooks: dict[str, Any] = {}
    call = Call(torch._utils._rebuild_tensor_v2, storage, offset, shape, strides, False, hooks)  # noqa: SLF001
    pickler.dump({"w": call})
    return buffer.getvalue()


for _name, _args in {
    "beyond_its_storage": ("0", 2048, 0, (4096, 32), (32, 1)),
    "before_its_storage": ("0", 2048, -1, (64, 32), (32, 1)),
    "of_negative_size": ("0", 2048, 0, (-64, 32), (32, 1)),
    "of_negative_strides": ("0", 2048, 2047, (64, 32), (-32, -1)),
    "of_absurd_size": ("0", 2048, 0, (1 << 40, 1 << 40), (0, 0)),
    "of_a_million_copies": ("0", 2048, 0, (1 << 20, 1 << 20), (0, 0)),
    "of_a_storage_that_is_not_there": ("99", 2048, 0, (64, 32), (32, 1)),
    "of_a_storage_elsewhere": ("../data.pkl", 2048, 0, (64, 32), (32, 1)),
    "of_a_storage_that_is_larger": ("0", 1 << 40, 0, (64, 32), (32, 1)),
}.items():

    def _make(folder: Path, args: Any = _args) -> None:
        make_torch(folder, _tensor_pickle(*args))

    corpus.append(Attack(f"torch_file_tensor_{_name}", "A tensor that is not where it says.", "open", _make))


def _forge_storage(**fields: Any) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        def change(metadata: Any) -> None:
            for index, info in metadata.storage_data.items():
                if index.fqn == "model.weight":
                    info.__dict__.update(fields)

        forge_dcp(folder, change)
        (folder.parent / "outside").mkdir(exist_ok=True)
        (folder.parent / "outside" / "x.distcp").write_bytes((folder / "__0_0.distcp").read_bytes())

    return make


for _name, _fields in {
    "path_up": {"relative_path": "../outside/x.distcp"},
    "path_absolute": {"relative_path": "/etc/passwd"},
    "path_backslash": {"relative_path": "..\\x.distcp"},
    "path_nul": {"relative_path": "a\0b"},
    "path_no_text": {"relative_path": 7},
    "offset_negative": {"offset": -1},
    "offset_text": {"offset": "0"},
    "length_absurd": {"offset": 0, "length": 1 << 61},
    "length_overflows": {"length": 1 << 64},
    "items_overlap": {"offset": 5},
}.items():
    corpus.append(
        Attack(f"dcp_{_name}", "An item that is not in the folder, or not possible.", "open", _forge_storage(**_fields))
    )


@corpus.attack("open")
def dcp_metadata_is_a_link(folder: Path) -> None:
    """The metadata is a link to a file outside."""
    make_dcp(folder)
    outside = folder.parent / "outside"
    outside.mkdir()
    (folder / ".metadata").rename(outside / "metadata")
    (folder / ".metadata").symlink_to(outside / "metadata")


@corpus.attack("open")
def dcp_metadata_is_a_pipe(folder: Path) -> None:
    """The metadata is a pipe. Opening it would block."""
    make_dcp(folder)
    (folder / ".metadata").unlink()
    os.mkfifo(folder / ".metadata")


@corpus.attack("open")
def dcp_data_is_a_link(folder: Path) -> None:
    """A data file is a link to a file outside."""
    make_dcp(folder)
    outside = folder.parent / "outside"
    outside.mkdir()
    (folder / "__0_0.distcp").rename(outside / "x")
    (folder / "__0_0.distcp").symlink_to(outside / "x")


@corpus.attack("open")
def dcp_tensor_of_absurd_shape(folder: Path) -> None:
    """A tensor that is larger than any memory."""

    def change(metadata: Any) -> None:
        metadata.state_dict_metadata["model.weight"].size = torch.Size([1 << 40, 1 << 20])

    forge_dcp(folder, change)


@corpus.attack("open")
def dcp_path_through_a_tensor(folder: Path) -> None:
    """A key below a tensor in the tree."""

    def change(metadata: Any) -> None:
        metadata.planner_data["step"] = ("model", "weight", "step")

    forge_dcp(folder, change)


@corpus.attack("open")
def dcp_paths_without_end(folder: Path) -> None:
    """A key that is nested deeper than any stack."""

    def change(metadata: Any) -> None:
        metadata.planner_data["step"] = ("a",) * 100_000

    forge_dcp(folder, change)


@corpus.attack("use")
def dcp_value_calls_os_system(folder: Path) -> None:
    """A value is a separate pickle. This one calls a function."""
    canary_call = Call(os.system, f"touch {canary(folder)}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(good_state() | {"evil": canary_call}, checkpoint_id=folder)


# DeepSpeed


def make_deepspeed(folder: Path, elements: int = 12, change: Callable[[Any, list[Any]], Any] | None = None) -> None:
    """One step of stage 1, by two ranks. `change` changes what the files hold: the model, and the two parts."""
    folder.mkdir(parents=True)
    weight = torch.arange(2.0 * elements)
    model = {"module": {"w": weight.bfloat16()}, "param_shapes": [{"w": weight.shape}], "dp_world_size": 2}
    parts = []
    for rank in range(2):
        mine = weight[rank * elements : (rank + 1) * elements].clone()
        base = {"state": {0: {"step": 3, "exp_avg": mine.clone()}}, "param_groups": [{"lr": 0.1}]}
        saved = {"base_optimizer_state": base, "single_partition_of_fp32_groups": [mine], "partition_count": 2}
        parts.append({"optimizer_state_dict": saved})
    if change is not None:
        change(model, parts)
    torch.save(model, folder / "mp_rank_00_model_states.pt")
    for rank, part in enumerate(parts):
        torch.save(part, folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")


def masters(part: Any) -> list[Any]:
    """The parameters in a part of ZeRO."""
    found: list[Any] = part["optimizer_state_dict"]["single_partition_of_fp32_groups"]
    return found


def moments(part: Any) -> dict[str, Any]:
    """The moments in a part of ZeRO."""
    found: dict[str, Any] = part["optimizer_state_dict"]["base_optimizer_state"]["state"][0]
    return found


def _share_one_moment(_model: Any, parts: list[Any]) -> None:
    for part in parts:
        moments(part).update({f"m{i}": moments(part)["exp_avg"] for i in range(400)})


for _name, _why, _change in (
    ("moment_short", "Reading it would go on into what lies behind it.",
     lambda _, parts: moments(parts[0]).update(exp_avg=torch.ones(3))),
    ("parts_shifted", "A rank has more than its share: all that follows would be shifted.",
     lambda _, parts: masters(parts[0]).insert(0, torch.ones(16))),
    ("parts_of_two_types", "Elements of one type, read as another.",
     lambda _, parts: masters(parts[0]).insert(0, torch.ones(12, dtype=torch.float64))),
    ("moment_expanded", "One number that stands for as many as wanted.",
     lambda _, parts: moments(parts[0]).update(exp_avg=torch.zeros(1).expand(12))),
    ("shape_absurd", "A parameter that is larger than any memory.",
     lambda model, _: model.update(param_shapes=[{"w": torch.Size([1 << 40, 1 << 19])}])),
    ("shape_negative", "A parameter of a negative size.",
     lambda model, _: model.update(param_shapes=[{"w": (-24,)}])),
    ("count_of_ranks", "The parts say that there are more of them.",
     lambda _, parts: parts[0]["optimizer_state_dict"].update(partition_count=3)),
):  # fmt: skip
    corpus.append(Attack(f"deepspeed_{_name}", _why, "open", lambda f, change=_change: make_deepspeed(f, 12, change)))


@corpus.attack("open")
def deepspeed_moments_share_memory(folder: Path) -> None:
    """Hundreds of moments in the memory of one: as a state, they are far larger than the files."""
    make_deepspeed(folder, 1 << 20, _share_one_moment)


@corpus.attack("open")
def deepspeed_experts(folder: Path) -> None:
    """Experts lie in files of their own. Without them the module is not whole."""
    make_deepspeed(folder)
    torch.save({"w": torch.ones(3)}, folder / "layer_0_expert_0_mp_rank_00_model_states.pt")


@corpus.attack("open")
def deepspeed_latest_is_outside(folder: Path) -> None:
    """The file that names the newest step names a folder outside."""
    make_deepspeed(folder.parent / "outside" / "step")
    folder.mkdir()
    (folder / "latest").write_text("../outside/step")


@corpus.attack("open")
def deepspeed_part_is_a_pipe(folder: Path) -> None:
    """A part is a pipe. Opening it would block."""
    make_deepspeed(folder)
    (folder / "zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    os.mkfifo(folder / "zero_pp_rank_1_mp_rank_00_optim_states.pt")


@corpus.attack("open")
def deepspeed_part_is_a_call(folder: Path) -> None:
    """A part is a pickle that calls a function."""
    make_deepspeed(folder)
    call = b"\x80\2" + CALLS["os_system"](str(canary(folder))) + b"."
    replace_pickle(folder / "zero_pp_rank_0_mp_rank_00_optim_states.pt", call)


# Hugging Face


def make_hf(folder: Path, index: str | None = None, **notes: str) -> None:
    """A folder with one file of safetensors, with these notes, and an index with this text."""
    folder.mkdir(parents=True)
    about = {"__metadata__": notes, "w": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}}
    head = json.dumps(about).encode()
    (folder / "model-00001-of-00001.safetensors").write_bytes(struct.pack("<Q", len(head)) + head + bytes(16))
    good = json.dumps({"weight_map": {"w": "model-00001-of-00001.safetensors"}})
    (folder / "model.safetensors.index.json").write_text(good if index is None else index)


for _name, _index in {
    "path_up": '{"weight_map": {"w": "../outside/x.safetensors"}}',
    "path_absolute": '{"weight_map": {"w": "/etc/passwd"}}',
    "path_nul": '{"weight_map": {"w": "a\\u0000b"}}',
    "path_is_a_number": '{"weight_map": {"w": 7}}',
    "nested_without_end": "[" * 100_000,
    "promises_more": '{"weight_map": {"v": "model-00001-of-00001.safetensors"}}',
}.items():
    corpus.append(
        Attack(
            f"hf_index_{_name}",
            "An index that names what is not there.",
            "open",
            lambda f, text=_index: make_hf(f, text),
        )
    )

for _name, _notes in {
    "offsets_absurd": {"DCP_SHARDING_INFO": json.dumps({"w": {"saved_offsets": [1 << 62, 0]}})},
    "offsets_negative": {"DCP_SHARDING_INFO": json.dumps({"w": {"saved_offsets": [-1, 0]}})},
    "offsets_too_few": {"DCP_SHARDING_INFO": json.dumps({"w": {"saved_offsets": [1]}})},
    "offsets_nested": {"DCP_SHARDING_INFO": "[" * 100_000},
    "label_of_more_files": {"milepost_save": json.dumps({"save_id": "a", "files": 2})},
    "label_nested": {"milepost_save": "[" * 100_000},
}.items():
    corpus.append(
        Attack(
            f"hf_{_name}", "Notes that do not fit the file.", "open", lambda f, notes=_notes: make_hf(f, None, **notes)
        )
    )


@corpus.attack("open")
def hf_index_is_a_pipe(folder: Path) -> None:
    """The index is a pipe. Opening it would block."""
    make_hf(folder)
    (folder / "model.safetensors.index.json").unlink()
    os.mkfifo(folder / "model.safetensors.index.json")


@corpus.attack("open")
def hf_file_is_a_link(folder: Path) -> None:
    """A file is a link to one outside."""
    make_hf(folder)
    outside = folder.parent / "outside"
    outside.mkdir()
    (folder / "model-00001-of-00001.safetensors").rename(outside / "x")
    (folder / "model-00001-of-00001.safetensors").symlink_to(outside / "x")
