"""Every code block of the documentation runs, every output that it shows is real, and every link leads somewhere."""

import importlib
import inspect
import pkgutil
import re
import subprocess
import sys
from itertools import chain
from pathlib import Path
from typing import get_args, is_typeddict

import pytest

import milepost
import milepost.errors
from tests import pages, test_architecture

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PROSE = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md"), *(ROOT / ".github").rglob("*.md")])
EVERYTHING = [*PROSE, *sorted(ROOT.glob("*/README.md"))]
RUNNING = [page for page in PROSE if {"python", "console"} & {block.kind for block in pages.blocks(page)}]
TUTORIAL = DOCS / "tutorial.md"  # starts real jobs
FRAMEWORKS = DOCS / "frameworks"  # one page for each framework
LONG = pytest.mark.timeout(600)  # seconds; the machine may be busy
PUBLIC = ["milepost", "milepost.events", "milepost.planning", "milepost.store", "milepost.testing"]
DIRECTIVE = re.compile(r"^\.\. auto(?:function|class|exception|data):: (milepost[\w.]*)$", re.MULTILINE)


def name_of(page):
    return str(page.relative_to(ROOT))


def without_code(page):
    return re.sub(r"`[^`\n]+`", "", pages.BLOCK.sub("", page.read_text()))


def anchors(page):
    """The anchors of a page's headings, as GitHub and MyST make them."""
    headings = re.findall(r"^#+ (.+)$", pages.BLOCK.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def marks_of(page):
    """Each page starts an interpreter or more: only the README is fast. Pages on frameworks need them."""
    marks = [] if page == ROOT / "README.md" else [pytest.mark.slow]
    if page == TUTORIAL or page.parent == FRAMEWORKS:
        marks.append(LONG)
    return [*marks, pytest.mark.frameworks] if page.parent == FRAMEWORKS else marks


@pytest.mark.parametrize("page", [pytest.param(p, marks=marks_of(p), id=name_of(p)) for p in RUNNING])
def test_code_blocks_run_and_print_what_the_page_shows(page, tmp_path, request):
    kind = pages.server_of(page)
    environment = {}
    if kind:
        server = pages.SERVERS[kind]
        environment = server.environment(request.getfixturevalue(server.fixture))
    pages.check(page, tmp_path, environment=environment)


@pytest.mark.parametrize("page", EVERYTHING, ids=name_of)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)]+)\)", without_code(page)):
        if "://" in target or target.startswith("mailto:"):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{name_of(page)} links to {target}"
        if anchor:
            assert anchor in anchors(file), f"{name_of(page)} links to {target}: there is no such heading"


@pytest.mark.parametrize("page", PROSE, ids=name_of)
def test_files_named_in_prose_exist(page):
    for name in re.findall(
        r"`((?:tests|src|attacks|benchmarks|faults|examples|docs|scripts)/[\w/.-]+)`", page.read_text()
    ):
        assert (ROOT / name).exists(), f"{name_of(page)} names {name}"


@pytest.mark.parametrize("page", EVERYTHING, ids=name_of)
def test_lines_end_at_120_columns(page):
    for number, line in enumerate(page.read_text().splitlines(), 1):
        # A row of a table cannot be broken.
        assert len(line) <= 120 or line.startswith("|"), f"{name_of(page)}:{number} has {len(line)} columns"


def test_the_index_names_every_page():
    index = (DOCS / "index.md").read_text()
    for page in sorted(DOCS.rglob("*.md")):
        path = str(page.relative_to(DOCS))
        assert path == "index.md" or f"({path}" in index, f"docs/index.md does not link to {path}"


def public_names():
    for module in PUBLIC:
        for name in importlib.import_module(module).__all__:
            yield f"{module}.{name}"


def resolve(name):
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


def test_the_reference_has_every_public_name():
    documented = {name for page in (DOCS / "reference").glob("*.md") for name in DIRECTIVE.findall(page.read_text())}
    objects = [resolve(name) for name in documented]
    missing = [n for n in public_names() if n not in documented and not any(resolve(n) is each for each in objects)]
    assert not missing, f"docs/reference does not describe {missing}"


def test_every_error_has_an_entry():
    page = (DOCS / "reference" / "errors.md").read_text()
    entries = dict(re.findall(r"^### `(\w+)`\n(.*?)(?=^##|\Z)", page, re.MULTILINE | re.DOTALL))
    for name, kind in vars(milepost.errors).items():
        if inspect.isclass(kind) and issubclass(kind, milepost.CheckpointError):
            assert name in entries, f"docs/reference/errors.md has no entry for {name}"
            for part in ("What happened", "What to do", "\n```"):
                assert part in entries[name], f"the entry for {name} lacks {part!r}"


