"""The order of batches: a function of (seed, step, index) alone, every window once an epoch, validation without a seed."""
from __future__ import annotations

import numpy as np
import pytest

from suite.corpora import DataError
from suite.tokens import FileTokens, RandomTokens, permute

SEQ, BATCH = 8, 6
TRAIN = np.arange(8 * 25 + 3, dtype="<u2")  # 25 windows; an id is its own position
VALID = np.arange(1000, 1000 + 8 * 10 + 1, dtype="<u2")


@pytest.fixture(params=["file", "random"])
def tokens(request):
    return FileTokens("t", BATCH, TRAIN, VALID) if request.param == "file" else RandomTokens("random", BATCH, 50257)


def test_ranks_and_micro_batches_get_rows_of_one_global_batch(tokens):
    for step in range(10):
        whole = tokens.batch(step, 3, range(BATCH), SEQ)
        assert whole.shape == (BATCH, SEQ + 1) and whole.dtype == np.int64
        for size in (1, 2, 3):
            parts = [tokens.batch(step, 3, range(a, a + size), SEQ) for a in range(0, BATCH, size)]
            np.testing.assert_array_equal(np.concatenate(parts), whole)


def test_batches_depend_on_seed_and_step(tokens):
    seen = {tokens.batch(step, seed, range(BATCH), SEQ).tobytes() for step in range(4) for seed in range(4)}
    assert len(seen) == 16


def test_every_window_once_an_epoch_in_another_order_each():
    tokens = FileTokens("t", BATCH, TRAIN, VALID)
    assert tokens.windows(SEQ) == 25
    starts = np.concatenate([tokens.batch(step, 0, range(BATCH), SEQ)[:, 0] for step in range(25)])  # six epochs
    epochs = [tuple(starts[25 * e : 25 * e + 25]) for e in range(6)]
    for epoch in epochs:
        assert sorted(epoch) == list(range(0, 200, 8))
    assert len(set(epochs)) == 6


def test_window_holds_inputs_and_their_targets():
    batch = FileTokens("t", BATCH, TRAIN, VALID).batch(2, 0, range(BATCH), SEQ)
    assert np.array_equal(batch, batch[:, :1] + np.arange(SEQ + 1))


def test_batch_larger_than_the_text_takes_whole_epochs():
    batch = FileTokens("t", 60, TRAIN, VALID).batch(0, 0, range(60), SEQ)
    assert np.unique(batch[:50, 0], return_counts=True)[1].tolist() == [2] * 25


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 16, 17, 100, 1000, 4097])
def test_permutation(n):
    orders = [permute(np.arange(n), n, seed, epoch) for seed in range(3) for epoch in range(3)]
    for order in orders:
        assert sorted(order.tolist()) == list(range(n))
    if n >= 16:
        assert len({order.tobytes() for order in orders}) == 9


def test_permutation_spreads_evenly_and_is_stable():
    order = permute(np.arange(10_000), 10_000, 0, 0)
    assert abs(np.corrcoef(np.arange(10_000), order)[0, 1]) < 0.03
    assert abs(np.corrcoef(order[1:], order[:-1])[0, 1]) < 0.03
    counts = np.zeros((8, 8))
    for seed in range(800):
        counts[np.arange(8), permute(np.arange(8), 8, seed, 0)] += 1
    assert abs(counts - 100).max() < 45  # 4.8 standard deviations of a fair draw
    assert permute(np.arange(6), 6, 1, 2).tolist() == [5, 3, 4, 1, 0, 2]  # a change would reorder every recorded run


def test_validation_is_fixed_and_spread_over_the_split():
    tokens = FileTokens("t", BATCH, TRAIN, VALID)
    whole = tokens.validation(SEQ)
    assert whole.shape == (10, SEQ + 1) and whole.dtype == np.int64
    np.testing.assert_array_equal(whole[:, 0], 1000 + 8 * np.arange(10))
    np.testing.assert_array_equal(tokens.validation(SEQ, 5), whole[::2])
    np.testing.assert_array_equal(tokens.validation(SEQ, 99), whole)


def test_random_is_uniform_and_its_validation_is_apart():
    tokens = RandomTokens("random", 64, 10)
    ids = tokens.batch(0, 0, range(64), 1000)
    counts = np.bincount(ids.ravel(), minlength=10)
    assert len(counts) == 10 and abs(counts / ids.size - 0.1).max() < 0.006
    held = tokens.validation(1000, 64)
    assert held.shape == (64, 1001) and (held == ids).mean() < 0.12
    assert tokens.validation(10).shape == (64, 11)


def test_short_text_is_one_clear_line():
    tokens = FileTokens("tiny.txt", BATCH, TRAIN[:8], VALID[:8])
    with pytest.raises(DataError, match=r"^tiny\.txt: the training split has 8 tokens, fewer than seq \+ 1 = 9$"):
        tokens.batch(0, 0, range(1), SEQ)
    with pytest.raises(DataError, match=r"^tiny\.txt: the validation split has 8 tokens, fewer than seq \+ 1 = 9$"):
        tokens.validation(SEQ)
    assert FileTokens("tiny.txt", BATCH, TRAIN[:9], VALID).batch(0, 0, range(1), SEQ).shape == (1, 9)


@pytest.mark.parametrize("sequences", [range(-1, 2), range(5, 7), range(6, 7)])
def test_sequences_outside_the_batch_are_refused(tokens, sequences):
    with pytest.raises(IndexError, match="of a batch of 6"):
        tokens.batch(0, 0, sequences, SEQ)
