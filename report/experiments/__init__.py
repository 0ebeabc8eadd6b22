"""Experiments: many runs of train_grpo.py, summarised into one small file, and drawn from it.

    python -m report.experiments countdown              run what is missing, then draw
    python -m report.experiments loss_types --draw      only draw, from the results that we ship

An arm of an experiment is the flags of a run. Every arm runs with every seed, two runs at a time
with a thread each (--jobs), and each run becomes a line of report/experiments/results/<name>.jsonl:

    {"row", "arm", "seed", "seconds", "steps": [...], "series": {name: [...]}, "eval": {...}}

An arm may also change a line of the code: it runs in a changed copy. A series is averaged over each
of up to 20 parts of the run. Interrupted, the same command goes on with the runs that are missing;
to run some again, delete their lines. The picture is images/<name>.png, and the table is printed:
means over the seeds, and the 95% confidence interval of each (Student's t).

To read, in this order:

    arms.py         what each experiment runs and draws
    changes.py      the arms that change a line of the code: the ladder and the museum
    run.py          runs, and what stays of them; behaviour.py reads the completions
    figures.py      pictures and tables
"""
