"""Records: whole or absent, a value or a reason, stale by key."""
import errno
import json
import os

import pytest

from suite import record
from suite.record import Metric, Record, RecordError, Traffic


def one(**more) -> Record:
    traffic = Traffic("tp", "forward", "all_reduce", "int8", "uint8", "activations", 2, 10, 11, 11.0, "counted")
    return Record(**{"id": "case", "case": {"model": "gpt-tiny"}, "status": "ok", "reason": None, "key": "k", "machine": "cpu2",
                     "metrics": [Metric("loss", 1.5, "nats/token", n=3, q20=1.0, q80=2.0)], "traffic": [traffic], **more})


def test_a_record_comes_back_as_it_was(tmp_path):
    path = record.write(one(), tmp_path)
    assert path == tmp_path / "runs" / "cpu2" / "case.json"
    assert record.read(path) == one()
    assert record.valid(path, "k") and not record.valid(path, "other")
    assert record.read_all(tmp_path / "runs") == [one()]


@pytest.mark.parametrize(("value", "reason"), [(None, None), (1.0, "why"), (float("nan"), None), (float("inf"), None)])
def test_a_metric_has_a_number_or_a_reason(value, reason):
    with pytest.raises(ValueError, match="metric loss: "):
        Metric("loss", value, "nats", reason=reason)


@pytest.mark.parametrize(("status", "reason"), [("ok", "oom"), ("failed", None)])
def test_a_failure_has_a_reason_and_nothing_else_has(status, reason):
    with pytest.raises(ValueError, match="a reason exactly where"):
        one(status=status, reason=reason)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"metrics": [{"name": "x"}], "traffic": []}', "null"])
def test_what_is_no_record_is_named(tmp_path, text):
    path = tmp_path / "case.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(RecordError, match=r"case\.json: not a record"):
        record.read(path)
    assert not record.valid(path, "k")


def test_another_schema_is_refused(tmp_path):
    path = record.write(one(), tmp_path)
    data = json.loads(path.read_text())
    path.write_text(json.dumps({**data, "schema": 99}))
    with pytest.raises(RecordError, match="schema 99, expected 1"):
        record.read(path)


@pytest.mark.parametrize("fault", ["fsync", "replace"])
def test_a_write_that_fails_leaves_the_old_record_and_no_part(tmp_path, monkeypatch, fault):
    path = record.write(one(), tmp_path)
    before = path.read_bytes()

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full) if fault == "fsync" else monkeypatch.setattr(type(path), "replace", full)
    with pytest.raises(OSError, match="No space left"):
        record.write(one(key="new"), tmp_path)
    assert path.read_bytes() == before and [p.name for p in path.parent.iterdir()] == ["case.json"]
