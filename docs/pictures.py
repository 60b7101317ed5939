"""Makes the pictures of `milepost view`: a small run on four real ranks, its page in Chromium, a picture of each part.

    python docs/pictures.py                  # writes docs/how-to/pictures/view-*.png

The steps of the run are made up, and saved by real ranks: a model that is cut by two axes of a mesh, some of it frozen.
One step has NaN in it, the file of another is cut off, and one save never finished.
"""

import math
import sys
import tempfile
from io import BytesIO
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the browser is in the folder of tests

import msgspec
import torch
from PIL import Image
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import milepost
from milepost.inspection.verified import record_verified
from milepost.view import collect
from milepost.view.page import save_page
from milepost.view.record import Page
from tests import browser
from tests.ranks import spawn

FOLDER = Path(__file__).parent / "how-to" / "pictures"
RANKS, STEPS, LAYERS, WIDTH, WORDS = 4, 14, 4, 256, 2048
COLOURS = 256
SOURCE = "runs/small"
"""Where the page says that it comes from, instead of a temporary folder."""
CLICK = "document.querySelectorAll('{} .list-row')[{}].click();"
TYPE = "{{ const at = document.getElementById('{}'); at.value = '{}'; at.dispatchEvent(new Event('{}')); }}"
PARTS = {
    "timeline": ("light", 1230, ""),
    "tensors": ("dark", 740, CLICK.format("#tree", 2)),
    "layout": (
        "light",
        1130,
        TYPE.format("layout-tensor", "model.layers.1.attention.wo.weight", "change")
        + TYPE.format("mesh-shape", "3", "input")
        + CLICK.format("#reads-table", 1),
    ),
    "statistics": (
        "dark",
        760,
        "milepost.pick(900); setTimeout(() => {" + CLICK.format("#statistics-table", 0) + "}, 100)",
    ),
    "changes": ("light", 740, ""),
}
"""For each part: light or dark, how high, and what is done before the picture is taken."""


