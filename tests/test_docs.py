"""Every code block of the documentation runs, and every output that it shows is real."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
PAGES = [p for p in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))] if "```python" in p.read_text()]


def blocks(page):
    return [(match[1], match[2]) for match in BLOCK.finditer(page.read_text())]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_every_code_block_runs_and_prints_what_the_page_shows(page, tmp_path):
    program = "\n".join(text for kind, text in blocks(page) if kind == "python")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    group = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        cwd=tmp_path, env={**os.environ, **group}, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    shown = done.stdout.replace(f"{tmp_path}/", "")
    for kind, text in blocks(page):
        if kind == "text":
            assert text.strip() in shown, f"{page.name} shows\n{text}\nbut the program printed\n{shown}"


def test_every_link_leads_somewhere():
    for page in [
        *ROOT.glob("*.md"),
        *(ROOT / "docs").rglob("*.md"),
        ROOT / "attacks" / "README.md",
        ROOT / "benchmarks" / "README.md",
        ROOT / "faults" / "README.md",
    ]:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_test_files_that_the_pages_name_exist():
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]:
        for name in re.findall(r"`((?:tests|src|attacks|benchmarks|faults|examples)/[\w/.]+)`", page.read_text()):
            assert (ROOT / name).exists(), f"{page.name} names {name}"
