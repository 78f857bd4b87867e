"""Every kernel at the shapes that count: what tests, benchmarks and the regression gate go through.

    for entry in ENTRIES:
        compile(entry, 90).spills                             # no GPU needed
        given = entry.inputs("cuda", seed=0)
        entry.function(**given); entry.reference(**entry.inputs("cuda", seed=0))

Shapes are those of one micro-batch of the models in workloads/models.yaml (t tokens, v columns of the padded vocabulary on
one rank), and one that no wide access fits.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kernels import (
    adamw,
    bottleneck,
    bottleneck_reference,
    cross_entropy,
    nvfp4,
    nvfp4_product,
    nvfp4_reference,
    reference,
    swiglu,
    taco,
    taco_reference,
)
from kernels.launch import TYPES, Compiled, Launch

BF16, FLOAT32 = torch.bfloat16, torch.float32


@dataclass(frozen=True)
class Entry:
    """function and reference take what `inputs` makes, by name; those that work in place return None. traffic: bytes that
    one call must move between memory and the chip. aligned: every row starts at a multiple of 16 elements. registers: at most
    so many a thread."""

    name: str
    function: Callable
    reference: Callable
    make: Callable[[str, int], dict[str, Any]]
    launch: Callable[..., Launch]
    traffic: int
    aligned: bool = True
    registers: int = 64

    def inputs(self, device: str, seed: int = 0) -> dict[str, Any]:
        """New arguments, the same for the same device and seed; on `meta` shapes and dtypes alone."""
        return self.make(device, seed)


def compile(entry: Entry, arch: int) -> Compiled:
    """Compiles one entry for an architecture as its launcher would, without a GPU; see Launch.compile."""
    return entry.launch(**entry.inputs("meta")).compile(arch)


def _normal(shape: tuple[int, ...], dtype: torch.dtype, device: str, seed: int, scale: float = 1.0) -> Tensor:
    if device == "meta":
        return torch.empty(shape, dtype=dtype, device=device)
    return torch.randn(shape, dtype=dtype, device=device, generator=torch.Generator(device).manual_seed(seed)).mul_(scale)


def logits_and_targets(tokens: int, width: int, dtype: torch.dtype, device: str, seed: int) -> tuple[Tensor, Tensor]:
    """Normal logits of deviation 3; a quarter of the targets lie on either side of this rank's columns."""
    logits = _normal((tokens, width), dtype, device, seed, 3.0)
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
    given = {name: _normal(shape, kind, device, seed + n, scale) for n, (name, (kind, scale)) in enumerate(names.items())}
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


def codec_inputs(numel: int, dtype: torch.dtype, ranks: int, group: int, options: dict[str, Any], device: str,
                 seed: int) -> dict[str, Any]:
    """For ranks 0 what `encode` takes, for 1 `decode`, for more `total` and `reduce` take: wires hold normal values."""
    size = taco_reference.nbytes(numel, group, options.get("mode", "lean"))
    if not ranks:
        x = _normal((1, numel), dtype, device, seed)
        return {"x": x, "group": group, "out": torch.empty(1, size, dtype=torch.uint8, device=device), **options}
    if device == "meta":
        wires = torch.empty(ranks, size, dtype=torch.uint8, device=device)
    else:
        wires = taco_reference.taco_encode(_normal((ranks, numel), torch.float32, device, seed), group, **options)
    return {"wires": wires, "group": group, "out": torch.empty(numel, dtype=dtype, device=device), **options}


def _decode_inputs(*shape) -> dict[str, Any]:
    given = codec_inputs(*shape)
    return {"wire": given.pop("wires"), **given, "out": given["out"][None]}


def _reduce_inputs(*shape) -> dict[str, Any]:
    given = codec_inputs(*shape)
    return given | {"out": torch.empty_like(given["wires"][0])}


def _encode_launch(x: Tensor, out: Tensor, group: int, **options) -> Launch:
    return taco.encode_launch(x, out, group, **options)


def _decode_launch(wire: Tensor, out: Tensor, group: int, **options) -> Launch:
    return taco.decode_launch(wire, out, group, **options)


def _total_launch(wires: Tensor, out: Tensor, group: int, **options) -> Launch:
    return taco.decode_launch(wires, out[None], group, stripes=len(wires), **options)


def _reduce_launch(wires: Tensor, out: Tensor, group: int, hadamard: bool = True, **options) -> Launch:
    return taco.reduce_launch(wires, out, group, **options)


