"""The cost model against numbers worked out by hand."""
import pytest

from suite.case import Case
from suite.record import Metric, Record, write
from suite.report import costmodel
from suite.report.source import entries
from suite.workload import models


def test_the_cost_model_by_hand():
    card = models()["gpt-6.7b"]
    plain = {"factor": "dense", "layout": "megatron", "codec": "bf16", "precision": "bf16"}
    sent = 2 * 1 / 2 * 4096 * (4 * 32 + 2) * 4096 * 2  # TP 2, 4,096 tokens, d 4,096, two bytes
    assert costmodel.wire(card, 2, 4096, "megatron", "bf16") == sent
    assert costmodel.wire(card, 2, 4096, "megatron", "int8") == pytest.approx(sent * (1 + 4 / 128) / 2)
    assert costmodel.wire(card, 1, 4096, "megatron", "unknown") == 0
    flops = 6 * (32 * 12 * 4096**2 + 50257 * 4096) + 6 * 32 * 2048 * 4096
    seconds = 4096 * flops / (2 * 400e12) + sent / 303e9
    assert costmodel.throughput(card, 2, 2048, 2, link_gb=303.0, tflops=400.0, **plain) == pytest.approx(4096 / seconds)
    low = {**plain, "factor": "cola", "layout": "btp"}
    assert costmodel.elements(models()["llama-7b"], "btp") == 2 * 32 * 7 * 1024 + 2 * 4096  # 7 T r a block and direction
    assert costmodel.throughput(card, 2, 2048, 2, link_gb=303.0, tflops=400.0, **low) > 4096 / seconds
    for change, words in (({"precision": "nvfp4"}, "no rate known for nvfp4"), ({"layout": "other"}, "layout other"),
                          ({"codec": "other"}, "codec other"), ({"factor": "other"}, "factor other")):
        assert words in costmodel.throughput(card, 2, 2048, 2, link_gb=1.0, tflops=1.0, **{**plain, **change})


def test_rates_are_measured_where_there_is_a_run_and_never_assumed_for_toys(tmp_path):
    assert costmodel.rate([], models()["gpt-6.7b"]) == (450.0, "assumed")
    assert costmodel.rate([], models()["gpt-tiny"])[0].startswith("no rate known for a model this small")
    this = Case(model="gpt-6.7b", device="cuda", measure="speed")
    rates = [Metric("model_tflops", 509.0, "TFLOP/s per GPU")]
    write(Record(this.id, this.row(), "ok", None, "key", "h200x2", metrics=rates), tmp_path)
    assert costmodel.rate(entries(tmp_path, {}), models()["gpt-6.7b"]) == (509.0, "h200x2")
