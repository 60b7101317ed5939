"""Listeners that come with Milepost: OpenTelemetry, Prometheus, torch.profiler, and the example for TensorBoard."""

import os
import re
import stat
import subprocess
import sys
import time

import pytest
import torch
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

import milepost
from milepost import events
from milepost.events import OpenTelemetry, ProfilerRanges, PrometheusFile, listen
from milepost.testing import run_ranks

STATE = {"w": torch.zeros(25_000), "step": 1}


@pytest.fixture
def tracing():
    """A provider of tracers, and the spans that ended, by name."""
    provider, exporter = TracerProvider(), InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    yield provider, lambda: {span.name: span for span in exporter.get_finished_spans()}
    provider.shutdown()


def test_spans_of_a_save_in_the_background_belong_to_the_caller(tmp_path, tracing):
    provider, spans = tracing
    tracer = provider.get_tracer("training")
    with listen(OpenTelemetry(provider)), milepost.Checkpointer(tmp_path, keep_last=1) as keeper:
        keeper.save(STATE, 1)
        with tracer.start_as_current_span("training step"):
            pending = keeper.async_save(STATE, 2)
        pending.result()
    found = spans()
    save, step, removal = found["milepost.save"], found["training step"], found["milepost.remove"]
    assert save.parent.span_id == step.context.span_id
    assert save.context.trace_id == step.context.trace_id
    assert save.end_time > step.end_time, "it went on when the caller had left its span"
    assert removal.parent.span_id == save.context.span_id
    about = {name: save.attributes[f"milepost.{name}"] for name in ("step", "rank", "world", "bytes")}
    assert about == {"step": 2, "rank": 0, "world": 1, "bytes": 200_000}, "copied, and written"
    for phase in ("describing", "staging", "blocking", "writing", "committing"):
        inner = found[f"milepost.{phase}"]
        assert inner.parent.span_id == save.context.span_id, phase
        assert save.start_time - 1e6 <= inner.start_time <= inner.end_time <= save.end_time + 1e6
    assert found["milepost.writing"].attributes["milepost.bytes"] == 100_000
    assert [event.name for event in save.events] == ["committed"]
    assert save.status.status_code is not StatusCode.ERROR


def test_failed_operation_has_an_error_status_and_notes(tmp_path, tracing):
    provider, spans = tracing
    listener = OpenTelemetry(provider)
    with listen(listener), pytest.raises(milepost.InvalidState):
        milepost.save({"bad": object()}, tmp_path)
    save = spans()["milepost.save"]
    assert save.status.status_code is StatusCode.ERROR
    assert "bad" in save.status.description
    assert save.attributes["error.type"] == "InvalidState"
    about = {"kind": "save", "url": "s3://b", "rank": 0, "world": 4, "pid": 1, "operation": "x", "step": 9}
    listener(events.Started(time=1.0, **about))
    listener(events.Retried(time=2.0, request="put", name="n", attempt=1, pause_s=0.1, reason="503", **about))
    listener(events.Waiting(time=3.0, meeting="writing", ranks=(3,), missing=1, since=1.0, waited_s=2.0, **about))
    listener(events.Ended(time=4.0, ok=True, seconds=3.0, bytes=1, retries=1, phases={}, **about))
    listener(events.Ended(time=5.0, ok=True, seconds=3.0, bytes=1, retries=1, phases={}, **about | {"operation": "y"}))
    span = spans()["milepost.save"]
    assert [event.name for event in span.events] == ["retry", "waiting"]
    assert span.events[1].attributes["milepost.ranks"] == (3,)
    assert (span.start_time, span.end_time) == (1_000_000_000, 4_000_000_000)


def test_span_of_an_unhealthy_save_says_why(tmp_path, tracing):
    provider, spans = tracing
    with listen(OpenTelemetry(provider)):
        milepost.save({"w": torch.tensor([float("inf")])}, tmp_path, healthy=True)
    [event] = spans()["milepost.save"].events
    assert event.attributes["milepost.healthy"] is False
    assert event.attributes["milepost.unhealthy.reason"] == "1 infinite in 'w'"


