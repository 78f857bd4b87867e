"""The `triaxis` command. Errors are one line on standard error and exit status 2; Ctrl-C is 130."""

from __future__ import annotations

import functools
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from suite import plan as planning
from suite import record, workload
from suite.gate.command import register as gates
from suite.rendezvous import Rendezvous

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Benchmark suite for three ways to make LLM training cheaper.",
)
Name = Annotated[str | None, typer.Argument(help="Only this workload.")]
Hours = Annotated[float | None, typer.Option(help="Budget in hours for the sizes short and full.")]
Size = Annotated[str | None, typer.Option(help="Largest size wanted: small, short, full.")]
Force = Annotated[bool, typer.Option("--force", envvar="TRIAXIS_FORCE", help="Also where the record still stands.")]


def one_line(command: Callable[..., Any]) -> Callable[..., Any]:
    """Turns what a user can cause into one line."""

    @functools.wraps(command)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        try:
            return command(*args, **kwargs)
        except typer.Exit:  # a RuntimeError too
            raise
        except KeyboardInterrupt:
            typer.echo("interrupted: ranks are gone, finished records are kept", err=True)
            raise typer.Exit(130) from None
        except (ValueError, OSError, RuntimeError) as error:
            typer.echo(f"error: {' '.join(str(error).split()) or type(error).__name__}", err=True)
            raise typer.Exit(2) from None

    return wrapped


def _here() -> str:
    """The name that this machine's records are filed under: on several machines with their number, as torchrun's NNODES says."""
    from suite.machine import Machine

    return Rendezvous.of(os.environ).filed(Machine.here().name)


def _planned(hours: float | None = None, size: str | None = None) -> list[planning.Planned]:
    from suite.machine import Machine

    return planning.plan(workload.load_all(), Machine.here(), hours, size)


def _chosen(name: str | None, planned: Sequence[planning.Planned]) -> list[planning.Planned]:
    if name is not None:
        workload.load(name)
    return [row for row in planned if name in (None, row.expanded.workload)]


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    widths = [max(len(str(row[i])) for row in [header, *rows]) for i in range(len(header))]
    for row in [header, *rows]:
        typer.echo("  ".join(str(cell).ljust(width) for cell, width in zip(row, widths)).rstrip())


@app.command()
@one_line
def doctor(hours: Hours = None, size: Size = None) -> None:
    """What this machine has, which cases would run, and for how long. Exit status 2 where something is wrong."""
    from suite import doctor as examination
    from suite.machine import Machine
    from suite.measure.provenance import topology

    machine = Machine.here()
    findings = examination.examine(machine, examination.ask_torch(), topology(machine) if machine.gpus else None)
    for found in findings:
        typer.echo(f"{found.level:5}  {found.what}: {found.text}")
    planned = _planned(hours, size)
    typer.echo()
    _table(("workload", "small", "short", "full", "hours", "others"), examination.forecast(planned))
    typer.echo(f"\ntogether {sum(planning.hours_by_workload(planned).values()):.2f} hours, as estimated from the rows alone")
    if any(found.level == "error" for found in findings):
        raise typer.Exit(2)


@app.command()
@one_line
def cases(name: Name = None, hours: Hours = None, size: Size = None) -> None:
    """Lists the cases: id, workload, size, estimated seconds, whether it runs here, what its record says."""
    machine = _here()
    rows = []
    for row in _chosen(name, _planned(hours, size)):
        where = row.expanded
        rows.append(
            (
                row.id,
                where.workload,
                where.size,
                f"{row.seconds:.0f}",
                "runs" if row.runs else f"not run: {row.reason}",
                _status(record.path_of(machine, row.id)),
            )
        )
    _table(("case", "workload", "size", "seconds", "here", "record"), rows)


def _status(path: Path) -> str:
    try:
        one = record.read(path)
    except FileNotFoundError:
        return "-"
    except record.RecordError:
        return "unreadable"
    return one.status if one.reason is None else f"failed: {one.reason}"


