"""How a run shows itself in a notebook: its newest steps. Reads their manifests and nothing else."""

from milepost.checkpoint import age_of, files_at
from milepost.core.manifest import Manifest
from milepost.core.notebook import html_block, show_age, show_size
from milepost.steps.shelf import Shelf, metrics_of

_STEPS = 5
_METRICS = 6
_HEADS = ("step", "size", "ranks", "age", "metrics", "state")


def run_html(shelf: Shelf) -> str:
    """The newest steps with size, age and metrics. Whatever goes wrong is told in the block, and nothing is raised."""
    url = "a place without a name"
    try:
        url = shelf.root.url
        recent = shelf.recent(_STEPS + 1)
        rows = [_row(shelf, step, folder) for step, folder in recent[:_STEPS]]
    except Exception as error:  # noqa: BLE001  # a notebook shows an object, or nothing at all
        return html_block("Checkpointer", url, (), (_HEADS, ()), f"{type(error).__name__}: {error}")
    facts = [f"newest step {recent[0][0]:,}" if recent else "nothing was saved here yet"]
    more = "There are older steps: `steps()` lists all." if len(recent) > _STEPS else ""
    return html_block("Checkpointer", url, facts, (_HEADS, rows), more)


def _row(shelf: Shelf, step: int, folder: str) -> tuple[str, ...]:
    try:
        files = files_at(shelf.within(folder))
    except Exception as error:  # noqa: BLE001  # another step may be fine
        reason = str(error).replace(f"{shelf.root.url}/", "")
        return str(step), "", "", "", "", reason or type(error).__name__
    try:
        return (str(step), *_columns(files.manifest))
    finally:
        files.close()


def _columns(manifest: Manifest) -> tuple[str, ...]:
    age_s, metrics = age_of(manifest), metrics_of(manifest)
    shown = [f"{name} {value:.4g}" for name, value in list(metrics.items())[:_METRICS]]
    health = manifest.health
    return (
        show_size(sum(file.size_bytes for file in manifest.files)),
        f"{manifest.world:,}",
        "" if age_s is None else show_age(age_s),
        ", ".join(shown + ["…"] * (len(metrics) > _METRICS)),
        "" if health is None or health.ok else f"not healthy: {health.reason}",
    )
