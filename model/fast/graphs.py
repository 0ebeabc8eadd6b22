"""Sampling with CUDA graphs, for a GPU. `Graphs` is called like `sample` in model/sampler.py.

A GPU that samples token by token waits for Python, which starts some twenty kernels per layer. A
CUDA graph records the kernels of a whole step (run the network on the newest tokens, draw the next
ones, write them down) and then runs them all in one call. It repeats what it has recorded: the same
sizes, the same addresses, the same Python numbers. Therefore

    - rows, columns and results have buffers of a fixed size, and numbers that change are tensors;
    - before each rollout, weights that need a cast or a merge are copied into buffers. All others
      are read in place, and if one has a new address, the graphs are captured anew.

On a CPU, the same steps run without graphs, so that tests can check them.
"""
import warnings

import torch
import torch.nn.functional as F

from errors import UserError, reason

from ..lora import LoRALinear
from ..model import KVCache, RMSNorm, rotary_frequencies, rotary_tables, rotate
from ..sampler import in_slices
from .shared_rows import products_dtype

COLUMNS = 128           # attention reads so many columns at first, and twice as many when needed
CHECK = 8               # tokens between two looks at which rows have ended; each waits for the GPU
FEWEST = 8              # rows; fewer would not be faster
MOST_GRAPHS = 12        # more would take long to capture; the one used longest ago is dropped


def lacking(model, dtype, device):
    """Returns what keeps this model from being sampled with CUDA graphs, or ""."""
    if model.config.num_experts:
        return "its experts"            # whose sizes depend on the tokens
    if (dtype == torch.bfloat16 and device.type == "cuda"
            and not torch.cuda.is_bf16_supported(including_emulation=False)):
        return "bfloat16 on this card"
    return ""