@app.command()
@one_line
def run(case: list[str], force: Force = False) -> None:
    """Runs one case, or several; those of one mesh and link share a start. Exit status 1 where one fails."""
    planned = [planning.Planned(row, True, None, 0.0) for row in workload.find_all(dict.fromkeys(case))]
    failed = False
    for launch in planning.launches(planned).values():
        results = _run(launch, force, plain=False)
        if not results:
            typer.echo(f"{launch.id}: this machine's ranks have ended; the machine of rank 0 holds the record")
        for result in results:
            _touch(result.id)
            typer.echo(f"{result.id}: {result.status}" + (f": {result.reason}" if result.reason else ""))
            failed |= result.status == "failed"
    if failed:
        raise typer.Exit(1)


@app.command(hidden=True)
@one_line
def launch(
    name: str,
    cases: list[str],
    stamp: Annotated[Path, typer.Option()],
    log: Annotated[Path | None, typer.Option()] = None,
    force: Force = False,
    child: Annotated[bool, typer.Option(help="End with the parent process.")] = False,
) -> None:
    """Runs a launch for the pipeline: the given cases in turn; writes the stamp also where some failed."""
    if child:
        from suite.processes import die_with_parent

        die_with_parent(signal.SIGTERM)
    one = planning.Launch(name, name.partition("-")[0], tuple(workload.find_all(cases)))
    records = _run(one, force, plain=True, log=log)
    from suite.run import stamp as text

    record.publish(stamp, text(one, records, _here()))


def _run(one: planning.Launch, force: bool, plain: bool, log: Path | None = None) -> list[record.Record]:
    from suite.run import run_launch
    from suite.show import best

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, stop)
    show = best(plain)
    try:
        return run_launch(one, force, show=show, log=log)
    finally:
        show.close()


def _touch(case_id: str) -> None:
    """Brings the stamps that know the case up to date, so that the pipeline remakes tables from the new record."""
    import hashlib

    machine = _here()
    for path in sorted((record.RESULTS / "launches" / machine).glob("*.json")):
        stamp = json.loads(path.read_text(encoding="utf-8"))
        for row in stamp["cases"]:
            if row["id"] == case_id:
                file = record.path_of(machine, case_id)
                one = record.read(file)
                row |= {"status": one.status, "reason": one.reason, "record": hashlib.sha256(file.read_bytes()).hexdigest()}
                record.publish(path, json.dumps(stamp, indent=1, sort_keys=True) + "\n")


@app.command()
@one_line
def show(case: str) -> None:
    """Shows a case's record on this machine: numbers with their kind, spread and conditions."""
    machine = _here()
    try:
        one = record.read(record.path_of(machine, case))
    except FileNotFoundError:
        workload.find(case)
        raise ValueError(f"{case}: no record on {machine} yet; `triaxis run {case}`") from None
    for line in _lines(one):
        typer.echo(line)


def _lines(one: record.Record) -> list[str]:
    facts = one.provenance
    lines = [f"{one.id} on {one.machine}: {one.status}" + (f": {one.reason}" if one.reason else ""), f"  digest   {one.key[:12]}"]
    lines.append(
        f"  started  {facts.get('started', '-')}, ended {facts.get('ended', '-')}, {facts.get('threads', '-')} threads a rank"
    )
    if one.phases:
        lines.append("  phases   " + ", ".join(f"{name} {seconds:.1f} s" for name, seconds in one.phases.items()))
    for metric in one.metrics:
        spread = f" [{metric.q20:.4g}, {metric.q80:.4g}]" if metric.q20 is not None and metric.q80 is not None else ""
        count = f", n={metric.n}" if metric.n else ""
        value = (
            f"{metric.value:.6g} {metric.unit}{spread} ({metric.kind}{count})"
            if metric.value is not None
            else f"none: {metric.reason}"
        )
        lines.append(f"  {metric.name:28} {value}")
    for row in one.traffic:
        lines.append(
            f"  {row.group} {row.way} {row.op} {row.codec} {row.purpose}: {row.calls} calls, {row.payload_bytes:,} bytes payload, "
            f"{row.wire_bytes:,.0f} on the wire a rank and step ({row.kind})"
        )
    lines += [f"  {key:8} {json.dumps(value)}" for key, value in one.case.items()]
    return lines


