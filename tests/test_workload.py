"""Workloads and cases: rows expand as written, equal meanings are equal cases, and every fault names file, row and key."""
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from suite.case import Case
from suite.options import AXES
from suite.workload import FOLDER, WorkloadError, load, load_all, models, names


@pytest.fixture
def written(tmp_path):
    def write(*rows, name="toy", **top):
        text = {"title": "Toy", "question": "?", "sizes": {"small": list(rows)}, **top}
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(text, sort_keys=False), encoding="utf-8")
        return tmp_path

    return write


def test_lists_are_swept_and_values_order(written):
    folder = written({"model": ["gpt-tiny", "qwen-tiny"], "mesh": {"tp": [2, 4]}, "comm": ["bf16", "int8"], "value": 1},
                     {"model": "gpt-tiny", "mesh": {"tp": 2}, "comm": {"forward": "fp8", "backward": "bf16"}, "value": 5})
    rows = load("toy", folder).rows
    assert len(rows) == 9 and rows[0].id == "gpt-tiny_tp2_fp8+bf16_s0" and rows[0].value == 5
    assert [row.id for row in rows[1:]] == sorted(row.id for row in rows[1:])


def test_rows_that_mean_the_same_are_one_case(written):
    """On one process no codec matters; shorthand and the long form are one."""
    long = {"model": "gpt-tiny", "factor": {"name": "dense"}, "precision": {"name": "bf16", "params": "float32"}}
    folder = written({"model": "gpt-tiny", "mesh": {"tp": 1}, "comm": ["bf16", "int8", "fp8"]}, long)
    assert [row.id for row in load("toy", folder).rows] == ["gpt-tiny_s0"]


def test_a_name_holds_fields_and_two_cases_may_not_share_it(written):
    row = {"model": ["gpt-tiny", "qwen-tiny"], "data": {"micro": 4, "batch": 8}, "name": "x-{model}-{data.micro}"}
    assert [r.id for r in load("toy", written(row)).rows] == ["x-gpt-tiny-4", "x-qwen-tiny-4"]
    with pytest.raises(WorkloadError, match=r"toy\.yaml: small row 1: name: two different cases are called 'same'"):
        load("toy", written({**row, "name": "same"}))
    with pytest.raises(WorkloadError, match=r"name: no field 'data\.mikro'"):
        load("toy", written({**row, "name": "{data.mikro}"}))
    with pytest.raises(WorkloadError, match="letters, digits"):
        load("toy", written({**row, "name": "a/b"}))


FAULTS = [
    ({"modle": "gpt-tiny"}, "model: expected a name, got None"),
    ({"model": "gpt-tiny", "stpes": 3}, "stpes: Extra inputs are not permitted"),
    ({"model": "gpt-tiny", "steps": "many"}, "steps: Input should be a valid integer.*got 'many'"),
    ({"model": "gpt-tiny", "steps": 0}, "steps: .*greater than or equal to 1, got 0"),
    ({"model": "gpt-tiny", "mesh": {"tp": None}}, "mesh.tp: .*valid integer.*got None"),
    ({"model": "gpt-tiny", "mesh": None}, "mesh: is empty"),
    ({"model": "gpt-tiny", "data": {"text": ""}}, "data.text: .*at least 1 character"),
    ({"model": "gpt-5"}, "model: unknown model 'gpt-5'; known: gpt-tiny"),
    ({"model": "gpt-tiny", "comm": "int9", "mesh": {"tp": 2}}, "unknown comm 'int9'; known: bf16"),
    ({"model": "gpt-tiny", "layout": {"name": "megatron", "recompute": "most"}}, "layout.*recompute|recompute"),
    ({"model": "gpt-tiny", "mesh": {"tp": 3}}, "mesh.tp: 3 does not divide 4 heads of gpt-tiny"),
    ({"model": "qwen2.5-0.5b", "mesh": {"tp": 4}}, "mesh.tp: 4 does not divide 14 heads"),
    ({"model": "gpt-tiny", "data": {"seq": 1024}}, "data.seq: 1024 is longer than the 512 positions of gpt-tiny"),
    ({"model": "gpt-tiny", "mesh": {"pp": 2}}, "mesh.pp: pipeline stages are not built yet"),
    ({"model": "gpt-tiny", "mesh": {"tp": 2}, "link": "p2p"}, "link: p2p needs device: cuda"),
    ({"model": "gpt-tiny", "data": {"batch": 9, "micro": 2}}, "data.batch 9 is no multiple of dp 1 x micro 2"),
    ({"model": "gpt-tiny", "value": "high"}, "value: expected a number, got 'high'"),
    ("gpt-tiny", "expected a map, got 'gpt-tiny'"),
]


