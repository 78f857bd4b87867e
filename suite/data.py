"""Token files and the order in which training reads them.

    prepare(case.data, vocab) -> Prepared       once, in one process, before ranks start
    Prepared.open() -> Tokens                   in every rank: memory maps, nothing is copied (suite/tokens.py)

    $TRIAXIS_CACHE or <repository>/.triaxis
      wheels/                                   downloads, see suite/corpora.py
      tokens/<text>-<tokenizer>-<key>/          train.bin valid.bin tokenizer.json meta.json; the key is made of what the
                                                files follow from, so nothing is ever stale. Copy the folder to a machine
                                                without a network and the wheels are not asked for.

Token files hold ids one after another, little-endian, 2 bytes each up to 65,536 entries of vocabulary and 4 above, each
document closed by the end-of-text id. Validation is whole documents, picked in order of the hash of their text: those that
fit until 5 % of the bytes are reached, never above 10 % (unless the smallest document is larger: then that one). Documents
that are equal stay together; a text that is one document is cut before its last sixteenth.
"""
from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from suite import corpora, tokenizer
from suite.case import Data
from suite.corpora import DataError
from suite.tokens import FileTokens, RandomTokens, Tokens
from suite.workload import ROOT

FORMAT = 1  # of the token files: part of every key
VALID_LEAST, VALID_MOST = 0.05, 0.10  # of the text's bytes
CUT = 16  # a text of one document gives its last 1/16 to validation
CHUNK = 4 << 20  # characters of text encoded at once
META = {"text", "digest", "dtype", "tokens", "tokenizer", "documents"}  # what reading needs of meta.json


def cache_folder() -> Path:
    """$TRIAXIS_CACHE, or .triaxis in the repository."""
    return Path(os.environ.get("TRIAXIS_CACHE") or ROOT / ".triaxis")


@dataclass(frozen=True)
class Prepared:
    """A text ready to train on. `digest` covers every id and the vocabulary; counts are None where text is `random`."""

    text: str
    meta: Path | None
    digest: str
    vocab_size: int  # of the tokenizer: ids are below it; of `random`: the given vocabulary
    end: int | None  # end-of-text id
    train_tokens: int | None
    valid_tokens: int | None
    documents: int | None
    batch: int  # sequences a step, over all replicas

    def open(self) -> Tokens:
        """Maps the token files. Raises DataError where one is missing or cut short."""
        if self.meta is None:
            return RandomTokens(self.text, self.batch, self.vocab_size)
        meta = _read_meta(self.meta)
        maps = [np.memmap(self.meta.with_name(f"{part}.bin"), dtype=meta["dtype"], mode="r") for part in ("train", "valid")]
        return FileTokens(self.text, self.batch, *maps)

    def describe(self) -> dict[str, Any]:
        """What a record keeps: the meta file, or the same facts about `random`."""
        if self.meta is None:
            return {"text": self.text, "digest": self.digest, "tokenizer": {"vocab_size": self.vocab_size}}
        return _read_meta(self.meta)


def prepare(data: Data, vocab: int) -> Prepared:
    """The token files of a case, made where they are missing (downloads, trains a tokenizer). `vocab` is read by `random` only.

    Two processes that ask at once make them once; a killed one leaves nothing that counts. Raises DataError.
    """
    if data.text == "random":
        digest = hashlib.sha256(f"random {FORMAT} {vocab}".encode()).hexdigest()
        return Prepared("random", None, digest, vocab, None, None, None, None, data.batch)
    cache = cache_folder()
    text, choice = corpora.source(data.text, cache), tokenizer.choose(data.tokenizer, cache)
    key = hashlib.sha256(json.dumps([FORMAT, text.identity, choice.identity]).encode()).hexdigest()[:12]
    name = re.sub(r"[^\w.]+", "-", f"{text.name}-{choice.name}").strip("-.") + f"-{key}"
    folder = cache / "tokens" / name
    if not (folder / "meta.json").exists():
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            with _locked(folder.parent / f".{name}.lock"):
                if not (folder / "meta.json").exists():
                    _make(folder, data, text, choice)
        except OSError as error:
            raise DataError(f"{folder}: token files cannot be written: {error.strerror or error}") from None
    return replace(read(folder / "meta.json", data.batch), text=data.text)  # equal files under two names share the folder


def read(path: Path, batch: int) -> Prepared:
    """Prepared token files by their meta.json; asks for no text, wheel or tokenizer. Raises DataError."""
    meta = _read_meta(path)
    tokens, made = meta["tokens"], meta["tokenizer"]
    return Prepared(meta["text"], path, meta["digest"], made["vocab_size"], made["end"], tokens["train"], tokens["valid"],
                    sum(meta["documents"].values()), batch)


def _read_meta(path: Path) -> dict[str, Any]:
    again = f"delete {path.parent} to prepare it again"
    try:
        meta = json.loads(path.read_text(encoding="utf-8"))
        missing = META - set(meta)
        if missing:
            raise DataError(f"{path}: lacks {', '.join(sorted(missing))}; {again}")
        for part, count in meta["tokens"].items():
            file = path.with_name(f"{part}.bin")
            expected = count * np.dtype(meta["dtype"]).itemsize
            if file.stat().st_size != expected:
                raise DataError(f"{file}: has {file.stat().st_size} bytes, expected {expected}; {again}")
    except DataError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{path}: not the meta file of token files ({error}); {again}") from None
    return meta


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # the kernel frees it when the process ends, however it ends
        yield


