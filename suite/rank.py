"""One process of a launch: joins the mesh once, then runs the launch's cases in turn. `python -m suite.rank LAUNCH.json`

    LAUNCH.json = {"launch", "machine", "results", "work", "threads", "runner": pid, "cases": [{"id", "key", "row"}]}

Every rank calls the executor (`suite.train:execute`); rank 0 publishes: the loss curve and GPU samples first, the record last,
so that a record stands for all that lies beside it. Any exception is told to the runner in one line and ends the process at
once, without waiting for the others: they may hang in a collective, and the runner ends them.
"""

from __future__ import annotations

import csv
import gc
import importlib
import io
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from suite import record
from suite.case import Case
from suite.digest import executor
from suite.events import Progress, emit, reason_of
from suite.link import VARIABLES
from suite.processes import alive, die_with_parent

FAILED = 3  # exit status of a rank whose case failed
LOSSES = ("step", "loss", "lr", "grad_norm", "tokens")


class DiskFull(OSError):
    """The record could not be written: one line with the file and why."""


def main(path: Path) -> None:
    die_with_parent()
    spec = json.loads(path.read_text(encoding="utf-8"))
    if not alive(spec["runner"]):
        sys.exit("the runner is gone")  # it ended before the kernel was asked to tell
    rank, local = int(os.environ.get("RANK", 0)), int(os.environ.get("LOCAL_RANK", 0))
    at_hand = None
    try:
        execute = _load(executor())
        mesh = _join(Case.model_validate(spec["cases"][0]["row"]), spec["threads"])
        cases = _agree(spec["cases"])
        emit("ready", rank=rank, pid=os.getpid(), at=time.time())
        progress = Progress(speaks=local == 0)
        for item in cases:
            at_hand = item["id"]
            emit("case", rank=rank, id=at_hand)
            began = time.time()
            case = Case.model_validate(item["row"])
            folder = Path(spec["work"]) / f"{item['id']}-{item['key'][:12]}"
            folder.mkdir(parents=True, exist_ok=True)
            outcome = execute(case, mesh, progress=progress, folder=folder)
            if rank == 0:
                _publish(spec, item, case, outcome, began)
                emit("done", id=at_hand, seconds=time.time() - began)
            del outcome
            _forget()
        at_hand = None
        mesh.close()
    except BaseException as error:
        traceback.print_exc()
        reason, echo = reason_of(error)
        if isinstance(error, DiskFull):
            reason = str(error)
        emit("failed", rank=rank, id=at_hand, reason=reason, echo=echo, disk=isinstance(error, DiskFull))
        sys.stdout.flush()
        # Not sys.exit: destroying a process group waits for peers that may never come.
        os._exit(FAILED)


def _load(name: str) -> Callable[..., Any]:
    module, _, function = name.partition(":")
    return getattr(importlib.import_module(module), function or "execute")


def _join(case: Case, threads: int) -> Any:
    from suite.mesh import Mesh

    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(threads)
        if case.device == "cuda" and not torch.cuda.is_available():
            raise record.CaseFailed(
                f"torch {torch.__version__} (built for CUDA {torch.version.cuda or 'none'}) sees no GPU; see `triaxis doctor`"
            )
    return Mesh.from_env(dp=case.mesh.dp, pp=case.mesh.pp, tp=case.mesh.tp, device=case.device, link=case.link)


def _agree(cases: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """On several machines each has its own runner; all follow the list of rank 0's."""
    if int(os.environ.get("WORLD_SIZE", 1)) == int(os.environ.get("LOCAL_WORLD_SIZE", 1)):
        return cases
    import torch.distributed as dist

    held = [list(cases)]
    dist.broadcast_object_list(held, src=0)
    return held[0]


def _publish(spec: Mapping[str, Any], item: Mapping[str, Any], case: Case, outcome: Any, began: float) -> None:
    from suite.measure.provenance import provenance

    results = Path(spec["results"])
    path = record.path_of(spec["machine"], item["id"], results)
    facts = {**provenance(), **getattr(outcome, "facts", {})}
    facts |= {
        "machine": spec["machine"],
        "launch": spec["launch"],
        "threads": spec["threads"],
        "link_variables": VARIABLES[str(case.link)],
        "started": _utc(began),
        "ended": _utc(time.time()),
    }
    try:
        losses, samples = path.with_suffix(".loss.csv"), path.with_suffix(".gpu.csv")
        for beside in (losses, samples):
            beside.unlink(missing_ok=True)
        if outcome.losses:
            record.publish(losses, _table(outcome.losses, LOSSES))
        for name, rows in getattr(outcome, "tables", {}).items():
            record.publish(path.with_suffix(f".{name}.csv"), _table(rows, tuple(rows[0]) if rows else ()))
        if outcome.samples is not None and Path(outcome.samples).exists():
            record.publish(samples, Path(outcome.samples).read_text(encoding="utf-8"))
        record.write(
            record.Record(
                item["id"],
                item["row"],
                "ok",
                None,
                item["key"],
                spec["machine"],
                facts,
                outcome.phases,
                outcome.metrics,
                outcome.traffic,
            ),
            results,
        )
    except OSError as error:
        raise DiskFull(f"{path.name}: cannot be written: {error.strerror or error}") from error


def _table(rows: Sequence[Mapping[str, Any]], first: Sequence[str]) -> str:
    """CSV with repr floats: the columns named first, then any others in order of name."""
    others = sorted({name for row in rows for name in row} - set(first))
    text = io.StringIO()
    writer = csv.DictWriter(text, [*first, *others], restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _utc(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")


def _forget() -> None:
    """Leaves the next case nothing of this one: memory, its peak, compiled code (whose number of variants is limited)."""
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is None:
        return
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()
    if torch.cuda.is_available():
        getattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None)()  # one a stream, which no cache gives back
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
