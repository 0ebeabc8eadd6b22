"""The decode step for a GPU: fixed shapes at fixed addresses, recorded once as a CUDA graph.

A step of 28 layers is about 1,000 kernels. Launched from Python one by one they take longer than
they run, so the GPU mostly waits. A graph is all of them in one launch, but it repeats exactly what
was recorded. So here the places of the cache do not grow token by token: each step attends to S of
them, and a bias of -inf hides those that are not filled yet. The newest token takes the last of the
S while it is read, and then moves to its own place, a number on the GPU that the graph counts up.

Recording costs two steps from Python, so it is to be seldom: S grows by a quarter each time, from
256 places to 1,280 in six graphs, and an eighth of the attention is wasted. Rows of completions
that ended leave a graph when the next one is recorded, which costs nothing extra. Until then they
are computed for nothing; a graph for each number of rows would cost more.
"""
import functools

import torch

BUCKET = 64             # S is a multiple of it, or all places


class GraphedStep:
    """`step` of a Decoding in which every completion has its own row."""

    def __init__(self, decoding):
        self.decoding, cache = decoding, decoding.cache         # (L, 2, max_rows, K, S, d)
        self.tokens = torch.zeros_like(decoding.positions)                      # (max_rows,)
        self.place = decoding.positions.new_full((1,), decoding.length)
        self.size, self.replay, self.graphs = 0, None, []
        cache[..., decoding.length:, :] = 0     # 0 times what was there before might be NaN
        if decoding.bias is None:
            decoding.bias = cache.new_zeros(cache.shape[2], 1, cache.shape[4])

    def __call__(self, tokens):
        """Reads one more token of each row, (n,); returns the logits of the next, (n, V)."""
        self.tokens[:len(tokens)] = tokens
        full = self.decoding.length >= self.size - 1
        logits = self.grow(len(tokens)) if full else self.replay()
        self.decoding.length += 1
        return logits[:len(tokens)]

    def grow(self, n):
        """A step of n rows in larger shapes, which the following steps then repeat."""
        decoding, filled = self.decoding, self.decoding.length
        size = -(-(filled + 2) * 5 // 4 // BUCKET) * BUCKET
        self.size = size = min(size, decoding.cache.shape[4])
        cache, bias = decoding.cache[:, :, :n, :, :size], decoding.bias[:n, :, :size]
        decoding.bias[:, :, filled:] = float("-inf")
        decoding.bias[:, :, size - 1] = 0

        def step():
            logits = decoding.read(self.tokens[:n], cache, bias)
            cache.index_copy_(4, self.place, cache[..., -1:, :].clone())
            decoding.bias.index_fill_(2, self.place, 0)
            self.place += 1
            return logits

        logits, self.replay = record(step, cache.device, self.graphs)
        return logits


def record(step, device, graphs):
    """Runs `step` and, on CUDA, records it; returns its result and a function that repeats it.

    graphs: the one before, whose memory the new one shares, and then the new one. Each result of
    the function overwrites the last. A step that cannot be recorded raises: after a failed capture
    PyTorch's allocator is in no known state, so there is no going on without. `--fast 0` samples
    without graphs.
    """
    if device.type != "cuda":
        return step(), step
    stream, graph = side_stream(device), torch.cuda.CUDAGraph()
    pool = graphs[0].pool() if graphs else None
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        first = step()          # libraries set themselves up, autocast converts what it keeps
        # Errors of this thread only: nccl's watchdog may ask the GPU something meanwhile.
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            result = step()     # recorded, not run
        finally:
            graph.capture_end()
    torch.cuda.current_stream(device).wait_stream(stream)
    graphs[:] = [graph]

    def replay():
        graph.replay()
        return result
    return first, replay


@functools.cache
def side_stream(device):
    """Always the same one: cuBLAS keeps a workspace for each stream that it has seen."""
    return torch.cuda.Stream(device)
