"""The fuzzer of the table of faults: it tells good endings from bad, does the same again, and finds what hides deep."""

import json
import random
import sys

import pytest

from attacks import forge
from faults import decoders as faults_decoders
from faults import fuzz as faults_fuzz
from faults.changes import change_bytes, change_json, change_opcodes, words
from faults.decoders import Decoder, decoders
from faults.fuzz import fuzz

GOOD = {"refused", "accepted and sound"}


def test_the_valid_inputs_of_each_decoder_are_accepted_and_sound():
    for name, decoder in decoders().items():
        for seed in decoder.seeds:
            assert decoder.sound(seed, decoder.decode(seed)), name


def test_the_valid_inputs_are_the_same_in_every_run():
    before = {name: decoder.seeds for name, decoder in decoders().items()}
    for cached in (forge.good_files, faults_decoders.dcp_files, decoders):
        cached.cache_clear()
    assert {name: decoder.seeds for name, decoder in decoders().items()} == before


def made_up(decode, sound=lambda data, found: True, seed=b'{"a": [1, 2]}', change=change_bytes):
    return Decoder(1, [seed], change, decode, (ValueError,), sound)


def test_an_exception_that_is_not_documented_is_a_crash():
    done = fuzz(made_up(lambda data: data[1000]), 20, random.Random(0))
    assert done.ended == {"crash (IndexError)": 20}
    assert len(done.bad) == 20


def test_a_decoder_that_accepts_anything_is_seen():
    done = fuzz(made_up(len, lambda data, found: False), 20, random.Random(0))
    assert done.ended == {"wrongly accepted": 20}


def test_accepted_input_that_cannot_be_rewritten_is_wrong():
    def sound(data, found):
        raise ValueError("cannot be written")

    done = fuzz(made_up(len, sound), 20, random.Random(0))
    assert done.ended == {"wrongly accepted (ValueError)": 20}


def test_a_refusal_is_good():
    def refuse(data):
        raise ValueError(data)

    done = fuzz(made_up(refuse), 20, random.Random(0))
    assert done.ended == {"refused": 20}
    assert done.bad == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "check"),
    [
        ("manifest, sealed again", "milepost.core.manifest.check"),
        ("manifest, sealed again", "milepost.core.manifest._check_files"),
        ("manifest, sealed again", "milepost.core.manifest._check_holders"),
        ("manifest, sealed again", "milepost.core.manifest.check_leaves"),
        ("manifest, sealed again", "milepost.core.layout.find_gap"),
        ("header", "milepost.core.shardfile._check_entries"),
        ("private record", "milepost.core.private_record.grow"),
    ],
)
def test_a_decoder_without_one_of_its_checks_is_found_out(monkeypatch, name, check):
    monkeypatch.setattr(check, lambda *_: None)
    runs = (fuzz(decoders()[name], 500, random.Random(seed)) for seed in range(40))
    assert any(set(done.ended) - GOOD for done in runs)


def test_a_manifest_whose_checksum_is_not_compared_is_found_out(monkeypatch):
    class AlwaysRight:
        class xxh3_64:
            def __init__(self, _data):
                pass

            def hexdigest(self):
                return decoders()["manifest"].seeds[0][-20:-4].decode()

    monkeypatch.setattr("milepost.core.seal.xxhash", AlwaysRight)
    assert set(fuzz(decoders()["manifest"], 500, random.Random(0)).ended) - GOOD


def hides_a_fault(data):
    """Reads JSON, and fails on what takes four changes, of which no input gets more than three at once."""
    found = json.loads(data)
    if not isinstance(found, dict):
        raise ValueError("no dict")
    if found.get("a") != 2:
        return 1
    if found.get("b") != 3:
        return 2
    if found.get("c") != 4:
        return 3
    if found.get("d") != 5:
        return 4
    raise KeyError("here")


@pytest.mark.slow
def test_guidance_passes_nested_conditions_that_chance_does_not():
    decoder = made_up(hides_a_fault, seed=b'{"a": 1, "b": 2, "c": 3, "d": 4}', change=change_json)

    def finds(guided):
        runs = [fuzz(decoder, 2500, random.Random(seed), guided, [__file__]) for seed in range(16)]
        return sum("crash (KeyError)" in done.ended for done in runs)

    assert finds(guided=True) >= 4
    assert finds(guided=False) == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["value", "pickle"])
def test_guidance_reaches_more_paths_than_changes_alone(name):
    guided, plain = (fuzz(decoders()[name], 500, random.Random(0), guided) for guided in (True, False))
    assert guided.paths > plain.paths


def test_only_the_lines_of_the_decoders_are_noted_and_tracing_ends():
    before = sys.gettrace()
    done = fuzz(decoders()["header"], 100, random.Random(0))
    assert sys.gettrace() is before
    assert {name for name, _, _ in done.arcs} <= faults_fuzz.FILES
    reached, there = faults_fuzz.lines_of(done.arcs)
    assert 20 < reached <= there < 100


@pytest.mark.parametrize("name", list(decoders()))
def test_one_seed_finds_the_same_again(name):
    decoder = decoders()[name]
    first, second = (fuzz(decoder, 100, random.Random(3)) for _ in range(2))
    assert first == second


@pytest.mark.parametrize("change", [change_bytes, change_json, change_opcodes])
def test_one_seed_makes_the_same_inputs_again(change):
    data, other = decoders()["value"].seeds[:2]
    first, second = random.Random(3), random.Random(3)
    assert [change(first, data, other) for _ in range(50)] == [change(second, data, other) for _ in range(50)]


def test_changes_take_parts_of_the_other_input():
    rng = random.Random(0)
    assert any(b'"other"' in change_json(rng, b'{"a": 1}', b'["other"]') for _ in range(50))


def test_the_words_of_the_decoders_are_known():
    assert {"namedtuple", "numpy", "dict", "@checksums"} <= set(words())


def test_a_changed_manifest_can_be_sealed_again():
    seed = decoders()["manifest"].seeds[0]
    assert faults_decoders.sealed(seed[: -faults_decoders.SEAL_BYTES]) == seed
