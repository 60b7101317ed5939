"""Attacks on those who look at a checkpoint in a browser or a notebook: texts that act as HTML or code.

Each payload sets a flag in the page if anything of it runs. In every other use these checkpoints are harmless, so they
are part of the corpus too. `tests/view/test_attacks.py` opens the pages of all of them in a real browser.
"""

from pathlib import Path
from typing import Any

from attacks.forge import Attack, Corpus, add_value, claim_large_files, forge_manifest, set_fields, tensor_row

corpus = Corpus()
FLAG = "window.__ran"
"""What a payload sets to 1."""
RUN = f"{FLAG}=1"
EVIL_HOST = "evil.example"
"""No page may ask this host for anything."""

PAYLOADS: dict[str, str] = {
    "script": f"<script>{RUN}</script>",
    "end_of_script": f"</script><script>{RUN}</script>",
    "end_of_script_in_capitals": f"</ScRiPt ><sCrIpT>{RUN}</sCrIpT>",
    "comment_and_script": f"<!--<script>{RUN}",
    "end_of_comment": f"--><script>{RUN}</script><!--",
    "end_of_cdata": f"]]><script>{RUN}</script>",
    "image": f"<img src=x onerror={RUN}>",
    "image_in_quotes": f"\"><img src=x onerror='{RUN}'>",
    "image_in_one_quote": f'\'><img src=x onerror="{RUN}">',
    "image_in_escapes": f'\\"><img src=x onerror={RUN}>\\u003cimg src=x onerror={RUN}\\u003e',
    "image_in_entities": f"&lt;img src=x onerror={RUN}&gt;&#60;img src=x onerror={RUN}&#62;",
    "svg": f"<svg/onload={RUN}>",
    "svg_script": f"<svg><script href='data:,{RUN}'/></svg>",
    "math": f"<math><mtext></form><form><mglyph><style></math><img src onerror={RUN}>",
    "template": f"<template><script>{RUN}</script></template><noscript><p id='</noscript><img src=x onerror={RUN}>'>",
    "attribute": f"' onfocus='{RUN}' autofocus tabindex=0 x='",
    "attribute_in_quotes": f'" onmouseover="{RUN}" style="position:fixed;inset:0" x="',
    "attribute_without_quotes": f"x onanimationstart={RUN} onclick={RUN}",
    "link": f"<a href=javascript:{RUN} style=position:fixed;inset:0>here</a>",
    "javascript_url": f"javascript:{RUN}//",
    "javascript_url_in_disguise": f"\x01java\tscript:{RUN}",
    "data_url": f"data:text/html,<script>parent.{RUN}</script>",
    "frame": f"<iframe srcdoc='<script>parent.{RUN}</script>'></iframe><iframe src=javascript:parent.{RUN}></iframe>",
    "object": f"<object data=javascript:{RUN}></object><embed src=//{EVIL_HOST}/x.swf>",
    "style": f"</style><style>body{{display:none}}@import '//{EVIL_HOST}/x.css'</style>",
    "css": f"red;}}*{{display:none;background:url(//{EVIL_HOST}/x)}}",
    "base": f"<base href=//{EVIL_HOST}/><meta http-equiv=refresh content='0;url=//{EVIL_HOST}/'>",
    "form": f"<form action=//{EVIL_HOST}/><button autofocus>Continue</button></form><input name=milepost id=milepost>",
    "end_of_everything": f"</textarea></title></select></table></pre></div></body></html><script>{RUN}</script>",
    "template_string": f"`${{{RUN}}}`${{{RUN}}}",
    "mustache": f"{{{{constructor.constructor('{RUN}')()}}}}{{%{RUN}%}}<%={RUN}%>#{{{RUN}}}",
    "chart_template": f"{{a}}{{b}}{{c}}{{@[0]}}{{evil|x}}{{b|<img src=x onerror={RUN}>}}",
    "python_template": "{0}{key}%s%(key)s{self.__class__}$data${data}",
    "line_separators": f"a\u2028{RUN}\u2029{RUN}\r\n{RUN}",
    "backslash_at_the_end": f"';{RUN}//\\",
    "other_brackets": f"\uff1cscript\uff1e{RUN}\uff1c/script\uff1e\u2039script\u203a",
    "hidden_letters": f"<\u200bscript>{RUN}</\u200bscript>\ufeff\u00ad",
    "other_direction": "\u202e\u2066gnp.sthgiew\u2069\u202d model.weight",
    "controls": "\x00\x07\x08\x1b[2J\x1b]0;owned\x07\x7f\x9b31m",
    "marks_without_end": "e" + "\u0301" * 2000,
    "regex": "(a+)+$|[z-a]**(?<x>\\",
    "spreadsheet": "=cmd|' /C calc'!A0",
}
"""What is put in the place of every text. By name."""
OWN_NAMES = ("__proto__", "constructor", "hasOwnProperty", "toString", "valueOf", "then", "length", "", " ", "NaN", "0")
"""Names that mean something else to a careless program in JavaScript."""


