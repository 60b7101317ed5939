"""Phase times over ranks: bounded, in any order of ranks."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from milepost.core.history import SAVE_PHASES, PhaseTime, check_timings, pack_times, phase_times

PHASES = st.dictionaries(st.sampled_from(SAVE_PHASES), st.sampled_from([0.0, 0.5, 1.0, 7.25]) | st.floats(0, 1e6))


@given(st.lists(PHASES, min_size=1, max_size=9))
def test_phase_times_name_median_and_slowest(ranks):
    times = phase_times([pack_times(rank) for rank in ranks])
    check_timings(times, len(ranks))
    kept = [{p: min(float(np.float16(min(s, 65504))), 65504) for p, s in rank.items()} for rank in ranks]
    assert [time.phase for time in times] == [p for p in SAVE_PHASES if any(rank.get(p, 0) > 0 for rank in kept)]
    for time in times:
        of_ranks = sorted(rank[time.phase] for rank in kept if rank.get(time.phase, 0) > 0)
        assert time.slowest_s == round(of_ranks[-1], 6)
        assert time.median_s == round(of_ranks[len(of_ranks) // 2], 6)
        first = next(n for n, rank in enumerate(kept) if rank.get(time.phase) == of_ranks[-1])
        assert time.slowest_rank == first


def test_what_ranks_send_is_small_and_bounded():
    everything = pack_times(dict.fromkeys(SAVE_PHASES, 1e30))
    assert len(everything) == 2 * len(SAVE_PHASES) <= 20
    assert {time.slowest_s for time in phase_times([everything, b""])} == {65504.0}
    assert pack_times({"of another operation": 3.0}) == b""
    assert phase_times([b""] * 10_000) == ()


@pytest.mark.parametrize(
    "time",
    [
        PhaseTime("writing", -1.0, 1.0, 0),
        PhaseTime("writing", 2.0, 1.0, 0),
        PhaseTime("writing", 1.0, float("inf"), 0),
        PhaseTime("writing", float("nan"), 1.0, 0),
        PhaseTime("writing", 1.0, 1.0, 4),
    ],
)
def test_impossible_times_are_refused(time):
    with pytest.raises(ValueError, match="writing"):
        check_timings((time,), 4)
