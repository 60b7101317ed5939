"""A real browser for the tests of pages: Chromium, driven by Playwright. Whatever a page does wrong fails the test.

A page that is opened here may load itself and nothing else. What its console reports as an error, an exception that
nobody caught, a violation of its content policy, and every other request are problems; `Tab.close` raises them.

A click or a key returns when the page has drawn what it asked for, and so do `open` and `until`: the page marks itself
as busy until then. On a busy machine the page may hear of the click only later. So no test asks once: what a page shows
is compared through `soon`, which asks until it is so.
"""

import os
import shutil
import time
from contextlib import contextmanager
from urllib.parse import urlsplit

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
TIMEOUT_MS = 60_000
"""How long anything of a page may take: as long as it does on a machine that does much else."""
_WATCH_POLICY = """
window.__violations = [];
document.addEventListener("securitypolicyviolation", e => {
    window.__violations.push(e.violatedDirective + " " + e.blockedURI);
});
"""
_SETTLED = """async () => {
    const frame = () => new Promise(go => { requestAnimationFrame(go); setTimeout(go, 5_000); });
    const isBusy = () => document.querySelector("[aria-busy=true]");
    const end = performance.now() + LIMIT;
    for (await frame(); isBusy() && performance.now() < end; await frame());
    return !isBusy();
}""".replace("LIMIT", str(TIMEOUT_MS))
_FRAMES = "async () => { for (let n = 0; n < 30; n += 1) await new Promise(requestAnimationFrame); }"
_ACTIONS = {"check", "click", "dispatch_event", "fill", "focus", "goto", "press", "reload", "select_option", "type"}


def why_not():
    """Why there is no browser here; empty if there is one."""
    try:
        import playwright.sync_api  # noqa: F401
    except ImportError:
        return "playwright is not installed"
    return "" if _browser() else f"there is no browser: none of {', '.join(BROWSERS)} is in the path"


def _browser():
    return next(filter(None, map(shutil.which, BROWSERS)), None)


@contextmanager
def started():
    """A browser, closed at the end."""
    from playwright.sync_api import sync_playwright

    # Chromium refuses to run as root in its sandbox.
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=_browser(), args=[*arguments, "--disable-dev-shm-usage"])
        try:
            yield browser
        finally:
            browser.close()


def _settle(page, what):
    """Wait until the page has drawn what was asked of it."""
    if not page.evaluate(_SETTLED):
        raise TimeoutError(f"the page is still busy after {what}")


class soon:
    """What a page shows, asked for again until a comparison with it holds: `assert "5" in soon(page.inner_text, "#a")`.

    After `TIMEOUT_MS` the comparison is False, and what was there last stands in the message of the assertion. There is
    no `not in`: wait for something that is there, or ask `soon(lambda: ... not in ...)`.
    """

    def __init__(self, ask, *arguments, limit_s=TIMEOUT_MS / 1000):
        self._ask = lambda: ask(*arguments)
        self._limit_s = limit_s
        self._last = None

    def _holds(self, test):
        end = time.monotonic() + self._limit_s
        while True:
            self._last = self._ask()
            if test(self._last):
                return True
            if time.monotonic() > end:
                return False
            time.sleep(0.02)

    def __eq__(self, wanted):
        return self._holds(lambda last: last == wanted)

    def __ne__(self, wanted):
        return self._holds(lambda last: last != wanted)

    def __contains__(self, part):
        return self._holds(lambda last: last is not None and part in last)

    def __bool__(self):
        return self._holds(bool)

    def startswith(self, start):
        return self._holds(lambda last: last is not None and last.startswith(start))

    __hash__ = None

    def __repr__(self):
        return repr(self._last)


def place_of(page, chart):
    """Where a chart of a page is, {x, y, width, height}, once it is drawn and at rest, so that clicks hit."""
    page.locator(f"{chart} canvas").first.wait_for()
    page.evaluate(_FRAMES)
    return page.locator(chart).bounding_box()


class _Settled:
    """A page, or a part of one, whose actions return when the page is no longer busy."""

    def __init__(self, part, page):
        self._part = part
        self._page = page

    def __getattr__(self, name):
        found = getattr(self._part, name)
        if not callable(found):
            return self._wrapped(found)

        def call(*args, **kwargs):
            result = found(*args, **kwargs)
            if name in _ACTIONS:
                _settle(self._page, f"{name} {args}")
            return self._wrapped(result)

        return call

    def _wrapped(self, found):
        from playwright.sync_api import Keyboard, Locator, Mouse

        return _Settled(found, self._page) if isinstance(found, Locator | Keyboard | Mouse) else found


class Tab:
    """One page in a context of its own. Everything that the page does wrong is in `problems`.

    `page`: its actions return when it has settled. `raw`: the same page, whose actions return at once.
    """

    def __init__(self, browser, **settings):
        self.problems = []
        usual = {"viewport": {"width": 1280, "height": 900}, "reduced_motion": "reduce"}
        self._context = browser.new_context(**{**usual, **settings})
        self._context.set_default_timeout(TIMEOUT_MS)
        self.raw = self._context.new_page()
        self.page = _Settled(self.raw, self.raw)
        self.raw.add_init_script(_WATCH_POLICY)
        self._own = None
        self.raw.on("console", self._hear)
        self.raw.on("pageerror", lambda error: self.problems.append(f"an exception: {error}"))
        self.raw.on("request", self._see)
        self.raw.on("popup", lambda page: self.problems.append(f"a new window: {page.url}"))
        self.raw.on("dialog", self._refuse)
        self.raw.on("download", lambda download: self.problems.append(f"a download: {download.url[:200]}"))

    def open(self, url):
        """Go to a page. From then on nothing but this page, or what the same server has, may be asked for."""
        self._own = urlsplit(str(url))
        self.page.goto(str(url), wait_until="load")
        return self.page

    def until(self, expression, timeout_s=TIMEOUT_MS / 1000):
        """Wait until this is true in the page and drawn, and give what it is. (Playwright's own way needs `eval`.)"""
        end = time.monotonic() + timeout_s
        while not (found := self.raw.evaluate(expression)):
            if time.monotonic() > end:
                raise TimeoutError(f"not true in {timeout_s:.0f} s: {expression}\n" + "\n".join(self.problems))
            self.raw.wait_for_timeout(20)
        _settle(self.raw, expression)
        return found

    def devtools(self):
        """A session with the browser's own tools for this page."""
        return self._context.new_cdp_session(self.raw)

    def _hear(self, message):
        if message.type in ("error", "warning"):
            self.problems.append(f"the console: {message.text[:500]}")

    def _refuse(self, dialog):
        self.problems.append(f"a dialog: {dialog.message[:200]}")
        dialog.dismiss()

    def _see(self, request):
        found = urlsplit(request.url)
        if found.scheme in ("data", "blob"):
            return
        same = (found.scheme, found.netloc) == (self._own.scheme, self._own.netloc)
        if not same or (found.scheme == "file" and found.path != self._own.path):
            self.problems.append(f"a request: {request.method} {request.url[:200]}")

    def check(self):
        """Raise if anything went wrong so far."""
        violations = self.raw.evaluate("(window.__violations ?? []).splice(0)")
        self.problems += [f"against its policy: {violation}" for violation in violations]
        found, self.problems = self.problems, []
        if found:
            raise AssertionError("\n".join(found))

    def close(self):
        """Close it, and raise if anything went wrong."""
        try:
            self.check()
        finally:
            self._context.close()