def _tie(record: dict[str, Any], key: str) -> None:
    """Add a tensor of this name: another name for `model.weight`."""
    record["tree"].append([1, key, "tensor", key])
    record["tensors"].append({**tensor_row(record), "key": key, "same_as": "model.weight"})


def put_everywhere(record: dict[str, Any], text: str) -> None:
    """Put a text into every field of a manifest that may be any text."""
    _tie(record, f"tensor {text}")
    add_value(record, text, name=f"value {text}", key=f"value {text}")
    record["tree"] += [[1, f"folder {text}", "dict", ""], [2, text, "value", f"folder {text}.{text}"]]
    record["values"].append({"key": f"folder {text}.{text}", "value": {"dict": [[text, {"list": [text, 1]}]]}})
    metrics = [["loss", 1.0], [text, 2.5]]
    retention = [["keep_last", text], [text, 3]]
    metadata = [["metrics", {"dict": metrics}], ["retention", {"dict": retention}], [text, text]]
    record.update(metadata={"dict": metadata}, created=text, writer=text, health={"ok": False, "reason": text})
    record["timings"] = [{"phase": text, "median_s": 1.0, "slowest_s": 2.0, "slowest_rank": 1}]
    record["replaced"] = [{"name": text, "size_bytes": 1, "checksum": text}]
    numbers = {"min": -1.0, "max": 1.0, "mean": 0.0, "rms": 0.5}
    record["statistics"] = [{"key": "model.weight", "count": 2048, "nan": 1, **numbers}]


def _add_payloads() -> None:
    for name, text in PAYLOADS.items():

        def make(folder: Path, text: str = text) -> None:
            forge_manifest(folder, lambda record: put_everywhere(record, text))

        corpus.append(Attack(f"page_{name}", "Text that acts when a page shows it carelessly.", "nothing", make))


_add_payloads()


@corpus.attack("nothing")
def page_names_of_javascript(folder: Path) -> None:
    """Keys and metrics that exist on every object of JavaScript."""

    def change(record: dict[str, Any]) -> None:
        for name in OWN_NAMES:
            _tie(record, name or "(empty)")
            add_value(record, name, name=f"value {name}", key=f"{name}.{name}")
        metrics = {"dict": [[name, float(number)] for number, name in enumerate(OWN_NAMES)]}
        record["metadata"] = {"dict": [["metrics", metrics], *([name, {"dict": [[name, 1]]}] for name in OWN_NAMES)]}
        record["timings"] = [
            {"phase": name, "median_s": 0.0, "slowest_s": 1.0, "slowest_rank": 0} for name in OWN_NAMES
        ]

    forge_manifest(folder, change)


@corpus.attack("nothing")
def page_key_of_a_million_letters(folder: Path) -> None:
    """One name that is larger than most pages."""
    forge_manifest(folder, lambda record: put_everywhere(record, "x<b>" * 250_000))


@corpus.attack("nothing")
def page_of_many_keys_on_one_level(folder: Path) -> None:
    """A list that is long enough to stop a browser that draws all of it."""

    def change(record: dict[str, Any]) -> None:
        for number in range(20_000):
            add_value(record, number, name=f"<i>{number}", key=f"<i>{number}")

    forge_manifest(folder, change)


