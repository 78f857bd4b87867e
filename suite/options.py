"""What each value of an axis may be given: its options with their ranges and defaults. `AXES` lists them.

A new value is one entry file (`suite/<axis>/<name>.py`) and one line here. Imports no torch.
"""
from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class Row(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


class NoOptions(Row):
    pass


class Recompute(Row):
    # segment: keep what ranks exchanged, recompute what lies between; layer: recompute whole layers, collectives included
    recompute: Literal["none", "segment", "layer"] = "none"


class Overlap(Recompute):
    overlap: bool = False  # sums of an input's gradient are under way while the weight's is computed, where products are plain


class Pairwise(Overlap):
    grouped: bool = True  # maps that share an input share a product


class BTP(Pairwise):
    norm: Literal["online", "sync", "local"] = "online"  # local changes the model with tp: for timing only
    prescale: Literal["auto", "always", "never"] = "auto"  # of online: shards by their own RMS, multiplied back behind the product


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
    depth: Literal[1, 2, 4, 8] = 1  # slices of an all-reduce under way
    direct: bool = True  # read the peers' memory where the link allows


class Group(Encoded):
    group: int = Field(128, ge=1)  # elements that share one scale


class Fused(Encoded):
    fused: bool = True  # each step one kernel on a GPU, else plain torch


class Grouped(Fused):
    group: int = Field(128, ge=1)


class Hadamard(Fused):
    group: Literal[32, 64, 128, 256, 512] = 128  # elements that are transformed together and share one scale


class Taco(Hadamard):
    mode: Literal["lean", "paper", "coarse"] = "lean"  # which scales are sent
    hadamard: bool = True
    alpha: bool = True
    format: Literal["e4m3", "e5m2"] = "e4m3"
    target: float | None = Field(None, gt=0)  # the largest code; none: the format's largest number
    rounding: Literal["nearest", "stochastic"] = "nearest"
    axis: Literal["hidden", "token"] = "hidden"  # along which a group lies

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
    "layout": {"megatron": Overlap, "megatron-sp": Recompute, "pairwise": Pairwise, "pairwise-heads": Pairwise, "btp": BTP},
    "comm": {"bf16": NoOptions, "fp32": NoOptions, "fp64": NoOptions, "int8": Grouped, "fp8": Grouped, "taco": Taco,
             "int8-hadamard": Hadamard, "int8-tensor": Encoded, "fp8-cast": Encoded, "tahquant": Group},
    "precision": {"bf16": Parameters, "float32": NoOptions, "float64": NoOptions, "fp8": Fp8, "nvfp4": Nvfp4, "mxfp4": Mxfp4,
                  "tetrajet": TetraJet},
}
