from .prompts import (
    PromptCollator,
    PromptDataset,
    batches_of_steps,
    read_heldout,
    rows_of_step,
    steps_per_epoch,
)

__all__ = ["PromptCollator", "PromptDataset", "batches_of_steps", "read_heldout", "rows_of_step",
           "steps_per_epoch"]
