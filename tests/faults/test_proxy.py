"""The proxy passes requests on as they are, counts them, and breaks what its rules name."""

import os
import time

import pytest

from faults.proxy import Rule
from faults.servers.object_server import BUCKET

obstore = pytest.importorskip("obstore")
BODY = os.urandom(300_000)


@pytest.fixture
def stores(seaweed, s3_proxy):
    """obstore's client by way of the proxy, and past it."""

    def client(endpoint):
        return obstore.store.S3Store(
            BUCKET,
            prefix=url.partition("?")[0].rpartition("/")[2],
            endpoint=endpoint,
            virtual_hosted_style_request=False,
            unsigned_payload=True,  # some servers compare what is signed
            client_options={"allow_http": True, "timeout": "1s"},
            retry_config={"max_retries": 0},
        )

    with seaweed.place(s3_proxy.endpoint) as url:
        yield client(s3_proxy.endpoint), client(seaweed.endpoint)


def content(store, name):
    try:
        return bytes(obstore.get(store, name).bytes())
    except FileNotFoundError:
        return None


def test_traffic_is_counted_and_signatures_stay_valid(stores, s3_proxy):
    broken, _ = stores
    obstore.put(broken, "a/b", BODY, mode="create")
    assert bytes(obstore.get_range(broken, "a/b", start=10, length=1000)) == BODY[10:1010]
    assert len(obstore.list(broken).collect()) == 1
    obstore.head(broken, "a/b")
    obstore.delete(broken, ["a/b"])
    traffic = s3_proxy.traffic()
    assert traffic.requests == {"PUT": 1, "GET": 1, "LIST": 1, "HEAD": 1, "DELETE": 1}
    assert len(BODY) <= traffic.bytes_up <= len(BODY) + 1000
    assert traffic.bytes_down >= 1000
    assert traffic.faults == 0
    assert [line.split(" ")[0] for line in s3_proxy.seen()] == ["PUT", "GET", "LIST", "HEAD", "DELETE"]
    assert s3_proxy.traffic(reset=True).total == 5
    assert s3_proxy.traffic().total == 0


@pytest.mark.parametrize(
    ("fault", "stored"),
    [
        ("lose_reply", BODY),
        ("stall_reply", BODY),
        ("cut_request", None),
        ("answer", None),
        ("stall", None),
        ("late", None),
    ],
)
def test_upload_fails_and_takes_effect_or_not(stores, s3_proxy, fault, stored):
    broken, direct = stores
    s3_proxy.set_rules(Rule(fault, "PUT", status=503))
    with pytest.raises(obstore.exceptions.BaseError):
        obstore.put(broken, "name", BODY, mode="create")
    assert content(direct, "name") == stored
    assert s3_proxy.release() == ([200] if fault == "late" else [])
    assert content(direct, "name") == (BODY if fault == "late" else stored)


def test_one_bit_of_an_upload_is_another(stores, s3_proxy):
    broken, direct = stores
    s3_proxy.set_rules(Rule("flip_request", "PUT"))
    obstore.put(broken, "name", BODY)
    assert changed_bits(content(direct, "name")) == 1


def test_one_bit_of_a_download_is_another(stores, s3_proxy):
    broken, direct = stores
    obstore.put(direct, "name", BODY)
    s3_proxy.set_rules(Rule("flip_reply", "GET"))
    assert changed_bits(content(broken, "name")) == 1
    assert content(broken, "name") == BODY, "once"


def changed_bits(found):
    return (int.from_bytes(found, "big") ^ int.from_bytes(BODY, "big")).bit_count()


def test_download_is_cut_too_short_or_too_long(stores, s3_proxy):
    broken, direct = stores
    obstore.put(direct, "name", BODY)
    s3_proxy.set_rules(Rule("cut_reply", "GET"), Rule("short_reply", "GET"), Rule("long_reply", "GET"))
    with pytest.raises(obstore.exceptions.BaseError):
        content(broken, "name")
    assert content(broken, "name") == BODY[: len(BODY) // 2]
    assert content(broken, "name")[: len(BODY)] == BODY
    assert len(content(direct, "name")) == len(BODY)


def test_rule_without_anything_to_break_makes_no_fault(stores, s3_proxy):
    broken, _ = stores
    s3_proxy.set_rules(Rule("flip_request", "LIST"))
    assert obstore.list(broken).collect() == []
    traffic = s3_proxy.traffic()
    assert (traffic.matched, traffic.faults) == (1, 0)


def test_rules_choose_by_name_turn_and_chance(stores, s3_proxy):
    broken, _ = stores

    def refused(name):
        try:
            obstore.put(broken, name, b"")
        except obstore.exceptions.BaseError:
            return True
        return False

    s3_proxy.set_rules(Rule("answer", "PUT", path="manifest", skip=1, times=2))
    assert [refused("other"), *(refused("x/manifest y") for _ in range(4))] == [False, False, True, True, False]
    s3_proxy.set_rules(Rule("answer", header="tests-first", times=None, chance=0.5))
    assert 10 < sum(refused(f"{number}") for number in range(60)) < 50
    s3_proxy.heal()
    assert not refused("other")


def test_latency_is_added_to_each_request(stores, s3_proxy):
    broken, _ = stores
    obstore.put(broken, "name", b"")
    s3_proxy.set_latency(0.1)
    start = time.monotonic()
    for _ in range(3):
        obstore.head(broken, "name")
    assert time.monotonic() - start >= 0.3
