"""How a copy moves its bytes: within its memory, in whole parts, and with many requests under way."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

import milepost
from milepost.copying.flow import flow_between
from milepost.core.limits import BLOCK_BYTES, KIB, MIB
from milepost.store import Traits
from tests.strategies import examples

CLOUD = Traits(64 * MIB, 8 * MIB, 16, is_current=True)
WEB = Traits(range_bytes=8 * MIB, requests=16)
FILES = Traits()
REPLY_COPIES = 3
"""Of a range that arrives: as it comes in, joined, and where it is put."""


@given(
    st.sampled_from([CLOUD, WEB, FILES]),
    st.sampled_from([CLOUD, FILES]),
    st.integers(64 * KIB, 2048 * MIB),
    st.lists(st.integers(0, 4096 * MIB), max_size=5),
    st.sampled_from([16 * KIB, 64 * KIB, 1 * MIB]),
)
@examples(300)
def test_memory_is_kept_to(source, target, memory, files, checked):
    flow = flow_between(source, target, None, memory, files, checked)
    assert flow.block_bytes % checked == 0 == flow.range_bytes % checked
    assert flow.threads >= 1
    assert flow.reads >= 1
    arriving = REPLY_COPIES * flow.reads * min(flow.range_bytes, flow.block_bytes) if source.requests else 0
    kept = arriving if flow.range_bytes >= flow.block_bytes else arriving + flow.block_bytes
    used = flow.threads * max(kept, flow.block_bytes)
    # Less than some blocks is not possible.
    assert used <= max(memory, 2 * REPLY_COPIES * max(checked, BLOCK_BYTES)), flow


def test_many_requests_are_under_way():
    large, small = [10_000 * MIB], [1 * MIB] * 1000
    default = 512 * MIB
    up = flow_between(FILES, CLOUD, None, default, large, BLOCK_BYTES)
    assert (up.block_bytes, up.threads) == (64 * MIB, 4)
    down = flow_between(CLOUD, FILES, None, default, large, BLOCK_BYTES)
    assert (down.block_bytes, down.threads) == (8 * MIB, 16)
    across = flow_between(CLOUD, CLOUD, None, default, large, BLOCK_BYTES)
    assert across.threads * across.reads >= 8
    assert flow_between(FILES, CLOUD, None, default, small, BLOCK_BYTES).threads == 16
    assert flow_between(CLOUD, CLOUD, None, default, small, BLOCK_BYTES).threads == 16


def test_transfer_of_the_caller_counts():
    few = milepost.Transfer(threads=1, block_bytes=1 * MIB, direct=False)
    flow = flow_between(CLOUD, FILES, few, 512 * MIB, [100 * MIB], BLOCK_BYTES)
    assert (flow.threads, flow.block_bytes, flow.direct) == (1, 1 * MIB, False)


def test_too_little_memory_is_refused():
    with pytest.raises(milepost.InvalidRequest, match="host_memory_bytes"):
        milepost.copy("memory://x", "memory://y", host_memory_bytes=1000)