def _taco(numel: int, dtype: torch.dtype, group: int, **options) -> list[Entry]:
    """One message of each kind: encode, decode, the sum of two ranks, the sum of 2 and 8 ranks encoded again."""
    mode, plain = options.get("mode", "lean"), numel * dtype.itemsize
    size = taco_reference.nbytes(numel, group, mode)
    name = f"{numel >> 20}Mi-{TYPES[dtype]}-g{group}" + "".join(f"-{k}={v}" for k, v in options.items())
    shape = numel, dtype

    def entry(what: str, ranks: int, make: Callable, launch: Callable, traffic: int) -> Entry:
        label = f"taco.{what}/{name}" + (f"-n{ranks}" if ranks > 1 else "")
        return Entry(label, getattr(taco, what), getattr(taco_reference, f"taco_{what}"),
                     partial(make, *shape, ranks, group, options), launch, traffic, True, 255)

    return [entry("encode", 0, codec_inputs, _encode_launch, plain + size),
            entry("decode", 1, _decode_inputs, _decode_launch, plain + size),
            entry("total", 2, codec_inputs, _total_launch, plain + 2 * size),
            *(entry("reduce", n, _reduce_inputs, _reduce_launch, (n + 1) * size) for n in (2, 8))]


def swiglu_inputs(tokens: int, width: int, dtype: torch.dtype, device: str, seed: int) -> dict[str, Any]:
    """Gate and up of deviation 2 and a gradient of deviation 1."""
    return {"gu": _normal((tokens, 2 * width), dtype, device, seed, 2.0), "dz": _normal((tokens, width), dtype, device, seed + 1)}


def _swiglu_launch(gu: Tensor, dz: Tensor) -> Launch:
    return swiglu.backward_launch(gu, dz, torch.empty_like(gu))


def _swiglu(model: str, tokens: int, width: int, dtype: torch.dtype) -> Entry:
    return Entry(f"swiglu.backward/{model}-{tokens}x{width}-{TYPES[dtype]}", swiglu.backward, reference.swiglu_backward,
                 partial(swiglu_inputs, tokens, width, dtype), _swiglu_launch, 5 * tokens * width * dtype.itemsize, width % 16 == 0,
                 64 if width % 16 == 0 else 128)



def _scale_inputs(tokens: int, width: int, dtype: torch.dtype, device: str, seed: int) -> dict[str, Any]:
    gain = _normal((width,), dtype, device, seed + 1)
    return {"x": _normal((tokens, width), dtype, device, seed, 3.0), "gain": gain, "eps": 1e-6}


def bottleneck_inputs(tokens: int, width: int, hidden: int, silu: bool, dtype: torch.dtype, backward: bool, device: str,
                      seed: int) -> dict[str, Any]:
    """A summed product of deviation 6 and the sums of squares of rows of deviation 3."""
    square = _normal((tokens,), FLOAT32, device, seed + 1)
    square = square if device == "meta" else square.abs_().add_(8.0).mul_(hidden)
    given = {"p": _normal((tokens, width), dtype, device, seed, 6.0), "square": square}
    given |= {"dh": _normal((tokens, width), dtype, device, seed + 2)} if backward else {}
    return given | {"hidden": hidden, "eps": 1e-6, "silu": silu}


def _scale_launch(x: Tensor, gain: Tensor, eps: float) -> Launch:
    return bottleneck.scale_launch(x, gain, eps, torch.empty_like(x), *(torch.empty(len(x), device=x.device) for _ in range(2)))


def _epilogue_launch(p: Tensor, **rest) -> Launch:
    return bottleneck.epilogue_launch(p, **rest, h=torch.empty_like(p))


def _epilogue_backward_launch(p: Tensor, **rest) -> Launch:
    return bottleneck.epilogue_backward_launch(p, **rest, dp=torch.empty_like(p), ds=torch.empty(len(p), device=p.device))


