"""Every public option refuses values that it cannot have, and names itself. So do options that would be ignored."""

import enum
import math

import pytest
import torch

import milepost
from milepost import InvalidRequest
from milepost.loading.options import LOAD_OPTIONS
from milepost.planning import CheckpointReader, CheckpointWriter, DefaultLoadPlanner, DefaultSavePlanner, StorageWriter
from milepost.saving.options import SAVE_OPTIONS
from milepost.store import MemoryStore

NAN, INF = math.nan, math.inf
FLAG = [None, 1, 0, "no", []]
WHOLE = [0, -1, NAN, INF, 1.5, "4", True, []]
SECONDS = [0, -1, NAN, INF, 1e12, "5", True, None, []]
TYPES = [1, "abc", [1], None, int, [int]]
SAVE = {
    **dict.fromkeys(("overwrite", "compare_replicas", "reduce_partial", "allow_pickle"), FLAG),
    "on_difference": [None, 1, [], "ignore"],
    "types": TYPES,
    "host_memory_bytes": [*WHOLE, None, 1000],
    "transfer": [1, "fast", [], milepost.Transfer],
    "progress": [1, "bar"],
    "metadata": [1, "x", [1], [("a", 1)]],
    "plans": [1, "x", milepost.Plans],
    "statistics": [None, 1, "all", []],
    "healthy": [None, 1, "finite", [], dict],
    "base": [1, [], "s3:/bucket/a"],
    "max_depth": [*WHOLE, None],
    "max_waste": [-0.1, 1.1, NAN, "much", None, True],
}
LOAD = {
    **dict.fromkeys(
        ("allow_missing", "allow_unexpected", "allow_unhealthy", "convert_dtype", "verify", "allow_pickle"), FLAG
    ),
    "share_reads": [1, "no"],
    "device": [1.5, "nowhere", []],
    **{name: SAVE[name] for name in ("types", "host_memory_bytes", "transfer", "progress")},
}
CALL = {"timeout_s": SECONDS, "process_group": [1, "x", []]}
SAVER = {
    "background": [None, [], "fork"],
    "stage": [1, [], "later"],
    "when_busy": [None, "maybe"],
    "staging_bytes": [-1, NAN, 1.5, "x", True],
}
STEP = [-1, "1", 1.5, True, 10_000_000_000]


class Run:
    """The public calls, each with one option to try."""

    def __init__(self, tmp_path):
        self.store = MemoryStore()
        self.state = {"w": torch.ones(3), "step": 1}
        milepost.save(self.state, self.store)
        self.keeper = milepost.Checkpointer(MemoryStore())
        self.keeper.save(self.state, 1)
        self.folder = tmp_path

    def save(self, **option):
        milepost.save(self.state, self.store, **option)

    def load(self, **option):
        milepost.load(self.state, self.store, **option)

    def explain(self, **option):
        milepost.explain(self.state, self.store, **option)

    def open(self, **option):
        milepost.open(self.store, **option)

    def verify(self, **option):
        milepost.open(self.store).verify(**option)

    def async_save(self, **option):
        try:
            milepost.async_save(self.state, self.store, **option).result(20)
        finally:
            milepost.close_async()

    def prewarm(self, **option):
        milepost.prewarm(self.state, **option)

    def saver(self, **option):
        milepost.AsyncSaver(**option)

    def checkpointer(self, **option):
        milepost.Checkpointer(self.store, **{"best": "loss"} | option)

    def keeper_save(self, **option):
        self.keeper.save(self.state, 2, **option)

    def keeper_async_save(self, **option):
        self.keeper.async_save(self.state, 2, **option).result(20)

    def restore(self, **option):
        self.keeper.restore(self.state, **option)

    def keeper_open(self, **option):
        self.keeper.open(**option)

    def remove(self, **option):
        self.keeper.remove(**option)

    def convert(self, **option):
        milepost.convert(self.store, self.folder / "converted", **option)

    def copy(self, **option):
        milepost.copy(self.store, self.folder / "copied", **option)

    def export(self, **option):
        milepost.export_safetensors({"w": torch.ones(3)}, self.folder / "exported", **option)

    def diff(self, **option):
        milepost.diff(self.store, self.store, **option)

    def transfer(self, **option):
        milepost.Transfer(**option)

    def plans(self, **option):
        milepost.Plans(**option)

    def guard(self, **option):
        milepost.PreemptionGuard(**option).close()


