"""Multi-turn completions: a tool answers during sampling, and then the policy continues.

A completion therefore contains tokens of the tool's answers. The policy reads these tokens, but is
not trained on them: completion_mask includes the tool's tokens, and loss_mask excludes them.
"""
import torch

from model.load import decode


class Turns:
    """Adds a tool's answers to the completions that a sampler is generating.

    tool: a Tool (reward/tools.py). batch: a batch of prompts from a PromptCollator. G: the number
    of completions per prompt. rng: a torch.Generator, which draws the seeds for the tool.

    A completion calls the tool by sampling the tool's stop token. The tokens of the answer are
    then appended to the completion one by one, before sampling continues.
    """

    def __init__(self, tool, batch, G, rng):
        columns = {"prompts": batch["prompts"], **batch["columns"]}
        count = len(batch["prompts"]) * G
        self.tool, self.tokenizer = tool, tool.tokenizer
        self.columns = {name: [value for value in values for _ in range(G)]
                        for name, values in columns.items()}
        seeds = torch.randint(2**31, (count,), generator=rng, device=rng.device)
        self.columns["seeds"] = seeds.tolist()
        self.texts = [[] for _ in range(count)]     # per row: own words, answer, own words, ...
        self.own = [[] for _ in range(count)]       # ids drawn since the last answer
        self.queue = [[] for _ in range(count)]     # ids of the answer, not yet read
        self.failures = [0] * count                 # number of answers that were errors
        self.lengths = [0] * count
        self.ended = [False] * count                # False: truncated at the length limit
        self.first, self.end = 0, 0                 # range of rows that are being sampled

    def begin(self, count):
        """Moves on to the next `count` completions. A batch may be sampled in several parts."""
        self.first, self.end = self.end, self.end + count

    def stops(self, place):
        """Returns the token ids, besides EOS, at which vLLM must stop sampling this completion."""
        asks = self.calls(self.first + place) < self.tool.max_calls
        return [self.tool.stop_id] if asks else []

    def waits(self, place):
        """Returns True while tokens of the tool's answer still have to be added to this row."""
        return bool(self.queue[self.first + place])

    def take(self, places, tokens, alive):
        """Returns (tokens to append, is_drawn, goes_on), each of shape (n,).

        places (n,): the index of each token's completion. alive (n,): False for EOS tokens.
        is_drawn: False for tokens of the tool. goes_on: False if the completion has ended.
        """
        rows = [self.first + place for place in places.tolist()]
        ids, goes_on = tokens.tolist(), alive.tolist()
        is_drawn, asking, in_vain = [], [], []
        for i, row in enumerate(rows):
            if self.queue[row]:
                is_drawn.append(False)
                ids[i], goes_on[i] = self.queue[row].pop(0), True
            else:
                is_drawn.append(True)
                self.own[row].append(ids[i])
                if ids[i] == self.tool.stop_id and self.calls(row) < self.tool.max_calls:
                    asking.append(i)
                elif ids[i] == self.tool.stop_id and not goes_on[i]:
                    in_vain.append(row)
            self.lengths[row] += 1
        for i, (answer, _) in zip(asking, self.ask([rows[i] for i in asking])):
            if answer is not None:
                goes_on[i] = True       # an end token that gets an answer only ends a turn
        for row, on in zip(rows, goes_on):
            self.ended[row] = not on
        for row, (answer, _) in zip(in_vain, self.answers_to(in_vain)[1]):
            self.ended[row] = answer is None    # with an answer, it would go on: truncated
        return tokens.new_tensor(ids), tokens.new_tensor(is_drawn), alive.new_tensor(goes_on)

    def calls(self, row):
        return len(self.texts[row]) // 2

    def ask(self, rows):
        """Calls the tool for these completions, and queues its answers for `take`."""
        histories, answers = self.answers_to(rows)
        for row, history, (answer, failed) in zip(rows, histories, answers):
            if answer is not None:
                self.texts[row], self.own[row] = [*history, answer], []
                self.queue[row] = self.tokenizer(answer, add_special_tokens=False)["input_ids"]
                self.failures[row] += failed
        return answers

    def answers_to(self, rows):
        """Calls the tool for these completions. Returns (histories, answers), two lists."""
        histories = []
        for row in rows:        # own: what the row wrote since the last answer
            own = self.tokenizer.decode(self.own[row][:-1]) + self.tool.stop
            histories.append([*self.texts[row], own])
        columns = {name: [values[row] for row in rows] for name, values in self.columns.items()}
        return histories, self.tool(histories, columns) if rows else []

    def finished(self, eos_ids):
        """Returns a list of texts for each completion, alternating between policy and tool."""
        for texts, unread in zip(self.texts, self.queue):
            if unread:                  # the rest of an answer that did not fit
                ids = self.tokenizer(texts[-1], add_special_tokens=False)["input_ids"]
                texts[-1] = self.tokenizer.decode(ids[:len(ids) - len(unread)])
        last = [decode(ids, self.tokenizer, eos_ids) for ids in self.own]
        return [[*texts, own] for texts, own in zip(self.texts, last)]
