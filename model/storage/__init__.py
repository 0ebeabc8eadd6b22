"""Weights in and out. Each file uses only those above it:

    files.py            opens what a stranger wrote: json, tensors, chat templates
    config.py           config.json as a MiniMindConfig, and the checks of one
    minimind_pth.py     MiniMind's .pth files, which have no config.json
    read.py             reads weights, tokenizers, adapters, checkpoints
    write.py            writes them
    saving.py           when a run is saved and resumed; keeps other runs out of its folder
    tokenizer.py        trains a tokenizer
    memory.py           what a run will take, by the config.json alone

On disk, weights are what transformers writes: a folder with config.json, model.safetensors and the
tokenizer's files. Where a function of read.py takes a path to weights, a hub id like
Qwen/Qwen3-0.6B will do too, as will one of MiniMind's .pth files.
"""
