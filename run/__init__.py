"""What surrounds a run and is not GRPO. edges/: options that the step of train_grpo.py walks past
without a look, each whole in one module."""
