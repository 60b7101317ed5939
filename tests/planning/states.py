"""States for tests of planners."""

import torch

import milepost
import milepost.dcp
from milepost.planning import DefaultSavePlanner

WHOLE = torch.arange(48.0).view(8, 6)


class Central(DefaultSavePlanner):
    """Takes part in the global plan, and changes nothing."""

    def create_global_plan(self, all_plans):
        self.seen = [plan.usable for plan in all_plans]
        return super().create_global_plan(all_plans)


def state_of(rank=0, world=1, fill=lambda t: t.clone()):
    rows = slice(8 * rank // world, 8 * (rank + 1) // world)
    part = milepost.Sharded((8, 6), {(rows.start, 0): fill(WHOLE[rows])})
    inner = [fill(torch.arange(3)), {"deep": fill(torch.ones(2, dtype=torch.bfloat16))}]
    return {"cut": part, "plain": fill(WHOLE[0]), "n": {"list": inner, "lr": 0.1}, "name": "x", "pair": (1, 2)}


def blank(rank=0, world=1):
    state = state_of(rank, world, torch.zeros_like)
    state["n"]["lr"], state["name"], state["pair"] = 0.0, "", ()
    return state


def assert_full(state, rank=0, world=1):
    expected = state_of(rank, world)
    assert all(torch.equal(a.data, b.data) for a, b in zip(state["cut"].parts, expected["cut"].parts, strict=True))
    assert torch.equal(state["plain"], expected["plain"])
    assert torch.equal(state["n"]["list"][0], expected["n"]["list"][0])
    assert torch.equal(state["n"]["list"][1]["deep"], expected["n"]["list"][1]["deep"])
    assert (state["n"]["lr"], state["name"], state["pair"]) == (0.1, "x", (1, 2))