def _bottleneck(model: str, tokens: int, shard: int, width: int, hidden: int, dtype: torch.dtype, silu: bool = True) -> list[Entry]:
    """The norm of a shard of the residual stream, and what follows the reduced latents of maps that share a product."""
    name = f"{model}-{tokens}x{width}-{TYPES[dtype]}" + ("" if silu else "-silu=False")
    rows, wide, shape = 4 * tokens, tokens * width * dtype.itemsize, (tokens, width, hidden, silu, dtype)
    aligned, registers = width % 16 == 0 and shard % 16 == 0, 255
    return [Entry(f"bottleneck.scale/{model}-{tokens}x{shard}-{TYPES[dtype]}" + ("" if silu else "-silu=False"), bottleneck.scale,
                  bottleneck_reference.scale, partial(_scale_inputs, tokens, shard, dtype), _scale_launch,
                  (2 * tokens + 1) * shard * dtype.itemsize + 2 * rows, aligned, registers),
            Entry(f"bottleneck.epilogue/{name}", bottleneck.epilogue, bottleneck_reference.epilogue,
                  partial(bottleneck_inputs, *shape, False), _epilogue_launch, 2 * wide + rows, aligned, registers),
            Entry(f"bottleneck.epilogue_backward/{name}", bottleneck.epilogue_backward, bottleneck_reference.epilogue_backward,
                  partial(bottleneck_inputs, *shape, True), _epilogue_backward_launch, 3 * wide + 2 * rows, aligned, registers)]


BACK = {"rounding": "stochastic", "margin": nvfp4_reference.MARGIN, "noise": 7, "signs": 9}  # the backward's operands


def nvfp4_inputs(rows: int, columns: int, turned: bool, options: dict[str, Any], device: str, seed: int) -> dict[str, Any]:
    """Normal values; turned: [columns, rows] of them transposed, so that the contraction runs down their columns."""
    x = _normal((rows, columns), BF16, device, seed)
    return {"x": x.t() if turned else x, **options}


