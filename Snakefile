"""Triaxis: cases -> records -> tables -> figures -> verdict.

snakemake --cores all                     everything that fits this machine in 3 hours (--config hours=N size=full)
snakemake --cores all taco                one workload
snakemake --cores all --forceall taco     the same, measured again
snakemake --cores all gate                kernels, losses and counts of this tree; --config base=REVISION: and times
"""

from suite import pipeline

P = pipeline.Pipeline(config)
PAGES = {
    "tables": ["measurements.csv", "communication.csv", "losses.csv", "loss_summary.csv", "loss_gaps.csv", "layouts.csv"],
    "claims": ["claims.csv", "claims.md"],
    "coverage": ["coverage.md"],
    "verdict": ["verdict.md"],
}


container: "docker://pytorch/pytorch:2.13.0-cuda13.0-cudnn9-runtime"


wildcard_constraints:
    machine=P.pattern([P.here]),
    launch=P.pattern(P.launches),
    workload=P.pattern(P.workloads),


onstart:
    pipeline.before(workflow)


rule all:
    input:
        P.stamps(),
        expand("results/figures/{workload}.png", workload=P.workloads),
        expand("results/tables/{name}", name=sum(PAGES.values(), [])),
        f"results/check/{P.here}.json",


for name in P.workloads:

    rule:
        name:
            name
        input:
            P.stamps(name),
            f"results/figures/{name}.png",


rule launch:
    output:
        "results/launches/{machine}/{launch}.json",
    log:
        "results/logs/{machine}/{launch}.log",
    threads: lambda wildcards: P.threads(wildcards.launch, workflow.cores)
    resources:
        gpu=lambda wildcards: P.launches[wildcards.launch].case.gpus,
    params:
        cases=lambda wildcards: P.cases(wildcards.launch),
        digests=lambda wildcards: P.digests[wildcards.launch],
    shell:
        "exec python -m suite.cli launch {wildcards.launch} --stamp {output} --log {log} --child {params.cases}"


rule plan:
    output:
        "results/plan/{machine}.json",
    log:
        "results/logs/{machine}/plan.log",
    params:
        options=P.options,
        rows=P.plan_digest,
    shell:
        "python -m suite.cli plan{params.options} > {output} 2> {log}"


for page, files in PAGES.items():

    rule:
        name:
            page
        input:
            P.stamps(),
            P.reference,
            f"results/plan/{P.here}.json",
            "workloads/claims.csv",
        output:
            report(
                expand("results/tables/{name}", name=files),
                caption=f"suite/report/captions/{page}.rst",
                category="Tables",
            ),
        log:
            f"results/logs/{page}.log",
        params:
            page=page,
            code=P.code(f"suite.report.{page}"),
            rows=P.all_rows,
        shell:
            "python -m suite.report.{params.page} --results results > {log} 2>&1"


rule figure:
    input:
        lambda wildcards: P.stamps(wildcards.workload),
    output:
        report(
            "results/figures/{workload}.png",
            caption="suite/report/captions/figure.rst",
            category="Figures",
        ),
    log:
        "results/logs/figure-{workload}.log",
    params:
        code=P.code("suite.report.figures"),
        rows=lambda wildcards: P.rows(wildcards.workload),
    shell:
        "python -m suite.report.figures --results results --workload {wildcards.workload} > {log} 2>&1"


rule check:
    input:
        expand("results/figures/{workload}.png", workload=P.workloads),
        expand("results/tables/{name}", name=sum(PAGES.values(), [])),
        launches=P.stamps(),
    output:
        "results/check/{machine}.json",
    log:
        "results/logs/{machine}/check.log",
    shell:
        "python -m suite.cli check --stamp {output} {input.launches} 2>&1 | tee {log}"


rule gate:
    input:
        "results/tables/gate.csv",
        "results/figures/gate.png",
        findings=f"results/gate/{P.here}.json",
    output:
        f"results/check/gate-{P.here}.txt",
    log:
        "results/logs/gate.log",
    shell:
        "python -m suite.cli gate check {input.findings} > {log} 2>&1 || {{ cat {log}; exit 1; }}; cp {log} {output}"


rule gate_findings:
    input:
        P.kept,
        "kernels/budget.json",
    output:
        "results/gate/{machine}.json",
    log:
        "results/logs/{machine}/gate.log",
    threads: lambda wildcards: workflow.cores
    params:
        base=f"--base {P.base}" if P.base else "",
        code=lambda wildcards: P.code("kernels.registry"),
    shell:
        "python -m suite.cli gate tree {output} {params.base} > {log} 2>&1"


rule gate_table:
    input:
        f"results/gate/{P.here}.json",
    output:
        report(
            ["results/tables/gate.csv", "results/figures/gate.png"],
            caption="suite/report/captions/gate.rst",
            category="Gate",
        ),
    log:
        "results/logs/gate-table.log",
    params:
        code=lambda wildcards: P.code("suite.report.gate"),
    shell:
        "python -m suite.report.gate --results results --findings {input} > {log} 2>&1"