WRITTEN = {
    "max_shard_bytes": WHOLE,
    "rename": [1, "x"],
    "file_name": [1, None, "", "adapter", "a/b.safetensors", "../a.safetensors", ".safetensors", b"a.safetensors"],
    **dict.fromkeys(("drop_values", "overwrite"), FLAG),
    **{name: SAVE[name] for name in ("host_memory_bytes", "transfer", "progress")},
    **CALL,
}
PLANNER = [1, "x"]
BAD = {
    "save": {
        **SAVE,
        **CALL,
        "planner": [*PLANNER, DefaultSavePlanner],
        "storage_writer": [1, "x", CheckpointWriter],
    },
    "load": {
        **LOAD,
        **CALL,
        "planner": [*PLANNER, DefaultLoadPlanner],
        "storage_reader": [1, "x", CheckpointReader],
    },
    "explain": {"types": TYPES, **CALL},
    "open": {"types": TYPES, "allow_pickle": FLAG},
    "verify": {"transfer": SAVE["transfer"], "progress": SAVE["progress"]},
    "async_save": {
        "then": [1],
        "optimizer": [1, [1]],
        "planner": PLANNER,
        "overwrite": ["no"],
        "stage": SAVER["stage"],
        "background": SAVER["background"],
        "timeout_s": [NAN, 0],
    },
    "prewarm": {"types": TYPES, "timeout_s": [NAN, 0]},
    "saver": {**SAVER, "timeout_s": SECONDS},
    "checkpointer": {
        **dict.fromkeys(("keep_last", "keep_every", "keep_best"), WHOLE),
        "best": [1, ""],
        "mode": [None, [], "least"],
        "coordinator_rank": [-1, NAN, "x", 1.5, True, None],
        "no_dist": FLAG,
        "save_planner": PLANNER,
        "load_planner": PLANNER,
        **SAVER,
        "incremental": FLAG,
        **{name: values for name, values in (SAVE | LOAD).items() if name not in ("metadata", "plans", "base")},
        "timeout_s": SECONDS,
    },
    "keeper_save": {"metrics": [1, [1], {"a": "x"}, {1: 2}], "metadata": SAVE["metadata"], "step": []},
    "keeper_async_save": {"metrics": [1, {"a": "x"}], "metadata": SAVE["metadata"]},
    "restore": {"step": STEP, "verify_first": [1, "no"], "verify": FLAG},
    "keeper_open": {"step": STEP},
    "remove": {"step": [*STEP, None]},
    "convert": {**WRITTEN, "to": [None, [], "zip"], "types": TYPES, "allow_pickle": FLAG},
    "copy": {
        **dict.fromkeys(("newest", "overwrite"), FLAG),
        "steps": [1, "1", [-1], ["x"], [1.5], [True], [None]],
        **{name: SAVE[name] for name in ("host_memory_bytes", "transfer", "progress")},
    },
    "export": WRITTEN,
    "diff": {"values": FLAG, "keys": [None, 1, b"*", []], "progress": SAVE["progress"]},
    "transfer": {"threads": [*WHOLE, None, 257], "block_bytes": [*WHOLE, None, 1000], "direct": FLAG},
    "plans": {"size": [*WHOLE, None]},
    "guard": {"grace_s": SECONDS, "timeout_s": SECONDS, "signals": [1, "x", ["x"], [0], [99], [True], None]},
}


