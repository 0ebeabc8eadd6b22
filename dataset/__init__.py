from .prompts import PromptCollator, PromptDataset, last_step_of, read_prompts, rows_of_step

__all__ = ["PromptCollator", "PromptDataset", "last_step_of", "read_prompts", "rows_of_step"]
