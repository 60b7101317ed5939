"""The tests mirror the package, can be read, and have a fast part that touches every folder."""

import ast
from pathlib import Path

import pytest

import milepost

TESTS = Path(__file__).parent
PACKAGE = Path(milepost.__file__).parent
FILES = sorted(TESTS.rglob("test_*.py"))
FOLDERS = sorted({path.parent for path in FILES})


def functions_of(path):
    """(name, slow) for each test function of a file."""
    tree = ast.parse(path.read_text())
    all_slow = any(isinstance(n, ast.Assign) and "pytest.mark.slow" in ast.unparse(n) for n in tree.body)
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            marks = [ast.unparse(decorator) for decorator in node.decorator_list]
            yield node.name, all_slow or "pytest.mark.slow" in marks


def test_every_folder_of_the_package_has_a_folder_of_tests():
    folders = {path.parent.relative_to(PACKAGE) for path in PACKAGE.glob("*/__init__.py")}
    missing = [str(folder) for folder in folders if not list((TESTS / folder).rglob("test_*.py"))]
    assert not missing, "tests of a folder stand in the folder of the same name"


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: str(folder.relative_to(TESTS.parent)))
def test_every_folder_has_fast_tests(folder):
    assert any(not slow for path in folder.glob("test_*.py") for _, slow in functions_of(path))


def test_files_have_at_most_500_lines():
    assert [path for path in TESTS.rglob("*.py") if path.read_text().count("\n") > 500] == []


def test_names_are_short():
    assert [name for path in FILES for name, _ in functions_of(path) if len(name) > 70] == []


def test_test_modules_do_not_import_each_other():
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("tests."):
                assert not node.module.split(".")[-1].startswith("test_"), f"{path} imports {node.module}"
