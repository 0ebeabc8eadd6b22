"""What surrounds a run and is not GRPO.

    loop.py       what stands around the loop of train_grpo.py: reports, checkpoints
    evaluation.py held-out problems, answered and judged
    backends.py   what runs a model: the plain functions or model/fast's, in slices, within shards
    saver.py      checkpoints, and resuming from them
    metrics.py    the numbers of a step; report.py prints and writes them, curves.py draws them, and
                  page.py makes the page to look into a run
    processes/    several processes that train one model: world.py, where their gradients meet;
                  shard.py divides weights over them; watch.py ends a run that is stopped or fails
    extensions/   options that the step does not know, each whole in one module
    minimind.py   MiniMind's flags

`python -m run.report.picture out/run_a` draws the curves from the command line, and
`python -m run.report.html_page out/run_a` writes the page.
"""
