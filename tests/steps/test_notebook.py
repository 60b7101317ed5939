"""What a notebook shows of a run: its newest steps, quickly, and the reason where a step cannot be read."""

import milepost
from milepost import Checkpointer
from milepost.steps.shelf import step_name
from milepost.store import Within
from tests.commit.object_places import RequestStore, objects
from tests.steps.numbered import state


def test_run_shows_its_newest_steps_with_metrics():
    with Checkpointer("memory://shown-run") as keeper:
        assert "nothing was saved here yet" in keeper._repr_html_()
        for step in range(1, 8):
            keeper.save(state(step), step, metrics={"loss<b>": 2.5 / step, "acc": float("nan")})
    shown = keeper._repr_html_()
    assert "newest step 7" in shown
    assert "loss&lt;b&gt; 0.3571, acc nan" in shown
    assert "0 seconds ago" in shown or "1 seconds ago" in shown
    assert shown.count("<tr>") == 1 + 5
    assert "There are older steps" in shown


def test_damaged_step_shows_the_reason_beside_whole_ones(tmp_path):
    keeper = Checkpointer(tmp_path)
    for step in (1, 2):
        keeper.save(state(step), step)
    manifest = tmp_path / step_name(2) / "manifest-00000001.json"
    manifest.write_bytes(manifest.read_bytes().replace(b"tensors", b"<i>sors"))
    shown = keeper._repr_html_()
    assert "is damaged: its checksum does not fit" in shown
    assert shown.count(" kB</code>") == 1


def test_run_whose_store_fails_shows_the_reason():
    class Failing(milepost.store.MemoryStore):
        def list(self, prefix, *, shallow=False):
            raise OSError("the <b>cable</b> is out")

    assert "OSError: the &lt;b&gt;cable&lt;/b&gt; is out" in Checkpointer(Failing())._repr_html_()


def test_run_of_a_thousand_steps_takes_few_requests():
    inner = objects()
    milepost.save(state(7), Within(inner, "one"))
    one = {name: data for name, data in inner.objects.items() if name.startswith("one/")}
    for step in range(1, 1001):
        inner.objects |= {name.replace("one", step_name(step), 1): content for name, content in one.items()}
    store = RequestStore(inner)
    assert "newest step 1,000" in Checkpointer(store)._repr_html_()
    assert len(store.taken()) <= 40
