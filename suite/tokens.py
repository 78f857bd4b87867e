"""The order in which training reads a text: tokens -> batches.

Window w of a split holds tokens w·seq ... (w+1)·seq: seq inputs with their targets, so each token but the first is a target
once. Sequence i of step t takes place g = t·batch + i of an endless list: epoch g // n over the n windows, each epoch a
permutation keyed by (seed, epoch) (Feistel network with cycle walking: no memory). Nothing else enters: the data order
is the same under any mesh and micro-batch. `random` draws ids by Philox keyed by seed, its counter made of t and i.
"""
from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np

from suite.corpora import DataError

RANDOM_VALIDATION = 64  # sequences, where no limit is given


class Tokens(ABC):
    """Sequences of one text. `size` is the global batch: what a step number counts in."""

    def __init__(self, name: str, size: int) -> None:
        self.name, self.size = name, size

    def batch(self, step: int, seed: int, sequences: range, seq: int) -> np.ndarray:
        """Sequences of one step's global batch: int64 [len(sequences), seq + 1], inputs [:, :-1] and targets [:, 1:].

        A function of (seed, step, index of the sequence in the global batch) alone; steps count from 0.
        Raises DataError where the training split is shorter than seq + 1, IndexError for a sequence outside the batch.
        """
        if len(sequences) and (min(sequences) < 0 or max(sequences) >= self.size):
            raise IndexError(f"sequences {sequences} of a batch of {self.size}")
        return self._batch(step, seed, np.asarray(sequences, dtype=np.int64), seq)

    @abstractmethod
    def validation(self, seq: int, limit_sequences: int | None = None) -> np.ndarray:
        """Validation windows, int64 [n, seq + 1]: all, or `limit_sequences` spread evenly over the split. No seed enters.

        Raises DataError where the validation split is shorter than seq + 1.
        """

    @abstractmethod
    def _batch(self, step: int, seed: int, sequences: np.ndarray, seq: int) -> np.ndarray:
        """`batch` of sequences that are within it."""


class FileTokens(Tokens):
    def __init__(self, name: str, size: int, train: np.ndarray, valid: np.ndarray) -> None:
        super().__init__(name, size)
        self.train, self.valid = train, valid

    def windows(self, seq: int) -> int:
        """Training windows, which is sequences an epoch."""
        return self._count(self.train, seq, "training")

    def validation(self, seq: int, limit_sequences: int | None = None) -> np.ndarray:
        count = self._count(self.valid, seq, "validation")
        taken = count if limit_sequences is None else min(limit_sequences, count)
        return _gather(self.valid, np.arange(taken) * count // max(taken, 1), seq)

    def _batch(self, step: int, seed: int, sequences: np.ndarray, seq: int) -> np.ndarray:
        count = self.windows(seq)
        epochs, places = np.divmod(step * self.size + sequences, count)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            places[here] = permute(places[here], count, seed, int(epoch))
        return _gather(self.train, places, seq)

    def _count(self, tokens: np.ndarray, seq: int, split: str) -> int:
        if len(tokens) < seq + 1:
            raise DataError(f"{self.name}: the {split} split has {len(tokens)} tokens, fewer than seq + 1 = {seq + 1}")
        return (len(tokens) - 1) // seq


class RandomTokens(Tokens):
    def __init__(self, name: str, size: int, vocab: int) -> None:
        super().__init__(name, size)
        self.vocab = vocab

    def validation(self, seq: int, limit_sequences: int | None = None) -> np.ndarray:
        count = RANDOM_VALIDATION if limit_sequences is None else limit_sequences
        return self._draw((0, 1), [(0, i) for i in range(count)], seq)

    def _batch(self, step: int, seed: int, sequences: np.ndarray, seq: int) -> np.ndarray:
        return self._draw((seed, 0), [(step, int(i)) for i in sequences], seq)

    def _draw(self, key: tuple[int, int], counters: Sequence[tuple[int, int]], seq: int) -> np.ndarray:
        rows = [np.random.Philox(key=_words(*key), counter=_words(0, 0, *c)).random_raw(seq + 1) for c in counters]
        return (np.array(rows, dtype=np.uint64).reshape(len(rows), seq + 1) % np.uint64(self.vocab)).astype(np.int64)


def _words(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.uint64)


def _gather(tokens: np.ndarray, windows: np.ndarray, seq: int) -> np.ndarray:
    out = np.empty((len(windows), seq + 1), dtype=np.int64)
    for row, window in zip(out, windows):
        row[:] = tokens[window * seq : window * seq + seq + 1]
    return out


def permute(places: np.ndarray, n: int, seed: int, epoch: int) -> np.ndarray:
    """Places 0 ... n-1 (int64) mapped by the permutation keyed by (seed, epoch): a six-round Feistel network over the next
    power of four, walked until the value lies below n (under four rounds of it on average)."""
    half = np.uint64(max(1, ((n - 1).bit_length() + 1) // 2))
    mask = np.uint64((1 << int(half)) - 1)
    keys = np.random.Philox(key=_words(seed, epoch)).random_raw(6)
    values = places.astype(np.uint64)
    todo = np.ones(len(values), dtype=bool)
    while todo.any():
        left, right = values[todo] >> half, values[todo] & mask
        for key in keys:
            left, right = right, left ^ (_mix(right + key) & mask)
        values[todo] = (left << half) | right
        todo = values >= n
    return values.astype(np.int64)


def _mix(x: np.ndarray) -> np.ndarray:
    """SplitMix64's finalizer (Steele, Lea, Flood 2014), modulo 2^64."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