class Graphs:
    """A sampler that owns buffers and CUDA graphs, for rollouts of one policy.

    most: the number of completions sampled at once; more are sampled in parts, by the same graphs.
    tolerance: how much logits may differ between a graph and the step that it has recorded.

    With the same generator state, two calls return the same completions, but not those of
    model/sampler.py. `free` gives back all memory; large buffers are freed after each call.
    """

    def __init__(self, most=0, tolerance=0.1):
        self.most, self.tolerance, self.buffers = most, tolerance, None

    def __call__(self, model, prompt_ids, prompt_mask, *, num_generations, **options):
        sliced = in_slices(self._rollout, self.most or len(prompt_ids) * num_generations)
        try:
            with torch.inference_mode():
                found = sliced(model, prompt_ids, prompt_mask, num_generations=num_generations,
                               **options)
            found = tuple(x.clone() for x in found)     # autograd can't use inference tensors
        except BaseException:
            self.free()
            raise
        self.buffers.weights.release()
        if prompt_ids.is_cuda:
            card = torch.cuda.get_device_properties(prompt_ids.device).total_memory
            if self.buffers.size() > card / 100:
                self.free()
        return found

    def free(self):
        self.buffers = None

    def _fitting(self, model, N, columns, eos_ids):
        """Returns buffers with room for N rows of so many columns, with the model's weights."""
        device = model.lm_head.weight.device
        kept, fixed = self.buffers, (torch.is_autocast_enabled(device.type), eos_ids.tolist())
        if kept is None or N > kept.N or columns > kept.S or kept.fixed != fixed:
            N = max(N, self.most, kept.N if kept else 0)
            columns = max(-(-columns // COLUMNS) * COLUMNS, kept.S if kept else 0)
            kept = self.buffers = None          # before more memory is needed
            self.buffers = Buffers(model, N, columns, eos_ids, fixed, self.tolerance)
        if self.buffers.weights.read(model):
            self.buffers.graphs.clear()
        return self.buffers

    def _rollout(self, model, prompt_ids, prompt_mask, *, num_generations, max_new_tokens,
                 temperature=1.0, eos_token_id, pad_token_id, generator=None, greedy=False,
                 tool=None):
        P, N, device = prompt_ids.shape[1], len(prompt_ids) * num_generations, prompt_ids.device
        if tool is not None:
            tool.begin(N)
        buffers = self._fitting(model, N, P + max_new_tokens,
                                prompt_ids.new_tensor(eos_token_id).view(-1))
        seed = torch.randint(2**62, (1,), generator=generator, device=device).item()
        buffers.start(model, prompt_ids, prompt_mask, num_generations, seed,
                      temperature=temperature, pad_token_id=pad_token_id, greedy=greedy)
        n, completion_of = buffers.N, torch.arange(buffers.N, device=device)
        ids = torch.full((n, max_new_tokens), pad_token_id, device=device)
        logps, drawn, lengths = torch.zeros(ids.shape, device=device), torch.ones_like(ids), 0

        def write():
            for of_all, of_rows in ((ids, buffers.ids), (logps, buffers.logps),
                                    (drawn, buffers.drawn)):
                of_all[completion_of] = of_rows[:n, :max_new_tokens]

        for t in range(max_new_tokens):
            going = None if tool is None else ~buffers.done[:n]
            if t == 0:
                buffers.draw(n, buffers.generator)      # from the logits of the prompts
            else:
                buffers.replay(n, P + t)
            if tool is not None:
                buffers.let_tool_answer(tool, completion_of, going.nonzero().squeeze(1), t)
            if tool is not None or t % CHECK == 0 or t + 1 == max_new_tokens:
                ended = buffers.done[:n]
                left, lengths = torch.stack(((~ended).sum(), buffers.lengths.max())).tolist()
                if left == 0:
                    break
                fewer = halved(n, left)
                if fewer < n:               # the rows that have ended leave, by halves
                    write()
                    n = fewer
                    rows = ended.int().argsort(stable=True)[:n]
                    completion_of = completion_of[rows]
                    buffers.keep(rows, P + t)
        write()
        found = ids[:N, :lengths], logps[:N, :lengths], drawn[:N, :lengths]
        return found[:2] if tool is None else found


def sample(model, prompt_ids, prompt_mask, **options):
    """Like `sample` in model/sampler.py, with buffers and graphs for this call alone."""
    return Graphs()(model, prompt_ids, prompt_mask, **options)


def halved(n, left):
    """Halves n as long as `left` rows fit, and n is above FEWEST."""
    while n > FEWEST and left <= n // 2:
        n //= 2
    return n


class Buffers:
    """What a step reads and writes, for N rows of at most S columns, and graphs of this step.

    A row's prompt begins in column 0, so columns are positions. Rows that don't take part in a
    rollout, or that have ended, still compute, but write no results.
    """

    def __init__(self, model, N, S, eos_ids, fixed, tolerance):
        config, self.device = model.config, eos_ids.device
        self.N, self.S, self.eos_ids = N, S, eos_ids
        self.fixed, self.tolerance = fixed, tolerance           # see Graphs
        self.H, self.K = config.num_attention_heads, config.num_key_value_heads
        self.d, self.eps = config.head_dim, config.rms_norm_eps
        self.weights = Weights(model)

        def zeros(*shape, dtype=torch.long):
            return torch.zeros(*shape, dtype=dtype, device=self.device)

        # A layer's keys and values are its first and last K heads.
        self.cache = zeros(config.num_hidden_layers, N, 2 * self.K, S, self.d,
                           dtype=self.weights.dtype)
        self.tokens, self.column = zeros(N), zeros(N)   # of each row: its newest token, and where
        self.done, self.lengths = zeros(N, dtype=torch.bool), zeros(N)
        self.t = zeros(1)                               # number of the token to be drawn
        self.ids, self.drawn = zeros(N, S), zeros(N, S)
        self.logps = zeros(N, S, dtype=torch.float32)
        self.logits = zeros(N, config.vocab_size, dtype=torch.float32)
        self.noise = torch.zeros_like(self.logits)
        self.temperature = torch.ones(1, device=self.device)
        self.randomness = torch.ones(1, device=self.device)     # 0: greedy
        self.pad = zeros(1)
        self.rows, self.places = (torch.arange(size, device=self.device) for size in (N, S))
        self.rotary = rotary_tables(self.places, rotary_frequencies(config, self.device))
        self.generator = torch.Generator(self.device)
        self.captures = self.device.type == "cuda"
        self.graphs = {}                                # (rows, columns) -> graph

    def size(self):
        """The size of the buffers in bytes."""
        large = self.cache, self.logits, self.noise, *self.weights.copies.values()
        return sum(x.numel() * x.element_size() for x in large)

    def start(self, model, prompt_ids, prompt_mask, G, seed, *, temperature, pad_token_id, greedy):
        """Reads the prompts, (B, P), each padded on the left, and gives each of them G rows."""
        (B, P), prompts = prompt_ids.shape, KVCache()
        logits = model(prompt_ids, prompt_mask, logits_to_keep=1, cache=prompts).squeeze(1)
        lengths = prompt_mask.sum(1)
        prompt_of = torch.arange(B, device=self.device).repeat_interleave(G)            # (N,)
        N = len(prompt_of)
        unpadded = (self.places[:P] + P - lengths[:, None]) % P                         # (B, P)
        unpadded = unpadded[prompt_of, None, :, None].expand(-1, self.K, -1, self.d)
        self.cache.zero_()
        for layer, pair in prompts.layers.items():
            for first, x in zip((0, self.K), pair):
                self.cache[layer, :N, first:first + self.K, :P] = x[prompt_of].gather(2, unpadded)
        self.logits[:N], self.column[:N] = logits[prompt_of], lengths[prompt_of] - 1
        self.column[N:] = 0
        self.done.copy_(self.rows >= N)
        self.temperature.fill_(temperature)
        self.randomness.fill_(0.0 if greedy else 1.0)
        self.pad.fill_(pad_token_id)
        for results, value in ((self.ids, pad_token_id), (self.logps, 0), (self.drawn, 1),
                               (self.lengths, 0), (self.t, 0)):
            results.fill_(value)
        self.seed = seed
        self.generator.manual_seed(seed)

    # --- a step -----------------------------------------------------------------------------------

    def step(self, n, S, generator):
        """Runs the network on the first n rows' newest tokens, and draws the next ones.

        Attention reads the first S columns.
        """
        with torch.autocast(self.device.type, enabled=False):       # weights are cast already
            self.decode(n, S)
            self.draw(n, generator)

    def draw(self, n, generator):
        """Draws a token for each row from the softmax of its logits, and writes it down.

        The argmax of logits plus Gumbel noise -log(e), with e from an exponential distribution, is
        a sample from their softmax (Gumbel, 1954). It needs no sum over the vocabulary.
        """
        logits, done = self.logits[:n] / self.temperature, self.done[:n]                # (n, V)
        noise = -self.noise[:n].exponential_(generator=generator).log()
        tokens = (logits + self.randomness * noise).argmax(-1)                          # (n,)
        logps = logits.gather(-1, tokens[:, None]).squeeze(1) - logits.logsumexp(-1)
        tokens = torch.where(done, self.pad, tokens)
        self.tokens[:n] = tokens
        self.ids[:n].index_copy_(1, self.t, tokens[:, None])
        self.logps[:n].index_copy_(1, self.t, logps.masked_fill(done, 0)[:, None])
        self.lengths[:n] += ~done
        self.column[:n] += 1
        self.done[:n] |= (tokens[:, None] == self.eos_ids).any(1)
        self.t += 1

    def decode(self, n, S):
        """Runs the network on the newest tokens of the first n rows, and writes the logits."""
        H, K, d, weights, column = self.H, self.K, self.d, self.weights, self.column[:n]
        rotary = [table[column] for table in self.rotary]                               # (n, 1, d)
        bias = torch.zeros(n, 1, 1, S, dtype=weights.dtype, device=self.device)
        bias.masked_fill_((self.places[:S] > column[:, None])[:, None, None], float("-inf"))
        bias = bias.expand(n, K, H // K, S)
        x = F.embedding(self.tokens[:n], weights.embedding)                             # (n, D)
        for layer, cache in zip(weights.layers, self.cache):
            heads = layer.qkv(self.normed(x, layer.attention_norm)).view(n, H + 2 * K, d)
            qk = heads[:, :H + K]
            if layer.head_norm is not None:             # of queries and keys together
                qk = F.rms_norm(qk, (d,), None, self.eps) * layer.head_norm
            qk = rotate(qk, rotary).to(weights.dtype)
            new = torch.cat((qk[:, H:], heads[:, H + K:]), 1)                           # (n, 2K, d)
            cache[self.rows[:n], :, column] = new
            out = F.scaled_dot_product_attention(       # (n, K, H/K, d)
                qk[:, :H].reshape(n, K, H // K, d), cache[:n, :K, :S], cache[:n, K:, :S],
                attn_mask=bias)
            x = x + layer.out(out.reshape(n, H * d))
            gate, up = layer.gate_up(self.normed(x, layer.mlp_norm)).chunk(2, -1)
            x = x + layer.down(F.silu(gate) * up)
        x = F.rms_norm(x, x.shape[-1:], None, self.eps) * weights.norm
        self.logits[:n] = F.linear(x.float(), weights.head.float())

    def normed(self, x, weight):
        return (F.rms_norm(x, x.shape[-1:], None, self.eps) * weight).to(self.weights.dtype)

    def let_tool_answer(self, tool, completion_of, rows, t):
        """Shows the tool the tokens of these rows, and writes down what it makes of them."""
        tokens, is_drawn, goes_on = tool.take(
            completion_of[rows], self.tokens[rows], ~self.done[rows])
        self.tokens[rows] = self.ids[rows, t] = tokens
        self.drawn[rows, t], self.done[rows] = is_drawn, ~goes_on
        self.logps[rows, t] *= is_drawn

    def keep(self, rows, columns):
        """Moves these rows, (n,), to the front."""
        n = len(rows)
        for layer in self.cache:        # one by one, which needs less memory
            layer[:n, :, :columns] = layer[rows, :, :columns]
        for one in (self.tokens, self.column, self.done, self.lengths, self.ids, self.drawn,
                    self.logps):
            one[:n] = one[rows]

    # --- graphs -----------------------------------------------------------------------------------

    def replay(self, n, columns):
        """Takes a step that reads so many columns, by its graph, which is captured if it is new."""
        S = COLUMNS
        while S < columns:
            S *= 2
        S = min(S, self.S)
        expected = None
        if self.captures and (n, S) not in self.graphs:
            expected = self.capture(n, S)
        if not self.captures:
            return self.step(n, S, self.generator)
        graph = self.graphs.pop((n, S))
        self.graphs[n, S] = graph               # the last one is the one used last
        graph.replay()
        if expected is not None:
            self.compare(self.logits[:n], expected)

    def capture(self, n, S):
        """Captures the graph of a step. Returns the logits, (n, V), that it should compute.

        They come from the same step without a graph, which also lets CUDA choose its kernels.
        """
        state = self.tokens, self.column, self.done, self.lengths, self.t, self.ids, self.logps
        before = [one.clone() for one in state]
        self.step(n, S, torch.Generator(self.device))           # the rollout's own stays as it is
        expected = self.logits[:n].clone()
        for one, old in zip(state, before):
            one.copy_(old)
        if len(self.graphs) == MOST_GRAPHS:
            del self.graphs[next(iter(self.graphs))]
        try:
            self.graphs[n, S] = self.record(n, S)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:           # the class of CUDA's errors
            self.graphs.clear()
            self.captures, self.generator = False, torch.Generator(self.device)
            self.generator.manual_seed(self.seed + 1)
            warnings.warn("sampling takes longer, because no CUDA graph could be captured "
                          f"({reason(error)})", stacklevel=2)
        return expected

    def record(self, n, S):
        """Returns a CUDA graph of a step, which is recorded, but not run."""
        graph, others = torch.cuda.CUDAGraph(), next(iter(self.graphs.values()), None)
        graph.register_generator_state(self.generator)
        with torch.cuda.graph(graph, pool=others and others.pool()):    # one pool for all
            self.step(n, S, self.generator)
        return graph

    def compare(self, logits, expected):
        """Raises a UserError if a graph's logits are not those of the step that it recorded."""
        same = (logits == expected) | (logits.isnan() & expected.isnan())
        difference = (logits - expected).abs().masked_fill(same, 0)
        in_float32 = self.weights.dtype == torch.float32        # else rounding makes outliers
        difference = (difference.max() if in_float32 else difference.mean()).item()
        if not difference <= self.tolerance:
            raise UserError(f"a CUDA graph's logits differ by {difference:.1g} from those of the "
                            "same step without it; pass --sampler plain, and report this")


class Layer:
    """A layer's weights: products qkv, out, gate_up and down; attention_, head_ and mlp_norm."""

    def __init__(self, weights, layer, number):
        attention, mlp = layer.self_attn, layer.mlp
        self.attention_norm = weights.in_place(layer.input_layernorm.weight)
        self.mlp_norm = weights.in_place(layer.post_attention_layernorm.weight)
        self.head_norm = None
        if isinstance(attention.q_norm, RMSNorm):
            config = weights.config
            self.head_norm = weights.copied((number, "head_norm"), [    # (H + K, d)
                *[attention.q_norm.weight[None]] * config.num_attention_heads,
                *[attention.k_norm.weight[None]] * config.num_key_value_heads],
                attention.q_norm.weight.dtype)
        self.qkv = Product(weights, (number, "qkv"), [
            attention.q_proj, attention.k_proj, attention.v_proj])
        self.out = Product(weights, (number, "out"), [attention.o_proj])
        self.gate_up = Product(weights, (number, "gate_up"), [mlp.gate_proj, mlp.up_proj])
        self.down = Product(weights, (number, "down"), [mlp.down_proj])


class Product:
    """The products of one input with the matrices of several linear layers, joined.

    Matrices that need a cast are copied into one. An adapter is merged into float32 matrices, but
    not into bfloat16, where it would be rounded away: there its A and B are products of their own.
    """

    def __init__(self, weights, name, layers):
        adapted, dtype = isinstance(layers[0], LoRALinear), weights.dtype
        bases = [layer.base if adapted else layer for layer in layers]
        merges = adapted and not weights.autocast
        matrices = [layer.merged() if merges else layer.weight for layer in layers]
        joins = merges or any(matrix.dtype != dtype for matrix in matrices)
        self.parts, self.adapters = [], []              # (matrix, bias), (A, B)
        for i in range(1 if joins else len(layers)):
            those = slice(None) if joins else slice(i, i + 1)
            matrix = (weights.copied((*name, "matrix"), matrices, dtype) if joins
                      else weights.in_place(matrices[i]))
            bias = None
            if bases[0].bias is not None:
                bias = weights.copied((*name, "bias", i), [x.bias for x in bases[those]], dtype)
            self.parts.append((matrix, bias))
        if adapted and not merges:
            for i, layer in enumerate(layers):
                A, B = layer.lora_A, layer.scale * layer.lora_B
                self.adapters.append((weights.copied((*name, "A", i), [A], dtype),
                                      weights.copied((*name, "B", i), [B], dtype)))

    def __call__(self, x):
        y = joined([F.linear(x, matrix, bias) for matrix, bias in self.parts])
        if self.adapters:
            y = y + joined([F.linear(F.linear(x, A), B) for A, B in self.adapters])
        return y


def joined(parts):
    return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


class Weights:
    """A model's tensors as a step reads them: copies whose addresses stay, or the model's own."""

    def __init__(self, model):
        self.config, device = model.config, model.lm_head.weight.device
        self.dtype = products_dtype(device, model.model.layers[0].mlp.down_proj.weight.dtype)
        self.autocast = torch.is_autocast_enabled(device.type)
        self.copies, self.addresses = {}, None

    def read(self, model):
        """Reads all weights. Returns True if one that is read in place has another address."""
        before, self.addresses, decoder = self.addresses, [], model.model
        self.embedding = self.in_place(decoder.embed_tokens.weight)
        self.norm = self.in_place(decoder.norm.weight)
        self.head = self.in_place(model.lm_head.weight)
        self.layers = [Layer(self, layer, i) for i, layer in enumerate(decoder.layers)]
        return before is not None and before != self.addresses

    def in_place(self, tensor):
        self.addresses.append(tensor.data_ptr())
        return tensor

    def copied(self, name, tensors, dtype):
        """Returns these tensors, joined along their rows, in the buffer of this name."""
        sizes = [len(tensor) for tensor in tensors]
        if name not in self.copies:
            self.copies[name] = torch.empty(sum(sizes), *tensors[0].shape[1:], dtype=dtype,
                                            device=tensors[0].device)
        for part, tensor in zip(self.copies[name].split(sizes), tensors):
            part.copy_(tensor)
        return self.copies[name]

    def release(self):
        """Drops the model's own tensors, so that a copy of a sharded model can be freed."""
        self.embedding = self.norm = self.head = self.layers = None
