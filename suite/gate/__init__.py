"""Kernel regressions: compile-time budgets, bytes and launches, paired A/B timing, benchmark files, losses and counts.

    budget.py resources.py calls.py    compiled without a GPU         losses.py    records against the committed ones
    ab.py worker.py steps.py           two revisions, interleaved     compare.py   two files of pytest-benchmark
    trial.py slower.py                 whether ab is right            tree.py      all of them over the working tree

Exit status of every gate: 0 nothing got worse, 1 something did, 2 wrong use or an unreadable file, 3 not comparable (another
Triton, other hardware): nothing is said about a regression then.
"""
