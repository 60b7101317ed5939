"""Broken requests to an object store: a few trials of each row hold, and a worse library would be noticed."""

import pytest

from faults import object_jobs, objects
from faults.object_lab import MILEPOST, ObjectLab, why_not
from faults.proxy import Rule
from faults.servers import SeaweedFS
from faults.servers.object_server import BUCKET

FAULTS = ("lose_reply", "cut_request", "cut_reply", "short_reply", "long_reply", "answer")


@pytest.fixture(scope="module")
def lab(tmp_path_factory, seaweed):
    if why_not():
        pytest.skip(why_not())
    with ObjectLab(tmp_path_factory.mktemp("objects"), seaweed) as running:
        yield running


@pytest.mark.parametrize(("number", "fault"), list(enumerate(FAULTS)))
def test_milepost_survives_a_broken_request(lab, number, fault):
    """The full table breaks each request. Here each fault meets another one."""
    first = objects.each_request(lambda n: lab.save_through(MILEPOST, True, (Rule(fault, skip=n),)), 1, number)
    assert next(first) == "saved, new"
    over = objects.each_request(lambda n: lab.save_through(MILEPOST, False, (Rule(fault, skip=n),)), 1, number)
    assert next(over) == "saved, new"
    if fault != "cut_request":  # the requests of a load have no bodies
        load = objects.each_request(lambda n: lab.load_through(MILEPOST, (Rule(fault, skip=n),)), 1, number)
        assert next(load) == "loaded, whole"


@pytest.mark.slow
def test_milepost_survives_a_stalled_request(lab):
    assert lab.save_through(MILEPOST, False, (Rule("stall_reply", "PUT", path="manifest"),)) == "saved, new"


@pytest.mark.parametrize("path", ["safetensors", "manifest"])
def test_bit_that_changes_in_an_upload_is_sent_again(lab, path):
    assert lab.save_through(MILEPOST, False, (Rule("flip_request", "PUT", path=path),)) == "saved, new"


def test_bit_that_changes_in_a_download_is_noticed(lab):
    for number in range(1, 6):
        ending = lab.load_through(MILEPOST, (Rule("flip_reply", skip=number),))
        assert ending == "loaded, whole", "it is asked for again"
    for path in ("safetensors", "manifest"):
        assert lab.load_through(MILEPOST, (Rule("flip_reply", "GET", path=path, times=None),)) == "load raised"


def test_several_broken_requests_of_one_save(lab):
    rules = tuple(Rule(fault, chance=0.1, times=None) for fault in FAULTS)
    saves = objects.each_request(lambda _: lab.save_through(MILEPOST, False, rules), 1)
    assert [next(saves), next(saves)] == ["saved, new", "saved, new"]


def test_longer_storm_than_the_patience_leaves_the_old(lab):
    rules = (Rule("answer", skip=3, times=None),)
    assert lab.save_through(MILEPOST, False, rules, patience_s=0.5) == "raised, old"


def test_credentials_that_expire_are_fetched_again(lab):
    assert objects._expire(lab, MILEPOST, True, 4) == "saved, new"
    assert objects._expire(lab, MILEPOST, False, 4) == "raised, old"


@pytest.mark.slow
@pytest.mark.parametrize("again", [False, True])
def test_late_requests_change_nothing_that_is_newer(lab, again):
    ending = objects._late(lab, MILEPOST, Rule("late", "PUT", path="manifest-", times=None), again)
    assert ending == ("raised, newer" if again else "raised, then new")
    assert objects._late(lab, MILEPOST, Rule("late", skip=6), again) == f"saved, {'newer' if again else 'then new'}"


@pytest.mark.slow
def test_server_killed_in_the_middle_of_a_save(lab):
    if not isinstance(lab.server, SeaweedFS):
        pytest.skip("this server keeps nothing when it is killed")
    lab.proxy.set_latency(0.03)
    try:
        assert objects._kill_server(lab, MILEPOST, False, 0.2) == "saved, new"
    finally:
        lab.proxy.set_latency(0.0)


@pytest.mark.slow
def test_races_and_killed_ranks(lab, monkeypatch):
    monkeypatch.setattr(object_jobs, "WRITERS", 3)
    raced, note = object_jobs.race_tally(lab, 1, MILEPOST)
    assert raced.counts == {object_jobs.ONE_WINNER: 1}, note
    monkeypatch.setattr(object_jobs, "WORLD", 2)
    killed = object_jobs.kill_tally(lab, MILEPOST, 2)
    assert killed.of("old", "new") == 2, killed.text


class Careless:
    """Two objects without checksums, written one after the other over the old ones, and asked for once."""

    name = "careless"

    def _store(self, place):
        import obstore

        return obstore.store.S3Store(
            BUCKET,
            prefix=place.prefix,
            endpoint=place.endpoint,
            virtual_hosted_style_request=False,
            unsigned_payload=True,
            client_options={"allow_http": True, "timeout": "2s"},
            retry_config={"max_retries": 0},
        )

    def save(self, what, place):
        for name, tensor in what.items():
            self._store(place).put(name, tensor.numpy().tobytes())

    def load(self, into, place):
        for name, tensor in into.items():
            data = bytes(self._store(place).get(name).bytes())
            tensor.view(-1).numpy().view("u1")[: len(data)] = list(data[: tensor.nbytes])


@pytest.mark.slow
def test_careless_library_is_noticed(lab):
    careless = Careless()
    flips = objects.each(lab, careless, 1, "flip_request", "flip_reply")
    assert flips.of("load is silent") > 0, flips.text
    assert flips.of("saved, silent") > 0, flips.text
    assert flips.of(*objects.WHOLE) < flips.trials
    cuts = objects.each(lab, careless, 1, "cut_request")
    assert cuts.of("raised, mixed") > 0, cuts.text
    late = objects._late(lab, careless, Rule("late", "PUT"), True)
    assert late == "raised, mixed for newer"


def test_data_that_no_save_sweeps_is_noticed(lab):
    _, direct = lab.places()
    assert lab.left_by_the_next(MILEPOST, direct) == ""
    Careless()._store(direct).put("data/of-others/00000.safetensors", b"data")
    assert lab.left_by_the_next(MILEPOST, direct) == ", with data that is not swept"
