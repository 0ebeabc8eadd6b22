"""Everything that a run needs besides GRPO itself.

    policy.py         loads models, and chooses how they run: plain, fast, vLLM, adapters, shards
    rollout.py        the completions of a step, and the micro-batches that are cut from them
    evaluate.py       evaluation on held-out problems
    checkpoint.py     checkpoints, resuming, and the final weights
    metrics.py        the metrics of a step
    distributed.py    the processes that train one model, and how they communicate
    fsdp.py           weights sharded across these processes
    signals.py        how a run ends before its last step
    minimind_flags.py MiniMind's flags
    report/           what a run prints, draws and writes
    extensions/       options of the algorithm, each in a module of its own
"""
