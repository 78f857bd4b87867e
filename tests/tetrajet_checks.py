"""One product of a layer under a recipe, on any shard of a model, and what its six quantisers gave."""
from types import SimpleNamespace

import torch
from wires import alone

from suite.factor.dense import Dense
from suite.layout.megatron import Megatron
from suite.seams import Key, Product, load
from suite.workload import models

WIRE = alone()


def recipe(name="tetrajet", **options):
    if name == "tetrajet":
        options = {"out": 0.0, "osci": 0.0, **options}
    return load("precision", name)(**options)


def product(model="olmo2-70m", sub="attention", names=("q", "k", "v"), tp=1, index=0):
    """Where the operands of one product lie on rank `index` of `tp`."""
    wire = SimpleNamespace(size=tp, index=index, id=WIRE.id)
    layout = Megatron(card=models()[model], factor=Dense(), precision=None, tp=wire)
    return layout.product(sub, names)


def free(d_in, d_out):
    """A product of any size on one process."""
    return Product("ffn.up", ((0, d_out, 0),), (0, d_in), WIRE)


def noise(seed=0, step=0, micro=0, dp=0):
    WIRE.key = Key(seed, step, micro, dp)
    return torch.tensor([seed, step, micro, dp])


def given(made, x, w, dy, place, at=None, layer=1):
    """(Y, dX, dW, {number: what that quantiser gave}) of one product and its gradients."""
    x, w = x.detach().clone().requires_grad_(), w.detach().clone().requires_grad_()
    found = {}
    watcher = SimpleNamespace(operand=lambda call, n, kind, t, out: found.setdefault(n, out.dense().clone()))
    made.watchers.append(watcher)
    y = made.matmul(x, w, (layer, place.name), noise() if at is None else at, place, {})
    y.backward(dy)
    made.watchers.remove(watcher)
    return y.detach(), x.grad, w.grad, found


def whole(t, d_in, d_out, dtype=torch.float32, seed=0):
    """x [t, d_in], w [d_out, d_in], dy [t, d_out], with an outlier channel and a loud token."""
    g = torch.Generator().manual_seed(seed)
    x, w, dy = (torch.randn(*shape, generator=g) for shape in ((t, d_in), (d_out, d_in), (t, d_out)))
    x[:, d_in // 3] *= 20
    dy[t // 2] *= 10
    return x.to(dtype), 0.02 * w, 1e-3 * dy.to(dtype)
