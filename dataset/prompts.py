"""Reads prompts from a jsonl file, and makes batches of prompts for the trainer."""
import copy
import json
import math
import re
import reprlib
import warnings
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch

from dataset.jsonl import parse, read_lines
from errors import COUNT, GIVEN, UserError

HERE = Path(__file__).resolve().parent
MOST_STEPS = 300        # in a run without --max_steps and --epochs
PROMPT_FIELDS = ("conversations", "prompt", "question", "problem", "messages")
# Reward functions get a line's other fields as keyword arguments, in addition to these.
RESERVED = {"prompts", "completions", "messages", "completion_ids", "own_words", "own_ids",
            "histories", "seeds", "reward_funcs", "reward_weights", "self"}
# Switches for thinking in the chat templates of Qwen3, MiniMind-3, DeepSeek-V3.1 and Granite.
SWITCHES = "enable_thinking", "open_thinking", "thinking"
ROLES = ("system", "user", "assistant", "tool")
# --system_prompt r1: asks for the format that format_reward and tag_reward check.
R1_SYSTEM_PROMPT = (
    "Think before you answer. Write your reasoning between <think> and </think>, then only the "
    "final answer between <answer> and </answer>, each tag on a line of its own, and nothing else:"
    "\n<think>\nyour reasoning\n</think>\n<answer>\nthe final answer\n</answer>")


def countdown_prompt(nums, target):
    return f"Use {', '.join(map(str, nums))} to make {target}."


class PromptDataset(list):
    """A list of the prompts in a jsonl file. A line may have any of these forms:

        {"conversations": [{"role": "user", "content": "..."}, ...], "answer": "42"}
        {"prompt": "..." or a list of turns, "answer": "42"}
        {"question": "...", "answer": "... #### 42"}            GSM8K
        {"problem": "...", "solution": "... \\boxed{42}"}       MATH, with or without an answer
        {"nums": [9, 8, 6], "target": 57}                     Countdown; a prompt is built from them

    If the last message is the assistant's, it is dropped. The answer is optional, but some reward
    functions need it. Each item of the dataset is {"messages": [...], **other_fields}. A field that
    a line lacks is None. Fields of prompts and answers that are null, NaN or blank count as
    missing. `places` holds "<path>, line <number>" for each item. From Python, you can also pass a
    list of such dicts, or a list of prompts. An invalid line raises a UserError that names the file
    and the line.
    """

    def __init__(self, path):
        self.places, rows = [], read_lines(path)
        if path in GIVEN:
            rows = ((f"prompts[{i}]", row if isinstance(row, dict) else {"prompt": row})
                    for i, row in enumerate(map(copy.deepcopy, GIVEN[path])))
        for where, row in rows:
            self.append(read_row(row, where))
            self.places.append(where)
        if not self:
            raise UserError(f"{path}: there are no prompts; write one JSON object per line")
        names = dict.fromkeys(name for row in self for name in row)     # a set has no fixed order
        for row in self:
            for name in names:
                row.setdefault(name)    # None


