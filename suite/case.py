"""One case: a point on the three axes plus the model, mesh, data and schedule it is run with.

A case is plain data (pydantic, frozen, unknown keys refused) and imports no torch, so that the pipeline can be parsed
in a second. `AXES` (suite/options.py) is the schema of the axes: one line a value. A value of an axis may also be
`package.module:Name`, which loads a class of your own with free options; nothing else in the suite has to know it.

    Case(model="gpt-tiny", mesh={"tp": 2}, comm="int8", steps=50).id  ->  "gpt-tiny_tp2_int8_s0"

The id holds every field that is off its default, or is the row's `name`; it is never parsed back.
"""
from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from suite.options import AXES, Row

PIECES = ("block", "collective", "quantize")
RECORDED = ("ab", "loss", "speed")  # what is measured of steps, which a CUDA graph may hold
ENTRY = re.compile(r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")  # package.module:Name, a value from outside the suite


class Choice(Row):
    """A value of an axis with its options; `name` alone is shorthand for all options at their defaults."""

    name: str
    options: dict[str, Any] = Field(default_factory=dict)

    def off_default(self, axis: str) -> dict[str, Any]:
        schema = AXES[axis].get(self.name)
        defaults = schema().model_dump() if schema else {}
        return {k: v for k, v in sorted(self.options.items()) if k not in defaults or defaults[k] != v}


def _choice(axis: str):
    def parse(value: Any) -> Any:
        if isinstance(value, Choice):
            value = {"name": value.name, "options": value.options}
        if isinstance(value, str):
            name, options = value, {}
        elif isinstance(value, dict) and isinstance(value.get("name"), str):
            name = value["name"]
            options = value.get("options")
            options = options if isinstance(options, dict) else {k: v for k, v in value.items() if k != "name"}
        else:
            raise ValueError(f"{axis}: expected a name or a map with a name, got {value!r}")
        if ENTRY.match(name):
            return Choice(name=name, options=options)
        if name not in AXES[axis]:
            raise ValueError(f"unknown {axis} {name!r}; known: {', '.join(sorted(AXES[axis]))}, or package.module:Name")
        return Choice(name=name, options=AXES[axis][name].model_validate(options).model_dump())

    return BeforeValidator(parse)


Codec = Annotated[Choice, _choice("comm")]


class Ways(Row):
    forward: Codec = Choice(name="bf16")
    backward: Codec = Choice(name="bf16")

    @model_validator(mode="before")
    @classmethod
    def shorthand(cls, value: Any) -> Any:
        if isinstance(value, str) or (isinstance(value, dict) and "name" in value):
            return {"forward": value, "backward": value}
        return value


class Comm(Row):
    """Codec by group and direction. `comm: int8` is shorthand for the tensor-parallel group in both directions."""

    tp: Ways = Ways()
    dp: Ways = Ways()
    pp: Ways = Ways()

    @model_validator(mode="before")
    @classmethod
    def shorthand(cls, value: Any) -> Any:
        if isinstance(value, str) or (isinstance(value, dict) and ("name" in value or "forward" in value or "backward" in value)):
            return {"tp": value}
        return value


class Mesh(Row):
    dp: int = Field(1, ge=1)
    pp: int = Field(1, ge=1)
    tp: int = Field(1, ge=1)

    @property
    def ranks(self) -> int:
        return self.dp * self.pp * self.tp


class Data(Row):
    """What is read. `tokenizer`: an integer trains a byte-level BPE of that size on the text's training split."""

    text: str = Field("shakespeare", min_length=1)  # a corpus, a path, hf:NAME, or `random` (uniform token ids)
    tokenizer: int | str = 1024
    seq: int = Field(128, ge=2)  # tokens a sequence
    batch: int = Field(8, ge=1)  # sequences a step, over all replicas
    micro: int | None = Field(None, ge=1)  # sequences a forward pass and replica; none: no accumulation


class Optim(Row):
    """AdamW with a cosine schedule. `warmup` is a fraction of the steps, `floor` a fraction of the peak rate."""

    lr: float = Field(3e-3, gt=0)
    floor: float = Field(0.1, ge=0, le=1)
    warmup: float = Field(0.1, ge=0, le=1)
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.95, ge=0, lt=1)
    eps: float = Field(1e-8, gt=0)
    decay: float = Field(0.1, ge=0)
    clip: float = Field(1.0, ge=0)  # 0: off


