"""What surrounds a run and is not GRPO.

    policy.py         loads models, and chooses what runs them: plain, fast, vLLM, adapters, shards
    rollout.py        the completions of a step, and the micro-batches that are cut from them
    evaluate.py       held-out problems, answered and scored
    checkpoint.py     checkpoints, resuming, and the final weights
    metrics.py        the numbers of a step
    distributed.py    the processes that train one model, and where their gradients meet
    fsdp.py           weights divided over them
    signals.py        how a run ends before its last step
    minimind_flags.py MiniMind's flags
    report/           what a run prints, draws and writes
    extensions/       options of the algorithm, each whole in one module
"""
