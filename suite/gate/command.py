"""`triaxis gate ...`: see suite/gate/__init__.py for the exit status."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from suite.gate.finding import FINE, Finding, markdown, status, summary

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Kernel regressions: budgets, paired timing, losses, counts.")
Page = Annotated[Path | None, typer.Option("--markdown", help="Also append the table, for a pull-request comment, to this file.")]
Update = Annotated[bool, typer.Option("--update", help="Write the committed file anew.")]
Runs = Annotated[Path | None, typer.Option(help="A folder of records; this machine's unless given.")]
Only = Annotated[list[str] | None, typer.Option("--only", "--kernel", help="Only kernels whose name holds this; often as wanted.")]
Shares = Annotated[list[float] | None, typer.Option("--share", help="How much slower; 0: nothing is. As often as wanted.")]
Tolerance = Annotated[list[str] | None, typer.Option(help="KERNEL=SHARE, as often as wanted.")]


def _tolerances(given: Sequence[str] | None) -> dict[str, float]:
    """Raises ValueError for what is not KERNEL=SHARE."""
    found = {}
    for text in given or []:
        name, sign, share = text.rpartition("=")
        if not sign or not name or not re.fullmatch(r"[0-9]*\.?[0-9]+", share):
            raise ValueError(f"--tolerance {text}: expected KERNEL=SHARE, such as taco.encode/32Mi=0.05")
        found[name] = float(share)
    return found


def _say(title: str, findings: Sequence[Finding], page: Path | None) -> None:
    """Prints what is not `ok` and the summary; ends with the exit status."""
    for one in findings:
        if one.verdict != FINE:
            typer.echo(str(one))
    typer.echo(f"{title}: {summary(findings)}")
    if page is not None:
        with page.open("a", encoding="utf-8") as file:
            file.write(markdown(title, findings) + "\n")
    if code := status(findings):
        raise typer.Exit(code)


def register(one_line: Callable) -> typer.Typer:
    """The commands, each with the given treatment of errors."""

    @app.command()
    @one_line
    def budget(update: Update = False, markdown: Page = None) -> None:
        """Compiles every kernel for every architecture, without a GPU, and compares with kernels/budget.json."""
        from suite.gate.budget import gate

        findings = gate(update=update)
        if update:
            for one in findings:
                if one.verdict != FINE:
                    typer.echo(str(one))
            typer.echo(f"kernels/budget.json is written: {summary(findings)} against the one before")
            return
        _say("Compile-time budgets", findings, markdown)

    @app.command()
    @one_line
    def ab(base: str, head: Annotated[str | None, typer.Argument()] = None, only: Only = None, tolerance: Tolerance = None,
           largest: Annotated[int, typer.Option(help="MiB a call moves, up to which a reference is timed on a CPU.")] = 4,
           markdown: Page = None) -> None:
        """Times the kernels of revision BASE against HEAD, or against the working tree: paired, interleaved. Each may be a folder
        (with a slash in its name) instead."""
        import torch

        from suite.gate.ab import gate
        from suite.workload import ROOT

        device = "cuda" if torch.cuda.is_available() else "cpu"
        findings = gate(ROOT, base, head, device, only or (), largest << 20, _tolerances(tolerance))
        for one in findings:
            if one.verdict == FINE:
                typer.echo(str(one))
        _say(f"Paired timing on {device} against {base}", findings, markdown)

    @app.command()
    @one_line
    def trial(runs: int = 20, share: Shares = None, slow: Annotated[str | None, typer.Option(help="Which is made slower.")] = None,
              only: Only = None, out: Annotated[Path | None, typer.Option(help="Its table.")] = None,
              resume: Annotated[bool, typer.Option(help="Go on where the table ends.")] = False) -> None:
        """Whether `ab` stays silent on a tree against itself and names a kernel made slower. Exit status 1 where not.

        The table of runs is results/gate/trial-DEVICE.csv unless --out says another."""
        import torch

        from suite import record
        from suite.gate import trial as trials
        from suite.machine import Machine
        from suite.measure.provenance import cpu_name, versions
        from suite.report.write import write_csv
        from suite.workload import ROOT

        device = "cuda" if torch.cuda.is_available() else "cpu"
        here, known = Machine.here(), versions()
        facts = {"machine": here.name, "processor": here.gpus[0].name if here.gpus else cpu_name(), "torch": known["torch"],
                 "triton": known["triton"]}
        path = out or record.RESULTS / "gate" / f"trial-{device}.csv"
        before = trials.load(path) if resume and path.exists() else []
        rows = list(before)

        def told(row: Mapping[str, Any]) -> None:
            rows.append(row)
            write_csv(path, trials.HEADER, rows)
            typer.echo(f"+{row['share']:.0%} run {row['run']}: alarms: {row['alarms'] or 'none'}; {row['unsure']} of "
                       f"{row['kernels']} without a verdict; faults: {row['faults'] or 'none'}; {row['seconds']:.0f} s")

        shares = share or trials.SHARES[device]
        trials.trial(ROOT, device, shares, slow or trials.usual(device), runs, only or (), facts, told, before)
        said = trials.summary(rows)
        for text, _ in said:
            typer.echo(text)
        if not all(good for _, good in said):
            raise typer.Exit(1)

    @app.command()
    @one_line
    def tree(out: Path, base: Annotated[str | None, typer.Option(help="Also paired timing against this revision.")] = None,
             runs: Runs = None) -> None:
        """Writes what all gates say of the working tree to a file, and succeeds whatever it is; `check` fails then."""
        import torch

        from suite import record
        from suite.gate import tree as trees
        from suite.machine import Machine

        rows = trees.findings(runs or record.folder(Machine.here().name), base, "cuda" if torch.cuda.is_available() else "cpu")
        trees.write(out, rows)

    @app.command()
    @one_line
    def check(findings: Path, markdown: Page = None) -> None:
        """Names what fails among the findings of `tree`, with their exit status."""
        from suite.gate import tree as trees

        rows = trees.read(findings)
        _say("Working tree", [Finding(f"{row['gate']} {row['kernel']}", row["verdict"], row["text"]) for row in rows], markdown)

    @app.command()
    @one_line
    def compare(old: Path, new: Path, tolerance: Tolerance = None, markdown: Page = None) -> None:
        """Compares two files of `pytest --benchmark-only --benchmark-json=FILE`."""
        from suite.gate.compare import gate

        _say(f"{new.name} against {old.name}", gate(old, new, _tolerances(tolerance)), markdown)

    @app.command()
    @one_line
    def losses(update: Update = False, runs: Runs = None, markdown: Page = None) -> None:
        """Compares losses and communication counts of this machine's records with those kept in suite/gate/reference/."""
        from suite import record
        from suite.gate.losses import gate
        from suite.machine import Machine

        findings = gate(runs or record.folder(Machine.here().name), update=update)
        _say("Losses and counts", findings, markdown)

    return app