@app.command()
@one_line
def retry(name: Name = None) -> None:
    """Clears failed records, and only those, with their checkpoints, so that the pipeline runs their cases from the start."""
    from suite.run import work_folders

    machine = _here()
    mine = {row.id for one in ([workload.load(name)] if name else workload.load_all().values()) for row in one.rows}
    cleared = set()
    for path in sorted(record.folder(machine).glob("*.json")):
        one = record.read(path)
        if one.status == "failed" and (name is None or one.id in mine):
            folders = work_folders(machine, one.id)
            for folder in folders:
                shutil.rmtree(folder)
            path.unlink()
            cleared.add(one.id)
            typer.echo(f"{one.id}: cleared ({one.reason})" + (", and what it had saved" if folders else ""))
    for path in sorted((record.RESULTS / "launches" / machine).glob("*.json")):
        if cleared & {row["id"] for row in json.loads(path.read_text(encoding="utf-8"))["cases"]}:
            path.unlink()
    typer.echo(f"{len(cleared)} failed records cleared")


@app.command()
@one_line
def prepare(name: Name = None, size: Size = None) -> None:
    """Downloads and tokenizes the text of every case that runs here."""
    from suite.data import prepare as make

    seen = set()
    for row in _chosen(name, _planned(size=size)):
        case = row.expanded.case
        what = (case.data.text, case.data.tokenizer, case.data.batch if case.data.text == "random" else None)
        if row.runs and case.reads_text and what not in seen:
            seen.add(what)
            made = make(case.data, workload.models()[case.model]["vocab"])
            typer.echo(f"{case.data.text}, tokenizer {case.data.tokenizer}: vocabulary {made.vocab_size}")


@app.command(name="import")
@one_line
def import_(source: Path, name: str, replace: bool = False) -> None:
    """Copies the records of a run (a folder or .tar.gz of results/runs/MACHINE) to results/reference/NAME."""
    from suite.report.reference import bring

    typer.echo(f"{bring(source, name, record.RESULTS, replace)}")


@app.command()
@one_line
def overhead(case: str, pairs: int = 12, steps: int = 10) -> None:
    """What the GPU sampler costs a step of the case: interleaved on and off in one process (one GPU). Numbers go to
    results/overhead/MACHINE.json."""
    from dataclasses import asdict

    from suite.measure.overhead import overhead as measured
    from suite.mesh import Mesh
    from suite.report.overhead import path_of
    from suite.train import WARMUP
    from suite.trainer import Trainer

    one = workload.find(case).case
    trainer = Trainer(one, Mesh.from_env(device=one.device))
    for step in range(WARMUP[one.device]):
        trainer.step(step)
    metrics = measured(trainer, pairs, steps)
    for metric in metrics:
        value = f"{metric.value:.5f} (n={metric.n})" if metric.value is not None else f"none: {metric.reason}"
        typer.echo(f"{metric.name}: {value}")
    if all(metric.value is not None for metric in metrics):
        rows = json.dumps([asdict(metric) for metric in metrics], indent=1, sort_keys=True)
        record.publish(path_of(_here(), record.RESULTS), rows + "\n")


@app.command(hidden=True)
@one_line
def plan(hours: Hours = None, size: Size = None) -> None:
    """Prints the plan as JSON: id, workload, size, runs, reason, seconds of every case."""
    typer.echo(json.dumps([row.row() for row in _planned(hours, size)], indent=1, sort_keys=True))


@app.command(hidden=True)
@one_line
def check(
    launches: Annotated[list[Path] | None, typer.Argument()] = None, stamp: Annotated[Path, typer.Option()] = Path("check.json")
) -> None:
    """Writes the stamp if no case of the launches failed; else names them and exits 1."""
    rows = [row for path in launches or [] for row in json.loads(path.read_text(encoding="utf-8"))["cases"]]
    failed = [row for row in rows if row["status"] != "ok"]
    for row in failed:
        typer.echo(f"{row['id']}: failed: {row['reason']}")
    if failed:
        typer.echo(f"{len(failed)} of {len(rows)} cases failed; `triaxis retry` clears them to be run again")
        raise typer.Exit(1)
    record.publish(stamp, json.dumps({"cases": len(rows)}) + "\n")


app.add_typer(gates(one_line), name="gate")

if __name__ == "__main__":
    sys.exit(app())
