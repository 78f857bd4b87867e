"""Where ranks meet: a collective in the forward pass and one in the backward pass, differentiable straight through.

    meet(forward, backward)
    (none, all_reduce)            entry of a column-parallel map: the input's gradient is summed
    (all_reduce, none)            exit of a row-parallel map
    (all_gather, reduce_scatter)  entry under sequence parallelism, and the reverse at the exit
    (all_reduce, all_reduce)      both sides sharded, as between two factors of a low-rank map

The codec is never differentiated. A statistic `exact` is summed over ranks beside x; its gradient is, by `exact_grad`:
    ("none", 0.0)      nothing
    ("sum", 0.0)       the ranks' partial gradients summed, riding in the backward message
    ("whole", 0.0)     its own: what follows the statistic is replicated, so that every rank has the whole gradient already
    (NAME, constant)   EXACT_GRADS[NAME](gradient of y after the backward collective, y, exact_out, constant): computed
                       locally, so that a statistic that is a function of one scale of y costs no message
Compiled graphs see one opaque operation, `triaxis::cross`, with the wire as an integer: codecs, transports and counters
stay outside, and changing a codec recompiles nothing. The layer is an integer too, so that layers share a graph. An all-reduce
there is `triaxis::cross_`, which may sum in place: the compiler, who knows what is read later, copies where it must.
"""
from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from suite.comm.wire import Wire, wire_of
from suite.opaque import opaque
from suite.seams import Op, Site, Way

EXACT_GRADS: dict[str, Callable[[Tensor, Tensor, Tensor, float], Tensor]] = {}


def meet(wire: Wire, x: Tensor, *, forward: Op, backward: Op, dim: int = 0, exact: Tensor | None = None,
         site: Site = (0, ""), exact_grad: tuple[str, float] = ("sum", 0.0),
         purpose: str = "activations") -> tuple[Tensor, Tensor | None]:
    """(y, summed statistic). `dim` belongs to both ops; shapes as in `Wire.start`. One rank: x and exact themselves.

    Every rank must call it, and its backward, in the same order. Works in eager mode, inside checkpointed regions and
    under torch.compile(fullgraph=True).
    """
    mode, constant = exact_grad
    if mode not in ("none", "sum", "whole") and mode not in EXACT_GRADS:
        known = "none, sum, whole"
        raise ValueError(f"meet: {site}: unknown exact_grad {mode!r}; known: {known}{''.join(', ' + n for n in EXACT_GRADS)}")
    if exact is not None:
        exact = exact.to(torch.promote_types(exact.dtype, torch.float32))
        exact = exact.detach() if mode == "none" else exact
    if wire.size == 1 and (exact is None or mode not in EXACT_GRADS):
        return x, exact
    if exact is None and forward == backward == "none":
        return x, None
    ends = (wire.id, wire.size, forward, backward, x.dim() and dim % x.dim(), *site, purpose)
    if exact is None:
        return _Meet.apply(x, *ends), None
    return _MeetExact.apply(x, exact, mode, constant, *ends)


def cross(wire: Wire, x: Tensor, op: Op, *, dim: int = 0, exact: Tensor | None = None, site: Site = (0, ""),
          way: Way = "forward", purpose: str = "activations") -> tuple[Tensor, Tensor | None]:
    """`Wire.run` for code that may be compiled; no gradient. Never returns x itself unless op is none or p is 1."""
    if exact is not None:
        exact = exact.to(torch.promote_types(exact.dtype, torch.float32))
    return _send(x, exact, wire.id, wire.size, op, x.dim() and dim % x.dim(), *site, purpose, way)


class _Meet(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, wire, size, forward, backward, dim, layer, name, purpose):
        ctx.ends = (wire, size, backward, dim, layer, name, purpose, "backward")
        return _send(_same(x, forward), None, wire, size, forward, dim, layer, name, purpose, "forward")[0]

    @staticmethod
    def backward(ctx, grad_y):
        return _send(grad_y, None, *ctx.ends)[0], *[None] * 8


