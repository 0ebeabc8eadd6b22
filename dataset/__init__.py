from .prompts import PromptCollator, PromptDataset, rows_of_step, steps_per_epoch

__all__ = ["PromptCollator", "PromptDataset", "rows_of_step", "steps_per_epoch"]
