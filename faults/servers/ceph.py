"""Ceph's object gateway (RGW): a monitor, a store in memory, and the gateway. Not part of every run; `scripts/ceph`."""

import shlex
import shutil
import uuid
from typing import ClassVar

from faults.servers.asking import ask
from faults.servers.object_server import BUCKET, ObjectServer
from faults.servers.seaweed import KEYS, OTHER_KEYS, REGION

PROGRAMS = ("ceph-authtool", "ceph-mon", "ceph-osd", "monmaptool", "radosgw", "radosgw-admin", "ceph")
_CONF = """
[global]
fsid = {fsid}
run dir = {folder}
admin socket = {folder}/$name.sock
mon host = v2:127.0.0.1:{mon}
public network = 127.0.0.0/8
ms bind ipv6 = false
keyring = {folder}/keyring
log file = {folder}/$name.log
mon data = {folder}/mon
mon allow pool size one = true
mon allow pool delete = true
mon warn on pool no redundancy = false
osd data = {folder}/osd
osd objectstore = memstore
memstore device bytes = 4294967296
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 4
osd crush chooseleaf type = 0
rgw frontends = beast endpoint=127.0.0.1:{rgw}
rgw data = {folder}/rgw
"""
_SCRIPT = """
set -e
conf="-c {folder}/ceph.conf"
keys="ceph-authtool {folder}/keyring --gen-key"
$keys --create-keyring -n mon. --cap mon 'allow *'
$keys -n client.admin --cap mon 'allow *' --cap osd 'allow *'
$keys -n osd.0 --cap mon 'allow profile osd' --cap osd 'allow *'
monmaptool --create --fsid {fsid} --addv a '[v2:127.0.0.1:{mon}]' {folder}/monmap
mkdir -p {folder}/mon {folder}/osd {folder}/rgw
ceph-mon $conf -i a --mkfs --monmap {folder}/monmap --keyring {folder}/keyring
ceph-mon $conf -i a -f &
ceph $conf --connect-timeout 30 osd new {osd}
ceph-osd $conf -i 0 --mkfs --osd-uuid {osd}
ceph-osd $conf -i 0 -f &
radosgw-admin $conf user create --uid tests --display-name tests --access-key {access} --secret-key {secret}
radosgw-admin $conf key create --uid tests --access-key {other_access} --secret-key {other_secret}
exec radosgw $conf -n client.admin -f
"""


class CephGateway(ObjectServer):
    """RGW from Debian's packages `radosgw`, `ceph-mon` and `ceph-osd`. `kill` loses its data."""

    scheme = "s3"
    port_names: ClassVar[tuple[str, ...]] = ("rgw", "mon")

    @staticmethod
    def why_not() -> str | None:
        """Why it cannot be started here; None if it can."""
        missing = [name for name in PROGRAMS if not shutil.which(name)]
        return f"{', '.join(missing)} not found: apt-get install radosgw ceph-mon ceph-osd" if missing else None

    @property
    def environment(self) -> dict[str, str]:
        """The environment in which clients find the credentials."""
        return {"AWS_ACCESS_KEY_ID": KEYS.access, "AWS_SECRET_ACCESS_KEY": KEYS.secret, "AWS_REGION": REGION}

    @property
    def settings(self) -> dict[str, str]:
        """What a URL's query says besides the endpoint."""
        return {"region": REGION, "path_style": "true"}

    def command(self) -> list[str]:
        """A script that makes the cluster, and ends as the gateway."""
        values = {"folder": self.folder, "fsid": uuid.uuid4(), "osd": uuid.uuid4(), **self.ports, **KEYS._asdict()}
        values |= {f"other_{name}": value for name, value in OTHER_KEYS._asdict().items()}
        (self.folder / "ceph.conf").write_text(_CONF.format(**values))
        return ["/bin/sh", "-c", _SCRIPT.format(**{name: shlex.quote(str(value)) for name, value in values.items()})]

    def is_ready(self) -> bool:
        """Whether the bucket is there."""
        if ask(self.address[1], "GET", "/").status != 200:
            return False
        self._client().create_bucket(Bucket=BUCKET)
        return True

    def remove(self, prefix: str) -> None:
        """Remove the objects below a prefix."""
        client = self._client()
        for page in client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=f"{prefix}/"):
            for found in page.get("Contents", []):
                client.delete_object(Bucket=BUCKET, Key=found["Key"])

    def _client(self):
        import boto3

        return boto3.client(
            "s3", endpoint_url=self.endpoint, aws_access_key_id=KEYS.access, aws_secret_access_key=KEYS.secret,
            region_name=REGION,
        )  # fmt: skip