def test_every_option_is_in_the_reference():
    page = (DOCS / "reference" / "options.md").read_text()
    calls = [
        "save",
        "load",
        "explain",
        "open",
        "convert",
        "copy",
        "export_safetensors",
        "diff",
        "async_save",
        "AsyncSaver",
        "Checkpointer",
    ]
    for call in calls:
        for name, parameter in inspect.signature(getattr(milepost, call)).parameters.items():
            further = [keys.__annotations__ for keys in get_args(parameter.annotation) if is_typeddict(keys)]
            for option in [name] if parameter.kind is parameter.KEYWORD_ONLY else chain(*further):
                assert f"`{option}`" in page, f"docs/reference/options.md does not describe {option} of {call}"


def test_the_design_page_draws_the_layers():
    [drawing] = [
        b.text for b in pages.blocks(DOCS / "explanation" / "design.md") if b.text.endswith("errors  version\n")
    ]
    drawn = [re.split(r" {3,}", line)[0].split() for line in drawing.splitlines()]
    layers = [[name or "milepost" for name in names] for names in test_architecture.LAYERS]
    assert [sorted(names) for names in reversed(drawn)] == [sorted(names) for names in layers]


@pytest.mark.parametrize("file", sorted((DOCS / "inventory").glob("*.txt")), ids=lambda file: file.name)
def test_names_of_the_inventories_exist(file):
    lines = [line.split() for line in file.read_text().splitlines() if not line.startswith("#")]
    assert lines == sorted(lines) or file.stem == "python"
    for name, kind, _ in lines:
        found = pkgutil.resolve_name(name if "." in name or kind == "module" else f"builtins.{name}")
        assert inspect.isclass(found) == (kind in ("class", "exception")), name


def docstring_examples():
    """(name, source, is a doctest) for each docstring of a public name, and of its methods, that shows code."""
    for name in public_names():
        value = resolve(name)
        members = vars(value).items() if inspect.isclass(value) else ()
        for full, item in [(name, value), *((f"{name}.{k}", v) for k, v in members if not k.startswith("_"))]:
            text = (inspect.getdoc(item) if callable(item) or isinstance(item, property) else None) or ""
            if ">>> " in text:
                yield pytest.param(full, text, True, id=full)
            elif "```python" in text:
                yield pytest.param(full, text, False, id=full)


@pytest.mark.parametrize("module", [milepost, milepost.store], ids=lambda module: module.__name__)
def test_every_call_and_class_has_an_example(module):
    ports = {"Reader", "Writer"}  # what a store gives; the examples of the stores use them
    for name in set(module.__all__) - ports:
        value = getattr(module, name)
        if inspect.isfunction(value) or (inspect.isclass(value) and not issubclass(value, Exception)):
            assert ">>> " in (inspect.getdoc(value) or ""), f"{name} has no example"


SESSION = """
import doctest, milepost, torch

runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
for text in {texts!r}:
    names = {{"milepost": milepost, "torch": torch}}
    runner.run(doctest.DocTestParser().get_doctest(text, names, {name!r}, None, None))
assert not runner.failures
"""


@pytest.mark.parametrize(("name", "text", "session"), list(docstring_examples()))
def test_docstring_examples_run(name, text, session, tmp_path):
    if session:
        # What the example of `save` saves is there for the others.
        before = [inspect.getdoc(milepost.save)] * (name != "milepost.save")
        source = SESSION.format(texts=[*before, text], name=name)
    else:
        source = "\n".join(["import milepost, torch", *(block[2] for block in pages.BLOCK.finditer(text))])
    pages.run_python([source], tmp_path)


@pytest.mark.slow
@LONG
def test_the_site_builds_without_a_warning(tmp_path):
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-E", "-t", "quick", "-b", "html"]
    done = subprocess.run(
        [*command, DOCS, tmp_path / "site"], cwd=ROOT, capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stderr
    for page in DOCS.rglob("*.md"):
        assert (tmp_path / "site" / page.relative_to(DOCS)).with_suffix(".html").exists(), page
    api = (tmp_path / "site" / "reference" / "api.html").read_text()
    assert 'id="milepost.save"' in api
    assert "docs.pytorch.org/docs/stable/generated/torch.load.html#torch.load" in api
