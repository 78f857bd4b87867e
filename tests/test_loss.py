"""The head's product with cross-entropy against torch's own, in chunks and with padding, and on a GPU."""
from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from wires import alone

from suite import loss
from suite.loss import chunk_bytes, chunk_tokens, linear_cross_entropy

TOKENS, HIDDEN, COLUMNS, VOCAB = 23, 16, 64, 50


def given(dtype: torch.dtype, device: str = "cpu", tokens: int = TOKENS) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(tokens, HIDDEN, generator=generator, dtype=torch.float64)
    w = torch.randn(COLUMNS, HIDDEN, generator=generator, dtype=torch.float64)
    targets = torch.randint(VOCAB, (tokens,), generator=generator)
    return x.to(device, dtype).requires_grad_(), w.to(device, dtype).requires_grad_(), targets.to(device)


def ours(x: Tensor, w: Tensor, targets: Tensor, factor: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    value = linear_cross_entropy(x, w, targets, alone(), VOCAB, x.dtype)
    (value * factor).backward()
    return value.detach(), x.grad, w.grad


def oracle(x: Tensor, w: Tensor, targets: Tensor, factor: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    """In float64 whatever the inputs."""
    x, w = (t.detach().double().requires_grad_() for t in (x, w))
    value = F.cross_entropy(x @ w[:VOCAB].t(), targets)
    (value * factor).backward()
    return value.detach(), x.grad, w.grad


@pytest.fixture
def small_chunks(monkeypatch):
    """Five tokens a chunk in bfloat16, fewer in wider dtypes."""
    monkeypatch.setitem(loss.CHUNK_LIMIT, "cpu", 5 * COLUMNS * 2)
    chunk_bytes.cache_clear()
    yield
    chunk_bytes.cache_clear()


def error(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want).norm() / want.norm())


@pytest.mark.parametrize("dtype, limit", [(torch.float64, 1e-13), (torch.float32, 1e-6)])
def test_equals_torch(dtype, limit):
    inputs = given(dtype)
    for got, want in zip(ours(*inputs, factor=0.25), oracle(*inputs, factor=0.25)):
        assert error(got, want) < limit
    assert not inputs[1].grad[VOCAB:].any(), "padding learns nothing"


@pytest.mark.parametrize("dtype, limit", [(torch.float64, 1e-13), (torch.float32, 1e-6)])
def test_chunks_change_nothing(small_chunks, dtype, limit):
    inputs = given(dtype)
    for got, want in zip(ours(*inputs), oracle(*inputs)):
        assert error(got, want) < limit


def test_chunks_of_bfloat16_add_up_in_float32(small_chunks):
    """The sum of 500 chunks rounds once. Summed in bfloat16, where a chunk is less than half a unit in the sum's last
    place, the gradient of the head would be off by more than a tenth."""
    x, w, _ = given(torch.bfloat16, tokens=2500)
    inputs = x.detach().abs().requires_grad_(), w, torch.full((2500,), 7)
    _, _, got = ours(*inputs)
    _, _, want = oracle(*inputs)
    assert error(got, want) < 4e-3


def test_inputs_stay_as_they_are_and_no_gradient_is_made_unasked(monkeypatch):
    inputs = given(torch.float32)
    before = [t.detach().clone() for t in inputs]
    ours(*inputs)
    assert all(torch.equal(a, b) for a, b in zip(inputs, before))
    monkeypatch.setattr(loss, "_gradient", None)
    with torch.no_grad():
        value = linear_cross_entropy(*inputs, alone(), VOCAB, torch.float32)
    assert value.item() == pytest.approx(oracle(*inputs)[0].item(), rel=1e-6)


@pytest.mark.parametrize("tokens, limit, chunk", [(100, 10**9, 100), (100, 4000, 10), (101, 4000, 10), (7, 1, 1), (64, 25200, 32)])
def test_chunks_are_even_and_within_the_limit(tokens, limit, chunk):
    assert chunk_tokens(tokens, 100, 4, limit) == chunk
    assert chunk * 400 <= max(limit, 400)


def test_the_cpu_holds_256_mib_of_logits():
    assert chunk_bytes(torch.device("cpu")) == 256 * 2**20


def test_a_gpu_holds_a_sixteenth_of_its_memory_and_8_gib_at_most(monkeypatch):
    class Properties:
        total_memory = 0

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    for memory, limit in [(24 << 30, 3 << 29), (80 << 30, 5 << 30), (192 << 30, 8 << 30)]:
        Properties.total_memory = memory
        chunk_bytes.cache_clear()
        assert chunk_bytes(torch.device("cuda", 0)) == limit
    chunk_bytes.cache_clear()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype, limit", [(torch.float64, 1e-13), (torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("pieces", [1, 3])
def test_equals_torch_on_a_device(monkeypatch, dtype, limit, pieces):
    monkeypatch.setattr(loss, "chunk_bytes", lambda device: -(-TOKENS // pieces) * COLUMNS * dtype.itemsize)
    inputs = given(dtype, "cuda")
    for got, want in zip(ours(*inputs), oracle(*inputs)):
        assert error(got, want) < limit
