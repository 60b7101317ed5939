"""What `planning.py` measured, as rows, tables and a figure."""

from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from planning_jobs import BAR_WORLD, FSDP, HSDP, KINDS, PIPELINE, SCALARS, DcpSize, Sizes
from planning_measure import Samples
from showing import Row, format_table


@dataclass(slots=True)
class Results:
    """Everything that was measured."""

    sizes: Sizes
    milepost: dict[tuple[str, int], Samples] = field(default_factory=lambda: defaultdict(Samples))
    manifest: dict[int, Samples] = field(default_factory=lambda: defaultdict(Samples))
    dcp: dict[DcpSize, Samples] = field(default_factory=lambda: defaultdict(Samples))
    real: dict[int, tuple[tuple[int, int], tuple[int, int]]] = field(default_factory=dict)
    by_step: tuple[dict[str, int], dict[str, int]] = field(default_factory=lambda: ({}, {}))
    memory_bytes: int = 0


def _below(name: str, value: float, unit: str, bar: float) -> Row:
    return Row(name, value, unit, f"< {bar:g}", value < bar)


def rows_of(results: Results) -> list[Row]:
    """Every figure, with its bar if it has one."""
    rows = []
    least, most = min(results.sizes.worlds), max(results.sizes.worlds)
    for (kind, world), samples in sorted(
        results.milepost.items(), key=lambda item: (KINDS.index(item[0][0]), item[0][1])
    ):
        name = f"Milepost, {kind}, {world} ranks"
        one = f"{name}: one rank", samples.median("one rank"), "s"
        barred = world == BAR_WORLD and kind != SCALARS
        rows.append(_below(*one, 0.1) if barred else Row(*one))
        if "lead, first" not in samples.values:
            continue
        rows += [Row(f"{name}: {who}", samples.median(who), "s") for who in ("lead, first", "lead, steady")]
        for when, bar in (("first", 1e6), ("steady", 250e3)):
            sent = f"{name}: sent and read in all, {when}", samples.median(f"bytes, {when}"), "B"
            rows.append(_below(*sent, bar) if world == BAR_WORLD and kind in (FSDP, HSDP, PIPELINE) else Row(*sent))
    for kind in KINDS:
        ratio = (results.milepost[kind, most].median("one rank")) / results.milepost[kind, least].median("one rank")
        rows.append(_below(f"Milepost, {kind}: one rank, {most} over {least} ranks", ratio, "x", 2))
    for world, samples in sorted(results.manifest.items()):
        name, at_bar = f"Milepost, FSDP, {world} ranks", world == BAR_WORLD
        for what, unit, bar in (("bytes", "B", 1e6), ("open", "s", 0.1), ("load plan", "s", 0.3)):
            label = {"bytes": "manifest", "open": "open the manifest", "load plan": f"load plan on {3 * world // 4}"}[
                what
            ]
            one = f"{name}: {label}", samples.median(what), unit
            rows.append(_below(*one, bar) if at_bar else Row(*one))
    rows.append(
        _below(f"Milepost, FSDP, {most} ranks: memory of the coordinator", results.memory_bytes / 1e6, "MB", 200)
    )
    for world, (real, crowd) in results.real.items():
        for when, a, b in (("first", real[0], crowd[0]), ("steady", real[1], crowd[1])):
            rows.append(Row(f"check, {world} ranks: sent, {when}, real threads", a, "B"))
            rows.append(Row(f"check, {world} ranks: sent, {when}, stand-ins", b, "B"))
    rows += [
        Row(f"DCP, FSDP, {size.world} ranks, {size.tensors} tensors: {what}", samples.median(what), _unit(what))
        for size, samples in sorted(results.dcp.items(), key=lambda item: item[0].world)
        for what in samples.values
    ]
    return rows


def _unit(what: str) -> str:
    return "B" if what == "peak" or "bytes" in what else "s"


