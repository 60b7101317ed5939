import signal

import pytest

from faults.netfs import NetworkFiles, why_not
from faults.proxy import Proxy
from faults.servers import Azurite, SeaweedFS, SmallGcs
from faults.servers.ceph import CephGateway
from tests import ranks

ranks.preload()
# A shell that starts us in the background lets us ignore Ctrl-C, and all that we start; some tests send it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

S3_SERVERS = {"seaweedfs": SeaweedFS, "ceph": CephGateway}
PLACES = ("here", "network", "network without links")


def pytest_addoption(parser):
    parser.addoption("--place", choices=PLACES, default="here", help="where the folders of all tests are; faults/netfs")
    parser.addoption("--s3", choices=S3_SERVERS, default="seaweedfs", help="the server of tests on S3; scripts/ceph")


def pytest_generate_tests(metafunc):
    """A test that is marked `places` runs on each of them; see `tmp_path`."""
    marks = list(metafunc.definition.iter_markers("places"))
    if marks and metafunc.config.getoption("--place") == "here":
        metafunc.parametrize("place", marks[0].args, indirect=True)


@pytest.fixture
def place(request):
    """What kind of file system `tmp_path` is on."""
    return getattr(request, "param", request.config.getoption("--place"))


@pytest.fixture
def tmp_path(tmp_path, place):
    """A folder of this test; on the file system that the test is marked with, or that `--place` names."""
    if place == "here":
        yield tmp_path
        return
    if why_not():
        pytest.skip(f"no network file system: {why_not()}")
    with NetworkFiles(tmp_path) as network:
        network.believe(attributes_s=1, names_s=1, absence_s=1, listings_s=1)
        if place == "network without links":
            network.without_links()
        folder = network.client / "folder"
        folder.mkdir()
        yield folder


@pytest.fixture(scope="session")
def seaweed(request):
    """An S3 server, started by the first test of a process that needs one: `with seaweed.place() as url:`."""
    yield from _started(S3_SERVERS[request.config.getoption("--s3")])


@pytest.fixture(scope="session")
def azurite():
    """A server of Azure's blob storage. It forgets what it has when it is killed."""
    yield from _started(Azurite)


@pytest.fixture(scope="session")
def small_gcs():
    """A server that speaks as much of Google Cloud Storage as Milepost uses."""
    yield from _started(SmallGcs)


def _started(server):
    if server.why_not():
        pytest.skip(server.why_not())
    with server() as running:
        yield running


@pytest.fixture
def s3_proxy(seaweed):
    """A proxy in front of the S3 server: `with seaweed.place(s3_proxy.endpoint) as url:`, and `s3_proxy.set_rules`."""
    with Proxy(seaweed.address) as proxy:
        yield proxy
