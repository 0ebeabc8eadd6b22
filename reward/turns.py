"""Turns: a tool answers while a completion is being sampled, and the policy continues from there.

Some tokens of a completion are therefore the tool's. The policy reads these tokens, but is not
trained on them: in a Rollout, completion_mask includes them, and loss_mask doesn't. Everything else
is the same as in GRPO without a tool.
"""
import torch

from model.load import decode


class Turns:
    """Adds a tool's answers to N completions; passed to a sampler as `tool`.

    tool: a Tool of tools.py. batch: from dataset/prompts.py, with G completions for each prompt,
    which share its columns. rng draws one number per completion, for the tool's column `seeds`.

    When a row draws the tool's stop token, the tool is called. Its answer is queued as tokens, and
    the row takes these tokens before it draws again. No text is encoded a second time.
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
        """Moves on to the next `count` rows, because a batch may be sampled in several slices."""
        self.first, self.end = self.end, self.end + count

    def stops(self, place):
        """Returns the ids at which a sampler that writes ahead must stop this row of the slice."""
        asks = self.calls(self.first + place) < self.tool.max_calls
        return [self.tool.stop_id] if asks else []

    def waits(self, place):
        """Whether this row of the slice has yet to read tokens of the tool."""
        return bool(self.queue[self.first + place])

    def take(self, places, tokens, alive):
        """Takes drawn tokens (n,); returns tokens to append, which were drawn, which rows continue.

        places (n,): each token's row within the slice. alive (n,): whether the token is not an EOS.
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
        """Queues the tool's answers to these rows; returns [(answer, is it an error)]."""
        histories, answers = self.answers_to(rows)
        for row, history, (answer, failed) in zip(rows, histories, answers):
            if answer is not None:
                self.texts[row], self.own[row] = [*history, answer], []
                self.queue[row] = self.tokenizer(answer, add_special_tokens=False)["input_ids"]
                self.failures[row] += failed
        return answers

    def answers_to(self, rows):
        """Returns the histories of these rows, and the tool's answers."""
        histories = []
        for row in rows:        # own: what the row wrote since the last answer
            own = self.tokenizer.decode(self.own[row][:-1]) + self.tool.stop
            histories.append([*self.texts[row], own])
        columns = {name: [values[row] for row in rows] for name, values in self.columns.items()}
        return histories, self.tool(histories, columns) if rows else []

    def finished(self, eos_ids):
        """Returns N lists of texts: own words, answer, own words, ..., ending with own words."""
        for texts, unread in zip(self.texts, self.queue):
            if unread:                  # the rest of an answer that did not fit
                ids = self.tokenizer(texts[-1], add_special_tokens=False)["input_ids"]
                texts[-1] = self.tokenizer.decode(ids[:len(ids) - len(unread)])
        last = [decode(ids, self.tokenizer, eos_ids) for ids in self.own]
        return [[*texts, own] for texts, own in zip(self.texts, last)]