def _size(size_bytes: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size_bytes >= size:
            return f"{size_bytes / size:.1f} {unit}"
    return f"{size_bytes:.0f} B"


def milepost_table(results: Results) -> str:
    """One line for each job."""
    heads = ["Milepost", "ranks", "one rank s", "", "lead s, first", "", "steady", "sent in all, first", "steady"]
    lines = []
    for kind in KINDS:
        for world in results.sizes.worlds:
            s = results.milepost[kind, world]
            line = [kind, str(world), f"{s.median('one rank'):.3f}", s.spread("one rank")]
            if "lead, first" in s.values:
                line += [f"{s.median('lead, first'):.3f}", s.spread("lead, first"), f"{s.median('lead, steady'):.3f}"]
                line += [_size(s.median(f"bytes, {when}")) for when in ("first", "steady")]
            lines.append(line + [""] * (len(heads) - len(line)))
    return format_table(heads, lines)


def comparison(results: Results) -> str:
    """Both systems side by side, for FSDP."""
    heads = ["FSDP", "ranks", "Milepost", "DCP", "DCP/Milepost"]
    lines, all_tensors = [], results.sizes.tensors
    for size, dcp in sorted(results.dcp.items(), key=lambda item: item[0].world):
        ours, manifest = results.milepost[FSDP, size.world], results.manifest[size.world]
        mark = "" if size.tensors == all_tensors else f" ({size.tensors} tensors)"
        for what, a, b, show in (
            ("busiest rank, CPU", ours.median("lead, first"), dcp.median("lead"), "{:.3f} s".format),
            ("the same, later saves [1]", ours.median("lead, steady"), dcp.median("lead"), "{:.3f} s".format),
            ("sent in all [2]", ours.median("bytes, first"), dcp.median("bytes"), _size),
            ("manifest or metadata", manifest.median("bytes"), dcp.median("metadata bytes"), _size),
            ("open it", manifest.median("open"), dcp.median("open"), "{:.3f} s".format),
            ("load plan of a rank", manifest.median("load plan"), dcp.median("load plan"), "{:.3f} s".format),
        ):
            at_least = "> " if mark else ""
            lines.append(
                [what, str(size.world), show(a), show(b) + mark, f"{at_least}{b / a:.{0 if b > 10 * a else 1}f}"]
            )
        lines.append(["memory of rank 0", str(size.world), "", _size(dcp.median("peak")) + mark, ""])
    lines.append(["memory of the coordinator", str(max(results.sizes.worlds)), _size(results.memory_bytes), "", ""])
    notes = (
        "[1] DCP as it is by default, without cached plans.",
        "[2] Milepost: sent and read, both counted. DCP: counted once, the broadcast metadata as size x (ranks - 1).",
        f"Milepost always with {all_tensors} tensors; where DCP had fewer, the ratio is a lower limit.",
    )
    return "\n".join([format_table(heads, lines), *notes])


def messages_table(results: Results) -> str:
    """The bytes of each kind of message, and the check of the count."""
    lines = [
        [when, step, f"{size}"]
        for when, steps in zip(("first", "steady"), results.by_step, strict=True)
        for step, size in sorted(steps.items())
    ]
    table = format_table(["save", f"messages, FSDP, {BAR_WORLD} ranks", "bytes"], lines)
    checks = [
        f"{world} ranks: real threads {real[0]} and {real[1]} bytes, stand-ins {crowd[0]} and {crowd[1]}"
        for world, (real, crowd) in results.real.items()
    ]
    return "\n".join(
        [table, "", f"The count, checked ({results.sizes.real_tensors} tensors; first save, steady state):", *checks]
    )


def bars_table(rows: list[Row]) -> str:
    """The rows that have a bar."""
    lines = [["met" if r.ok else "MISSED", r.name, f"{r.value:.4g} {r.unit}", r.bar or ""] for r in rows if r.bar]
    return format_table(["", "bar", "value", "wanted"], lines)


def draw(results: Results, file: Path) -> None:
    """Growth curves of both systems."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    worlds, sizes = list(results.sizes.worlds), sorted(results.dcp, key=lambda size: size.world)
    dcp_worlds = [size.world for size in sizes]
    ours, theirs = "#1f5fa8", "#c4501b"
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4.2))

    def line(axes: Any, x: list[int], y: list[float], color: str, style: str, label: str) -> None:
        axes.plot(x, y, style, color=color, marker="o", markersize=4, linewidth=1.8, label=label)

    def samples(what: str) -> list[float]:
        return [results.milepost[FSDP, world].median(what) for world in worlds]

    def dcp(what: str) -> list[float]:
        # Scaled up where there were fewer tensors; the title says so.
        return [results.dcp[size].median(what) * results.sizes.tensors / size.tensors for size in sizes]

    line(left, dcp_worlds, dcp("lead"), theirs, "-", "DCP: rank 0")
    line(left, worlds, samples("lead, first"), ours, "-", "Milepost: lead, first save")
    line(left, worlds, samples("one rank"), ours, "--", "Milepost: any other rank")
    line(left, worlds, samples("lead, steady"), ours, ":", "Milepost: lead, later saves")
    line(right, dcp_worlds, dcp("bytes"), theirs, "-", "DCP: sent in all")
    line(right, dcp_worlds, dcp("metadata bytes"), theirs, "--", "DCP: metadata file")
    line(right, worlds, samples("bytes, first"), ours, "-", "Milepost: sent and read in all, first save")
    line(right, worlds, [results.manifest[w].median("bytes") for w in worlds], ours, "--", "Milepost: manifest")
    line(right, worlds, samples("bytes, steady"), ours, ":", "Milepost: sent and read in all, later saves")
    for axes, title, unit in ((left, "Planning a save, busiest rank", "CPU seconds"), (right, "Metadata", "bytes")):
        axes.set(
            xscale="log",
            yscale="log",
            xlabel="ranks",
            ylabel=unit,
            xticks=worlds,
            xticklabels=[f"{w:,}" for w in worlds],
        )
        axes.set_title(title, loc="left", fontsize=11)
        axes.minorticks_off()
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        low, high = axes.get_ylim()
        axes.set_ylim(low, high * (high / low) ** 0.5)  # room for the legend
        axes.legend(frameon=False, fontsize=8, loc="upper right")
    fewer = [f"{size.world:,} with {size.tensors}" for size in sizes if size.tensors != results.sizes.tensors]
    scaled = f" ({', '.join(fewer)} tensors, scaled up)" if fewer else ""
    title = f"{results.sizes.tensors:,} tensors, FSDP. DCP was measured up to {max(dcp_worlds):,} ranks{scaled}"
    figure.suptitle(title, fontsize=9)
    figure.tight_layout()
    figure.savefig(file, dpi=110)
