"""Kernel regressions: compile-time budgets, bytes and launches, paired A/B timing, benchmark files, losses and counts.

Exit status of every gate: 0 nothing got worse, 1 something did, 2 wrong use or an unreadable file, 3 not comparable (another
Triton, other hardware): nothing is said about a regression then.
"""
