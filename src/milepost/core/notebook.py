"""How objects show themselves in a notebook: a small block of HTML. Pure.

Every text is escaped here, so no key and no metadata can act as HTML. Texts stand in `<code>`, where notebooks do not
look for formulas either.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import islice

from milepost.core.box import Box
from milepost.core.division import parts_of
from milepost.core.layout import Boxes, Grid, Layout
from milepost.core.manifest import Manifest, Tensor
from milepost.core.ranks import show_ranks, unpack_ranks
from milepost.core.tree import LEAVES

_SIGNS = {ord("&"): "&amp;", ord("<"): "&lt;", ord(">"): "&gt;", ord('"'): "&quot;", ord("'"): "&#39;"}
_LETTERS = 120
_ROWS = 10
_CELL = "text-align:left;white-space:pre-wrap;overflow-wrap:anywhere"
_UNITS = ("B", "kB", "MB", "GB", "TB", "PB", "EB")
_KEY_HEADS = ("key", "dtype", "shape", "size")
_AGES = ((2 * 86_400, 86_400, "days"), (2 * 3_600, 3_600, "hours"), (120, 60, "minutes"))


def escaped(text: str, most: int = _LETTERS) -> str:
    r"""The text as HTML shows it, cut to `most` letters.

    Letters that are not visible, or that change the direction of writing, are spelled out: `\x1b`, `\u202e`.
    """
    shown = text if len(text) <= most else f"{text[: most - 1]}…"
    if not shown.isprintable():
        shown = "".join(sign if sign.isprintable() else _spelled(sign) for sign in shown)
    return shown.translate(_SIGNS)


def _spelled(sign: str) -> str:
    return sign.encode("unicode_escape").decode("ascii")


def checkpoint_html(url: str, manifest: Manifest, age_s: float | None) -> str:
    """A checkpoint: what is in it, and its first keys. Takes time in proportion to the keys, and reads nothing."""
    leaves = [node for node in manifest.tree if node.kind in LEAVES]
    facts = [f"generation {manifest.generation}" if manifest.generation else manifest.format]
    facts += [count_of(len(leaves), "key"), show_size(sum(t.size_bytes for t in manifest.tensors if not t.same_as))]
    facts.append(f"saved by {count_of(manifest.world, 'rank')}")
    if age_s is not None:
        facts.append(show_age(age_s))
    if manifest.health is not None and not manifest.health.ok:
        facts.append(f"not healthy: {manifest.health.reason}")
    first = leaves[:_ROWS]
    wanted = {node.key for node in first if node.kind == "tensor"}
    tensors = {tensor.key: tensor for tensor in manifest.tensors if tensor.key in wanted}
    rows = [_key_row(node.key, tensors.get(node.key)) for node in first]
    more = len(leaves) - len(first)
    return html_block("Checkpoint", url, facts, (_KEY_HEADS, rows), f"{more:,} more" if more else "")


def _key_row(key: str, tensor: Tensor | None) -> tuple[str, ...]:
    if tensor is None:
        return key, "value", "", ""
    return key, tensor.dtype, _shape(tensor.shape), show_size(tensor.size_bytes)


def _shape(numbers: Iterable[int]) -> str:
    return " x ".join(f"{number:,}" for number in numbers) or "scalar"


def tensor_html(manifest: Manifest, tensor: Tensor, file_name: Callable[[int], str]) -> str:
    """A saved tensor: how it was cut, and which rank wrote which box into which file; the first of them."""
    layout = manifest.layout_of(tensor)
    facts = [tensor.dtype, _shape(tensor.shape), show_size(tensor.size_bytes), _cut(layout)]
    whole = Box.whole(tensor.shape)
    held = layout.overlapping(tensor.shape, whole)
    written = ((part, rank) for h in held for part, rank in parts_of(tensor, h.box, h.holders))
    some = list(islice(written, _ROWS + 1))
    rows = [(_box(part), str(rank), file_name(rank)) for part, rank in some[:_ROWS]]
    note = "and more" if len(some) > _ROWS else ""
    return html_block("LazyTensor", tensor.key, facts, (("box", "rank", "file"), rows), note)


def _box(box: Box) -> str:
    return ", ".join(f"{start}:{start + size}" for start, size in zip(box.offset, box.shape, strict=True)) or "all"


def _cut(layout: Layout) -> str:
    if isinstance(layout, Boxes):
        return f"cut freely, into {len(layout.held):,}"
    if isinstance(layout, Grid):
        axes = [f"dim {cut.dim}" if cut is not None else "copies" for cut in layout.cuts]
        return f"on a mesh of {_shape(layout.mesh.shape)} ranks: {', '.join(axes)}"
    return f"whole on {show_ranks(unpack_ranks(layout.ranks))}"


def html_block(
    kind: str, place: str, facts: Iterable[str], table: "tuple[Sequence[str], Iterable[Sequence[str]]]", note: str = ""
) -> str:
    """A block with a heading, a line of facts, a table (its heads and its rows), and a note below it."""
    heads, rows = table
    lines = [f"<div><strong>{escaped(kind)}</strong> <code>{escaped(place, 4 * _LETTERS)}</code>"]
    lines.append(f"<div>{' · '.join(map(escaped, facts))}</div>")
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    if body:
        top = "".join(f'<th scope="col" style="text-align:left">{escaped(head)}</th>' for head in heads)
        lines.append(f"<table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>")
    if note:
        lines.append(f"<div><em><code>{escaped(note, 8 * _LETTERS)}</code></em></div>")
    return "\n".join([*lines, "</div>"])


def _cell(text: str) -> str:
    return f'<td style="{_CELL}"><code>{escaped(text)}</code></td>'


def show_size(size_bytes: int) -> str:
    """A number of bytes as people read it: `13.1 GB`."""
    value, unit = float(size_bytes), 0
    while value >= 999.5 and unit < len(_UNITS) - 1:
        value, unit = value / 1000, unit + 1
    return f"{size_bytes} B" if unit == 0 else f"{value:.3g} {_UNITS[unit]}"


def show_age(seconds: float) -> str:
    """How long ago that was: `3 hours ago`."""
    for least, unit, name in _AGES:
        if seconds >= least:
            return f"{seconds // unit:.0f} {name} ago"
    return f"{max(seconds, 0):.0f} seconds ago"


def count_of(number: int, noun: str) -> str:
    """A number with its noun: `1 key`, `2,000 keys`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