@pytest.mark.parametrize(("row", "line"), FAULTS)
def test_a_fault_names_file_row_and_key(written, row, line):
    folder = written({"model": "qwen-tiny"}, row)
    with pytest.raises(WorkloadError, match=f"toy.yaml: small row 2: .*({line})") as caught:
        load("toy", folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("text", "line"), [
    (b"title: [", "toy.yaml: line 1: "),
    (b"- a\n", "toy.yaml: expected a map"),
    (b"\xff\xfe", r"toy.yaml: not UTF-8 \(byte 0\)"),
    (b"titel: x\nsizes: {}\n", "toy.yaml: unknown key 'titel'"),
    (b"title: x\nsizes: {tiny: []}\n", "toy.yaml: sizes: expected a map of small, short, full"),
])
def test_a_file_that_is_no_workload(tmp_path, text, line):
    (tmp_path / "toy.yaml").write_bytes(text)
    with pytest.raises(WorkloadError, match=line):
        load("toy", tmp_path)
    with pytest.raises(WorkloadError, match="no workload 'toys'; known: toy"):
        load("toys", tmp_path)


def test_ids_of_two_workloads_may_not_clash(written):
    written({"model": "gpt-tiny", "name": "same"}, name="one")
    folder = written({"model": "qwen-tiny", "name": "same"}, name="two")
    with pytest.raises(WorkloadError, match=r"two.yaml and one.yaml call different cases 'same'"):
        load_all(folder)


def test_the_shipped_workloads_expand_to_cases_with_ids_of_their_own():
    workloads = load_all()
    assert set(workloads) == set(names()) and "models" not in workloads
    rows = [row for w in workloads.values() for row in w.rows]
    assert len({row.id for row in rows}) == len({row.case.model_dump_json() for row in rows})
    assert all(load(name).cases("small") for name in workloads)


def test_model_cards_have_one_schema():
    keys = {name: set(card) - {"theta", "positions"} for name, card in models().items()}
    assert len({frozenset(k) for k in keys.values()}) == 1, keys
    assert yaml.safe_load((FOLDER / "models.yaml").read_text())["families"].keys() == {"gpt", "qwen2.5", "llama", "olmo2"}


codecs = st.one_of(
    st.sampled_from([name for name, schema in AXES["comm"].items() if "group" not in schema.model_fields]),
    st.fixed_dictionaries({"name": st.sampled_from(["int8", "fp8"]), "group": st.sampled_from([32, 128, 512])}),
)


@settings(max_examples=60, deadline=None)
@given(forward=codecs, backward=codecs, tp=st.sampled_from([1, 2, 4]), seed=st.integers(0, 3), steps=st.integers(1, 99),
       layout=st.sampled_from(["megatron", "megatron-sp"]), micro=st.sampled_from([None, 1, 2]))
def test_a_case_survives_its_row_and_its_id_tells_it_apart(forward, backward, tp, seed, steps, layout, micro):
    row = {"model": "gpt-tiny", "mesh": {"tp": tp}, "comm": {"forward": forward, "backward": backward}, "seed": seed,
           "steps": steps, "layout": layout, "data": {"micro": micro}}
    case = Case(**row)
    assert Case(**case.row()) == case and Case(**case.row()).id == case.id
    other = Case(**{**row, "seed": seed + 1})
    assert other.id != case.id
    if tp > 1:
        changed = Case(**{**row, "comm": {"forward": {"name": "int8", "group": 64}, "backward": backward}})
        assert changed == case or changed.id != case.id
