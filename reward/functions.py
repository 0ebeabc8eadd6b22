"""Rewards by rule: one function each, with TRL's signature.

    f(prompts: list[str], completions: list[str], **columns) -> list[float | None]

`columns` holds the dataset's other fields (`answer`, ...), `messages` (the chat before each
completion), `completion_ids`, and `own_words` and `own_ids`, both without a tool's. Rules read
these: nobody is paid for a tool's words. A rule has no options: a column of that name would set
them.
None: the reward does not apply. If the chat template opens `<think>`, completions begin with it.
"""
from .answers import TAGS, extract_answer, gold_text, read, same_answer
from .child import CHILD, LONGEST

NGRAM = 4               # tokens; of repetition_reward


def accuracy_reward(prompts, completions, answer=None, own_words=None, **columns):
    """1 if the reply's answer, or all of it, equals the gold answer in the column `answer`, else 0.

    Any of a list of gold answers is right. reward/answers.py says what is equal, and leaves
    expressions to math-verify (reward/child.py). None if there is no gold answer, or if
    math-verify was late too often in this step to be asked.
    """
    rewards, questions, rows = [], [], []
    for reply, gold in zip(own_words or completions, answer or [None] * len(completions)):
        found = [same(reply, one) for one in (gold if isinstance(gold, list) else [gold])]
        rewards.append(None if gold is None else float(True in found))
        if True not in found:
            for pair in filter(None, found):
                rows.append(len(rewards) - 1)
                questions.append(("math_verify", *pair))
    for row, said in zip(rows, CHILD.ask(questions)):
        rewards[row] = None if None in (said, rewards[row]) else max(rewards[row], float(said))
    return rewards


def same(reply, gold):
    """Whether a reply is right: True, False, or two expressions to compare."""
    if gold is None:
        return False
    bare = not any(tag in reply for tag in TAGS)
    if bare and read(reply)[2] == read(gold_text(gold))[2]:
        return True
    pair = same_answer(extract_answer(reply), gold)
    return pair if len(str(pair)) <= LONGEST else False


def soft_overlong_reward(max_completion_length):
    """A reward function: DAPO's soft overlong punishment (arXiv 2503.14476, equation 13).

    Over the last fifth of max_completion_length it falls from 0 to -1. With a hard limit, a single
    token too many costs everything, without warning. Here the policy feels the limit coming.
    """
    cache = max(1, max_completion_length // 5)

    def soft_overlong(prompts, completions, completion_ids, **columns):
        return [max(-1.0, min(0.0, (max_completion_length - cache - len(ids)) / cache))
                for ids in completion_ids]

    return soft_overlong


def repetition_reward(prompts, completions, completion_ids, own_ids=None, **columns):
    """-(1 - distinct n-grams / n-grams) of the token ids: 0 without repetition, near -1 in a loop.

    Token ids rather than words, so that it works for Chinese and other text without spaces.
    """
    rewards = []
    for ids in own_ids or completion_ids:
        ngrams = [tuple(ids[i:i + NGRAM]) for i in range(len(ids) - NGRAM + 1)]
        rewards.append(len(set(ngrams)) / len(ngrams) - 1 if ngrams else 0.0)
    return rewards


def reasoning_gym_reward(prompts, completions, answer, metadata, **columns):
    """What the task's own judge gives the extracted answer, 0 to 1; 1 too if all of it is right.

    All of a reply is worth nothing less: many a judge pays a share for any text with the answer.
    """
    rows = [row for row, gold in enumerate(answer) if gold is not None and metadata[row]]
    questions = [("reasoning_gym", text, answer[row], metadata[row]) for row in rows
                 for text in (extract_answer(completions[row]), completions[row].strip())]
    said, rewards = CHILD.ask(questions), [None] * len(completions)
    for row, of_answer, of_all in zip(rows, said[::2], said[1::2]):
        if of_answer is not None and of_all is not None:
            rewards[row] = max(of_answer, of_all // 1)
    return rewards


# By the names that --reward_funcs knows.
RULES = {"accuracy": accuracy_reward, "repetition": repetition_reward,
         "reasoning_gym": reasoning_gym_reward}
