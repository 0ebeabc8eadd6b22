"""Turns: while a completion is sampled, a tool answers, and the policy reads on.

So some tokens of a completion were not chosen by the policy. It reads them and never learns them:
of a Rollout, `attention` has all of them, and `mask` only those that the policy chose. All else is
GRPO as before.
"""
import torch

from model.load import decode


class Turns:
    """What a tool adds to N completions; the keyword `tool` of a sampler.

    tool: a Tool of tools.py. batch: of dataset/prompts.py, G completions for each prompt, which
    share its columns. rng gives each of them a number, which the tool finds in the column `seeds`.

    Where a row draws the tool's stop token, the tool is asked. Its text is queued, and the row
    takes these tokens before it draws again. No text is encoded a second time.
    """

    def __init__(self, tool, batch, G, rng):
        columns = {"prompts": batch["prompts"], **batch["columns"]}
        count = len(batch["prompts"]) * G
        self.tool, self.tokenizer = tool, tool.tokenizer
        self.columns = {name: [value for value in values for _ in range(G)]
                        for name, values in columns.items()}
        seeds = torch.randint(2**31, (count,), generator=rng, device=rng.device)
        self.columns["seeds"] = seeds.tolist()
        self.texts = [[] for _ in range(count)]     # of each row: own words, answer, own words, ...
        self.own = [[] for _ in range(count)]       # the ids that it drew since
        self.queue = [[] for _ in range(count)]     # the ids that it is yet to read
        self.failures = [0] * count                 # answers that were errors
        self.lengths = [0] * count
        self.ended = [False] * count                # False: cut off at the length limit
        self.first, self.end = 0, 0                 # the rows that are being sampled

    def begin(self, count):
        """The next `count` rows are to be sampled: a batch may come in slices."""
        self.first, self.end = self.end, self.end + count

    def stops(self, place):
        """The ids at which a sampler that writes ahead must stop this row of the slice."""
        asks = self.calls(self.first + place) < self.tool.max_calls
        return [self.tool.stop_id] if asks else []

    def waits(self, place):
        """Whether this row of the slice has yet to read words of the tool."""
        return bool(self.queue[self.first + place])

    def take(self, places, tokens, alive):
        """What happens to tokens just drawn, (n,): the tokens, which were drawn, which rows go on.

        places (n,): the row of each, counted from the slice's first. alive (n,): not an EOS.
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
                goes_on[i] = True       # an end token that is answered ends only a turn
        for row, on in zip(rows, goes_on):
            self.ended[row] = not on
        for row, (answer, _) in zip(in_vain, self.answers_to(in_vain)[1]):
            self.ended[row] = answer is None    # else it wanted to go on: it is cut off
        return tokens.new_tensor(ids), tokens.new_tensor(is_drawn), alive.new_tensor(goes_on)

    def calls(self, row):
        return len(self.texts[row]) // 2

    def ask(self, rows):
        """The tool's answers to these rows, each with whether it is an error; they are queued."""
        histories, answers = self.answers_to(rows)
        for row, history, (answer, failed) in zip(rows, histories, answers):
            if answer is not None:
                self.texts[row], self.own[row] = [*history, answer], []
                self.queue[row] = self.tokenizer(answer, add_special_tokens=False)["input_ids"]
                self.failures[row] += failed
        return answers

    def answers_to(self, rows):
        """The histories of these rows, and the tool's answers."""
        histories = []
        for row in rows:        # what it wrote since the last answer, through the stop token
            own = self.tokenizer.decode(self.own[row][:-1]) + self.tool.stop
            histories.append([*self.texts[row], own])
        columns = {name: [values[row] for row in rows] for name, values in self.columns.items()}
        return histories, self.tool(histories, columns) if rows else []

    def finished(self, eos_ids):
        """N lists of texts: own words and answers in turn, own words at both ends."""
        for texts, unread in zip(self.texts, self.queue):
            if unread:                  # of an answer that did not fit
                ids = self.tokenizer(texts[-1], add_special_tokens=False)["input_ids"]
                texts[-1] = self.tokenizer.decode(ids[:len(ids) - len(unread)])
        last = [decode(ids, self.tokenizer, eos_ids) for ids in self.own]
        return [[*texts, own] for texts, own in zip(self.texts, last)]
