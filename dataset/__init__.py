from .prompts import PromptCollator, PromptDataset, batches_from, read_prompts

__all__ = ["PromptCollator", "PromptDataset", "batches_from", "read_prompts"]
