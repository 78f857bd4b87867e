"""Every kernel at the shapes that count: what tests, benchmarks and the regression gate go through.

    for entry in ENTRIES:
        compile(entry, 90).spills                             # no GPU needed
        given = entry.inputs("cuda", seed=0)
        entry.function(**given); entry.reference(**entry.inputs("cuda", seed=0))

Shapes are those of one micro-batch of the models in workloads/models.yaml (t tokens, v columns of the padded vocabulary on
one rank), and one that no wide access fits.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from kernels import adamw, bottleneck, bottleneck_reference, cross_entropy, reference, swiglu, taco_reference
from kernels.entry import BF16, FLOAT32, Entry, normal
from kernels.launch import TYPES, Launch
from kernels.registry_codecs import exchange_entry, grouped_entries, taco_entries
from kernels.registry_nvfp4 import channel_entries, nvfp4_beside, nvfp4_entries


def logits_and_targets(tokens: int, width: int, dtype: torch.dtype, device: str, seed: int) -> tuple[Tensor, Tensor]:
    """Normal logits of deviation 3; a quarter of the targets lie on either side of this rank's columns."""
    logits = normal((tokens, width), dtype, device, seed, 3.0)
    if device == "meta":
        return logits, torch.empty(tokens, dtype=torch.int64, device=device)
    generator = torch.Generator(device).manual_seed(seed + 1)
    return logits, torch.randint(-width // 2, width + width // 2, (tokens,), device=device, generator=generator)


def _statistics(tokens: int, width: int, valid: int, dtype: torch.dtype, device: str, seed: int) -> dict[str, Any]:
    logits, target = logits_and_targets(tokens, width, dtype, device, seed)
    return {"logits": logits, "target": target, "valid": valid}


def _gradient(tokens: int, width: int, valid: int, dtype: torch.dtype, device: str, seed: int) -> dict[str, Any]:
    logits, target = logits_and_targets(tokens, width, dtype, device, seed)
    rows = {name: torch.empty(tokens, device=device) for name in ("peak", "total")}
    if device != "meta":
        rows["peak"].copy_(logits.amax(1))
        rows["total"].fill_(width / 16)
    return {"logits": logits, "target": target, **rows, "scale": 1.0 / tokens, "valid": valid}


def _statistics_launch(logits: Tensor, target: Tensor, valid: int) -> Launch:
    results = (torch.empty(len(logits), device=logits.device) for _ in range(3))
    return cross_entropy.statistics_launch(logits, target, valid, *results)


def step_inputs(shape: tuple[int, ...], dtype: torch.dtype, states: torch.dtype, device: str, seed: int) -> dict[str, Any]:
    """A weight of deviation 0.02, a gradient with the moments that a few steps leave, and the third step's numbers."""
    names = {"param": (dtype, 0.02), "grad": (dtype, 1e-3), "exp_avg": (states, 1e-3), "exp_avg_sq": (states, 1e-3)}
    given = {name: normal(shape, kind, device, seed + n, scale) for n, (name, (kind, scale)) in enumerate(names.items())}
    if device != "meta":
        given["exp_avg_sq"].square_()
    return given | {"lr": 3e-4, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "decay": 0.1, "step": 3,
                    "clip": torch.empty((), device=device) if device == "meta" else torch.tensor(0.37, device=device)}


def _cross_entropy(model: str, tokens: int, width: int, valid: int, dtype: torch.dtype) -> list[Entry]:
    name, size, aligned = f"{model}-{tokens}x{width}-{TYPES[dtype]}", tokens * width * dtype.itemsize, width % 16 == 0
    shape = tokens, width, valid, dtype
    registers = 64 if aligned else 128
    return [Entry(f"cross_entropy.statistics/{name}", cross_entropy.statistics, reference.cross_entropy_statistics,
                  partial(_statistics, *shape), _statistics_launch, size, aligned, registers),
            Entry(f"cross_entropy.gradient/{name}", cross_entropy.gradient, reference.cross_entropy_gradient,
                  partial(_gradient, *shape), cross_entropy.gradient_launch, 2 * size, aligned, registers)]


def _adamw(model: str, rows: int, columns: int, dtype: torch.dtype, states: torch.dtype) -> Entry:
    aligned = rows * columns % 16 == 0
    traffic = rows * columns * (3 * dtype.itemsize + 4 * states.itemsize)
    return Entry(f"adamw.step/{model}-{rows}x{columns}-{TYPES[dtype]}-{TYPES[states]}", adamw.step, reference.adamw_step,
                 partial(step_inputs, (rows, columns), dtype, states), adamw.step_launch, traffic, aligned, 64 if aligned else 128)


def swiglu_inputs(tokens: int, width: int, dtype: torch.dtype, device: str, seed: int) -> dict[str, Any]:
    """Gate and up of deviation 2 and a gradient of deviation 1."""
    return {"gu": normal((tokens, 2 * width), dtype, device, seed, 2.0), "dz": normal((tokens, width), dtype, device, seed + 1)}


def _swiglu_launch(gu: Tensor, dz: Tensor) -> Launch:
    return swiglu.backward_launch(gu, dz, torch.empty_like(gu))


def _swiglu(model: str, tokens: int, width: int, dtype: torch.dtype) -> Entry:
    return Entry(f"swiglu.backward/{model}-{tokens}x{width}-{TYPES[dtype]}", swiglu.backward, reference.swiglu_backward,
                 partial(swiglu_inputs, tokens, width, dtype), _swiglu_launch, 5 * tokens * width * dtype.itemsize, width % 16 == 0,
                 64 if width % 16 == 0 else 128)


def _scale_inputs(tokens: int, width: int, local: bool, dtype: torch.dtype, device: str, seed: int) -> dict[str, Any]:
    gain = normal((width,), dtype, device, seed + 1)
    return {"x": normal((tokens, width), dtype, device, seed, 3.0), "gain": gain, "eps": 1e-6, "local": local}


def bottleneck_inputs(tokens: int, width: int, hidden: int, silu: bool, dtype: torch.dtype, backward: bool, device: str,
                      seed: int) -> dict[str, Any]:
    """A summed product of deviation 6 and the sums of squares of rows of deviation 3."""
    square = normal((tokens,), FLOAT32, device, seed + 1)
    square = square if device == "meta" else square.abs_().add_(8.0).mul_(hidden)
    given = {"p": normal((tokens, width), dtype, device, seed, 6.0), "square": square}
    given |= {"dh": normal((tokens, width), dtype, device, seed + 2)} if backward else {}
    return given | {"hidden": hidden, "eps": 1e-6, "silu": silu}


def _scale_launch(x: Tensor, gain: Tensor, eps: float, local: bool) -> Launch:
    rows = (torch.empty(len(x), device=x.device) for _ in range(2))
    return bottleneck.scale_launch(x, gain, eps, local, torch.empty_like(x), *rows)


def _epilogue_launch(p: Tensor, **rest) -> Launch:
    return bottleneck.epilogue_launch(p, **rest, h=torch.empty_like(p))


def _epilogue_backward_launch(p: Tensor, **rest) -> Launch:
    return bottleneck.epilogue_backward_launch(p, **rest, dp=torch.empty_like(p), ds=torch.empty(len(p), device=p.device))


def _bottleneck(model: str, tokens: int, shard: int, width: int, hidden: int, dtype: torch.dtype, silu: bool = True) -> list[Entry]:
    """The norm of a shard of the residual stream, and what follows the reduced latents of maps that share a product."""
    name = f"{model}-{tokens}x{width}-{TYPES[dtype]}" + ("" if silu else "-silu=False")
    rows, wide, shape = 4 * tokens, tokens * width * dtype.itemsize, (tokens, width, hidden, silu, dtype)
    aligned, registers = width % 16 == 0 and shard % 16 == 0, 255
    def scaling(local: bool) -> Entry:
        label = f"bottleneck.scale/{model}-{tokens}x{shard}-{TYPES[dtype]}" + ("" if local else "-local=False")
        traffic = (2 * tokens + 1) * shard * dtype.itemsize + (1 + local) * rows
        return Entry(label, bottleneck.scale, bottleneck_reference.scale, partial(_scale_inputs, tokens, shard, local, dtype),
                     _scale_launch, traffic, aligned, registers)

    return [scaling(True), scaling(False),
            Entry(f"bottleneck.epilogue/{name}", bottleneck.epilogue, bottleneck_reference.epilogue,
                  partial(bottleneck_inputs, *shape, False), _epilogue_launch, 2 * wide + rows, aligned, registers),
            Entry(f"bottleneck.epilogue_backward/{name}", bottleneck.epilogue_backward, bottleneck_reference.epilogue_backward,
                  partial(bottleneck_inputs, *shape, True), _epilogue_backward_launch, 3 * wide + 2 * rows, aligned, registers)]


ENTRIES = [
    *_cross_entropy("gpt", 16384, 50304, 50257, BF16),
    *_cross_entropy("qwen2.5", 8192, 151936, 151936, BF16),
    *_cross_entropy("qwen2.5-tp2", 4096, 76032, 76032, BF16),
    *_cross_entropy("gpt", 4096, 50304, 50257, FLOAT32),
    *_cross_entropy("odd", 37, 1003, 990, BF16),
    *_cross_entropy("odd", 37, 1003, 990, FLOAT32),
    _adamw("gpt-1.3b-ffn", 8192, 2048, BF16, BF16),
    _adamw("gpt-1.3b-ffn", 8192, 2048, FLOAT32, FLOAT32),
    _adamw("gpt-1.3b-ffn", 8192, 2048, BF16, FLOAT32),
    _adamw("qwen2.5-14b-embed", 152064, 5120, BF16, BF16),
    _adamw("odd", 37, 41, BF16, BF16),
    _swiglu("qwen2.5-0.5b", 16384, 4864, BF16),
    _swiglu("qwen2.5-0.5b", 16384, 4864, FLOAT32),
    _swiglu("odd", 37, 1003, BF16),
    *_bottleneck("llama-7b-tp2", 16384, 2048, 3072, 4096, BF16),
    *_bottleneck("llama-7b-tp4", 16384, 1024, 3072, 4096, BF16, silu=False),
    *_bottleneck("llama-3b-tp2", 16384, 1536, 2304, 3072, FLOAT32),
    *_bottleneck("odd", 37, 1003, 331, 2006, BF16),
    *nvfp4_entries("olmo2-370m", 16384, 1024),
    *nvfp4_entries("llama-7b", 16384, 11008),
    *nvfp4_entries("odd", 37, 1003),
    *nvfp4_beside("olmo2-370m", 16384, 1024),
    *channel_entries("olmo2-370m", 16384, 1024, 922),
    *channel_entries("odd", 37, 1003, 903),
    *(entry for group in taco_reference.GROUPS for entry in taco_entries(1 << 25, BF16, group)),
    *taco_entries(1 << 25, BF16, 128, hadamard=False),
    *taco_entries(1 << 25, FLOAT32, 128),
    *taco_entries(1 << 25, BF16, 128, mode="paper"),
    *taco_entries(1 << 25, BF16, 128, format="e5m2"),
    exchange_entry(1 << 25, BF16, 128),
    exchange_entry(1 << 25, BF16, 128, mode="paper"),
    *grouped_entries(1 << 25, BF16, 128, format="e4m3"),
    *grouped_entries(1 << 25, BF16, 128, format="int8"),
    *grouped_entries(1 << 25, BF16, 128, hadamard=True, format="int8"),
    *grouped_entries(1 << 25, BF16, 256, hadamard=True, format="int8"),
]
