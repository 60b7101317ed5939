import pytest

from milepost.view import write_page
from tests import browser
from tests.ranks import spawn
from tests.view import jobs


@pytest.fixture(scope="session")
def chromium():
    """A browser for all tests of a process."""
    if browser.why_not():
        pytest.skip(browser.why_not())
    with browser.started() as running:
        yield running


@pytest.fixture
def tab(chromium):
    """A fresh tab: `page = tab.open(url)`. What the page does wrong fails the test at its end."""
    made = browser.Tab(chromium)
    yield made
    made.close()


@pytest.fixture
def new_tab(chromium):
    """Makes tabs with other settings: `new_tab(color_scheme="dark")`."""
    tabs = []

    def make(**settings):
        tabs.append(browser.Tab(chromium, **settings))
        return tabs[-1]

    yield make
    for made in tabs:
        made.close()


@pytest.fixture(scope="module")
def show_once(chromium, tmp_path_factory):
    """The tab with the page of a place, for all tests of a file: `tab = show_once(place)`."""
    tabs = []

    def shown(place):
        tabs.append(browser.Tab(chromium))
        tabs[-1].open(write_page(place, tmp_path_factory.mktemp("page") / "page.html").as_uri())
        tabs[-1].until("document.documentElement.dataset.ready === 'true'")
        return tabs[-1]

    yield shown
    for made in tabs:
        made.close()


@pytest.fixture
def show(tab, tmp_path):
    """Writes the page of a place, opens it, and waits until it is drawn: `page = show(place)`."""

    def shown(place, options=None):
        page = tab.open(write_page(place, tmp_path / "page.html", options).as_uri())
        tab.until("document.documentElement.dataset.ready === 'true'")
        return page

    return shown


@pytest.fixture(scope="session")
def meshed(tmp_path_factory):
    """A checkpoint of four ranks, with tensors cut in every way."""
    place = tmp_path_factory.mktemp("meshed") / "step"
    spawn(4, jobs.save_meshed, str(place))
    return place


@pytest.fixture(scope="session")
def run(tmp_path_factory):
    """A run of one process: whole steps, one unhealthy, one damaged, one unfinished; some verified."""
    place = tmp_path_factory.mktemp("run") / "run"
    jobs.save_run(place)
    return place