@corpus.attack("nothing")
def page_of_a_deep_tree(folder: Path) -> None:
    """Containers inside each other, as deep as a tree may be, with HTML in each name."""

    def change(record: dict[str, Any]) -> None:
        record["tree"] += [[depth, f"<ul>{depth}", "dict", ""] for depth in range(1, 99)]
        record["tree"].append([99, "leaf", "value", "deep"])
        record["values"].append({"key": "deep", "value": 1})

    forge_manifest(folder, change)


@corpus.attack("nothing")
def page_of_many_metrics(folder: Path) -> None:
    """More curves than a chart can draw, with numbers at the ends of what a float can be."""
    ends = (1e308, -1e308, 5e-324, -0.0, 2.0**53, 0.1)
    metrics = [[f"m{number}<b>", ends[number % len(ends)]] for number in range(2000)]
    odd = [["nan", {"float": "nan"}], ["inf", {"float": "inf"}], ["text", "<b>"], ["list", {"list": [1]}]]
    set_fields(folder, metadata={"dict": [["metrics", {"dict": metrics + odd}]]})


@corpus.attack("nothing")
def page_of_metrics_that_are_no_dict(folder: Path) -> None:
    """Metadata of the right name and the wrong type."""
    odd = [["metrics", {"list": [1, "<b>"]}], ["retention", "all<b>"], ["step", {"dict": [["a", None]]}]]
    set_fields(folder, metadata={"dict": odd})


@corpus.attack("nothing")
def page_of_times_without_end(folder: Path) -> None:
    """Seconds that are longer than the universe is old, and as many phases as there may be."""
    phases = [{"phase": f"p{number}", "median_s": 0.0, "slowest_s": 1e300, "slowest_rank": 0} for number in range(64)]
    set_fields(folder, timings=phases)


@corpus.attack("nothing")
def page_of_odd_statistics(folder: Path) -> None:
    """Numbers that no chart has a place for."""
    ends = {"min": -1.7e308, "max": 5e-324, "mean": -1e300, "rms": 1.7e308}
    rows = [
        {"key": "model.weight", "count": 2048, "nan": 1024, "inf": 1, **ends, "histogram": [[-2123, 1022], [26, 1]]},
        {"key": "model.bias", "count": 48, "nan": 48},
    ]
    set_fields(folder, statistics=rows, health={"ok": False, "reason": "<b>" * 100_000})


_DATES: dict[str, str] = {
    "before_time": "0001-01-01T00:00:00+00:00",
    "after_time": "9999-12-31T23:59:59+00:00",
    "far_zone": "2026-01-01T00:00:00+23:59",
    "no_date": "yesterday",
    "empty": "",
    "number": "1e400",
}


def _add_dates() -> None:
    for name, text in _DATES.items():
        why = "Not a date, or one that cannot be drawn."
        corpus.append(
            Attack(f"page_date_{name}", why, "nothing", lambda folder, text=text: set_fields(folder, created=text))
        )


_add_dates()


@corpus.attack("verify")
def page_of_a_tensor_in_half_a_million_parts(folder: Path) -> None:
    """A layout map that cannot be drawn box by box: strides cut one dimension into very many runs."""

    def change(record: dict[str, Any]) -> None:
        claim_large_files(record)
        record["layouts"].append({"kind": "grid", "mesh": {"shape": [2], "ranks": "0-1"}, "cuts": [[0, 2**15]]})
        tensor_row(record).update(layout=len(record["layouts"]) - 1, shape=[2**40, 32])

    forge_manifest(folder, change)


@corpus.attack("verify")
def page_of_a_tensor_of_64_dimensions(folder: Path) -> None:
    """More dimensions than any picture has."""

    def change(record: dict[str, Any]) -> None:
        claim_large_files(record)
        tensor_row(record).update(shape=[64, 32, *[1] * 62])

    forge_manifest(folder, change)
