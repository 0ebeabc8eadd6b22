"""Penalties: rewards of 0 or less, for running long and for running in circles."""


def soft_overlong_reward(max_completion_length, cache=None):
    """A reward function: the soft overlong punishment of DAPO (arXiv 2503.14476, equation 13), from the length in tokens.

        0                            up to L - cache tokens          L = max_completion_length
        (L - cache - length) / cache from there down to -1 at L

    A hard limit punishes the one token too many as much as all that came before it; here a policy feels the limit coming.
    `cache` is a fifth of L where it is not given.
    """
    cache = max(1, max_completion_length // 5) if cache is None else cache

    def soft_overlong(prompts, completions, completion_ids, **columns):
        return [max(-1.0, min(0.0, (max_completion_length - cache - len(ids)) / cache)) for ids in completion_ids]

    return soft_overlong


def repetition_reward(prompts, completions, completion_ids, n=4, **columns):
    """-(1 - distinct n-grams / n-grams) of the token ids: 0 where nothing recurs, close to -1 for a loop.

    Over ids, not words: text without spaces between words, such as Chinese, repeats itself too.
    """
    rewards = []
    for ids in completion_ids:
        ngrams = [tuple(ids[i:i + n]) for i in range(len(ids) - n + 1)]
        rewards.append(len(set(ngrams)) / len(ngrams) - 1 if ngrams else 0.0)
    return rewards
