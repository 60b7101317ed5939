"""Hostile checkpoints: every attack of the corpus ends in an error of Milepost, or does no harm."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LATER_USES = ("metadata", "evil", "tree", "state", "load", "stateful")
DIFFERENCES = ("load", "load_bytes")
"""Uses that may find that the forged checkpoint holds more than the target: a difference, not harm."""


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_no_attack_gets_through():
    """All in one process with little memory. Nothing is run, nothing outside is touched, nothing takes long."""
    problems = {}
    for report in run_attacks():
        found = list(problems_of(report))
        if found:
            problems[report["name"]] = found
    assert problems == {}, json.dumps(problems, indent=2)


def run_attacks():
    """What each attack came to, in the words of `attacks.run`."""
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
    command = [sys.executable, "-m", "attacks.run"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=380, check=False)
    reports = [json.loads(line) for line in done.stdout.splitlines()]
    last = reports[-1]["name"] if reports else "none"
    assert done.returncode == 0, f"the process died ({done.returncode}) after {last}:\n{done.stderr[-3000:]}"
    assert len(reports) > 300
    return reports


def problems_of(report):
    outcomes = report["outcomes"]
    yield from report["seen"]
    for use, outcome in outcomes.items():
        if outcome != "right" and not outcome.startswith("refused "):
            yield f"{use}: {outcome}"

    def refused(use):
        return outcomes.get(use, "").startswith("refused ")

    match report["stop"]:
        case "open":
            yield from (f"{use} was not refused" for use in ("open", "load", "explain") if not refused(use))
        case "verify":
            yield from (f"{use} was refused" for use in ("open", "list") if refused(use))
            yield from (f"{use} was not refused" for use in ("verify", "state", "load") if not refused(use))
        case "use":
            yield from (f"{use} was refused" for use in ("open", "list") if refused(use))
            if not any(refused(use) for use in LATER_USES):
                yield "nothing was refused"
        case "nothing":
            yield from (f"{use}: {outcomes[use]}" for use in outcomes if refused(use) and use not in DIFFERENCES)
