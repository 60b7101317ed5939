"""Diagnoses of real object stores: fit ones, and those that cannot be used."""

import json

import jsonschema
import pytest

import milepost
from faults.proxy import Rule
from milepost.cli.app import main
from milepost.cli.app import milepost as group
from milepost.cli.schema import schema_of
from milepost.core.limits import MIB
from milepost.doctor.diagnose import diagnose
from milepost.store import CloudOptions, CloudStore, store_at


def checks_of(found):
    return {check.name: check for check in found.checks}


@pytest.fixture(autouse=True)
def credentials(seaweed, monkeypatch):
    for key, value in seaweed.environment.items():
        monkeypatch.setenv(key, value)


def test_fit_bucket_is_told_so_and_nothing_remains(seaweed, capsys):
    with seaweed.place() as url:
        assert main(["doctor", "--json", "--size", "1M", url]) == 0
        assert list(store_at(url).list("")) == []
    found = json.loads(capsys.readouterr().out)
    jsonschema.validate(found, schema_of(group.get_command(None, "doctor")))
    assert (found["kind"], found["fit"]) == ("object store", True)
    names = {check["name"]: check for check in found["checks"]}
    assert names.keys() == {
        "reachable", "atomic create", "listing", "delete", "small writes", "requests", "clock", "large writes",
        "reads", "held",
    }  # fmt: skip
    assert names["clock"]["state"] == "ok"
    assert "endpoint http" in names["reachable"]["found"]


def test_bucket_that_is_missing_and_a_wrong_key_are_named(seaweed):
    options = {"endpoint": seaweed.endpoint, "region": "us-east-1", "patience_s": 1.0}
    wrong = CloudOptions(access_key_id="nobody", secret_access_key="x" * 20, **options)
    for store in (CloudStore("s3://no-such-bucket/a", CloudOptions(**options)), CloudStore("s3://milepost/a", wrong)):
        found = diagnose(store, size_bytes=MIB)
        assert not found.fit
        assert checks_of(found)["reachable"].state == "fail"
        assert checks_of(found)["further checks"].state == "skipped"
        assert len(checks_of(found)["reachable"].found) > 40, "it says why, and what to do"


@pytest.mark.slow
def test_service_that_loses_replies_for_a_while_is_fit(seaweed, s3_proxy):
    with seaweed.place(s3_proxy.endpoint) as url:
        s3_proxy.set_rules(Rule("lose_reply", "PUT", path="race", times=3))
        found = diagnose(url, size_bytes=MIB)
        assert found.fit, [check for check in found.checks if check.state == "fail"]
        assert s3_proxy.traffic().faults == 3
        milepost.save({"step": 1}, url)
        assert list(store_at(url).list(".milepost")) == []
