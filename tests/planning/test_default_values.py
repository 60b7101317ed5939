"""Default planners: states rebuilt from metadata, keys of other layouts, and the bytes of values."""

import io
import os
import pickle
from enum import Enum

import pytest
import torch
from torch.distributed.checkpoint import _nested_dict as torch_nested
from torch.distributed.checkpoint import _traverse as torch_traverse

from milepost.errors import InvalidRequest, InvalidState, UnsafeCheckpoint, UnsupportedFormat
from milepost.planning.default import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    EmptyStateDictLoadPlanner,
)
from milepost.planning.global_plan import create_default_local_metadata
from milepost.planning.records import BytesStorageMetadata, Metadata, MetadataIndex
from milepost.planning.value_bytes import pack_value
from milepost.state.values import Codec
from tests.planning.play import Saved, equal, load, nested, save


class Colour(Enum):
    RED = 1


# ---- rebuilding a state


def test_a_state_is_rebuilt_from_the_metadata_alone():
    saved = save([DefaultSavePlanner() for _ in range(2)], [nested(2)] * 2)
    target = {}
    load([EmptyStateDictLoadPlanner()], [target], saved)
    assert equal(target["model"], nested(2)["model"])
    assert target["tuple"][0].tolist() == [2.0, 2.0]
    assert target["optim"]["state"]["0"]["step"] == 2
    assert target["list"][2] == {"deep": {"value": (2, "x")}}
    assert target["values"] == nested(2)["values"]


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        (["optim"], {"optim": {"lr": 1, "m": [torch.ones(1)]}}),
        ("optim", {"optim": {"lr": 1, "m": [torch.ones(1)]}}),
        ({"model.layer"}, {"model": {"layer": {"w": torch.ones(2)}}}),
        (["model.layer.w", "optim.lr"], {"model": {"layer": {"w": torch.ones(2)}}, "optim": {"lr": 1}}),
        ([], {}),
    ],
)
def test_some_keys_or_all_below_a_name_are_rebuilt(keys, expected):
    state = {
        "model": {"layer": {"w": torch.ones(2)}, "layers": torch.ones(1)},
        "optim": {"lr": 1, "m": [torch.ones(1)]},
        "optimum": 5,
    }
    saved = save([DefaultSavePlanner()], [state])
    target = {}
    load([EmptyStateDictLoadPlanner(keys)], [target], saved)
    assert equal(target, expected)


def test_keys_that_select_nothing_are_told_unless_a_partial_load_is_wanted():
    saved = save([DefaultSavePlanner()], [{"a": 1}])
    with pytest.raises(RuntimeError, match=r"^Missing key in checkpoint state_dict: b, c\.$"):
        load([EmptyStateDictLoadPlanner(["a", "b", "c"])], [{}], saved)
    target = {}
    load([EmptyStateDictLoadPlanner(["a", "b"], allow_partial_load=True)], [target], saved)
    assert target == {"a": 1}
    with pytest.raises(InvalidRequest, match="fills an empty dict"):
        load([EmptyStateDictLoadPlanner()], [{"a": 1}], saved)


def test_a_tensor_too_large_to_be_had_is_refused():
    metadata = create_default_local_metadata({"w": torch.empty(2**50, device="meta")})
    with pytest.raises(UnsafeCheckpoint, match="cannot be had"):
        EmptyStateDictLoadPlanner().set_up_planner({}, metadata)


# ---- keys and values of other layouts


def as_torch_saved(state, flatten):
    """A checkpoint of a state as another version of torch lays it out, values as files of torch.save."""
    flat, paths = flatten(state)
    data = {}
    for key, value in flat.items():
        if isinstance(value, torch.Tensor):
            data[MetadataIndex(key, [0] * value.dim())] = value.clone()
        else:
            stream = io.BytesIO()
            torch.save(value, stream)
            data[MetadataIndex(key)] = stream.getvalue()
    metadata = create_default_local_metadata(flat)
    metadata.planner_data = paths
    return Saved(data, metadata, [], [])


def flat_of_2_3(state):
    flat, paths = {}, {}

    def visit(path, value):
        key = ".".join(map(str, path))
        flat[key], paths[key] = value, path

    torch_traverse.traverse_state_dict_v_2_3(state, visit)
    return flat, paths