def _make(folder: Path, data: Data, text: corpora.Source, choice: tokenizer.Choice) -> None:
    """Writes the files beside the final folder, then renames. The caller holds the lock of this name."""
    temporary = folder.with_name(f".{folder.name}.tmp")
    for left in (temporary, folder):  # of a process that was killed; a folder without meta.json
        shutil.rmtree(left, ignore_errors=True)
    temporary.mkdir()
    try:
        spool = _Spool(temporary / "documents", data.text, text)
        made = choice.build(lambda: spool.read(valid=False))
        made.save(str(temporary / "tokenizer.json"))
        vocab, end = tokenizer.size(made), tokenizer.end_of_text(made)
        dtype = "<u2" if vocab <= 1 << 16 else "<u4"
        digest = hashlib.sha256(f"{vocab} {end} {dtype}".encode())
        counts = {part: _encode(made, spool.read(valid=part == "valid"), temporary / f"{part}.bin", dtype, end, digest)
                  for part in ("train", "valid")}
        meta = {
            "format": FORMAT, "text": data.text, "text_sha256": spool.sha256, "sources": [*text.origins, *choice.origins],
            "tokenizer": {"spec": data.tokenizer, "sha256": corpora.sha256_of(temporary / "tokenizer.json"), "vocab_size": vocab,
                          "end": end},
            "documents": spool.count(), "bytes": spool.bytes(), "tokens": counts, "dtype": dtype, "digest": digest.hexdigest(),
        }
        (temporary / "documents").unlink()
        (temporary / "meta.json").write_text(json.dumps(meta, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


class _Spool:
    """All documents of a text in one file, split into training and validation; 17 bytes of memory a document."""

    def __init__(self, path: Path, name: str, text: corpora.Source) -> None:
        self.path = path
        hashes, sizes, whole = array("Q"), array("Q"), hashlib.sha256()
        with path.open("wb") as file:
            for number, document in enumerate(text.documents(), 1):
                if not document.strip():
                    continue
                try:
                    raw = document.encode()
                except UnicodeEncodeError:
                    raise DataError(f"{name}: document {number} holds half of a surrogate pair") from None
                file.write(raw)
                whole.update(raw + b"\0")
                hashes.append(int.from_bytes(hashlib.blake2b(raw, digest_size=8).digest(), "little"))
                sizes.append(len(raw))
        self.sha256 = whole.hexdigest()
        if not sizes:
            raise DataError(f"{name}: no text: it is empty or white space")
        if text.sha256 not in (None, self.sha256):
            raise DataError(f"{name}: the text read out of its wheels has sha256 {self.sha256}, expected {text.sha256}")
        self.sizes = np.array(sizes, dtype=np.int64)
        self.valid = _split(np.array(hashes, dtype=np.uint64), self.sizes)
        if self.valid.all():
            self._cut(name)

    def _cut(self, name: str) -> None:
        """One document (perhaps repeated): its first copy becomes two, cut after a white space if there is one."""
        with self.path.open("rb") as file:
            text = file.read(self.sizes[0]).decode()
        if len(text) < 2:
            raise DataError(f"{name}: {len(text)} character is too short to split into training and validation")
        at = min(len(text) - 1, len(text) * (CUT - 1) // CUT + 1)
        space = max(text.rfind(" ", len(text) // 2, at), text.rfind("\n", len(text) // 2, at)) + 1
        head = len(text[: space or at].encode())
        self.sizes, self.valid = np.array([head, self.sizes[0] - head]), np.array([False, True])

    def read(self, valid: bool) -> Iterator[str]:
        """The documents of one split, in order."""
        with self.path.open("rb") as file:
            for size, is_valid in zip(self.sizes.tolist(), self.valid.tolist()):
                if is_valid == valid:
                    yield file.read(size).decode()
                else:
                    file.seek(size, os.SEEK_CUR)

    def count(self) -> dict[str, int]:
        return {"train": int((~self.valid).sum()), "valid": int(self.valid.sum())}

    def bytes(self) -> dict[str, int]:
        return {"train": int(self.sizes[~self.valid].sum()), "valid": int(self.sizes[self.valid].sum())}


def _split(hashes: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Which documents [n] are validation (module docstring); all of them where the text is one document, however often."""
    unique, inverse = np.unique(hashes, return_inverse=True)
    weights = np.bincount(inverse, weights=sizes) / sizes.sum()
    taken = np.zeros(len(unique), dtype=bool)
    filled = 0.0
    for i, weight in enumerate(weights.tolist()):
        if filled >= VALID_LEAST:
            break
        if filled + weight <= VALID_MOST:
            taken[i] = True
            filled += weight
    if not filled:
        taken[int(weights.argmin())] = True
    return taken[inverse]


def _encode(made: Any, documents: Iterator[str], path: Path, dtype: str, end: int, digest: Any) -> int:
    """Writes one split; returns its tokens and feeds their bytes to `digest`."""
    made.encode_special_tokens = True
    count = 0
    with path.open("wb") as file:

        def write(texts: list[str]) -> int:
            encodings = made.encode_batch_fast(texts, add_special_tokens=False)
            ids = [np.array([*encoding.ids, end], dtype=dtype) for encoding in encodings]
            raw = np.concatenate(ids).tobytes()
            file.write(raw)
            digest.update(raw)
            return sum(map(len, ids))

        held: list[str] = []
        size = 0
        for document in documents:
            held.append(document)
            size += len(document)
            if size >= CHUNK:
                count += write(held)
                held, size = [], 0
        if held:
            count += write(held)
    return count
