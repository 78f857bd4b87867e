"""In short, for who must decide: how many times faster each method was seen to be, by the link between the GPUs.

A cell holds the least and the largest number over models and layouts, and of how many cases there are a number: `1.24 to 1.67 (2 of
4)`; `not measured` where there is none. Numbers are those of one reference, compared as claims are (suite/report/claims.py).
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from suite.report import compare, selector
from suite.report.source import Entry
from suite.report.write import markdown, number

LINKS = {"p2p": "NVLink (`p2p`)", "shm": "host memory (`shm`)", "socket": "sockets (`socket`)"}
STEP = "device=cuda tp=2 measure=speed batch=4 model=llama-3b|llama-7b precision=bf16-params=bfloat16 comm=bf16"
BTP = f"{STEP} factor=cola layout=btp"


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
