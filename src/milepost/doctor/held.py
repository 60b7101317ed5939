"""What a place holds already: a run, a checkpoint, and what was left by saves and by checks that were killed."""

from milepost.commit.beside import names_at
from milepost.doctor.records import PlaceCheck
from milepost.doctor.scratch import PREFIX
from milepost.inspection.runs import PlaceSummary, look_at
from milepost.store import Store

_SHOWN = 5


def check_held(place: Store) -> PlaceCheck:
    """What is at the place, as far as names and manifests tell."""
    summary = look_at(place)
    corners = sorted(name.removesuffix("/") for name in names_at(place) if name.startswith(PREFIX))
    # Some servers go on listing folders that are empty.
    left = [name for name in corners if not place.traits.is_current or next(iter(place.list(f"{name}/")), None)]
    problems, advice = _problems(summary)
    if left:
        problems.append(f"left by a check that was killed: {_listed(left)}")
        advice = advice or "Remove what was left"
    found = "; ".join([_described(summary), *problems])
    return PlaceCheck(name="held", state="warn" if problems else "ok", found=found, advice=advice)


def _described(summary: PlaceSummary) -> str:
    whole = [step for step in summary.steps if step.state == "whole"]
    if summary.kind == "nothing":
        return "no checkpoint yet"
    if summary.kind == "checkpoint":
        return f"a checkpoint of the format {summary.steps[0].format}, {summary.steps[0].state}"
    newest = f"the newest that is whole is {whole[-1].name}" if whole else "none of them whole"
    return f"a run of {len(summary.steps):,} steps, {newest}"


def _problems(summary: PlaceSummary) -> tuple[list[str], str]:
    """What is wrong with what is there, and what to do about the worst of it."""
    advices = {
        "damaged": "`milepost verify` names what is damaged",
        "unreadable": "`milepost ls` says why it cannot be read",
        "unfinished": "If no job is saving, `milepost prune --unfinished` removes what was never finished",
    }
    found, advice = [], ""
    for state, words in advices.items():
        names = [step.name for step in summary.steps if step.state == state]
        if names:
            found.append(f"{state}: {_listed(names)}")
            advice = advice or words
    return found, advice


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
