"""One case: a point on the three axes plus the model, mesh, data and schedule it is run with.

A case is plain data (pydantic, frozen, unknown keys refused) and imports no torch, so that the pipeline can be parsed
in a second. `AXES` is the schema of the axes: one line a value. A value of an axis may also be `package.module:Name`,
which loads a class of your own with free options; nothing else in the suite has to know it.

    Case(model="gpt-tiny", mesh={"tp": 2}, comm="int8", steps=50).id  ->  "gpt-tiny_tp2_int8_s0"

The id holds every field that is off its default, or is the row's `name`; it is never parsed back.
"""
from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

ENTRY = re.compile(r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")  # package.module:Name, a value from outside the suite


class Row(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


class NoOptions(Row):
    pass


class Recompute(Row):
    # segment: keep what ranks exchanged, recompute what lies between; layer: recompute whole layers, collectives included
    recompute: Literal["none", "segment", "layer"] = "none"


class Pairwise(Recompute):
    grouped: bool = True  # maps that share an input share a product


class BTP(Pairwise):
    norm: Literal["online", "sync", "local"] = "online"  # local changes the model with tp: for timing only


class LowRank(Row):
    rank: float = Field(0.25, gt=0)  # width of the bottleneck: up to 1 a fraction of the hidden size, above a number
    kv: Literal["factored", "dense"] = "factored"


class CoLA(LowRank):
    gate: Literal["plain", "activated"] = "plain"  # whether the gate of a gated feed-forward layer keeps its own activation


class Parameters(Row):
    params: Literal["float32", "bfloat16"] = "float32"  # of the master weights and the optimizer's states
    residual: Literal["bfloat16", "float32"] = "bfloat16"  # of the residual stream; float32 is what autocast leaves it in


class Quantised(Parameters):
    compute: Literal["bfloat16", "float32"] = "bfloat16"  # of activations and of what products take and give


class Fp4(Quantised):
    level: Literal["emulated", "slab", "native"] = "emulated"  # how products of FP4 operands run
    rounding: Literal["stochastic", "nearest"] = "stochastic"  # of the backward operands


class TetraJet(Fp4):
    outer: Literal[128, "tensor"] = 128  # elements under one float32 scale
    weight: Literal["1x16", "16x16"] = "1x16"  # elements of the weight under one E4M3 scale
    aligned: Literal["both", "weight", "none"] = "both"  # which backward operands are made of what the forward used
    hadamard: Literal["both", "dw", "none"] = "both"  # which backward products are rotated
    margin: bool = True  # scales of stochastic operands leave 16/17, so that none clips
    noise: Literal["independent", "shared"] = "independent"  # of the two operands of a product
    out: float = Field(0.1, ge=0, le=1)  # OutControl: share of input channels kept in FP8; 0: off
    out_start: float = Field(0.04, ge=0)  # first scored step; below 1 a share of the run
    out_steps: int = Field(50, ge=1)
    out_count: Literal["round", "pad128"] = "round"
    out_order: Literal["norm", "index"] = "norm"  # of the channels left in FP4
    out_select: Literal["shard", "global"] = "shard"  # where the inputs of a map are sharded
    osci: float = Field(8.0, ge=0)  # OsciReset: risk from which on a weight is reset; 0: off
    osci_start: float = Field(0.64, ge=0)  # first step; below 1 a share of the run
    osci_period: int = Field(200, ge=1)
    osci_window: int = Field(50, ge=1)
    osci_share: float = Field(1.0, gt=0, le=1)  # of the weights that is watched; 0.1: the memory-efficient variant
    # by what operands are made on a GPU; the same numbers
    quantiser: Literal["kernels", "compiled", "eager"] = "kernels"

    @model_validator(mode="after")
    def periodic(self) -> TetraJet:
        if self.osci and self.osci_period < self.osci_window + 2:
            raise ValueError(f"osci_period: {self.osci_period} is too short for a window of {self.osci_window}: it takes "
                             f"{self.osci_window + 2} steps")
        return self


class Nvfp4(Fp4):
    outer: Literal[128, "tensor"] = "tensor"
    weight: Literal["1x16", "16x16"] = "16x16"
    hadamard: Literal["both", "dw", "none"] = "dw"
    tail: int = Field(0, ge=0)  # last layers that stay in `compute`


class Mxfp4(Fp4):
    level: Literal["emulated"] = "emulated"
    scale: Literal["ceil", "floor"] = "ceil"  # ceil: nothing clips (TetraJet v1); floor: OCP's
    aligned: Literal["both", "weight", "none"] = "both"


class Fp8(Quantised):
    gradient: Literal["e4m3", "e5m2"] = "e4m3"  # format of dY


class Encoded(Row):
    # smaller messages cross uncompressed; auto: each size as it was fastest when it first came
    min_bytes: Annotated[int, Field(ge=0)] | Literal["auto"] = 0
    algorithm: Literal["auto", "one-shot", "two-shot"] = "auto"
    depth: Literal[0, 1, 2, 4, 8] = 0  # slices of an all-reduce under way; 0: by its size
    direct: bool = True  # read the peers' memory where the link allows


class Group(Encoded):
    group: int = Field(128, ge=1)  # elements that share one scale


class Hadamard(Encoded):
    group: Literal[32, 64, 128, 256, 512] = 128  # elements that are transformed together and share one scale


class Taco(Hadamard):
    mode: Literal["lean", "paper", "coarse"] = "lean"  # which scales are sent
    hadamard: bool = True
    alpha: bool = True
    format: Literal["e4m3", "e5m2"] = "e4m3"
    target: float | None = Field(None, gt=0)  # the largest code; none: the format's largest number
    rounding: Literal["nearest", "stochastic"] = "nearest"
    axis: Literal["hidden", "token"] = "hidden"  # along which a group lies
    fused: bool = True  # one kernel on a GPU, else plain torch

    @model_validator(mode="after")
    def fitting(self) -> Taco:
        top = {"e4m3": 448.0, "e5m2": 57344.0}[self.format]
        if self.target is not None and self.target > top:
            raise ValueError(f"target: {self.target:g} is above {top:g}, the largest number of {self.format}")
        if self.mode == "lean" and not self.alpha:
            raise ValueError("alpha: false needs mode: paper or coarse (lean sends one multiplier a group, in which alpha cancels)")
        return self


# axis -> value -> its options. A new value is one entry file and one line here.
AXES: dict[str, dict[str, type[Row]]] = {
    "factor": {"dense": NoOptions, "svd": LowRank, "cola": CoLA, "lax": LowRank},
    "layout": {"megatron": Recompute, "megatron-sp": Recompute, "pairwise": Pairwise, "pairwise-heads": Pairwise, "btp": BTP},
    "comm": {"bf16": NoOptions, "fp32": NoOptions, "fp64": NoOptions, "int8": Group, "fp8": Group, "taco": Taco,
             "int8-hadamard": Hadamard, "int8-tensor": Encoded, "fp8-cast": Encoded, "tahquant": Group},
    "precision": {"bf16": Parameters, "float32": NoOptions, "float64": NoOptions, "fp8": Fp8, "nvfp4": Nvfp4, "mxfp4": Mxfp4,
                  "tetrajet": TetraJet},
}


class Choice(Row):
    """A value of an axis with its options; `name` alone is shorthand for all options at their defaults."""

    name: str
    options: dict[str, Any] = {}

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
    collective of [data.batch x data.seq, hidden] and own the machine (suite/measure/collective.py); both need tp > 1. `quantize`
    runs time the precision's quantisers, on one process that owns the machine (suite/measure/quantize.py).
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
    measure: Literal["loss", "speed", "codec", "collective", "quantize"] = "loss"
    implementation: Literal["triaxis", "transformers"] = "triaxis"
    compile: bool | None = None  # none: where the device is a GPU
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
        if self.measure == "quantize" and self.mesh.ranks > 1:
            raise ValueError("measure: quantize runs on one process")
        if self.implementation == "transformers" and self.measure in ("codec", "collective", "quantize"):
            raise ValueError(f"measure: {self.measure} needs implementation: triaxis")
        if self.implementation == "transformers" and self.mesh.ranks > 1:
            raise ValueError("implementation: transformers runs on one process")
        return self

    @property
    def micro(self) -> int:
        """Sequences in one forward pass of one replica."""
        return self.data.micro or max(1, self.data.batch // self.mesh.dp)

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
    usual = {"device": "cpu", "measure": "loss", "implementation": "triaxis", "compile": case.device == "cuda", "init": None,
             "save": 0, "steps": 50}
    words += [_word(v) if k in ("device", "measure", "implementation") else f"{k}={_word(v)}"
              for k, v in ((k, getattr(case, k)) for k in usual) if v != usual[k]]
    return "_".join([*words, f"s{case.seed}"])
