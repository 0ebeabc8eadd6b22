"""The parts of a training run besides the GRPO algorithm itself, which is in train_grpo.py.

    loop.py           what surrounds a step: prompts, evaluations, checkpoints, signals
    policy.py         loads models, and selects how they run: plain, fast, vLLM, LoRA or sharded
    rollout.py        the completions of a step, and how they are split into micro-batches
    evaluate.py       evaluation on held-out problems
    checkpoint.py     checkpoints, resuming, and the final weights
    metrics.py        the metrics of a step
    distributed.py    the processes that train one model, and how they communicate
    fsdp.py           weights sharded across these processes
    signals.py        how a signal or an error ends a run early
    minimind_flags.py MiniMind's flags
    report/           the terminal output, the plots and the files of a run
    extensions/       options of the algorithm, one module each"""
