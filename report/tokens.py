"""A completion's tokens as texts, each with the log-probability it was sampled with."""


def add_tokens(rows, rollout, tokenizer):
    """Give each of describe()'s rows "tokens" and "token_logps", as long as each other.

    The texts together are the completion; the EOS that ends it is an empty one. With process
    supervision also "token_advantages", since there each token has its own.
    """
    fields = {"token_logps": rollout.sampling_logps.tolist()}
    if rollout.advantages.dim() == 2:
        fields["token_advantages"] = rollout.advantages.tolist()
    for i, (row, ids) in enumerate(zip(rows, rollout.token_ids())):
        row["tokens"] = token_texts(ids, tokenizer)
        for name, values in fields.items():
            row[name] = [round(value, 4) for value in values[i][:len(ids)]]
    return rows


def token_texts(ids, tokenizer):
    """What each token adds to the text.

    Tokens are decoded after their predecessor, since some tokenizers drop a leading space. One that
    holds a part of a character adds nothing, and the last of its parts the whole character.
    """
    texts, start, end = [], 0, 0        # ids[start:end] is the context of the next token
    for k in range(1, len(ids) + 1):
        context, text = (tokenizer.decode(part, skip_special_tokens=True)
                         for part in (ids[start:end], ids[start:k]))
        if text.endswith("\ufffd") and k < len(ids):
            texts.append("")
        else:
            texts.append(text[len(context):])
            start, end = end, k
    return texts
