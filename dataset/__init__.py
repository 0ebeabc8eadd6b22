from .prompts import PromptCollator, PromptDataset, batches_from, read_prompts, rows_of_step

__all__ = ["PromptCollator", "PromptDataset", "batches_from", "read_prompts", "rows_of_step"]