def quantized(rows: int, columns: int, device: str, seed: int) -> nvfp4_reference.Quantized:
    """Normal values to nearest."""
    if device != "meta":
        return nvfp4_reference.nvfp4_quantize(_normal((rows, columns), BF16, device, seed))
    codes, inner, outer = (torch.empty(rows, columns // n, dtype=dtype, device=device)
                           for n, dtype in ((2, torch.uint8), (16, torch.float8_e4m3fn), (128, FLOAT32)))
    return nvfp4_reference.Quantized(codes, inner, outer, columns)


def _packed(rows: int, columns: int, device: torch.device) -> list[Tensor]:
    """Codes, inner and outer scales, without values."""
    tiles = -(-columns // 128)
    return [torch.empty(rows, tiles * n, dtype=dtype, device=device)
            for n, dtype in ((64, torch.uint8), (8, torch.uint8), (1, FLOAT32))]


def _quantize_launch(x: Tensor, rounding: str = "", **options) -> Launch:
    return nvfp4.quantize_launch(x, *_packed(*x.shape, x.device), **options)


def _rounded_launch(x: Tensor, rounding: str = "", **options) -> Launch:
    width = x.shape[1] + (-x.shape[1] % 16 if "signs" in options else 0)
    return nvfp4.quantize_launch(x, out=torch.empty(len(x), width, dtype=BF16, device=x.device), **options)


def _requantize_launch(given: nvfp4_reference.Quantized, rounding: str = "", **options) -> Launch:
    return nvfp4.quantize_launch(given, *_packed(given.columns, len(given.codes), given.codes.device), **options)


def _dequantize_launch(q: nvfp4_reference.Quantized, dtype: torch.dtype) -> Launch:
    return nvfp4.dequantize_launch(q, torch.empty(len(q.codes), q.columns, dtype=dtype, device=q.codes.device))


def _largest_launch(x: Tensor, signs: int | None = None) -> Launch:
    return nvfp4.quantize_launch(x, signs=signs, peak=torch.zeros(1, dtype=torch.int32, device=x.device), search=True)


def _slab_launch(a: nvfp4_reference.Quantized, b: nvfp4_reference.Quantized, dtype: torch.dtype) -> Launch:
    return nvfp4_product.launch(a, b, torch.empty(len(a.codes), len(b.codes), dtype=dtype, device=a.codes.device))


def _inner_launch(x: Tensor, rounding: str = "", **options) -> Launch:
    tiles = -(-x.shape[1] // 128)
    outer, out = torch.empty(len(x), tiles, device=x.device), torch.empty(len(x), tiles * 128, dtype=BF16, device=x.device)
    return nvfp4.quantize_launch(x, outer=outer, out=out, **options)


def value_inputs(rows: int, columns: int, width: int, device: str, seed: int) -> dict[str, Any]:
    """Codes times inner scales, and outer scales, of [rows, width] and [columns, width]."""
    found: dict[str, Any] = {"dtype": BF16}
    for n, (name, r) in enumerate((("a", rows), ("b", columns))):
        x = _normal((r, width), BF16, device, seed + n)
        made = nvfp4_reference.inner_values(x) if device != "meta" else (x, torch.empty(r, width // 128, device=device))
        found |= dict(zip((name, f"{name}_outer"), made))
    return found


def _values_launch(a: Tensor, a_outer: Tensor, b: Tensor, b_outer: Tensor, dtype: torch.dtype) -> Launch:
    return nvfp4_product.values_launch(a, a_outer, b, b_outer, torch.empty(len(a), len(b), dtype=dtype, device=a.device))


def _nvfp4(model: str, rows: int, columns: int) -> list[Entry]:
    """An operand to nearest, one of the backward, and one that lies transposed: as codes, and as the bfloat16 they stand for."""
    def entry(what: str, kind: str, turned: bool, options: dict[str, Any], launch: Callable) -> Entry:
        r, k = (columns, rows) if turned else (rows, columns)
        k_out = k + (-k % 16 if "signs" in options else 0)
        written = 2 * r * k_out if what == "rounded" else r * -(-k // 128) * (64 + 8 + 4)
        reference = getattr(nvfp4_reference, f"nvfp4_{what}")
        return Entry(f"nvfp4.{what}/{model}-{rows}x{columns}-{kind}", getattr(nvfp4, what), reference,
                     partial(nvfp4_inputs, rows, columns, turned, options), launch, 2 * rows * columns + written,
                     rows % 128 == columns % 128 == 0, 255)

    return [entry(what, kind, turned, options, launch)
            for what, launch in (("quantize", _quantize_launch), ("rounded", _rounded_launch))
            for kind, turned, options in (("nearest", False, {}), ("back", False, BACK), ("transposed", True, BACK))]


def _nvfp4_beside(model: str, rows: int, columns: int) -> list[Entry]:
    """What reads codes, the search for a tensor's largest magnitude, and the product over slabs with a square weight."""
    name, packed, plain = f"{model}-{rows}x{columns}", rows * columns * 76 // 128, 2 * rows * columns
    return [
        Entry(f"nvfp4.dequantize/{name}", nvfp4.dequantize, nvfp4_reference.nvfp4_dequantize,
              lambda *place: {"q": quantized(rows, columns, *place), "dtype": BF16}, _dequantize_launch, packed + plain, True, 255),
        Entry(f"nvfp4.requantize/{name}", nvfp4.requantize, nvfp4_reference.nvfp4_requantize,
              lambda *place: {"given": quantized(rows, columns, *place), **BACK}, _requantize_launch, 2 * packed, True, 255),
        Entry(f"nvfp4.largest_magnitude/{name}", nvfp4.largest_magnitude, nvfp4_reference.largest_magnitude,
              lambda *place: nvfp4_inputs(rows, columns, False, {"signs": BACK["signs"]}, *place), _largest_launch, plain + 4, True,
              255),
        Entry(f"nvfp4.inner_values/{name}", nvfp4.inner_values, nvfp4_reference.inner_values,
              partial(nvfp4_inputs, rows, columns, False, BACK), _inner_launch, 2 * plain + rows * columns // 32, True, 255),
        Entry(f"nvfp4_product.slab_values/{name}x{columns}", nvfp4_product.slab_values, nvfp4_reference.slab_values,
              partial(value_inputs, rows, columns, columns), _values_launch,
              2 * plain + 2 * columns * columns + (rows + columns) * columns // 32, True, 255),
        Entry(f"nvfp4_product.slab/{name}x{columns}", nvfp4_product.slab, nvfp4_reference.slab_product,
              lambda device, seed: {"a": quantized(rows, columns, device, seed), "b": quantized(columns, columns, device, seed + 1),
                                    "dtype": BF16}, _slab_launch, packed + columns * columns * 76 // 128 + plain, True, 255)]


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
    *_nvfp4("olmo2-370m", 16384, 1024),
    *_nvfp4("llama-7b", 16384, 11008),
    *_nvfp4("odd", 37, 1003),
    *_nvfp4_beside("olmo2-370m", 16384, 1024),
    *(entry for group in taco_reference.GROUPS for entry in _taco(1 << 25, BF16, group)),
    *_taco(1 << 25, BF16, 128, hadamard=False),
    *_taco(1 << 25, FLOAT32, 128),
    *_taco(1 << 25, BF16, 128, mode="paper"),
    *_taco(1 << 25, BF16, 128, format="e5m2"),
]
