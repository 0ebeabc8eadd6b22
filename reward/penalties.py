"""Penalties: rewards of 0 or less, for completions that run long or repeat themselves."""


def soft_overlong_reward(max_completion_length, cache=None):
    """A reward function: DAPO's soft overlong punishment (arXiv 2503.14476, equation 13).

    With length in tokens and L = max_completion_length:

        0                                   length <= L - cache
        (L - cache - length) / cache        L - cache < length <= L, falling from 0 to -1
        -1                                  length > L

    With a hard limit, a single token too many costs everything, without warning. Here the policy
    feels the limit coming. `cache` defaults to a fifth of L.
    """
    cache = max(1, max_completion_length // 5) if cache is None else cache

    def soft_overlong(prompts, completions, completion_ids, **columns):
        return [max(-1.0, min(0.0, (max_completion_length - cache - len(ids)) / cache))
                for ids in completion_ids]

    return soft_overlong


def repetition_reward(prompts, completions, completion_ids, n=4, **columns):
    """-(1 - distinct n-grams / n-grams) of the token ids: 0 without repetition, near -1 in a loop.

    Token ids rather than words, so that it works for Chinese and other text without spaces.
    """
    rewards = []
    for ids in completion_ids:
        ngrams = [tuple(ids[i:i + n]) for i in range(len(ids) - n + 1)]
        rewards.append(len(set(ngrams)) / len(ngrams) - 1 if ngrams else 0.0)
    return rewards
