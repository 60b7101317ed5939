"""Hostile checkpoints, bombs and fuzzed input, a few of each; and that the harness would notice if one got through."""

import os
import random
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import faults_fuzz
import faults_hostile
from faults_fuzz import Decoder, change_bytes, change_json, change_opcodes, decoders, fuzz

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")  # the forks only read and end


@pytest.mark.timeout(120)
def test_a_few_of_each_keep_the_promise_and_the_canary_comes_to_life_in_dcp(tmp_path):
    rows = {row.number: row for row in faults_hostile.rows(False, tmp_path)}
    assert list(rows) == [17, 19, 20]
    for row in rows.values():
        assert row.ok, f"{row.milepost.text}: {row.note}"
    # Else the canary would prove nothing.
    assert rows[17].dcp.counts == {"executed": len(faults_hostile.WAYS)}
    assert rows[19].dcp.of("tried to allocate it") > 0
    assert rows[20].milepost.of("accepted and sound") > 100
    assert rows[20].milepost.trials >= faults_hostile.QUICK_INPUTS * 0.99


def report(*seen, **outcomes):
    return {"name": "x", "seen": list(seen), "outcomes": outcomes}


def test_an_attack_that_gets_through_is_no_good_ending():
    ending = faults_hostile.corpus_ending
    assert ending(report("the canary: code was executed", open="right")) == "executed"
    assert ending(report("os.system ('touch x',)", open="refused A: b")) == "executed"
    assert ending(report("open ['/outside/x']", open="right")) == "outside touched"
    assert ending(report(open="refused A: b", load="KeyError: c")) == "KeyError"
    assert ending(report(open="right", load="wrong: a tensor is wrong")) == "wrong"
    assert ending(report(open="right", load="refused A: b")) == "refused"
    assert ending(report(open="right")) == "read without harm"


def test_a_reader_that_runs_its_input_is_seen(tmp_path):
    def make(path):
        path.write_text(f"touch {path.parent}/canary")

    assert faults_hostile.way_ending(make, lambda path: os.system(path.read_text()), tmp_path / "a" / "x") == "executed"
    assert faults_hostile.way_ending(make, Path.read_text, tmp_path / "b" / "x") == "read without harm"


def test_a_reader_that_allocates_what_is_claimed_is_seen(tmp_path):
    def greedy(_path):
        return len(bytearray(1 << 40))

    ending, _, _ = faults_hostile.in_a_fork(lambda: faults_hostile.measured(greedy, tmp_path))
    assert ending == "tried to allocate it"


def test_memory_that_is_taken_within_the_limit_is_measured(tmp_path):
    def takes(_path):
        return bytearray(100 << 20).count(1)

    ending, cpu_s, grown = faults_hostile.in_a_fork(lambda: faults_hostile.measured(takes, tmp_path))
    assert ending == "read without harm"
    assert cpu_s > 0
    assert grown > 90 << 20


def test_a_process_that_dies_or_does_not_end_is_seen():
    assert faults_hostile.in_a_fork(lambda: os.kill(os.getpid(), 9)) == "died with -9"
    assert faults_hostile.in_a_fork(lambda: os._exit(3)) == "died with 3"
    assert faults_hostile.in_a_fork(lambda: os.read(os.pipe()[0], 1), limit_s=0.1) == "no end in 0.1 s"
    assert faults_hostile.in_a_fork(lambda: 7) == 7


def test_the_valid_inputs_of_each_decoder_are_accepted_and_sound():
    for name, decoder in decoders().items():
        for seed in decoder.seeds:
            assert decoder.sound(seed, decoder.decode(seed)), name


def made_up(decode, sound=lambda data, found: True):
    return Decoder(1, [b'{"a": [1, 2]}'], change_bytes, decode, (ValueError,), sound)


def test_an_exception_that_is_not_documented_is_a_crash():
    ended, bad = fuzz(made_up(lambda data: data[1000]), 20, random.Random(0))
    assert ended == {"crash (IndexError)": 20}
    assert len(bad) == 20


def test_a_decoder_that_accepts_anything_is_seen():
    ended, _ = fuzz(made_up(len, lambda data, found: False), 20, random.Random(0))
    assert ended == {"wrongly accepted": 20}


def test_a_refusal_is_good():
    def refuse(data):
        raise ValueError(data)

    ended, bad = fuzz(made_up(refuse), 20, random.Random(0))
    assert ended == {"refused": 20}
    assert bad == []


@pytest.mark.parametrize(
    ("name", "break_it"),
    [
        ("manifest", lambda monkeypatch: monkeypatch.setattr("milepost.core.manifest.xxhash", AlwaysRight)),
        (
            "manifest, sealed again",
            lambda monkeypatch: monkeypatch.setattr("milepost.core.manifest.check", print_nothing),
        ),
        ("header", lambda monkeypatch: monkeypatch.setattr("milepost.core.shardfile._check_entry", print_nothing)),
    ],
)
def test_a_decoder_without_its_checks_is_found_out(monkeypatch, name, break_it):
    break_it(monkeypatch)
    ended, _ = fuzz(decoders()[name], 3000, random.Random(0))
    assert set(ended) - {"refused", "accepted and sound"}


def print_nothing(*_arguments):
    """A check that passes everything."""


class AlwaysRight:
    """A checksum that fits everything: that of the good manifest."""

    class xxh3_64:
        def __init__(self, _data):
            pass

        def hexdigest(self):
            return decoders()["manifest"].seeds[0][-20:-4].decode()


@pytest.mark.parametrize("change", [change_bytes, change_json, change_opcodes])
def test_one_seed_makes_the_same_inputs_again(change):
    data = decoders()["value"].seeds[0]
    first, second = random.Random(3), random.Random(3)
    assert [change(first, data) for _ in range(50)] == [change(second, data) for _ in range(50)]


def test_a_changed_manifest_can_be_sealed_again():
    seed = decoders()["manifest"].seeds[0]
    assert faults_fuzz.sealed(seed[: -faults_fuzz.SEAL_BYTES]) == seed
