"""Reports: records -> tables, claims and verdicts, coverage, figures. Imports no torch.

    python -m suite.report.tables    results/tables/{measurements,communication,losses,loss_summary,loss_gaps,layouts}.csv
    python -m suite.report.claims    results/tables/claims.csv, claims.md
    python -m suite.report.coverage  results/tables/coverage.md
    python -m suite.report.figures   results/figures/<workload>.png
    python -m suite.report.verdict   results/tables/verdict.md
    python -m suite.report.reference results/reference/<name>/ from a run, and the scoreboard of the README

The same records, workloads and claims give byte-identical files.
"""
