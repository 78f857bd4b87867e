"""Coverage: method x model x TP -> throughput, loss, GPU utilization, bytes. Every cell is a number or a reason.

A method is what a case does off the baseline (suite.report.source.method); those of the three papers are rows before they
have cases. Each column holds one kind of number. The library's collectives are ring-equivalent bytes, so modelled; what is
not run takes the cost model (suite.report.costmodel): one H200 host, link p2p, 8 sequences of 2,048 tokens (or the model's
positions) a step. A measured cell names machine, link and n; `a to
b` are several settings of one cell (sequence, batch, steps), told apart in measurements.csv.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

from suite.case import Case
from suite.record import publish
from suite.report import costmodel
from suite.report.losses import family
from suite.report.source import BASELINE, NOT_RUN, RUN, WIRE, Entry, ReportError, main, variant
from suite.report.write import markdown, number
from suite.workload import Workload, models, refused

PAPERS = {"taco": {"comm.tp.forward": "taco"}, "boost": {"factor": "cola", "layout": "btp"}, "tetrajet": {"precision": "tetrajet"}}
DEGREES = (1, 2, 4, 8)
SEQ, BATCH, LINK = 2048, 8, "p2p"
HEADER = ("method", "model", "TP", "tokens/s (measured)", "tokens/s (modelled)", "validation loss, nat (measured)",
          "GPU utilization, % (measured)", "bytes sent a step and rank (counted)", "bytes sent a step and rank (modelled)")
UNDEFINED = f"{NOT_RUN}: no case defined yet"
Axes = Mapping[str, str]  # the fields of the case that are off the baseline


def axes(entry: Entry) -> dict[str, str]:
    fields = ("factor", "layout", "precision", "comm.tp.forward")
    return {k: entry.flat[k] for k in fields if variant(entry.flat[k], BASELINE[k]) is None}


def paper_method(axes: Axes) -> str:
    return " ".join(sorted(f"{k.removesuffix('.tp.forward')}={v}" for k, v in axes.items()))


def cell(entries: Sequence[Entry], name: str, kind: str) -> str:
    """The numbers of that kind, or the reason why there are none."""
    groups: dict[tuple[str, str], dict[tuple, list[float]]] = {}
    for entry in entries:
        metric = entry.metric(name)
        if metric is not None and metric.value is not None and metric.kind == kind:
            where = (entry.label, entry.case["link"])
            groups.setdefault(where, {}).setdefault(family(entry), []).append(metric.value)
    if not groups:
        return _why(entries, name, kind)
    texts = []
    for (label, link), families in sorted(groups.items()):
        means = sorted(fmean(values) for values in families.values())
        span = " to ".join(dict.fromkeys((number(means[0]), number(means[-1]))))
        n = sum(len(values) for values in families.values())
        of = sum(e.label == label and e.case["link"] == link and e.status != NOT_RUN for e in entries)
        texts.append(f"{span} ({label}{'' if link == 'none' else f' {link}'}, n={n}{f' of {of}' if of > n else ''})")
    return "; ".join(texts)


def _why(entries: Sequence[Entry], name: str, kind: str) -> str:
    reasons = []
    for entry in entries:
        metric = entry.metric(name)
        if entry.status == NOT_RUN:
            reasons.append((2, f"{NOT_RUN}: {entry.reason}"))
        elif entry.status != "ok":
            reasons.append((0, f"failed: {entry.reason}"))
        elif metric is not None and metric.value is not None:
            reasons.append((1, f"{metric.kind} only"))
        elif metric is not None:
            reasons.append((1, str(metric.reason)))
        else:
            missing = "nothing counted" if entry.record.traffic else "no traffic"
            reasons.append((1, missing if name in WIRE else f"no {name} in the record"))
    return "; ".join(dict.fromkeys(text for _, text in sorted(set(reasons))[:2])) if reasons else UNDEFINED


def modelled(name: str, off: Axes, model: str, tp: int, entries: Sequence[Entry]) -> tuple[str, str]:
    """(tokens/s, bytes) of the cost model as text, or the reasons. `off`: the axes of the method of that name."""
    if name not in ("baseline", paper_method(off)):
        return (f"no cost model for {name}",) * 2
    card = models()[model]
    seq = min(SEQ, card["positions"]) if card["position"] == "learned" else SEQ
    reason = refused(Case(model=model, mesh={"tp": tp}, data={"seq": seq, "batch": BATCH}))
    if reason:
        return (f"refused: {reason}",) * 2
    flat = {**BASELINE, **off}
    tflops, source = costmodel.rate(entries, card)
    speed = costmodel.throughput(card, tp, seq, BATCH, factor=flat["factor"], layout=flat["layout"], codec=flat["comm.tp.forward"],
                                 precision=flat["precision"], link_gb=costmodel.LINKS[LINK], tflops=tflops)
    sent = costmodel.wire(card, tp, seq * BATCH, flat["layout"], flat["comm.tp.forward"])
    if not isinstance(speed, str):
        speed = f"{number(speed)} (h200 {LINK}, {tflops:.0f} TFLOP/s {source})"
    if not isinstance(sent, str):
        sent = f"{number(sent)} (cost model, {BATCH} x {seq} tokens)" if tp > 1 else "no traffic at TP 1"
    return speed, sent


def rows(entries: Sequence[Entry], workloads: Mapping[str, Workload]) -> list[tuple[str, ...]]:
    """Rows of coverage.md under HEADER."""
    planned = {(e.origin, e.id) for e in entries}
    asked = [Entry(RUN, "-", r.id, r.case.row(), NOT_RUN, "no record yet", r.workload, r.size)
             for w in workloads.values() for r in w.rows if (RUN, r.id) not in planned]
    everything = [*entries, *asked]
    methods: dict[str, Axes] = {"baseline": {}}
    cells: dict[tuple[str, str, int], list[Entry]] = {}
    for entry in everything:
        cells.setdefault((entry.method, entry.case["model"], entry.case["mesh"]["tp"]), []).append(entry)
    for entry in sorted(everything, key=lambda e: e.method):
        methods.setdefault(entry.method, axes(entry))
    for paper in PAPERS.values():
        methods.setdefault(paper_method(paper), paper)
    names = [m for m in models() if any(e.case["model"] == m for e in everything)]
    degrees = sorted({*DEGREES, *(e.case["mesh"]["tp"] for e in everything)})
    table = []
    for name, off in methods.items():
        for model in names:
            for tp in degrees:
                only_wire = bool(off) and all(k.startswith("comm.") for k in off)
                if tp == 1 and only_wire:
                    table.append((name, model, "1", *["no traffic at TP 1: see baseline"] * 6))
                    continue
                table.append((name, model, str(tp), *_cells(cells.get((name, model, tp), []), name, off, model, tp, entries)))
    return table


def _cells(here: Sequence[Entry], name: str, off: Axes, model: str, tp: int, entries: Sequence[Entry]) -> list[str]:
    tokens, sent = modelled(name, off, model, tp, entries)
    timed = [e for e in here if e.case["measure"] == "speed"] or here
    lossy = [e for e in here if e.case["measure"] == "loss"] or here
    if any(e.metric("wire_bytes_modelled") for e in here):
        sent = cell(here, "wire_bytes_modelled", "modelled")
    return [cell(timed, "tokens_per_second", "measured"), tokens, cell(lossy, "validation_loss", "measured"),
            cell(timed, "gpu_utilization", "measured"), cell(here, "wire_bytes_counted", "counted"), sent]


def filled(table: Sequence[Sequence[str]]) -> None:
    """Raises ReportError naming the first empty cell."""
    for row in table:
        if len(row) != len(HEADER):
            raise ReportError(f"coverage.md: row {row[0]}: {len(row)} cells, expected {len(HEADER)}")
        for key, value in zip(HEADER, row):
            if not value.strip() or value.strip() == "-":
                raise ReportError(f"coverage.md: {row[0]}, {row[1]}, TP {row[2]}: {key} is empty")


def write(results: Path, entries: Sequence[Entry], workloads: Mapping[str, Workload]) -> list[Path]:
    table = rows(entries, workloads)
    filled(table)
    path = results / "tables" / "coverage.md"
    publish(path, "# Coverage\n\n" + (__doc__ or "").partition("\n\n")[2].strip() + "\n\n" + markdown(HEADER, table))
    return [path]


if __name__ == "__main__":
    main(__doc__, lambda arguments, workloads, entries: write(arguments.results, entries, workloads))
