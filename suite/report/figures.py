"""One figure a workload: results/figures/<workload>.png. A row of panels a model and source, a column a quantity.

Columns are drawn where a record has their numbers: loss curves, final loss against the baseline, bytes on the wire, and
the metrics of suite.report.panels.BARS. Cases without a record of this machine are drawn from the committed
references, in rows of their own. A workload without an ok record gives a figure that says so. The same records give the same bytes.
"""
from __future__ import annotations

import argparse
import io
import os
import textwrap
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from suite.report import panels, studies
from suite.report.source import RUN, Entry, ReportError, main
from suite.workload import Workload

COLUMNS = {"curves": panels.curves, "difference": panels.difference, "wire": panels.wire, "against_n": studies.against_n,
           "by_size": studies.by_size, "octaves": studies.octaves, "layer": studies.layer,
           **{bar.metric: partial(panels.bars, bar=bar) for bar in panels.BARS}}


def _library() -> tuple[Any, Any]:
    """(Figure, seaborn) with a canvas that needs no display, whatever MPLBACKEND and DISPLAY say."""
    os.environ["MPLBACKEND"] = "Agg"
    import matplotlib

    matplotlib.use("Agg", force=True)
    import seaborn
    from matplotlib.figure import Figure

    seaborn.set_theme(style="whitegrid", rc={
        "font.family": "DejaVu Sans", "axes.titlesize": 9, "axes.labelsize": 9, "xtick.labelsize": 8, "ytick.labelsize": 8,
        "axes.axisbelow": True, "grid.color": "0.92", "axes.edgecolor": "0.6", "hatch.linewidth": 0.8})
    return Figure, seaborn


def style(entries: Sequence[Entry], seaborn: Any) -> panels.Style:
    """The baseline dark, the others from the colour-blind safe palette."""
    names = panels.order(entries)
    others = [n for n in names if n != "baseline"]
    colours = dict(zip(others, seaborn.color_palette("colorblind", len(others))))
    return panels.Style({n: "0.25" if n == "baseline" else colours[n] for n in names})


def chosen(entries: Sequence[Entry], workload: str) -> list[Entry]:
    """Entries of the workload: this machine's, and of the references those cases of which it has no record."""
    mine = [e for e in entries if workload in e.workload.split("+")]
    runs = [e for e in mine if e.origin == RUN]
    done = {e.id for e in runs if e.record is not None}
    return [*(e for e in mine if e.origin != RUN and e.id not in done), *runs]


def draw(workload: Workload, entries: Sequence[Entry]) -> bytes:
    """The figure as PNG."""
    figure_class, seaborn = _library()
    mine = chosen(entries, workload.name)
    rows = panels.rows_of(mine)
    look = style([e for e in mine if e.status == "ok"], seaborn)
    columns = _columns(figure_class, rows, look)
    if not columns:
        figure = figure_class(figsize=(8, 3))
        panels.empty(figure.add_subplot(), f"{workload.title}\n\nno finished case yet")
    else:
        figure = figure_class(figsize=(4.1 * len(columns), 1.0 + 3.1 * len(rows)))
        grid = figure.subplots(len(rows), len(columns), squeeze=False)
        for line, ((source, model, device), group) in zip(grid, rows.items()):
            for ax, name in zip(line, columns):
                if not COLUMNS[name](ax, group, look):
                    panels.empty(ax, "not measured")
            line[0].annotate(f"{model} on {source} ({device})", (0, 1), (-36, 34), xycoords="axes fraction",
                             textcoords="offset points", fontsize=11, fontweight="bold", va="bottom")
        _frame(figure, workload, look, panels.caption(mine))
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=130, bbox_inches="tight", metadata={"Software": None})
    return out.getvalue()


def _columns(figure_class: Any, rows: Mapping[tuple, list[Entry]], look: panels.Style) -> list[str]:
    """The columns for which a row has numbers, found by drawing into axes that are thrown away."""
    return [name for name, panel in COLUMNS.items()
            if any(panel(figure_class().add_subplot(), group, look) for group in rows.values())]


def _frame(figure: Any, workload: Workload, look: panels.Style, missing: str) -> None:
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], color=colour, linestyle=look.dash(name), marker=look.marker(name), markersize=6, label=name)
               for name, colour in look.colours.items()]
    width, height = figure.get_size_inches()
    figure.subplots_adjust(left=0.06, right=0.99, wspace=0.26, hspace=0.66, top=1 - 1.75 / height, bottom=0.55 / height)
    question = "\n".join(textwrap.wrap(workload.question, int(width * 13)))
    figure.text(0.0, 1 - 0.05 / height, workload.title, fontsize=14, fontweight="bold", va="top")
    figure.text(0.0, 1 - 0.38 / height, question, fontsize=10, color="0.35", va="top")
    figure.legend(handles=handles, loc="upper left", bbox_to_anchor=(0.0, 1 - 0.58 / height), ncols=min(6, len(handles)),
                  frameon=False, fontsize=9, borderaxespad=0, borderpad=0)
    if missing:
        figure.text(0.0, 0.0, "\n".join(textwrap.wrap(missing, int(width * 15))), fontsize=8, color="0.35", va="top")


def write(results: Path, entries: Sequence[Entry], workloads: Mapping[str, Workload], only: str | None = None) -> list[Path]:
    """Writes the figures (of one workload where `only` names it). Raises ReportError for an unknown name."""
    if only is not None and only not in workloads:
        raise ReportError(f"no workload {only!r}; known: {', '.join(workloads)}")
    folder = results / "figures"
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name in [only] if only else sorted(workloads):
        path = folder / f"{name}.png"
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        temporary.write_bytes(draw(workloads[name], entries))
        paths.append(temporary.replace(path))
    return paths


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workload", help="only this one")


if __name__ == "__main__":
    main(__doc__, lambda arguments, workloads, entries: write(arguments.results, entries, workloads, arguments.workload), options)
