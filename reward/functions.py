"""Rule-based reward functions, with TRL's signature:

    f(prompts: list[str], completions: list[str], **columns) -> list[float | None]

`columns` holds the dataset's other fields (such as `answer`), `messages` (the chat before each
completion), `completion_ids`, `own_words` and `own_ids`. own_words and own_ids are the completions
and their token ids without the answers of a tool. Most functions read only own_words or own_ids,
so that a tool's answers earn no reward. A function returns None for a completion that it can't
score. If the chat template ends a prompt with `<think>`, the completions begin with `<think>`.
"""
from errors import UserError

from .answers import (
    TAGS,
    after_thinking,
    answer_block,
    boxed,
    extract_answer,
    is_mathematics,
    read,
    same_answer,
)
from .child import CHILD, LONGEST

NGRAM = 4               # tokens per n-gram, in repetition_reward


def accuracy_reward(prompts, completions, answer=None, own_words=None, **columns):
    """The reward is 1 if a completion's answer equals the gold answer in the column `answer`, or 0.

    A completion may consist of only the answer. A gold answer may be a list of accepted answers.
    Expressions are compared by math-verify. The reward is None if there is no gold answer, or if
    math-verify has exceeded its time limit too often in this step.
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
        if said is None:                        # it took too long
            rewards[row] = None
        elif rewards[row] is not None:
            rewards[row] = max(rewards[row], float(said))
    return rewards


def same(reply, gold):
    """Returns True, False, or a pair of expressions that math-verify has to compare."""
    if gold is None:
        return False
    gold = gold_text(gold)
    answer = extract_answer(reply)
    found = same_answer(answer, gold)
    rest = after_thinking(reply)
    if found is False and answer_block(reply) is None and not any(tag in rest for tag in TAGS):
        found = same_answer(rest, gold)         # the reply may consist of only the answer
    return found if len(str(found)) <= LONGEST else False


def gold_text(gold):
    """Returns the gold answer alone: the text after ####, the content of a box, or all of it."""
    _, hashes, text = str(gold).rpartition("####")
    text = text.strip().partition("\n")[0] if hashes else text
    text = boxed(text, text)
    if not text.strip():
        raise UserError("the column answer is empty; add the gold answer, or leave the field out")
    return text


def kind_of(gold):
    """Returns the kind of a gold answer: "number", "words" or "expression"."""
    number, _, words, _ = read(gold_text(gold[0] if isinstance(gold, list) else gold))
    if number is not None:
        return "number"
    return "expression" if is_mathematics(words) else "words"


def soft_overlong_reward(max_completion_length):
    """Returns a reward function: DAPO's soft overlong punishment (arXiv 2503.14476, equation 13).

    The reward falls linearly from 0 to -1 over the last fifth of max_completion_length.
    """
    cache = max(1, max_completion_length // 5)

    def soft_overlong(prompts, completions, completion_ids, **columns):
        return [max(-1.0, min(0.0, (max_completion_length - cache - len(ids)) / cache))
                for ids in completion_ids]

    return soft_overlong


def repetition_reward(prompts, completions, completion_ids, own_ids=None, **columns):
    """The reward is (number of distinct n-grams / number of n-grams) - 1, so it is at most 0.

    The n-grams consist of token ids, not words, because languages like Chinese have no spaces.
    """
    rewards = []
    for ids in own_ids or completion_ids:
        ngrams = [tuple(ids[i:i + NGRAM]) for i in range(len(ids) - NGRAM + 1)]
        rewards.append(len(set(ngrams)) / len(ngrams) - 1 if ngrams else 0.0)
    return rewards


def reasoning_gym_reward(prompts, completions, answer, metadata, **columns):
    """The reward is the score from 0 to 1 that reasoning-gym gives to the extracted answer.

    The reward is also 1 if the whole completion has a score of 1. Lower scores of the completion
    are ignored, because many scorers give such scores to any text that contains the answer.
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
