"""Wires for tests over several processes, and what each rank puts on them."""
import torch

from suite.case import Choice
from suite.comm.counter import Counter
from suite.comm.wire import Wire
from suite.mesh import Group
from suite.seams import make

NATIVE = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}
SITE = (3, "out")


def build(name, **options):
    return make("comm", Choice(name=name, options=options), device="cpu")


def wire_on(mesh, forward="fp32", backward=None, name="tp", **options):
    codecs = {"forward": build(forward, **options), "backward": build(backward or forward, **options)}
    return Wire(name, mesh.group(name), codecs, Counter())


def mine(mesh, *shape, dtype=torch.float32, rank=None, seed=0):
    """What a rank holds; any rank can make any other's."""
    rank = mesh.rank if rank is None else rank
    return torch.randn(*shape, generator=torch.Generator().manual_seed(100 * seed + rank), dtype=torch.float64).to(dtype)


def everyones(mesh, *shape, **kwargs):
    return [mine(mesh, *shape, rank=r, **kwargs) for r in range(mesh.size)]


def error(y, x):
    return float((y.double() - x.double()).norm() / x.double().norm())


def alone(forward="bf16"):
    return Wire("tp", Group(), {"forward": build(forward), "backward": build(forward)}, Counter())