@pytest.mark.parametrize("flatten", [torch_nested.flatten_state_dict, flat_of_2_3], ids=["2.4", "2.3"])
def test_torch_layouts_are_found_with_closed_tuples_and_mappings(flatten):
    def state(fill):
        return {
            "model": {"w": torch.full((2,), fill)},
            "groups": {"lr": fill, "betas": (fill, 0.5)},
            "moments": (torch.full((2,), fill), torch.full((3,), fill)),
            "deep": {"only": {"values": [fill]}},
        }

    saved = as_torch_saved(state(2.0), flatten)
    for partial in (False, True):
        target = state(0.0)
        load([DefaultLoadPlanner(allow_partial_load=partial)], [target], saved)
        assert equal(target, state(2.0))
    target = state(0.0) | {"more": 1}
    load([DefaultLoadPlanner(allow_partial_load=True)], [target], saved)
    assert equal(target, state(2.0) | {"more": 1})
    with pytest.raises(RuntimeError, match=r"^Missing key in checkpoint state_dict: more\.$"):
        load([DefaultLoadPlanner()], [target], saved)
    target = {}
    load([EmptyStateDictLoadPlanner()], [target], saved)
    assert equal(target, state(2.0))


def test_a_planner_that_renames_keeps_its_own_names():
    class Renames(DefaultLoadPlanner):
        def set_up_planner(self, state_dict, metadata=None, is_coordinator=False):
            super().set_up_planner(state_dict, metadata, is_coordinator)
            self.state_dict = {f"old.{key}": value for key, value in self.state_dict.items()}
            self.mappings = {f"old.{key}": path for key, path in self.mappings.items()}

    saved = save([DefaultSavePlanner()], [{"old": {"a": {"w": torch.ones(2)}, "v": 5}}])
    target = {"a": {"w": torch.zeros(2)}, "v": 0}
    load([Renames()], [target], saved)
    assert equal(target, {"a": {"w": torch.ones(2)}, "v": 5})
    saved = save([DefaultSavePlanner()], [{"old": {"v": 6}, "t": 7}])
    target = {"v": 0, "t": (torch.zeros(1),)}
    load([Renames(allow_partial_load=True)], [target], saved)
    assert equal(target, {"v": 6, "t": (torch.zeros(1),)})


# ---- values


def test_values_are_json_and_never_pickles():
    saved = save([DefaultSavePlanner(types=[Colour])], [{"v": {"a": (1, None)}, "c": Colour.RED, "list": [1.5]}])
    assert all(data[:1] in b'{["-0123456789ntf' for data in saved.data.values())
    target = {"v": {"a": 0}, "c": None, "list": None}
    load([DefaultLoadPlanner(types=[Colour])], [target], saved)
    assert target == {"v": {"a": (1, None)}, "c": Colour.RED, "list": [1.5]}
    with pytest.raises(UnsupportedFormat, match=r"types=.Colour"):
        load([DefaultLoadPlanner()], [dict(target)], saved)
    with pytest.raises(InvalidState, match="'c'"):
        save([DefaultSavePlanner()], [{"c": Colour.RED}])


class Hostile:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


@pytest.mark.parametrize("how", ["zip", "legacy", "pickle", "milepost"])
def test_hostile_blob_runs_nothing_unless_pickles_are_allowed(tmp_path, how):
    folder = tmp_path / "made by the blob"
    stream = io.BytesIO()
    if how == "pickle":
        pickle.dump(Hostile(str(folder)), stream, 2)
    elif how == "milepost":
        stream.write(pack_value(Hostile(str(folder)), Codec(allow_pickle=True), "v").getvalue())
    else:
        torch.save(Hostile(str(folder)), stream, _use_new_zipfile_serialization=how == "zip")
    saved = Saved({MetadataIndex("v"): stream.getvalue()}, Metadata({"v": BytesStorageMetadata()}), [], [])
    refusal = UnsupportedFormat if how == "milepost" else UnsafeCheckpoint
    for planner, target in [(DefaultLoadPlanner(), {"v": 0}), (EmptyStateDictLoadPlanner(), {})]:
        with pytest.raises(refusal, match="allow_pickle=True"):
            load([planner], [target], saved)
    assert not folder.exists()
    if how != "pickle":
        load([DefaultLoadPlanner(allow_pickle=True)], [{"v": 0}], saved)
        assert folder.exists()


@pytest.mark.parametrize(
    "data", [b"", b"{", b"\xff", b"PK\x03\x04 no zip", b"\x80", b'{"tuple": 5}', b"[1]", b"[" * 9999]
)
def test_bytes_that_are_no_value_are_told_with_their_key(data):
    saved = Saved({MetadataIndex("v"): data}, Metadata({"v": BytesStorageMetadata()}), [], [])
    with pytest.raises((InvalidState, UnsafeCheckpoint), match="'v'"):
        load([DefaultLoadPlanner()], [{"v": 0}], saved)


def test_bytes_that_a_program_made_itself_pass_through():
    saved = save([DefaultSavePlanner()], [{"raw": io.BytesIO(b"\xff[any")}])
    assert saved.data == {MetadataIndex("raw"): b"\xff[any"}
    target = {"raw": io.BytesIO()}
    load([DefaultLoadPlanner()], [target], saved)
    assert target["raw"].getvalue() == b"\xff[any"
