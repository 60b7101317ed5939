"""Object stores on this machine, for tests, fault experiments and benchmarks. They listen on loopback only.

    with SeaweedFS() as server, server.place() as url:
        milepost.save(state, url)

Each server has `why_not()`, which says why it cannot be started here, or gives None.
"""

from faults.servers.seaweed import SeaweedFS

__all__ = ["SeaweedFS"]