def shapes() -> dict[str, tuple[int, ...]]:
    """The weights of a small transformer."""
    found: dict[str, tuple[int, ...]] = {"tok_embeddings.weight": (WORDS, WIDTH), "norm.weight": (WIDTH,)}
    for layer in range(LAYERS):
        inside = {"wq": (WIDTH, WIDTH), "wk": (WIDTH // 4, WIDTH), "wv": (WIDTH // 4, WIDTH), "wo": (WIDTH, WIDTH)}
        found |= {f"layers.{layer}.attention.{name}.weight": shape for name, shape in inside.items()}
        wide = {"w1": (11 * WIDTH // 4, WIDTH), "w2": (WIDTH, 11 * WIDTH // 4), "w3": (11 * WIDTH // 4, WIDTH)}
        found |= {f"layers.{layer}.feed_forward.{name}.weight": shape for name, shape in wide.items()}
        found[f"layers.{layer}.norm.weight"] = (WIDTH,)
    return found | {"output.weight": (WORDS, WIDTH)}


def train(rank: int, run: str) -> None:
    """Save a run, on one of the ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    random = torch.Generator().manual_seed(7)
    weights = {key: torch.randn(shape, generator=random) / 50 for key, shape in shapes().items()}

    def cut(key: str, tensor: Tensor) -> DTensor:
        other = Replicate() if tensor.ndim == 1 else Shard(1) if "wo" in key or "w2" in key else Shard(0)
        return distribute_tensor(tensor, mesh, [Shard(0), other])

    def placed(change: Any) -> dict[str, Any]:
        return {key: cut(key, change(tensor)) for key, tensor in weights.items()}

    options: dict[str, Any] = {"statistics": "histogram", "healthy": True}
    with milepost.Checkpointer(run, keep_last=6, keep_every=500, keep_best=2, best="loss", **options) as keeper:
        for number in range(1, STEPS + 1):
            move(weights, random)
            model = placed(lambda tensor: tensor.bfloat16())
            if number == 9:
                model["layers.2.attention.wq.weight"].to_local()[0, :3] = math.nan
            moments = {"exp_avg": placed(lambda t: t / 1000), "exp_avg_sq": placed(lambda t: (t / 1000) ** 2)}
            state = {"model": nest(model), "optim": {name: nest(flat) for name, flat in moments.items()}}
            state |= {"step": 100 * number, "rng": milepost.PerRank(torch.arange(4) + rank)}
            keeper.save(state, 100 * number, metrics=metrics_at(number), metadata={"commit": "4f1c2aa"})


def move(weights: dict[str, Tensor], random: torch.Generator) -> None:
    """Change the weights, as training does: some words only, and nothing in the frozen layer 0."""
    for key, tensor in weights.items():
        if key.startswith("tok"):
            words = torch.randint(0, WORDS // 2, (40,), generator=random)
            tensor[words] += torch.randn(len(words), WIDTH, generator=random) / 300
        elif not key.startswith("layers.0."):
            tensor.add_(torch.randn(tensor.shape, generator=random), alpha=0.001)


def metrics_at(number: int) -> dict[str, float]:
    """Made-up metrics that look like training."""
    loss = 2.1 + 7 * math.exp(-number / 4) + 0.05 * math.sin(3 * number)
    return {"loss": loss, "grad_norm": 0.6 + 0.2 * math.cos(number), "learning_rate": 3e-4 * (1 - number / 40)}


def nest(flat: dict[str, Any]) -> dict[str, Any]:
    """A dict of dicts, from keys with dots."""
    made: dict[str, Any] = {}
    for key, value in flat.items():
        *path, last = key.split(".")
        at = made
        for name in path:
            at = at.setdefault(name, {})
        at[last] = value
    return made


def spoil(run: Path) -> None:
    """Verify the oldest steps, cut off a file of one, and leave what a save leaves that never finished."""
    steps = sorted(run.glob("step-*"))
    for step in steps[:3]:
        record_verified(step, 1)
    victim = sorted((steps[-3] / "data").rglob("*.safetensors"))[1]
    victim.write_bytes(victim.read_bytes()[:-1000])
    left = run / f"step-{100 * (STEPS + 1):010}" / "data" / "00000001-0123456789abcdef"
    left.mkdir(parents=True)
    (left / "00000.safetensors").write_bytes(b"half")


def take(page: Path, folder: Path) -> None:
    """Open the page and write a picture of each part."""
    with browser.started() as running:
        for part, (theme, height, click) in PARTS.items():
            tab = browser.Tab(running, color_scheme=theme, viewport={"width": 1280, "height": height})
            opened = tab.open(f"{page.as_uri()}#part={part}")
            tab.until("document.documentElement.dataset.ready === 'true'")
            opened.wait_for_timeout(300)
            opened.evaluate(click)
            opened.wait_for_timeout(300)
            picture = Image.open(BytesIO(opened.screenshot())).convert("RGB")
            small = picture.quantize(COLOURS, dither=Image.Dither.NONE)
            target = folder / f"view-{part}{'-dark' * (theme == 'dark')}.png"
            small.save(target, optimize=True)
            print(f"{target.name}: {target.stat().st_size / 1000:.0f} kB")
            tab.close()


def renamed(page: Page) -> Page:
    """The page, as if the run were somewhere else."""
    steps = [msgspec.structs.replace(step, url=f"{SOURCE}/{step.name}") for step in page.steps]
    return msgspec.structs.replace(page, source=SOURCE, steps=steps)


def main() -> None:
    """Make the run, write its page, and take the pictures."""
    if browser.why_not():
        sys.exit(browser.why_not())
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as work:
        run = Path(work) / "run"
        spawn(RANKS, train, str(run))
        spoil(run)
        take(save_page(renamed(collect(run)), Path(work) / "page.html"), FOLDER)


if __name__ == "__main__":
    main()