def read_row(row, where):
    row = row if isinstance(row, dict) else {}
    for name in row:
        if not isinstance(name, str):
            raise UserError(f"{where}: the field name {name!r} is not a text; rename the field")
    row = {name: value for name, value in row.items()
           if name not in PROMPT_FIELDS or not is_missing(value)}
    field = next((name for name in PROMPT_FIELDS if name in row), None)
    if not field and "target" in row and isinstance(row.get("nums"), list):
        field, row["prompt"] = "prompt", countdown_prompt(row["nums"], row["target"])
    if not field:
        raise UserError(f"{where}: no prompt found; put it in one of the fields "
                        f"{', '.join(PROMPT_FIELDS)}")
    name, answer = gold_of(row)
    for gold in answer if isinstance(answer, list) and answer else [answer]:
        if isinstance(gold, (list, dict, bool)) or (
                gold is not None and not str(gold).rpartition("####")[2].strip()):
            raise UserError(f"{where}: the field {name} must be a text, a number, or a list of "
                            "these, and must not be empty; without an answer, leave it out")
    if answer is not None or "answer" in row:
        row["answer"] = answer
    messages = row.pop(field)
    for name in RESERVED.intersection(row):
        raise UserError(f"{where}: the field name {name} is reserved for reward functions and "
                        "tools; rename the field")
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    if not is_chat(messages, where) or any(
            turn["role"] == "tool" or turn.get("tool_calls") for turn in messages):
        raise UserError(f"{where}: {field} must be a string or a list of turns, each with a "
                        "content and a role, system, user or assistant, and no tool_calls; in Share"
                        "GPT files rename from to role, value to content, human to user, and so on")
    if messages and messages[-1]["role"] == "assistant":    # the policy samples its own reply
        messages = messages[:-1]
    if not messages or not messages[-1]["content"].strip():
        raise UserError(f"{where}: {field} has nothing to reply to; end it with a user turn that "
                        "is not empty")
    tools = row.get("tools")                    # where TRL puts it
    if is_missing(tools):
        tools = messages[0].get("tools")        # where MiniMind puts it
    if tools and isinstance(tools, str):        # MiniMind's files and parquet store JSON text
        tools = parse(tools.encode(), f"{where}: tools")
    if tools and not isinstance(tools, list):
        raise UserError(f"{where}: tools must be a list, as apply_chat_template expects it, or "
                        "that list as JSON; rename the column if it means something else")
    if tools is not None:
        messages[0]["tools"] = without_nulls(tools)
    return {**row, "messages": messages}


def is_missing(value):
    """Returns whether a field is empty: None, blank text, or NaN and the like from pandas."""
    if isinstance(value, (str, list, dict)):
        return isinstance(value, str) and not value.strip()
    return str(value).lower() in ("none", "nan", "nat", "<na>")


