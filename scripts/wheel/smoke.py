"""An installed Milepost saves and loads, on one rank and on two. Run by scripts/check-wheel, outside the repository."""

import importlib.util
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

import milepost
from milepost.testing import run_ranks


def one_process(folder: Path) -> None:
    """A model and its optimizer, saved, changed, and loaded."""
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 64)).sum().backward()
    optimizer.step()
    state = {"model": model, "optim": optimizer, "step": 1}
    before = model.weight.detach().clone()
    milepost.save(state, folder / "one")
    optimizer.step()
    milepost.load(state, folder / "one")
    assert model.weight.equal(before)
    assert milepost.open(folder / "one").verify().ok


def two_ranks(folder: Path) -> None:
    """Two ranks as threads save, and one process loads."""

    def work(comm: Any) -> None:
        part = {(2 * comm.rank, 0): torch.full((2, 3), float(comm.rank))}
        milepost.save({"w": milepost.Sharded((4, 3), part)}, folder / "two", process_group=comm)

    run_ranks(2, work)
    whole = milepost.load({"w": torch.zeros(4, 3)}, folder / "two")["w"]
    assert whole[:, 0].tolist() == [0, 0, 1, 1]


def one_page(folder: Path) -> None:
    """The page of a checkpoint: its scripts and styles are in the wheel, and the licences of what is vendored."""
    program = Path(sys.prefix) / "bin" / "milepost"
    subprocess.run([program, "view", "one"], cwd=folder, check=True, capture_output=True)  # noqa: S603  # our own
    page = (folder / "milepost-one.html").read_text()
    assert "echarts" in page
    assert "milepost-ready" in page
    vendored = Path(milepost.__file__).parent / "view" / "assets" / "vendor"
    assert {"LICENSE-echarts", "NOTICE-echarts", "LICENSE-d3"} <= {path.name for path in vendored.iterdir()}


def main() -> None:
    """Check that this is the installed package, without development extras, and that it works."""
    assert Path(milepost.__file__).is_relative_to(Path(sys.prefix)), milepost.__file__
    extras = [name for name in ("pytest", "hypothesis", "safetensors", "zstandard") if importlib.util.find_spec(name)]
    assert not extras, f"{extras} should not be installed here"
    assert (Path(milepost.__file__).parent / "py.typed").exists()
    with tempfile.TemporaryDirectory() as folder:
        one_process(Path(folder))
        two_ranks(Path(folder))
        one_page(Path(folder))
    print(f"Python {platform.python_version()}: the wheel of Milepost {milepost.__version__} saves and loads")


if __name__ == "__main__":
    main()
