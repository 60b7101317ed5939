"""The frame of these tests itself: a page that does something wrong is noticed."""

import time

import pytest

POLICY = "default-src 'none'; script-src 'unsafe-inline'; connect-src http:; img-src file:"
WRONG = {
    "<script>console.error('odd')</script>": "the console: odd",
    "<script>setTimeout(() => { throw new Error('odd too') })</script>": "an exception: odd too",
    "<img alt='' src='other.png'>": "a request: GET file:",
    "<script>fetch('http://127.0.0.1:9/x').catch(() => 0)</script>": "a request: GET http://127.0.0.1:9/x",
    "<script>alert('hello')</script>": "a dialog: hello",
    "<b style='color:red'>a</b>": "against its policy: style-src",
}


def test_wrong_page_is_noticed(tab, tmp_path):
    page = tmp_path / "page.html"
    head = f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
    page.write_text(f"<!doctype html><html><head>{head}</head><body>{''.join(WRONG)}</body></html>")
    *events, _ = WRONG.values()  # the last one is asked for by `check`
    opened, end = tab.open(page.as_uri()), time.monotonic() + 60
    while any(one not in "\n".join(tab.problems) for one in events) and time.monotonic() < end:
        opened.wait_for_timeout(20)
    with pytest.raises(AssertionError) as caught:
        tab.check()
    assert [problem for problem in WRONG.values() if problem not in str(caught.value)] == []
