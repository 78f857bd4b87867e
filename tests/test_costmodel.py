"""The cost model against numbers worked out by hand, against what the counter counts, and against the committed records."""
import pytest
from parity import case_of, train

from suite.case import Case
from suite.record import Metric, Record, write
from suite.report import costmodel
from suite.report.source import entries
from suite.workload import ROOT, load_all, models


def test_the_cost_model_by_hand():
    card = models()["gpt-6.7b"]
    plain = {"factor": "dense", "layout": "megatron", "codec": "bf16", "precision": "bf16"}
    activations = 2 * 1 / 2 * 4096 * (4 * 32 + 2) * 4096 * 2  # TP 2, 4,096 tokens, d 4,096, two bytes
    exact = 4 * (3 * 4096 + 1)  # cross-entropy, norm
    sent = activations + exact
    assert costmodel.wire(card, 2, 4096, "megatron", "bf16") == sent
    assert costmodel.wire(card, 2, 4096, "megatron", "int8") == pytest.approx(activations * (1 + 4 / 128) / 2 + exact)
    replicated = (2 * 32 + 1) * 4096 * 2 + 2 * 32 * 4096 + 2048 * 4096  # norms, biases of o and down, positions
    assert costmodel.wire(card, 2, 4096, "megatron-sp", "bf16") == sent + 4 * replicated
    assert costmodel.wire(models()["olmo2-70m"], 2, 4096, "megatron", "bf16") == (
        4096 * (4 * 8 + 2) * 512 * 2 + 4 * (3 * 4096 + 1 + 4 * 8 * 4096))
    assert costmodel.wire(card, 1, 4096, "megatron", "unknown") == 0
    flops = 6 * (32 * 12 * 4096**2 + 50257 * 4096) + 6 * 32 * 2048 * 4096
    seconds = 4096 * flops / (2 * 400e12) + sent / 303e9
    assert costmodel.throughput(card, 2, 2048, 2, link_gb=303.0, tflops=400.0, **plain) == pytest.approx(4096 / seconds)
    low = {**plain, "factor": "cola", "layout": "btp"}
    assert costmodel.elements(models()["llama-7b"], "btp") == 2 * 32 * 7 * 1024 + 2 * 4096  # 7 T r a block and direction
    assert costmodel.throughput(card, 2, 2048, 2, link_gb=303.0, tflops=400.0, **low) > 4096 / seconds
    llama, vanilla = models()["llama-7b"], {"factor": "cola", "layout": "pairwise", "codec": "bf16", "precision": "bf16"}
    wide, thin = (costmodel.throughput(llama, 2, 4096, 4, link_gb=1e9, tflops=400.0, **{**vanilla, "layout": layout})
                  for layout in ("pairwise", "btp"))
    more = 16384 / wide - 16384 / thin  # nothing to send in no time: a second core attention alone
    assert more == pytest.approx(16384 * 6 * 32 * 4096 * 4096 / (2 * 400e12), rel=1e-4)
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


@pytest.mark.ranks
@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("layout", ["megatron", "megatron-sp"])
@pytest.mark.parametrize("model", ["gpt-tiny", "qwen-tiny"])
def test_the_model_is_what_the_counter_counts(model, layout, tp):
    """To the byte: activations, cross-entropy, replicated gradients, and K/V heads fewer than ranks (qwen-tiny at TP 4)."""
    data = case_of(model, layout, tp, "float32").data
    counted = sum(row.wire_bytes for row in train(model, layout, tp, "float32", 20).traffic)
    assert costmodel.wire(models()[model], tp, data.batch * data.seq, layout, "fp32") == counted


def test_the_model_is_what_the_committed_records_counted():
    """Layouts without options, one micro-batch a step, no compression: what is modelled of NCCL is known exactly."""
    seen = set()
    for entry in entries(ROOT / "results", load_all()):
        case, sent = entry.case, entry.metric("wire_bytes")
        layout, codec = entry.flat["layout"], entry.flat["comm.tp.forward"]
        plain = entry.flat["factor"] == "dense" and layout in ("megatron", "megatron-sp") and codec == "bf16"
        once = case["mesh"]["dp"] == 1 and case["data"]["micro"] is None
        if not entry.origin.startswith("reference:") or sent is None or not plain or not once:
            continue
        tokens = case["data"]["seq"] * case["data"]["batch"]
        assert costmodel.wire(models()[case["model"]], case["mesh"]["tp"], tokens, layout, codec) == sent.value, entry.id
        seen.add((case["model"], layout))
    assert {(m, layout) for m in ("gpt-6.7b", "qwen2.5-7b") for layout in ("megatron", "megatron-sp")} <= seen