class _MeetExact(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, exact, mode, constant, wire, size, forward, backward, dim, layer, name, purpose):
        y, total = _send(_same(x, forward), exact, wire, size, forward, dim, layer, name, purpose, "forward")
        ctx.ends, ctx.mode, ctx.constant = (wire, size, backward, dim, layer, name, purpose, "backward"), mode, constant
        if size == 1:
            y, total = y.view_as(y), total.view_as(total)
        if mode in EXACT_GRADS:
            ctx.save_for_backward(y, total)
        return y, total

    @staticmethod
    def backward(ctx, grad_y, grad_total):
        rides = grad_total if ctx.mode == "sum" else None
        grad_x, grad_exact = _send(grad_y, rides, *ctx.ends)
        grad_exact = grad_total if ctx.mode == "whole" else grad_exact
        if ctx.mode in EXACT_GRADS:
            y, total = ctx.saved_tensors
            grad_exact = EXACT_GRADS[ctx.mode](grad_x, y, total, ctx.constant).to(total.dtype)
        return grad_x, grad_exact, *[None] * 10


def _same(x: Tensor, op: Op) -> Tensor:
    """A function's output must not be its input, so where nothing is sent the output is a view."""
    return x.view_as(x) if op == "none" else x


def _send(x: Tensor, exact: Tensor | None, wire: int, size: int, op: Op, dim: int, layer: int, name: str, purpose: str,
          way: Way) -> tuple[Tensor, Tensor | None]:
    if size == 1:
        return x, exact
    if op == "none":
        return x, None if exact is None else _operation(exact, None, wire, size, "all_reduce", 0, layer, name, "statistic", way)[0]
    y, total = _operation(x, exact, wire, size, op, dim, layer, name, purpose, way)
    return y, None if exact is None else total


def _operation(*arguments) -> tuple[Tensor, Tensor]:
    """The opaque operation where a graph is being traced; else the same function without the dispatcher's detour."""
    if not torch.compiler.is_compiling():
        return _cross(*arguments)
    x, exact, wire, size, op, *rest = arguments
    if op != "all_reduce":
        return _crossing(*arguments)
    y = x.clone(memory_format=torch.contiguous_format)
    return y, _crossing_in_place(y, exact, wire, size, *rest)


def _cross(x: Tensor, exact: Tensor | None, wire: int, size: int, op: str, dim: int, layer: int, name: str, purpose: str,
           way: str) -> tuple[Tensor, Tensor]:
    y, total = wire_of(wire).run(op, x, dim=dim, exact=exact, site=(layer, name), way=way, purpose=purpose)
    return y, x.new_empty(0) if total is None else total


def _shape(x, exact, wire, size, op, dim, layer, name, purpose, way):
    shape = list(x.shape)
    if op == "all_gather":
        shape[dim] = shape[dim] * size
    elif op == "reduce_scatter":
        shape[dim] = shape[dim] // size
    return x.new_empty(shape), _total(x, exact)


def _total(x, exact, *_):
    return x.new_empty(0) if exact is None else torch.empty_like(exact, memory_format=torch.contiguous_format)


def _cross_(x: Tensor, exact: Tensor | None, wire: int, size: int, dim: int, layer: int, name: str, purpose: str,
            way: str) -> Tensor:
    y, total = wire_of(wire).run("all_reduce", x, dim=dim, exact=exact, site=(layer, name), way=way, purpose=purpose, owned=True)
    if y is not x:
        x.copy_(y)
    return x.new_empty(0) if total is None else total


_MESSAGE = "SymInt dim, SymInt layer, str name, str purpose, str way"
_crossing = opaque("cross", f"(Tensor x, Tensor? exact, SymInt wire, SymInt size, str op, {_MESSAGE}) -> (Tensor, Tensor)",
                   _cross, _shape)
_crossing_in_place = opaque("cross_", f"(Tensor(a!) x, Tensor? exact, SymInt wire, SymInt size, {_MESSAGE}) -> Tensor",
                            _cross_, _total)