def test_without_opentelemetry_the_error_says_how_to_install():
    code = """
import sys
sys.modules["opentelemetry"] = None
import milepost
try:
    milepost.events.OpenTelemetry()
except milepost.InvalidRequest as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert 'pip install "milepost[opentelemetry]"' in done.stdout


SAMPLE = re.compile(r'([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{((?:[a-zA-Z_]\w*="(?:[^"\\\n]|\\["\\n])*",?)*)\})? (\S+)')


def parse(path):
    """The samples of a text file, strictly: each metric once, with help and type, and no sample twice."""
    text, samples, seen, kind = path.read_bytes().decode(), {}, set(), ""
    assert text.endswith("\n")
    for line in text.removesuffix("\n").split("\n"):
        if line.startswith("# HELP "):
            current = line.split(" ", 3)[2]
            assert current not in seen, "samples of one metric stand together"
            seen.add(current)
        elif line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ")
            assert name == current
            assert kind in ("gauge", "counter")
            assert name.endswith("_total") == (kind == "counter")
        else:
            match = SAMPLE.fullmatch(line)
            assert match, line
            assert match[1] == current
            labels = re.findall(r'(\w+)="((?:[^"\\]|\\.)*)"', match[2] or "")
            plain = {k: re.sub(r"\\(.)", lambda m: "\n" if m[1] == "n" else m[1], v) for k, v in labels}
            key = (match[1], frozenset(plain.items()))
            assert key not in samples
            samples[key] = float(match[3])
    return samples


def test_prometheus_file_says_when_the_last_checkpoint_was_committed(tmp_path):
    path, run = tmp_path / "milepost.prom", 'a "b"\\\nc\rd\u2028e'
    before = time.time()
    with listen(PrometheusFile(path, labels={"run": run})), milepost.Checkpointer(tmp_path / "run") as keeper:
        keeper.save(STATE, 41)
        keeper.save(STATE, 42)
        keeper.restore(STATE)
        with pytest.raises(milepost.InvalidState):
            keeper.save({"x": object()}, 43)

    def value(name, **labels):
        return parse(path).get((name, frozenset({"run": run, **labels}.items())))

    last = "milepost_last_checkpoint_"
    assert before <= value(last + "timestamp_seconds") <= time.time()
    assert (value(last + "step"), value(last + "bytes")) == (42, 100_000)
    timings = {t.phase: t for t in milepost.open(tmp_path / "run/step-0000000042").manifest.timings}
    writing = timings["writing"]
    assert value(last + "phase_seconds", phase="writing", rank="slowest") == writing.slowest_s > 0
    assert value(last + "phase_slowest_rank", phase="writing") == 0
    assert value("milepost_operations_total", kind="save") == 3
    assert value("milepost_failures_total", kind="save") == 1
    assert value("milepost_operations_total", kind="load") == 1
    assert value("milepost_retries_total", kind="save") == 0
    assert value("milepost_phase_seconds_total", kind="load", phase="reading") > 0
    assert [entry.name for entry in tmp_path.iterdir() if "prom" in entry.name] == ["milepost.prom"]

    # The job starts again: the age of the last checkpoint goes on, the counters begin anew.
    stamp = value(last + "timestamp_seconds")
    with listen(PrometheusFile(path, labels={"run": run})):
        assert value(last + "timestamp_seconds") == stamp
        with pytest.raises(milepost.InvalidState):
            milepost.save({"x": object()}, tmp_path / "run")
        assert value(last + "timestamp_seconds") == stamp
        assert value(last + "step") == 42
        milepost.save(STATE, tmp_path / "other")
    assert value(last + "timestamp_seconds") > stamp
    assert value(last + "step") is None, "of this one the step is not known"


def test_prometheus_file_tells_the_age_of_the_last_healthy_checkpoint(tmp_path):
    path, sick = tmp_path / "a.prom", {"w": torch.full((25_000,), float("nan")), "step": 1}
    target = {"w": torch.zeros(25_000), "step": 0}

    def value(name):
        return parse(path).get((name, frozenset()))

    last, healthy = "milepost_last_checkpoint_", "milepost_last_healthy_checkpoint_timestamp_seconds"
    with listen(PrometheusFile(path)), milepost.Checkpointer(tmp_path / "run", healthy=True) as keeper:
        assert (value(healthy), value("milepost_skipped_steps_total")) == (None, 0)
        keeper.save(STATE, 1)
        first = value(healthy)
        assert first == value(last + "timestamp_seconds")
        assert value(last + "healthy") == 1
        keeper.async_save(sick, 2).result()
        keeper.wait()
        assert (value(last + "healthy"), value(last + "step"), value(healthy)) == (0, 2, first)
        keeper.restore(target)
        assert value("milepost_skipped_steps_total") == 1
    with listen(PrometheusFile(path)), milepost.Checkpointer(tmp_path / "run", healthy=True) as keeper:
        keeper.save(sick, 3)  # of a job that was started again
        assert (value(last + "step"), value(healthy)) == (3, first)
        keeper.save(STATE, 4)
        assert value(healthy) == value(last + "timestamp_seconds") > first


def test_prometheus_file_counts_one_rank_and_one_process(tmp_path):
    def work(comm):
        milepost.save(STATE, tmp_path / "a", process_group=comm)

    with listen(PrometheusFile(tmp_path / "0.prom")), listen(PrometheusFile(tmp_path / "2.prom", rank=2)):
        run_ranks(3, work)
        if (child := os.fork()) == 0:
            milepost.save(STATE, tmp_path / "b")
            os._exit(0)
        os.waitpid(child, 0)
    for name in ("0.prom", "2.prom"):
        samples = parse(tmp_path / name)
        assert samples["milepost_operations_total", frozenset({("kind", "save")})] == 1
    assert any(name.endswith("phase_slowest_rank") for name, _ in parse(tmp_path / "0.prom"))
    assert not any(name.endswith("phase_slowest_rank") for name, _ in samples), "only the coordinator knows"


def test_prometheus_file_refuses_what_cannot_work(tmp_path):
    for given, why in [
        ({"path": tmp_path / "milepost.txt"}, "end in .prom"),
        ({"path": tmp_path / "none" / "a.prom"}, "cannot write"),
        ({"path": tmp_path / "a.prom", "labels": {"a-b": "c"}}, "letters, digits"),
        ({"path": tmp_path / "a.prom", "labels": {"phase": "c"}}, "used already"),
    ]:
        with pytest.raises(milepost.InvalidRequest, match=why):
            PrometheusFile(**given)
    path = tmp_path / "b.prom"
    path.write_bytes(b"\xff\xfe milepost_last_checkpoint_step 1\n" + os.urandom(100))
    PrometheusFile(path)
    assert parse(path), "what lay there was no such file"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_prometheus_file_in_a_folder_without_permission(tmp_path):
    tmp_path.chmod(stat.S_IRUSR | stat.S_IXUSR)
    with pytest.raises(milepost.InvalidRequest, match="cannot write"):
        PrometheusFile(tmp_path / "a.prom")


def test_full_disk_does_not_stop_saves_and_the_file_recovers(tmp_path, caplog):
    folder = tmp_path / "collector"
    folder.mkdir()
    with listen(PrometheusFile(folder / "a.prom")):
        (folder / "a.prom").unlink()
        folder.rmdir()
        milepost.save(STATE, tmp_path / "run")
        assert "PrometheusFile failed" in caplog.text
        folder.mkdir()
        milepost.save(STATE, tmp_path / "run")
    samples = parse(folder / "a.prom")
    assert samples["milepost_operations_total", frozenset({("kind", "save")})] == 2


def test_phases_are_ranges_of_the_profiler_on_their_threads(tmp_path):
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profile, listen(ProfilerRanges()):
        milepost.save(STATE, tmp_path)
        milepost.load(STATE, tmp_path)
    found = {event.name: event for event in profile.events()}
    assert {"milepost save: writing", "milepost save: committing", "milepost load: reading"} <= found.keys()
    writing, inner = found["milepost save: writing"].time_range, found["milepost save: comparing"].time_range
    assert writing.start <= inner.start <= inner.end <= writing.end