@pytest.mark.parametrize(("call", "option"), [(call, option) for call, options in BAD.items() for option in options])
def test_bad_values_are_refused_by_name(call, option, tmp_path):
    run = Run(tmp_path)
    before = dict(run.store.objects)
    for value in BAD[call][option]:
        with pytest.raises(InvalidRequest, match=option):
            getattr(run, call)(**{option: value})
    assert run.store.objects == before
    assert list(tmp_path.iterdir()) == []
    assert run.keeper.steps() == [1]


def test_every_option_of_saves_and_loads_is_tried():
    assert SAVE.keys() == SAVE_OPTIONS
    assert LOAD.keys() == LOAD_OPTIONS


def test_all_wrong_values_are_named_at_once():
    with pytest.raises(InvalidRequest, match=r"overwrite is True or False, not 'no'; compare_replicas is .* not 3"):
        milepost.save({}, "memory://wrong", overwrite="no", compare_replicas=3)


class Colour(enum.Enum):
    RED = 1


def test_types_that_can_be_read_once_hold_for_every_call():
    with milepost.Checkpointer("memory://types-once", types=iter([Colour])) as keeper:
        for step in (1, 2):
            keeper.save({"colour": Colour.RED}, step)
            target = {"colour": None}
            assert keeper.restore(target) == step
            assert target == {"colour": Colour.RED}


# ---- options that a planner or a storage decides


class Global(DefaultSavePlanner):
    def create_global_plan(self, all_plans):
        return super().create_global_plan(all_plans)


class Elsewhere(StorageWriter):
    """Storage of another kind. Nothing must reach it."""

    def reset(self, checkpoint_id=None):
        pass

    def refuse(self, *_, **__):
        raise AssertionError("storage was asked to do something")

    set_up_storage_writer = prepare_local_plan = prepare_global_plan = write_data = finish = refuse
    validate_checkpoint_id = storage_meta = refuse


GIVEN = {"transfer": milepost.Transfer(1), "host_memory_bytes": 1 << 20, "progress": print}


@pytest.mark.parametrize(
    ("storage", "ignored"),
    [
        ({"planner": DefaultSavePlanner()}, {"types": [Colour], "allow_pickle": True}),
        ({"storage_writer": CheckpointWriter("memory://ignored")}, {"allow_pickle": True, **GIVEN}),
        ({"planner": Global()}, {"on_difference": "warn", "compare_replicas": False, "reduce_partial": True}),
        ({"storage_writer": Elsewhere()}, {"metadata": {"a": 1}, "overwrite": False, **GIVEN}),
    ],
)
@pytest.mark.parametrize("save", [milepost.save, milepost.async_save])
def test_options_that_a_save_would_ignore_are_refused(save, storage, ignored):
    path = None if "storage_writer" in storage else "memory://ignored"
    for name, value in ignored.items():
        with pytest.raises(InvalidRequest, match=name):
            save({"w": torch.ones(1)}, path, **storage, **{name: value})
    milepost.close_async()


def test_options_that_a_load_would_ignore_are_refused():
    milepost.save({"n": 1}, "memory://ignored-load")
    of_planner = {"allow_missing": True, "allow_unexpected": True, "convert_dtype": True, "device": "cpu"}
    of_planner |= {"share_reads": False, "allow_pickle": True}
    of_reader = {"verify": False, **GIVEN}

    def load(storage, **options):
        path = None if "storage_reader" in storage else "memory://ignored-load"
        return milepost.load({"n": 0}, path, **storage, **options)

    planner, reader = {"planner": DefaultLoadPlanner()}, {"storage_reader": CheckpointReader("memory://ignored-load")}
    for storage, ignored in ((planner, of_planner), (reader, of_planner | of_reader)):
        for name, value in ignored.items():
            with pytest.raises(InvalidRequest, match=name):
                load(storage, **{name: value})
    # The defaults change nothing, and what the planner's own reader can do is done.
    assert load(planner, allow_missing=False, types=(), **GIVEN, verify=False) == {"n": 1}
    assert load(reader, convert_dtype=False, verify=True) == {"n": 1}
