"""What layouts of low-rank maps share: which factors lie together in one leaf, and the two products.

    A   maps with the same input: their rows stacked, one product [T, d_in] -> [T, k r]         leaf `attention.q+k+v.a`
    B   maps with the same output width: one strided batch [T, k r] -> [T, k n], no copy        leaf `ffn.gate+up.b`

`grouped: false` gives each factor a product and each latent a message of its own. Where K and V stay dense, a layout says
where they lie (`dense`). Biases stand behind B; A has none.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from suite.comm.wire import Wire
from suite.layout.megatron import Megatron
from suite.model import maps
from suite.seams import Precision, Product

INTO = {"attention": ("q", "k", "v"), "ffn": ("gate", "up")}
OUT = {"attention": "o", "ffn": "down"}


class LowRankLayout(Megatron):
    recompute_ends = True
    stacks_dense = True  # whether dense K and V meet where first factors do, and so may share their product

    def __init__(self, *, card: Mapping[str, Any], factor: Any, precision: Precision, tp: Wire, recompute: str = "none",
                 overlap: bool = False, grouped: bool = True):
        super().__init__(card=card, factor=factor, precision=precision, tp=tp, recompute=recompute, overlap=overlap)
        self.grouped = grouped and getattr(precision, "stack", True)
        self.linear = maps(card)

    def refuse(self, tokens: int) -> str | None:
        if not self.factored("attention", "o"):
            return "needs a low-rank factor: a dense map has no bottleneck"
        if self.recompute == "segment" and self.factor.crosses:
            return "recompute: segment keeps no latent that crosses to the next layer"
        return None

    # groups

    def into(self, sub: str) -> tuple[str, ...]:
        """Maps into the core."""
        return tuple(name for name in INTO[sub] if name in self.linear[sub])

    def downs(self, sub: str) -> list[tuple[str, ...]]:
        """Maps into the core whose first products are one."""
        names = tuple(name for name in self.into(sub) if self.stacks_dense or self.factored(sub, name))
        return [names] if self.grouped else [(name,) for name in names]

    def ups(self, sub: str) -> list[tuple[str, ...]]:
        """Factored maps into the core whose second products are one batch: neighbours of equal width."""
        found: list[tuple[str, ...]] = []
        for name in self.into(sub):
            if not self.factored(sub, name):
                continue
            if self.grouped and found and self.linear[sub][found[-1][0]][1] == self.linear[sub][name][1]:
                found[-1] += (name,)
            else:
                found.append((name,))
        return found

    def groups(self, names: Sequence[str]) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        self._places()
        for full in names:
            *path, name, kind = full.split(".")
            if kind == "bias" or len(path) < 3 or name not in INTO[path[-1]]:
                continue
            for piece in self.ups(path[-1]) if kind == "b" else self.downs(path[-1]):
                if name in piece and len(piece) > 1:
                    found.setdefault(".".join([*path, "+".join(piece), "b" if kind == "b" else "a"]), []).append(full)
        return found

    # products

    def _places(self) -> None:
        """Finds all products before a block is compiled, which may change nothing outside itself."""
        for sub in self.linear:
            for piece in [*self.downs(sub), (OUT[sub],), *((name,) for name in self.into(sub))]:
                self.place(sub, piece, "a")
            for piece in [*self.ups(sub), (OUT[sub],), *((name,) for name in self.into(sub) if self.factored(sub, name))]:
                self.place(sub, piece, "b")

    def place(self, sub: str, names: Sequence[str], kind: str) -> tuple[str, Product]:
        """(leaf, where the operands of its product lie) of stacked matrices."""
        key = f"{sub}.{'+'.join(names)}.{kind}"
        if key not in self.products:
            rows, first, columns = [], 0, (0, 0)
            for name in names:
                d_in, d_out, _ = self.linear[sub][name]
                matrices = self.factor.shapes((0, f"{sub}.{name}"), d_in, d_out)
                matrix = kind if kind in matrices else "weight"
                shape, spec = matrices[matrix], self.spec(f"{sub}.{name}.{matrix}", matrices[matrix])
                start, length = spec.span(shape, self.tp.index, self.tp.size)
                rows.append((first, length, start) if spec.dim == 0 else (first, shape[0], 0))
                columns = (start if spec.dim == 1 else 0, shape[1])
                first += rows[-1][1]
            leaf = f"{sub}.{names[0]}.{matrix}" if len(names) == 1 else key
            self.products[key] = leaf, Product(key, tuple(rows), columns, self.tp)
        return self.products[key]

    def down(self, x: Tensor, p: Mapping[str, Tensor], layer: int, noise: Tensor, sub: str, names: Sequence[str]) -> Tensor:
        """x times the first factors (or dense matrices) of maps that share it: [T, d_in] -> [T, sum of rows]."""
        leaf, product = self.place(sub, names, "a")
        return self.precision.matmul(x, p[leaf], (layer, product.name), noise, product, p)

    def up(self, h: Tensor, p: Mapping[str, Tensor], layer: int, noise: Tensor, sub: str, names: Sequence[str]) -> Tensor:
        """h [T, k r] times the second factors of maps of equal width -> [T, k n], side by side."""
        leaf, product = self.place(sub, names, "b")
        site = layer, product.name
        if len(names) == 1:
            return self.precision.matmul(h, p[leaf], site, noise, product, p)
        batch = getattr(self.precision, "batch", None)
        if batch is not None:
            return batch(h, p[leaf], len(names))
        ys = [self.precision.matmul(part, w, (layer, one.name), noise, one, p)
              for part, w, one in zip(h.chunk(len(names), -1), p[leaf].chunk(len(names)),
                                      (self.place(sub, (name,), "b")[1] for name in names))]
        return torch.cat(ys, dim=-1)

    def biased(self, y: Tensor, p: Mapping[str, Tensor], sub: str, name: str) -> Tensor:
        bias = p.get(f"{sub}.{name}.bias")
        return y if bias is None else y + bias.to(y.dtype)

    def latent(self, y: Tensor, p: dict[str, Tensor], sub: str, names: Sequence[str]) -> Tensor:
        """What stands between the factors; keeps what crosses to the next layer."""
        key = f"{sub}.{'+'.join(names)}.latent"
        past = p.get(key)
        if self.factor.crosses:
            p[key] = y
        return self.factor.between(y, past)

    def maps_of(self, h: Tensor, p: Mapping[str, Tensor], layer: int, noise: Tensor, sub: str, names: Sequence[str],
                whole: bool = False) -> list[Tensor]:
        """Latents h [T, r of each name] -> what the maps give, one tensor a name; `whole`: gate and up in one."""
        pieces = [piece for piece in self.ups(sub) if set(piece) <= set(names)] or [tuple(names)]
        found, r, at = [], h.shape[-1] // len(names), 0
        for piece in pieces:
            y = self.up(h[:, at:at + len(piece) * r], p, layer, noise, sub, piece)
            at += len(piece) * r
            found += [y] if whole and len(pieces) == 1 else y.chunk(len(piece), dim=-1)
        return found
