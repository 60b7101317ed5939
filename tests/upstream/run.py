"""Run PyTorch's own tests for DCP on `milepost.dcp`: ./scripts/upstream [--how alias|rewrite|both] [file ...]

alias: `torch.distributed.checkpoint` leads to Milepost everywhere, for torch too. rewrite: the tests import
`milepost.dcp`. baseline.json names the tests that pass for torch itself on a machine without accelerators. Exit status
0: all of those pass; 1: some do not.
"""

import argparse
import contextlib
import fnmatch
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.upstream.fetch import tests_folder

HERE = Path(__file__).parent
BASELINE = json.loads((HERE / "baseline.json").read_text())
THEIRS, OURS = "torch.distributed.checkpoint", "milepost.dcp"
TEMPORARY = '"/tmp/dcp_testing"', "f\"{__import__('tempfile').gettempdir()}/dcp_testing\""
"""A place that one of the tests uses on every machine; here it is in a folder of the run's own."""
TEST_S, RANKS_S, FILE_S = 900, 840, 3600
CHANCES = 2
"""Some of the tests depend on time; one that fails gets another chance."""


def main():
    parser = argparse.ArgumentParser(prog="./scripts/upstream", description=__doc__.partition("\n")[0])
    parser.add_argument("files", nargs="*", help="files of the tests, such as test_planner.py or 'e2e/*'; all if none")
    parser.add_argument("--how", choices=["alias", "rewrite", "both"], default="both")
    parser.add_argument("--jobs", type=int, default=2, help="how many files run at once")
    parser.add_argument("--out", default="", help="a folder for logs; else they are in a temporary one if tests fail")
    given = parser.parse_args()
    files = [file for file in BASELINE if not given.files or any(fnmatch.fnmatch(file, one) for one in given.files)]
    if not files:
        parser.error(f"no file of the tests is called {', '.join(given.files)}")
    out = Path(given.out or tempfile.mkdtemp(prefix="upstream-")).resolve()
    ways = ["alias", "rewrite"] if given.how == "both" else [given.how]
    lost = [one for how in ways for one in run_all(how, files, given.jobs, out / how)]
    if lost:
        print(f"logs: {out}")
    return 1 if lost else 0


def run_all(how, files, jobs, out):
    """Run the files in one way, and print a table. Gives the tests of the baseline that did not pass."""
    copy_tests(out / "tests", how)
    started = time.monotonic()
    with ThreadPoolExecutor(jobs) as pool:
        results = dict(zip(files, pool.map(lambda file: run_chances(how, file, out), files), strict=True))
    wide = max(map(len, files))
    print(f"\n{how}\n{'file':<{wide}}  baseline  passed")
    lost = []
    for file, result in results.items():
        passed = [test for test in BASELINE[file] if result.get(test, ("", ""))[0] == "passed"]
        lost += [(file, test, result) for test in BASELINE[file] if test not in passed]
        print(f"{file:<{wide}}  {len(BASELINE[file]):8}  {len(passed):6}")
    total = sum(len(BASELINE[file]) for file in files)
    print(f"{'all':<{wide}}  {total:8}  {total - len(lost):6}  ({time.monotonic() - started:.0f} s)")
    for file, test, result in lost:
        print(f"LOST {file}::{test}  {reason(result.get(test, result.get('', ('', 'did not run'))))}")
    return lost


def copy_tests(folder, how):
    """The tests, with the other name if they are rewritten."""
    source = tests_folder()
    for path in source.rglob("*.py"):
        text = path.read_text().replace(*TEMPORARY)
        if how == "rewrite":
            text = f"import {OURS}\n{text.replace(THEIRS, OURS)}"
        target = folder / path.relative_to(source)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)


def reason(outcome):
    lines = outcome[1].strip().splitlines() or [outcome[0]]
    told = [line for line in lines if line.startswith("E ") and ("Error" in line or "Exception" in line)]
    return (told or lines)[-1][:200]


def run_chances(how, file, out):
    """The outcome and the text of each test of a file."""
    result = run_file(how, file, out, [])
    for _ in range(CHANCES - 1):
        again = [test for test in BASELINE[file] if result.get(test, ("passed", ""))[0] != "passed"]
        if again:
            found = run_file(how, file, out, again)
            result |= {test: outcome for test, outcome in found.items() if outcome[0] == "passed"}
    print(f"  {how} {file}: {sum(outcome[0] == 'passed' for outcome in result.values())} passed", flush=True)
    return result


def run_file(how, file, out, tests):
    report, name = out / f"{file.replace('/', '-')}.jsonl", Path(file).name
    report.unlink(missing_ok=True)
    arguments = ["-m", "pytest", "-q", "-p", "upstream_report", "-p", "no:cacheprovider", "--tb=short", "-W", "ignore"]
    # Its handlers would be counted by a test of torch's loggers.
    arguments += ["-p", "no:logging", "--timeout", str(TEST_S), "--timeout-method", "signal"]
    arguments += ["--rootdir", str(out / "tests"), "-c", os.devnull, *([f"{name}::{one}" for one in tests] or [name])]
    with open(report.with_suffix(".log"), "a") as log, tempfile.TemporaryDirectory(prefix="upstream-") as temporary:
        process = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=(out / "tests" / file).parent,
            env=environment(how, report, temporary),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(FILE_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # ranks that hang
        process.wait()
    return outcomes(report)


def environment(how, report, temporary):
    path = [str(HERE / "shim"), str(HERE.parents[1] / "src"), os.environ.get("PYTHONPATH", "")]
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        "PYTHONDONTWRITEBYTECODE": "1",
        "UPSTREAM_HOW": how,
        "UPSTREAM_REPORT": str(report),
        "TMPDIR": temporary,
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": str(RANKS_S),
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }


def outcomes(report):
    """By test, its outcome and text; under "" what went wrong before tests ran."""
    found = {"": ("failed", "the run ended before this test")}
    for line in report.read_text().splitlines() if report.exists() else []:
        record = json.loads(line)
        if record["kind"] == "collect":
            found[""] = "failed", record["text"]
        elif record["kind"] == "run" and found.get(record["test"], ("passed", ""))[0] != "failed":
            found[record["test"]] = record["outcome"], record["text"]
    return found


if __name__ == "__main__":
    sys.exit(main())
