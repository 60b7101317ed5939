"""Object stores on this machine, for tests, fault experiments and benchmarks. They listen on loopback only.

    with SeaweedFS() as server, server.place() as url:
        milepost.save(state, url)

Each has `why_not()`, which says why it cannot be started here, or gives None.
"""

from faults.servers.azurite import Azurite
from faults.servers.object_server import ObjectServer
from faults.servers.seaweed import SeaweedFS
from faults.servers.small_gcs import SmallGcs

__all__ = ["Azurite", "ObjectServer", "SeaweedFS", "SmallGcs"]
