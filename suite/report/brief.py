"""In short, for who must decide: how many times faster each method was seen to be, by the link between the GPUs, and how far
from bf16's loss each of them trained.

A cell of the first table holds the least and the largest number over models and layouts, and of how many cases there are a
number: `1.24 to 1.67 (2 of 4)`; `not measured` where there is none. Numbers are those of one reference, compared as claims are
(suite/report/claims.py). A row of the second is a method over its seeds (suite/report/losses.py): its gap to the same-seed bf16
run, beside how far bf16's own seeds lie apart; and how it stands to the other FP4 recipe, with the smallest difference that the
runs could have shown (suite/report/gaps.py).
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from suite.report import compare, gaps, losses, selector
from suite.report.source import BASELINE, Entry
from suite.report.write import markdown, number

LINKS = {"p2p": "NVLink (`p2p`)", "shm": "host memory (`shm`)", "socket": "sockets (`socket`)"}
STEP = "device=cuda tp=2 measure=speed batch=4 model=llama-3b|llama-7b precision=bf16-params=bfloat16 comm=bf16"
BTP = f"{STEP} factor=cola layout=btp"
LOSS, RECIPE = "validation_loss", "nvfp4"  # the loss compared; NVIDIA's recipe, which an FP4 method is held against


@dataclass(frozen=True)
class Line:
    """what is faster, than what; metric of the numerator alone, or over the denominator's."""

    what: str
    than: str
    metric: str
    numerator: str
    denominator: str | None = None


LINES = (
    Line("TACO: all-reduce of 64 MiB", "the library's bfloat16", "all_reduce_speedup",
         "workload=taco measure=collective tp=2 device=cuda model=gpt-6.7b batch=64 comm=taco"),
    Line("TACO: training step, 6.7B and 7B, 4,096 tokens", "the bfloat16 wire", "default_over_row",
         "workload=taco measure=ab graph=true tp=2 device=cuda batch=2 comm=taco"),
    Line("BOOST: training step, 3B and 7B, 16,384 tokens", "full rank", "tokens_per_second", BTP,
         f"{STEP} factor=dense layout=megatron"),
    Line("BOOST: the same", "low rank split pair by pair", "tokens_per_second", BTP, f"{STEP} factor=cola layout=pairwise"),
)


def cell(line: Line, link: str, entries: Sequence[Entry], defined: Sequence[Entry]) -> str:
    """entries: of one reference; defined: all cases that there are."""
    top = selector.parse(f"{line.numerator} link={link}")
    bottom = selector.parse(f"{line.denominator} link={link}") if line.denominator else None
    mine = [e for e in entries if top.matches(e)]
    pairs = selector.pairs(mine, [e for e in entries if bottom.matches(e)], selector.free(top, bottom)) if bottom else [
        (e,) for e in mine]
    found = [compare.number("ratio", [m.value for m in metrics]) for pair in pairs
             for metrics, reason in [compare.metrics(pair, line.metric)] if not reason]
    if not found:
        return "not measured"
    ends = list(dict.fromkeys(number(value) for value in (min(found), max(found))))
    return f"{' to '.join(ends)} ({len(found)} of {len({e.id for e in defined if top.matches(e)})})"


def table(entries: Sequence[Entry], defined: Sequence[Entry]) -> str:
    """Markdown; empty where a reference has none of it."""
    rows = [(line.what, line.than, *(cell(line, link, entries, defined) for link in LINKS)) for line in LINES]
    if all(text == "not measured" for row in rows for text in row[2:]):
        return ""
    return markdown(("times faster", "than", *LINKS.values()), rows)


def _spread(values: Sequence[float], unit: str) -> str:
    """Mean and its interval over seeds."""
    interval = losses.t_interval(values)
    ends = f" [{interval[0]:+.3f}, {interval[1]:+.3f}]" if interval else ""
    return f"{fmean(values):+.3f}{ends} {unit}" if values else "-"


def _method(entry: Entry) -> str:
    """What is off bf16: the precision, or else the codec on the wire."""
    precision = entry.flat["precision"]
    return entry.flat["comm.tp.forward"] if precision == BASELINE["precision"] else precision


def loss_table(entries: Sequence[Entry]) -> str:
    """Markdown, of the CUDA runs of one reference; empty where there are none. Means and 95 % t-intervals over the seeds that both
    sides of a difference finished."""
    mine = [e for e in entries if e.case["measure"] == "loss" and e.case["device"] == "cuda"]
    against = {(row["case"], row["metric"]): row for row in gaps.rows(mine)
               if row["metric"] == LOSS and row["precision"] != RECIPE and f"_{RECIPE}_" in row["other"]}
    rows = []
    for one in losses.compare(mine):
        if one.metric != LOSS or not one.differences or one.base is None or one.base.key == one.family.key:
            continue
        first = one.family.entries[0]
        data, steps = first.case["data"], first.case["steps"]
        base = one.base.losses(LOSS)
        band = f"{one.band[0]:+.2f} to {one.band[1]:+.2f} % ({len(base)})" if one.band else "one seed"
        row = against.get((first.id, LOSS))
        other = "-" if row is None else (f"{row['difference']:+.4f} [{row['difference_low']:+.4f}, {row['difference_high']:+.4f}] "
                                         f"(n={row['n']}), could have shown {row['smallest']:.4f}: {row['finding']}")
        rows.append((_method(first), f"{first.case['model']}, {steps * data['seq'] * data['batch'] / 1e6:.1f}M tokens, "
                     f"TP {first.case['mesh']['tp']}, lr {first.case['optim']['lr']:g}",
                     f"{len(one.differences)} of {len(one.family.entries)}",
                     _spread([one.losses[s] - base[s] for s in one.differences], "nats"),
                     _spread(list(one.differences.values()), "%"), band, other))
    header = ("trained with", "model", "seeds", "gap to bf16", "in %", "bf16's own seeds", f"over `{RECIPE}`, nats")
    return markdown(header, rows) if rows else ""