def without_nulls(schema, parent=""):
    """Returns tools without the null fields by which Arrow gives all of them the same parameters.

    A parameter's default value may be null.
    """
    if isinstance(schema, list):
        return [without_nulls(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    return {name: without_nulls(value, name) for name, value in schema.items()
            if value is not None or name == "default" and parent != "properties"}


def gold_of(row):
    """Returns (field, answer): the field that contains the row's gold answer, and the answer.

    The answer is None if the row has no gold answer. A field `solution` must contain a box or ####.
    """
    if isinstance(row.get("reward_model"), dict):
        row = row | {"reward_model.ground_truth": row["reward_model"].get("ground_truth")}
    for name in ("answer", "reward_model.ground_truth", "ground_truth", "final_answer", "solution"):
        gold = row.get(name)
        if not is_missing(gold) and (
                name != "solution" or re.search(r"\\f?box|####", str(gold))):
            return name, gold
    return "answer", None


def is_chat(turns, where):
    """Returns whether each message has a role and a text. A list as content raises a UserError."""
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        return False
    if any(isinstance(turn.get("content"), list) for turn in turns):
        raise UserError(f"{where}: a content is a list, but must be a text; to join its parts: "
                        'turn["content"] = "".join(part["text"] for part in turn["content"])')
    return all(turn.get("role") in ROLES and isinstance(turn.get("content"), str) for turn in turns)


class PromptCollator:
    """Collates dataset items into {"prompts", "prompt_ids", "prompt_mask", "prefills", "columns"}.

    system_prompt is added to chats without a system prompt; "r1" selects a built-in one. It is not
    added to columns["messages"], so reward models don't read the system prompt.

    thinking: turns thinking on or off in the chat template. None keeps the template's default.
    template_kwargs: other arguments of the chat template, as {name: value}.
    """

    def __init__(self, tokenizer, max_seq_len, system_prompt=None, thinking=True,
                 template_kwargs=None):
        self.tokenizer, self.max_seq_len = tokenizer, max_seq_len
        self.system_prompt = R1_SYSTEM_PROMPT if system_prompt == "r1" else system_prompt
        self.switches = {} if thinking is None else dict.fromkeys(SWITCHES, thinking)
        self.switches |= template_kwargs or {}
        for name in template_kwargs or ():
            if name not in str(tokenizer.chat_template):
                raise UserError(f"--chat_template_kwargs: the chat template does not use {name}; "
                                "check the name in the template, or leave it out")

    def render(self, messages, add_generation_prompt=True):
        """Applies the chat template to these messages, and returns the prompt as text."""
        tools = messages[0].get("tools")
        if self.system_prompt and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": self.system_prompt}, *messages]
        render = partial(self.tokenizer.apply_chat_template, messages, **self.switches | {
            "tokenize": False, "add_generation_prompt": add_generation_prompt})
        try:
            text = render(tools=tools)
            shown = not tools or text != render()
        except Exception as error:      # a template is a program, and can raise anything
            roles = reprlib.repr([turn["role"] for turn in messages])
            raise UserError(f"the tokenizer's chat template rejects the roles {roles}: {error}; "
                            "leave out --system_prompt, write the prompts without that role, or "
                            "pass another --tokenizer_path") from None
        if not shown:
            raise UserError("the tokenizer's chat template ignores the field tools of the data; "
                            "leave the field out, or pass another --tokenizer_path")
        return text

    def lacks_header(self, messages):
        """Returns whether the template writes a header before replies, but not after prompts."""
        prompt, mark = self.render(messages), "reply to find"
        with suppress(UserError):       # a template may refuse other chats than the policy's
            if prompt == self.render(messages, add_generation_prompt=False):
                chat = [*messages, {"role": "assistant", "content": mark}]
                before = self.render(chat, add_generation_prompt=False).partition(mark)[0]
                return before.strip() != prompt.strip()
        return False

    def encode(self, items):
        """Returns (texts, ids): the prompt of each item as text, and as a list of token ids."""
        texts = [self.render(item["messages"]) for item in items]
        ids = self.tokenizer(texts, add_special_tokens=False)["input_ids"]
        return texts, ids

    def __call__(self, items):
        """Returns a batch of these items. prompt_ids and prompt_mask (B, P) are padded on the left.

        A prompt longer than max_seq_len is cut to its last max_seq_len tokens.
        "prefills" holds what the chat template has already written of each completion, which is
        `<think>\\n` in some templates, and "" in most templates.
        """
        texts, ids = self.encode(items)
        for i, row in enumerate(ids):
            if len(row) > self.max_seq_len:
                ids[i] = row[-self.max_seq_len:]
                texts[i] = self.tokenizer.decode(ids[i])
        P = max(map(len, ids))
        pad = self.tokenizer.pad_token_id or 0
        names = {name for item in items for name in item}
        return {
            "prompts": texts,
            "prompt_ids": torch.tensor([[pad] * (P - len(row)) + row for row in ids]),
            "prompt_mask": torch.tensor([[0] * (P - len(row)) + [1] * len(row) for row in ids]),
            "prefills": [re.search(r"(?:<think>\s*)?\Z", text)[0] for text in texts],
            "columns": {name: [item.get(name) for item in items] for name in sorted(names)},
        }


def asking_as_trained(tokenizer, switches):
    """Returns a copy of the tokenizer whose chat template has these switches as its defaults."""
    tokenizer, template = copy.copy(tokenizer), tokenizer.chat_template
    if isinstance(template, str):           # there may be several, by name
        template = re.sub(r"\A(\{%- set \w+ = \w+ if \w+ is defined else .*? %\})+", "", template)
        tokenizer.chat_template = "".join(
            f"{{%- set {name} = {name} if {name} is defined else {json.dumps(value)} %}}"
            for name, value in switches.items() if name in template) + template
    return tokenizer


def check_ids(ids, where, tokenizer, config, new):
    """Raises a UserError if an id is not in the vocabulary, or if the prompt is too long."""
    largest, most = max(ids), getattr(config, "max_position_embeddings", None) or math.inf
    if largest >= config.vocab_size:        # a tokenizer may have image tokens
        raise UserError(f"{where}: the token {tokenizer.convert_ids_to_tokens(largest)} has the id "
                        f"{largest}, but the weights know only {config.vocab_size} tokens; remove "
                        "the token, or use another tokenizer")
    if len(ids) + new > most:
        raise UserError(f"{where}: {len(ids)} tokens, and {new} that may follow, are more than the "
                        f"{most} positions of the weights; lower --max_gen_len, or shorten it")


def without_overlong(rows, places, collate, args, config):
    """Returns the rows whose prompts fit in max_seq_len, or all rows if long prompts are cut."""
    limit, overlong = f"--max_seq_len {collate.max_seq_len}", args.overlong_prompts
    encoded = collate.encode(rows)[1]
    lengths = [len(ids) for ids in encoded]
    for ids, place in zip(encoded, places):
        if config and (overlong == "cut" or len(ids) <= collate.max_seq_len):
            check_ids(ids[-collate.max_seq_len:], place, collate.tokenizer, config,
                      args.max_gen_len)
    fitting = [row for row, length in zip(rows, lengths) if length <= collate.max_seq_len]
    if len(fitting) == len(rows):
        return rows
    longest, place = max(zip(lengths, places), key=lambda pair: pair[0])
    found = f"{len(rows) - len(fitting)} of {len(rows)} prompts are longer than {limit} tokens"
    if overlong == "refuse" or overlong == "drop" and not fitting:
        raise UserError(f"{place}: the prompt has {longest} tokens with its chat template, and "
                        f"{found}; raise --max_seq_len to {longest}, or pass --overlong_prompts "
                        f"cut{' or drop' if fitting else ''}")
    fate = "lose their beginning, the system prompt first" if overlong == "cut" else "were dropped"
    warnings.warn(f"{found} and {fate}", stacklevel=2)
    return rows if overlong == "cut" else fitting


def rows_of_step(step, num_rows, prompts_per_rank, *, rank=0, world_size=1, seed=0, shuffle=True):
    """Returns the indices of the rows that one rank reads at one step. Steps start at 1.

    Each step takes `prompts_per_rank` rows per rank, and the last step of an epoch takes the rest.
    The rows depend only on the seed and the step, so a resumed run reads the same rows as an
    uninterrupted run. With `shuffle`, each epoch has a new order.
    """
    per_step = prompts_per_rank * world_size
    epoch, position = divmod(step - 1, steps_per_epoch(num_rows, prompts_per_rank, world_size))
    generator = torch.Generator().manual_seed(seed + 1_000_003 * epoch)
    shuffled = torch.randperm(num_rows, generator=generator).tolist()
    order = shuffled if shuffle else range(num_rows)
    rows = order[position * per_step:(position + 1) * per_step]
    even = len(rows) // world_size * world_size         # every rank must get the same number
    return list(rows[:even][rank::world_size])


def steps_per_epoch(num_rows, prompts_per_rank, world_size=1):
    """Returns the number of steps per epoch. A last step with fewer rows than ranks is skipped."""
    full, rest = divmod(num_rows, prompts_per_rank * world_size)
    return full + (rest >= world_size)


# --- the data of a run ----------------------------------------------------------------------------


def add_flags(parser):
    flag = parser.group("1. generate").add_argument
    flag("--data_path", help="jsonl file of training prompts (default: dataset/train.jsonl)")
    flag("--shuffle", type=int, choices=(0, 1), default=1, help="1: shuffle the prompts anew in "
         "each pass over the file; 0: keep the order of the file")
    flag("--max_seq_len", "--max_prompt_length", type=COUNT, default=66,
         help="maximum tokens per prompt")
    flag("--overlong_prompts", choices=("refuse", "cut", "drop"), default="refuse",
         help="what to do with longer prompts: stop with an error (refuse), keep their last tokens "
         "(cut), or leave them out (drop)")
    flag("--system_prompt", help="added to chats without one; r1: a text that asks for the tags")
    flag("--chat_template_kwargs", type=json_object, default="{}", metavar="JSON", help="switches "
         "of the chat template, e.g. '{\"thinking\": true}'; --reasoning sets known ones")
    flag = parser.group("5. log").add_argument
    flag("--eval_data_path", help="jsonl, held-out problems (default: dataset/heldout.jsonl)")
    flag("--eval_samples", type=COUNT, default=1000, help="held-out problems per evaluation")


def json_object(text):
    dict(json.loads(text))
    return text


def check(args):
    """Sets the default data files. If only --data_path is given, evaluation is off by default."""
    args.data_path = args.data_path or str(HERE / "train.jsonl")
    own_data = not is_arithmetic(args.data_path)
    if own_data and not args.eval_data_path:
        if args.eval_only or args.eval_interval:
            raise UserError(f"--{'eval_only' if args.eval_only else 'eval_interval'} would evaluate"
                            " on our arithmetic problems, not on your task; pass your problems with"
                            " --eval_data_path")
        args.eval_interval = 0
    elif args.eval_interval is None:
        args.eval_interval = 30
    if not own_data:
        args.eval_data_path = args.eval_data_path or str(HERE / "heldout.jsonl")


def is_arithmetic(path):
    """Returns whether `path` is the default training file, dataset/train.jsonl."""
    return Path(path).resolve() == HERE / "train.jsonl"


def read_prompts(args, tokenizer, config=None):
    """Returns (collate, problems, heldout): the collator, training rows, and evaluation rows."""
    collate = PromptCollator(tokenizer, args.max_seq_len, args.system_prompt, bool(args.reasoning),
                             json.loads(args.chat_template_kwargs))
    problems, heldout = PromptDataset(args.data_path), []
    if collate.lacks_header(problems[0]["messages"]):
        warnings.warn("the tokenizer's chat template ignores add_generation_prompt, so the policy "
                      "has to write the header of the assistant's turn itself; add it to the "
                      "template, or pass another --tokenizer_path", stacklevel=2)
    problems = without_overlong(problems, problems.places, collate, args, config)
    if args.eval_interval or args.eval_only:
        data = PromptDataset(args.eval_data_path)
        pairs = [(row, place) for row, place in zip(data, data.places)
                 if "accuracy" not in args.eval_reward_funcs or row.get("answer") is not None]
        if not pairs:
            raise UserError(f"--eval_data_path {args.eval_data_path}: no line has an answer to "
                            "compare with; add the field answer, pass your own reward function as "
                            "--eval_reward_funcs, or train with --eval_interval 0")
        heldout, places = zip(*pairs[:args.eval_samples])
        heldout = without_overlong(list(heldout), places, collate, args, config)
    return collate, problems, heldout


def last_step_of(num_problems, num_prompts, world, args):
    """Returns a run's last step: --max_steps or the end of --epochs, whichever comes first.

    Without these flags, it is the end of the first epoch, but at most MOST_STEPS.
    """
    per_pass = steps_per_epoch(num_problems, num_prompts, world.size)
    last_step = (args.epochs or 1) * per_pass
    if args.max_steps is None and not args.epochs:
        last_step = min(last_step, MOST_STEPS)
    elif args.max_steps:
        last_step = min(args.max_steps, last_step) if args.epochs else args.max_steps
    if per_pass < 1:
        raise UserError(f"{args.data_path}: {num_problems} prompts are too few for {world.size} "
                        "processes; add prompts until there is at least one for each process")
    return last_step
