"""Rule-based reward functions, with TRL's signature:

    f(prompts: list[str], completions: list[str], **columns) -> list[float | None]

`columns` holds the dataset's other fields (`answer`, ...), `messages` (the chat before each
completion), `completion_ids`, and `own_words` and `own_ids`, which leave out a tool's words. Most
rules read only these two, so that a tool's words earn nothing; overlong, reasoning_gym and rm read
the whole completion. Rules have no options, since a column of the same name would set them. None
means that the reward does not apply. If the template opens `<think>`, completions begin with it.
"""
from .answers import TAGS, extract_answer, gold_text, read, same_answer
from .child import CHILD, LONGEST

NGRAM = 4               # tokens per n-gram, in repetition_reward


def accuracy_reward(prompts, completions, answer=None, own_words=None, **columns):
    """1 if the answer in a completion equals the gold answer in the column `answer`, else 0.

    The whole completion may also be the answer, and `answer` may be a list of right answers.
    reward/answers.py compares the two, and leaves expressions to math-verify (reward/child.py). The
    reward is None without a gold answer, or if math-verify was late too often in this step.
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
    """Whether a completion is right: True, False, or two expressions to compare."""
    if gold is None:
        return False
    bare = not any(tag in reply for tag in TAGS)
    if bare and read(reply)[2] == read(gold_text(gold))[2]:
        return True
    pair = same_answer(extract_answer(reply), gold)
    return pair if len(str(pair)) <= LONGEST else False


def soft_overlong_reward(max_completion_length):
    """Returns DAPO's soft overlong punishment, a reward function (arXiv 2503.14476, equation 13).

    The reward falls linearly from 0 to -1 over the last fifth of max_completion_length, so that a
    completion which comes close to the limit already gets a small penalty.
    """
    cache = max(1, max_completion_length // 5)

    def soft_overlong(prompts, completions, completion_ids, **columns):
        return [max(-1.0, min(0.0, (max_completion_length - cache - len(ids)) / cache))
                for ids in completion_ids]

    return soft_overlong


def repetition_reward(prompts, completions, completion_ids, own_ids=None, **columns):
    """-(1 - distinct n-grams / n-grams) of the token ids: 0 without repetition, near -1 in a loop.

    It counts token ids rather than words, so it also works for text without spaces, e.g. Chinese.
    """
    rewards = []
    for ids in own_ids or completion_ids:
        ngrams = [tuple(ids[i:i + NGRAM]) for i in range(len(ids) - NGRAM + 1)]
        rewards.append(len(set(ngrams)) / len(ngrams) - 1 if ngrams else 0.0)
    return rewards


def reasoning_gym_reward(prompts, completions, answer, metadata, **columns):
    """The score, 0 to 1, that the task's own scorer in reasoning-gym gives the extracted answer.

    It is also 1 if the whole completion scores 1. Lower scores of the whole completion don't count,
    because many scorers give partial credit to any text that contains the answer.
    """
    rows = [row for row, gold in enumerate(answer) if gold is not None and metadata[row]]
    questions = [("reasoning_gym", text, answer[row], metadata[row]) for row in rows
                 for text in (extract_answer(completions[row]), completions[row].strip())]
    said, rewards = CHILD.ask(questions), [None] * len(completions)
    for row, of_answer, of_all in zip(rows, said[::2], said[1::2]):
        if of_answer is not None and of_all is not None:
            rewards[row] = max(of_answer, of_all // 1)
    return rewards


# The names that --reward_funcs knows.
RULES = {"accuracy": accuracy_reward, "repetition": repetition_reward,
         "reasoning_gym": reasoning_gym_reward}
