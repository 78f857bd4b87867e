"""What a gate says: one line each about one kernel, as text, as Markdown for a pull-request comment, as an exit status."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

WORSE = "worse"  # fails
MISSING = "missing"  # fails: deleted or renamed
FAULT = "fault"  # fails: cannot be trusted (NaN, zeros, a benchmark that throws)
APART = "not comparable"  # its own exit status
REBASELINE = "rebaseline"
NEW, CHANGED, BETTER, UNSURE, SKIPPED, FINE = "new", "changed", "better", "no verdict", "skipped", "ok"
FAILING = (WORSE, MISSING, FAULT)
SIGNS = {WORSE: "❌", MISSING: "❌", FAULT: "❌", APART: "⚠️", REBASELINE: "⚠️", BETTER: "✅", FINE: "✅"}


@dataclass(frozen=True)
class Finding:
    kernel: str
    verdict: str
    text: str = ""

    def __str__(self) -> str:
        return f"{self.verdict}: {self.kernel}" + (f": {self.text}" if self.text else "")


def status(findings: Sequence[Finding]) -> int:
    """The exit status: 1 where one fails, else 3 where one cannot be compared, else 0."""
    verdicts = {one.verdict for one in findings}
    if verdicts & set(FAILING):
        return 1
    return 3 if verdicts & {APART, REBASELINE} else 0


def summary(findings: Sequence[Finding]) -> str:
    """One line: how many of each verdict."""
    verdicts = list(dict.fromkeys(one.verdict for one in findings))
    return ", ".join(f"{sum(one.verdict == word for one in findings)} {word}" for word in verdicts) or "nothing compared"


def markdown(title: str, findings: Sequence[Finding]) -> str:
    """A table of what is not `ok`, failures first, and the summary."""
    order = [*FAILING, APART, REBASELINE]
    shown = sorted((one for one in findings if one.verdict != FINE),
                   key=lambda one: (order.index(one.verdict) if one.verdict in order else len(order), one.kernel))
    lines = [f"### {title}", "", summary(findings), ""]
    if shown:
        lines += ["| | kernel | what |", "|---|---|---|"]
        for one in shown:
            text = one.text.replace("|", "\\|")
            lines.append(f"| {SIGNS.get(one.verdict, '')} {one.verdict} | `{one.kernel}` | {text} |")
    return "\n".join(lines) + "\n"