Link = Literal["none", "p2p", "p2p-nvls", "shm", "socket", "gloo", "shaped"]


class Case(Row):
    """See the module docstring. `measure`: `loss` runs are deterministic and validated, `speed` runs own the machine.

    `codec` runs look at what a codec does to a trained model's messages (suite/measure/captured.py), `collective` runs time one
    collective of [data.batch x data.seq, hidden] and own the machine (suite/measure/collective.py); both need tp > 1. `ab` runs
    compare a codec with the plain wire, or a layout with the same at default options, in turn (suite/measure/interleaved.py);
    `block` runs time one layer and its pieces (suite/measure/block.py), `quantize` runs the precision's quantisers
    (suite/measure/quantize.py): each on a machine of its own.
    """

    model: str
    factor: Annotated[Choice, _choice("factor")] = Choice(name="dense")
    layout: Annotated[Choice, _choice("layout")] = Choice(name="megatron")
    comm: Comm = Comm()
    precision: Annotated[Choice, _choice("precision")] = Choice(name="bf16")
    mesh: Mesh = Mesh()
    device: Literal["cpu", "cuda"] = "cpu"
    link: Link | None = None
    data: Data = Data()
    optim: Optim = Optim()
    steps: int = Field(50, ge=1)
    seed: int = Field(0, ge=0)
    measure: Literal["loss", "speed", "codec", "collective", "ab", "block", "quantize"] = "loss"
    implementation: Literal["triaxis", "transformers"] = "triaxis"
    compile: bool | None = None  # none: where the device is a GPU
    graph: bool = False  # a step's passes are recorded once as a CUDA graph and replayed (suite/recorded.py)
    init: str | None = None  # path of a checkpoint to start from (ours or Hugging Face safetensors)
    save: int = Field(0, ge=0)  # steps between checkpoints, from which a cut run goes on; 0: none
    name: str | None = None

    @field_validator("factor", "layout", "precision", "comm", "mesh", "data", "optim", mode="before")
    @classmethod
    def not_empty(cls, value: Any) -> Any:
        if value is None:
            raise ValueError("is empty: give it a value or leave the key out")
        return value

    @model_validator(mode="before")
    @classmethod
    def settle(cls, value: Any) -> Any:
        """Fills what follows from the rest, and makes rows that mean the same equal."""
        if not isinstance(value, dict):
            return value
        value = dict(value)
        mesh = value.get("mesh")
        ranks = 0
        if isinstance(mesh, dict) and all(isinstance(n, int) for n in mesh.values()):
            ranks = mesh.get("dp", 1) * mesh.get("pp", 1) * mesh.get("tp", 1)
        elif isinstance(mesh, Mesh):
            ranks = mesh.ranks
        elif "mesh" not in value:
            ranks = 1
        if ranks == 1:
            value["link"] = "none"
            value.pop("comm", None)
        elif value.get("link") is None:
            value["link"] = "p2p" if value.get("device") == "cuda" else "gloo"
        if value.get("compile") is None:
            value["compile"] = value.get("device") == "cuda"
        return value

    @model_validator(mode="after")
    def consistent(self) -> Case:
        if self.mesh.ranks > 1 and self.link == "none":
            raise ValueError(f"link: none needs a mesh of one process, not {self.mesh.ranks}")
        if self.device == "cpu" and self.link not in ("none", "gloo"):
            raise ValueError(f"link: {self.link} needs device: cuda (on the CPU: gloo)")
        if self.data.batch % (self.mesh.dp * self.micro):
            raise ValueError(f"data.batch {self.data.batch} is no multiple of dp {self.mesh.dp} x micro {self.micro}")
        if self.layout.options.get("norm") == "local" and self.measure != "speed":
            raise ValueError("layout: norm: local changes the model with tp: only a row with measure: speed may time it")
        if self.measure in ("codec", "collective") and self.mesh.tp == 1:
            raise ValueError(f"measure: {self.measure} needs mesh.tp of at least 2: with one process nothing crosses")
        if self.measure == "ab" and not (self.layout.off_default("layout") or self.comm != Comm()):
            raise ValueError("measure: ab needs a codec or an option of the layout off its default, which it is compared with")
        if self.measure == "ab" and not self.layout.off_default("layout") and (self.mesh.tp == 1 or self.mesh.dp > 1):
            raise ValueError("measure: ab of a codec needs mesh.tp of at least 2 and mesh.dp 1: it is about what tp sends")
        if self.measure == "ab" and self.steps < 2:
            raise ValueError("measure: ab needs steps of at least 2: fewer pairs give no interval")
        if self.measure == "quantize" and self.mesh.ranks > 1:
            raise ValueError("measure: quantize runs on one process")
        if self.graph and (self.device == "cpu" or self.measure not in RECORDED):
            raise ValueError(f"graph: needs device: cuda and measure: {' or '.join(RECORDED)}")
        if self.graph and self.link == "gloo":
            raise ValueError("graph: link: gloo passes host memory, which a graph cannot")
        if self.implementation == "transformers" and self.measure not in ("loss", "speed"):
            raise ValueError(f"measure: {self.measure} needs implementation: triaxis")
        if self.implementation == "transformers" and self.graph:
            raise ValueError("graph: needs implementation: triaxis")
        if self.implementation == "transformers" and self.mesh.ranks > 1:
            raise ValueError("implementation: transformers runs on one process")
        return self

    @property
    def micro(self) -> int:
        """Sequences in one forward pass of one replica."""
        return self.data.micro or max(1, self.data.batch // self.mesh.dp)

    @property
    def reads_text(self) -> bool:
        """Whether it takes text: what measures a piece makes its own tensors."""
        return self.measure not in PIECES

    @property
    def gpus(self) -> int:
        """GPUs the case needs; ranks joined by gloo share one."""
        return 0 if self.device == "cpu" else 1 if self.link == "gloo" else self.mesh.ranks

    @property
    def id(self) -> str:
        return self.name or _identify(self)

    def row(self) -> dict[str, Any]:
        """The expanded case as plain data with sorted keys: what a record holds and a digest is made of."""
        return self.model_dump(mode="json")


def _word(value: Any) -> str:
    return re.sub(r"[^\w.=+-]+", "-", str(value)).strip("-")


def _choice_words(choice: Choice, axis: str) -> str:
    return _word(choice.name) + "".join(f"-{k}={_word(v)}" for k, v in choice.off_default(axis).items())


def _identify(case: Case) -> str:
    words = [_word(case.model)]
    for axis in ("factor", "layout"):
        text = _choice_words(getattr(case, axis), axis)
        if text != Case.model_fields[axis].default.name:
            words.append(text)
    words += [f"{k}{n}" for k, n in case.mesh.model_dump().items() if n > 1]
    if case.mesh.ranks > 1:
        for group in ("tp", "dp", "pp"):
            ways: Ways = getattr(case.comm, group)
            texts = [_choice_words(c, "comm") for c in (ways.forward, ways.backward)]
            text = texts[0] if texts[0] == texts[1] else f"{texts[0]}+{texts[1]}"
            if group == "tp" and case.mesh.tp > 1:
                words.append(text)
            elif text != "bf16":
                words.append(f"{group}={text}")
    if _choice_words(case.precision, "precision") != "bf16":
        words.append(_choice_words(case.precision, "precision"))
    usual_link = {"cpu": "gloo", "cuda": "p2p"}[case.device]
    if case.link not in ("none", usual_link):
        words.append(str(case.link))
    for part in ("data", "optim"):
        mine, usual = getattr(case, part).model_dump(), type(getattr(case, part))().model_dump()
        words += [f"{k}={_word(v)}" for k, v in mine.items() if v != usual[k]]
    usual = {"device": "cpu", "measure": "loss", "implementation": "triaxis", "compile": case.device == "cuda", "graph": False,
             "init": None, "save": 0, "steps": 50}
    words += [_word(v) if k in ("device", "measure", "implementation") else f"{k}={_word(v)}"
              for k, v in ((k, getattr(case, k)) for k in usual) if v != usual[k]]
    return "_".join([*words, f"s{case.seed}"])
