"""Saves of a staged state in a process, with any planner and storage that can be pickled.

`async_save(..., async_checkpointer_type=AsyncCheckpointerType.PROCESS)` hands the usual saves to a writing process in a
faster way. This module is for programs that run such saves themselves.
"""

import os
import uuid
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.utils.distributed import get_free_port

from milepost.comm import Announcement, Call, Comm, broadcast
from milepost.comm.distributed import address_for
from milepost.core.wire import Wire
from milepost.dcp._engine.calls import comm_of
from milepost.dcp._engine.executors import SaveExecutor, in_thread
from milepost.dcp._engine.lent import lend
from milepost.dcp._engine.process_executor import GroupProcesses
from milepost.dcp._engine.save_process import GroupPlace, ProcessRequest, ProcessSignal, RequestId, SaveProcess
from milepost.dcp.api import raising_checkpoint_exceptions
from milepost.errors import InvalidRequest
from milepost.planning.protocol import SavePlanner, StorageWriter
from milepost.planning.records import Metadata

__all__: list[str] = []

_CheckpointSaveProcessControlOpts = ProcessSignal
_CheckpointRequestIdentifier = RequestId
_AsyncCheckpointRequest = ProcessRequest
_MEETING_PLACE = Announcement("finding a place to meet", Wire(tuple[str, int, str]))
_PROCESSES = GroupProcesses()


@dataclass(init=False)
class _ProcessGroupInitInfo:
    """Where the saving processes of all ranks meet. All ranks make it together, and find the same place.

    With DCP_USE_PREFIX_STORE=1, in the store at MASTER_ADDR and MASTER_PORT that serves the training; else at a free
    port of the coordinator. Raises CheckpointException, on every rank, if there is no such place.
    """

    local_rank: int
    global_rank: int
    world_size: int
    tcp_store_master_addr: str
    tcp_store_master_port: int
    use_prefix_store: bool
    disable_automatic_gc: bool
    disable_manual_gc: bool

    def __init__(self, process_group: Any = None, _comm: Comm | None = None) -> None:
        comm = _comm or comm_of(process_group, no_dist=False)
        self.local_rank = dist.get_node_local_rank(fallback_rank=0)
        self.global_rank, self.world_size = comm.rank, comm.size
        self.use_prefix_store = os.environ.get("DCP_USE_PREFIX_STORE") == "1"
        self.disable_automatic_gc = os.environ.get("DCP_DISABLE_AUTOMATIC_GC") == "1"
        self.disable_manual_gc = os.environ.get("DCP_DISABLE_MANUAL_GC") == "1"
        call = Call("saving in", "a process")
        with raising_checkpoint_exceptions("get_master_addr_and_port", comm):
            found = broadcast(comm, call, _MEETING_PLACE, lambda: self._found(process_group))
        self.tcp_store_master_addr, self.tcp_store_master_port, self._prefix = found

    def _found(self, process_group: Any) -> tuple[str, int, str]:
        # A prefix of their own: processes that come after these do not meet their leftovers.
        prefix = f"milepost/saving/{uuid.uuid4().hex}"
        address = os.environ.get("MASTER_ADDR")
        if not self.use_prefix_store:
            port_here: int = get_free_port()  # type: ignore[no-untyped-call]
            return address or address_for(process_group or dist.group.WORLD), port_here, prefix
        port = os.environ.get("MASTER_PORT")
        if address is None or port is None or not port.isdecimal():
            raise InvalidRequest(
                "DCP_USE_PREFIX_STORE=1 needs MASTER_ADDR and MASTER_PORT, the address of the job's store; they are "
                f"{address!r} and {port!r}"
            )
        return address, int(port), prefix

    @property
    def place(self) -> GroupPlace:
        """The same, for the processes."""
        prefix = self._prefix if self.use_prefix_store else None
        address, port = self.tcp_store_master_addr, self.tcp_store_master_port
        collect = not self.disable_manual_gc
        return GroupPlace(self.global_rank, self.world_size, address, port, prefix, self.disable_automatic_gc, collect)


class _AsyncCheckpointProcess(SaveProcess):
    """A saving process, for a program that keeps one itself. All ranks make it together."""

    def __init__(self, pg_init_info: _ProcessGroupInitInfo) -> None:
        super().__init__(pg_init_info.place)

    def save(
        self,
        staged_state_dict: dict[str, Any],
        *,
        checkpoint_id: str | os.PathLike[str] | None = None,
        storage_writer: StorageWriter | None = None,
        planner: SavePlanner | None = None,
        no_dist: bool = False,
        use_collectives: bool = True,
    ) -> Metadata:
        """Save in the process, and wait for the end. Raises what the save raised."""
        identifier = RequestId(checkpoint_id)
        request = ProcessRequest(staged_state_dict, identifier, storage_writer, planner, no_dist, use_collectives)
        self.begin(request)
        while (metadata := self.outcome(60.0)) is None:
            pass
        return metadata


class _ProcessBasedAsyncCheckpointExecutor(SaveExecutor):
    """Saves in a process that stays for later saves, also after one that failed. All executors share it."""

    def execute_save(
        self,
        staging_future_or_state_dict: "Future[dict[str, Any]] | dict[str, Any]",
        *,
        checkpoint_id: str | os.PathLike[str] | None = None,
        storage_writer: StorageWriter | None = None,
        planner: SavePlanner | None = None,
        process_group: "dist.ProcessGroup | None" = None,
        no_dist: bool = False,
        use_collectives: bool = True,
    ) -> "Future[Metadata]":
        """Save in the process of this rank. The first save starts it, and so does one after a process has died."""
        group = _PROCESSES.of(process_group, no_dist)
        comm = comm_of(process_group, no_dist).secondary("executor")
        request = ProcessRequest({}, RequestId(checkpoint_id), storage_writer, planner, no_dist, use_collectives)
        alone = no_dist or not dist.is_initialized()

        def meet_at(ranks: Comm) -> GroupPlace | None:
            return None if alone else _ProcessGroupInitInfo(process_group, ranks).place

        return in_thread(partial(group.save, staging_future_or_state_dict, request, comm, meet_at), group)


lend(__name__, "_CHECKPOINT_PROCESS logger")
