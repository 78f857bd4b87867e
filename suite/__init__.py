"""Triaxis: benchmark and reproducibility suite for three ways to make LLM training cheaper.

A training step has three axes: `comm` (what crosses between processes), `layout` (where tensors lie) and `precision`
(in what numbers products run). `case.py` names a point on them, `trainer.py` and `train.py` run it, `run.py` turns it
into a record, `report/` turns records into tables, figures and verdicts.
"""
