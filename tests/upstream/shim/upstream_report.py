"""A plugin of pytest: one line of JSON for each outcome, written at once, so that it survives a crash of the run."""

import json
import os
import re


def put(**record):
    with open(os.environ["UPSTREAM_REPORT"], "a") as file:
        file.write(json.dumps(record) + "\n")


def pytest_itemcollected(item):
    put(kind="item", test=item.nodeid.partition("::")[2])


def pytest_collectreport(report):
    if report.failed:
        put(kind="collect", text=str(report.longrepr)[-3000:])


def pytest_runtest_logreport(report):
    if report.when == "call" or report.outcome != "passed":
        test = report.nodeid.partition("::")[2]
        put(kind="run", test=test, outcome=report.outcome, text=_why(report) if report.failed else "")


def _why(report):
    """The error. Of a rank that died, the kit tells only the exit status; what it died of is in what it printed."""
    text = str(report.longrepr)[-3000:]
    printed = "\n".join(found for name, found in report.sections if "stderr" in name or "stdout" in name)
    died = [line for line in printed.splitlines() if re.match(r"^[\w.]*(Error|Exception)\b", line)]
    return f"{text}\nE   a rank died of: {died[-1][:400]}" if died and "exit code" in text else text
