"""A training step and an all-reduce of the revision whose folder the process is in, to be timed by suite/gate/worker.py.

    step:gpt-tiny     loss, gradients, clipping and AdamW of the smallest GPT on one process, a vocabulary of VOCAB, WIDTH tokens
    collective:taco   VALUES bfloat16 values summed by TACO over two processes joined by gloo; on the CPU only

Imports the revision's suite, and nothing of this file's neighbours. The two processes are this file too: they make as many calls
as each line of their standard input says, and end with it.

    RANK=0 WORLD_SIZE=2 ... python steps.py     in the folder of a revision
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

VOCAB, WIDTH, VALUES = 512, 64, 1 << 16
WRONG = 0.2  # relative error of a sum that is none


def benches(device: str) -> dict[str, Any]:
    """What the revision in the current folder has of them: nothing where it has no suite."""
    if not Path("suite/assemble.py").exists():
        return {}
    return {"step:gpt-tiny": Step(device)} | ({"collective:taco": Collective()} if device == "cpu" else {})


class Step:
    """`check()` gives a fault or None; `seconds(loops)` the time of a step, after `check`, or `prepare` where it was released."""

    def __init__(self, device: str) -> None:
        self.device = device

    def check(self) -> str | None:
        import torch

        one, other = self._build(0), self._build(1)
        losses = [self._step().item() for self.model, self.optimizer, self.gradients, self.rows in (one, one, one, other)]
        if not all(0 < loss < 100 for loss in losses):
            return f"losses {losses}"
        if losses[0] == losses[3]:
            return "gives the same loss for other weights and tokens"
        if not losses[2] < losses[0]:
            return f"three steps on one batch do not lower the loss: {losses[:3]}"
        if self.device == "cuda":
            torch.cuda.synchronize()
        self.model, self.optimizer, self.gradients, self.rows = one
        return None

    def prepare(self) -> None:
        self.model, self.optimizer, self.gradients, self.rows = self._build(0)

    def _build(self, seed: int) -> tuple[Any, ...]:
        import torch

        from suite.assemble import assemble
        from suite.case import Case
        from suite.mesh import Mesh
        from suite.optimizer import AdamW

        data = {"text": "random", "seq": WIDTH, "batch": 1}
        row = {"model": "gpt-tiny", "measure": "speed", "compile": False, "device": self.device, "seed": seed, "data": data}
        case = Case.model_validate(row)
        made = assemble(case, Mesh.from_env(device=self.device), VOCAB)
        rows = torch.randint(VOCAB, (1, WIDTH + 1), generator=torch.Generator().manual_seed(seed)).to(self.device)
        return made.model, AdamW(made.model.weights.leaves.values(), case.optim), made.gradients, rows

    def _step(self) -> Any:
        loss = self.model.loss(self.rows[:, :-1].contiguous(), self.rows[:, 1:].contiguous())
        loss.backward()
        self.gradients.settle()
        _, factor = self.gradients.clip(1.0)
        self.optimizer.step(1e-3, factor)
        self.optimizer.zero()
        return loss.detach()

    def loops(self) -> int:
        return 1

    def restore(self) -> None:
        """A step's time does not depend on the weights."""

    def release(self) -> None:
        self.model = self.optimizer = self.gradients = self.rows = None

    def seconds(self, loops: int) -> float:
        import torch

        begun = time.perf_counter()
        for _ in range(loops):
            self._step()
        if self.device == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - begun) / loops


class Collective:
    """As Step, over two processes of its own; rank 0 times between two meetings."""

    def check(self) -> str | None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": "2"}
        self.ranks = [subprocess.Popen([sys.executable, __file__], text=True, stdin=subprocess.PIPE,
                                       stdout=subprocess.PIPE if index == 0 else None,
                                       env={**os.environ, **meeting, "RANK": str(index), "LOCAL_RANK": str(index)})
                      for index in (0, 1)]
        return self._ask("check 0") or self._ask("check 1") or None

    def prepare(self) -> None:
        fault = self.check()  # two new processes
        if fault:
            raise RuntimeError(fault)

    def _ask(self, line: str) -> str:
        for rank in self.ranks:
            rank.stdin.write(line + "\n")
            rank.stdin.flush()
        answer = self.ranks[0].stdout.readline()
        if not answer:
            raise RuntimeError(f"rank 0 has ended, exit status {self.ranks[0].wait()}")
        return answer.strip()

    def loops(self) -> int:
        return 1

    def restore(self) -> None:
        """It changes nothing in place."""

    def release(self) -> None:
        for rank in self.ranks:
            rank.stdin.close()
            rank.wait(60)

    def seconds(self, loops: int) -> float:
        return float(self._ask(f"run {loops}"))


def message(index: int, seed: int) -> Any:
    import torch

    return torch.randn(VALUES, generator=torch.Generator().manual_seed(10 * seed + index)).bfloat16()


def wire() -> Any:
    """This rank's wire of the two."""
    from suite.case import Choice
    from suite.comm.counter import Counter
    from suite.comm.wire import Wire
    from suite.mesh import Mesh
    from suite.seams import make

    group = Mesh.from_env(tp=2, link="gloo", timeout=60.0).group("tp")
    codecs = {way: make("comm", Choice(name="taco")) for way in ("forward", "backward")}
    return Wire("tp", group, codecs, Counter())


def checked(made: Any, seed: int) -> str:
    """A fault of the sum, or nothing."""
    exact = sum(message(index, seed).double() for index in (0, 1))
    error = ((made.double() - exact).norm() / exact.norm()).item()
    return "" if error < WRONG else "writes nothing but zeros" if not made.count_nonzero() else f"the sum is {error:.3g} off"


def serve() -> None:
    """One rank: an answer to each line is rank 0's."""
    import torch

    index = int(os.environ["RANK"])

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    torch.set_num_threads(1)
    one, given = wire(), message(index, 0)
    for line in sys.stdin:
        what, number = line.split()
        if what == "check":
            answer: Any = checked(one.run("all_reduce", message(index, int(number)))[0], int(number))
        else:
            one.barrier()
            begun = time.perf_counter()
            for _ in range(int(number)):
                one.run("all_reduce", given)
            answer = (time.perf_counter() - begun) / int(number)
        if index == 0:
            answers.write(f"{answer}\n")
            answers.flush()
    os._exit(0)  # leaving the group would wait for the other, which may be gone


if __name__ == "__main__":
    sys.path[0] = str(Path.cwd())  # the revision's own modules
    serve()
