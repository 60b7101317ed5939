"""The examples in the docstrings of what users call run as they stand."""

import doctest
import importlib

import pytest

import milepost

MODULES = ["milepost.api", "milepost.background.saver", "milepost.background.pending"]


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_of_docstrings_run(name):
    module = importlib.import_module(name)
    found = doctest.DocTestFinder(exclude_empty=True).find(module, globs={"milepost": milepost})
    examples = sum(len(one.examples) for one in found)
    assert examples
    runner = doctest.DocTestRunner()
    # In the order of the file: what one example saves another loads.
    for one in sorted(found, key=lambda one: one.lineno or 0):
        runner.run(one)
    assert runner.summarize(verbose=False).failed == 0
    milepost.close_async()
