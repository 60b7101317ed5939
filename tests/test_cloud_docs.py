"""What the pages on object stores say of permissions, versions and locks, held against real servers."""

import json
import re
from pathlib import Path
from urllib.parse import parse_qs, unquote

import pytest
import torch

import milepost
from faults.proxy import Proxy
from tests import pages

HOW_TO = Path(__file__).parent.parent / "docs" / "how-to"
BLOBS = "Microsoft.Storage/storageAccounts/blobServices/containers/blobs"
PLACES = {"s3": "s3://my-bucket/runs", "gcs": "gs://my-bucket/runs", "azure": "az://my-container/runs"}
PERMISSIONS = {
    "s3": {"PUT": "s3:PutObject", "GET": "s3:GetObject", "LIST": "s3:ListBucket", "DELETE": "s3:DeleteObject"},
    "gcs": {k: f"storage.objects.{k.lower()}" for k in ("GET", "LIST", "DELETE")} | {"PUT": "storage.objects.create"},
    "azure": {"PUT": f"{BLOBS}/write", "GET": f"{BLOBS}/read", "LIST": f"{BLOBS}/read", "DELETE": f"{BLOBS}/delete"},
}
"""What each service asks for a kind of request."""


def documents(kind):
    """The JSON documents of a page."""
    return [json.loads(block.text) for block in pages.blocks(HOW_TO / f"{kind}.md") if block.kind == "json"]


def allowed(kind):
    """The permissions of the policy on a page."""
    if kind == "gcs":
        [role] = [block.text for block in pages.blocks(HOW_TO / "gcs.md") if block.kind == "yaml"]
        return set(re.findall(r"^  - (\S+)$", role, re.MULTILINE))
    if kind == "azure":
        [role] = [each for each in documents(kind) if "DataActions" in each]
        return set(role["DataActions"])
    [policy] = [each for each in documents(kind) if "Statement" in each]
    actions = [statement["Action"] for statement in policy["Statement"]]
    return {action for each in actions for action in ([each] if isinstance(each, str) else each)}


def use_everything(root):
    """All that a job asks of a store: saves, an overwrite, steps that are removed, leftovers, loads, reads."""
    state = {"w": torch.arange(200_000.0), "step": 1}
    milepost.save(state, f"{root}/one")
    milepost.save(state, f"{root}/one")
    milepost.load(state, f"{root}/one")
    with milepost.open(f"{root}/one") as checkpoint:
        assert checkpoint.verify().ok
    with milepost.Checkpointer(f"{root}/run", keep_last=1) as keeper:
        assert keeper.restore(state, default=0) == 0
        for step in (1, 2):
            keeper.async_save(state, step)
        keeper.wait()
        assert keeper.steps() == [2]
        keeper.remove(2)
        assert keeper.remove_unfinished() == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", PLACES)
def test_policy_allows_what_is_asked_and_no_more(kind, request, monkeypatch):
    page = pages.SERVERS[kind]
    server = request.getfixturevalue(page.fixture)
    with Proxy(server.address) as proxy:
        for name, value in page.environment(server, proxy.endpoint).items():
            monkeypatch.setenv(name, value)
        use_everything(PLACES[kind])
        asked = proxy.seen()
    bucket, _, prefix = PLACES[kind].partition("://")[2].partition("/")
    for line in asked:
        verb, target = line.split(maxsplit=1)
        path, _, query = target.partition("?")
        if verb == "LIST":
            assert parse_qs(query)["prefix"][0].startswith(f"{prefix}/"), f"{line}: not below the prefix"
        elif verb != "DELETE":  # the names of a batch are in its body
            assert f"/{bucket}/{prefix}/" in unquote(path), line
            assert not query, f"{line}: this may need another permission"
    assert {PERMISSIONS[kind][line.split(maxsplit=1)[0]] for line in asked} == allowed(kind)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["versions", "locks"])
def test_buckets_that_keep_what_is_deleted(kind, seaweed, monkeypatch):
    for name, value in pages.SERVERS["s3"].environment(seaweed).items():
        monkeypatch.setenv(name, value)
    client = pytest.importorskip("boto3").client("s3")
    client.create_bucket(Bucket=kind, ObjectLockEnabledForBucket=kind == "locks")
    if kind == "locks":
        rule = {"ObjectLockEnabled": "Enabled", "Rule": {"DefaultRetention": {"Mode": "COMPLIANCE", "Days": 1}}}
        client.put_object_lock_configuration(Bucket=kind, ObjectLockConfiguration=rule)
    else:
        client.put_bucket_versioning(Bucket=kind, VersioningConfiguration={"Status": "Enabled"})
    use_everything(f"s3://{kind}/runs")
    state = {"step": 0}
    with milepost.Checkpointer(f"s3://{kind}/runs/run") as keeper:
        keeper.save({"step": 2}, 2)  # a step that was removed comes back
        assert (keeper.steps(), keeper.restore(state), state) == ([2], 2, {"step": 2})
    assert client.list_object_versions(Bucket=kind)["DeleteMarkers"], "the bucket does not keep what is deleted"


@pytest.mark.parametrize("kind", PLACES)
def test_documents_on_the_pages_are_valid_json(kind):
    assert documents(kind)
