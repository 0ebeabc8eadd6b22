"""Tools: functions that answer while a completion is being sampled (--tool). A tool is a function

    f(histories: list[list[str]], **columns) -> list[str | None]

that is called with one history for each completion that calls the tool at this moment: the policy's
texts and the tool's answers, alternating. f.stop is the text of the token that calls the tool, and
each history ends with it. If the tool returns a text, the policy reads it and continues. If it
returns None, nothing is added, and if f.stop is an end token, the completion has ended. `columns`
are `prompts`, the data's fields, and `seeds`, a number for each row: a tool that seeds its random
numbers with (seed, number of turns) repeats them when a run is resumed.
"""
import json
import warnings

from errors import UserError, cut, reason

from .load import check_columns, show

MOST_CHARACTERS = 4000      # per answer


class Tool:
    """Calls a tool. An exception other than a UserError becomes its answer; new kinds are shown.

    stop_id: the token that calls the tool; UserError if f.stop is not the text of one token.
    max_calls: how often a completion may call it.
    """

    def __init__(self, function, tokenizer, max_calls):
        self.function, self.tokenizer, self.max_calls = function, tokenizer, max_calls
        self.name = getattr(function, "__name__", type(function).__name__)
        self.stop, self.seen = getattr(function, "stop", ""), set()
        ids = tokenizer(self.stop, add_special_tokens=False)["input_ids"]
        if len(ids) != 1:
            raise UserError(f"--tool {self.name}: its attribute stop is {self.stop!r}, which is "
                            f"{len(ids)} tokens with this tokenizer, but must be one; set "
                            f"{self.name}.stop to the text of the token that asks the tool")
        self.stop_id = ids[0]

    def __call__(self, histories, columns):
        """Returns (answer, did the tool raise) for each history; after an error, one at a time.

        An answer longer than MOST_CHARACTERS loses its middle.
        """
        check_columns(f"--tool {self.name}", self.function, columns, histories)
        try:
            answers = self.function(histories, **columns)
            if not isinstance(answers, (list, tuple)) or len(answers) != len(histories):
                raise TypeError("it must return a list with one answer for each of the "
                                f"{len(histories)} histories")
            return [(self.checked(answer), False) for answer in answers]
        except UserError:
            raise
        except (Exception, SystemExit) as error:
            if len(histories) == 1:
                self.warn(error)
                return [(reason(error), True)]
        return [self([history], {name: values[i:i + 1] for name, values in columns.items()})[0]
                for i, history in enumerate(histories)]

    def checked(self, answer):
        if answer is None:
            return None
        if not isinstance(answer, str):
            raise TypeError(f"an answer must be a text or None, not {answer!r}")
        answer.encode()         # raises for an unpaired surrogate, which no token can represent
        return cut(answer, MOST_CHARACTERS)

    def warn(self, error):
        """Shows the first error of each kind, with its traceback."""
        if type(error) not in self.seen:
            self.seen.add(type(error))
            show(error)
            # warn() would be silent in a second run of the same process.
            warnings.warn_explicit(f"the tool {self.name} raised ({reason(error)}), which is now "
                                   "its answer; further cases are only counted",
                                   UserWarning, __file__, 0)


def tool_calls(functions):
    """Returns a tool that runs these functions when a completion calls them as Qwen3 does:

        <tool_call>
        {"name": "add", "arguments": {"a": 2, "b": 3}}
        </tool_call>

    MiniMind-3 uses the same format. A reply may have several calls, after its thinking. All results
    come back in one turn: text unchanged, other values as JSON, and for a call that failed a line
    with the reason. The next reply begins like the first, with what the chat template writes.
    """
    named = {function.__name__: function for function in functions}

    def result(call):
        try:
            call = json.loads(call)
            if call["name"] not in named:
                raise LookupError(f"no tool {call['name']!r}; choose from {', '.join(named)}")
            value = named[call["name"]](**call["arguments"])
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            text.encode()       # as in Tool.checked, but for this call alone
            return text
        except Exception as error:
            return reason(error)

    def tool(histories, prompts, **columns):
        answers = []
        for (*_, reply), prompt in zip(histories, prompts):
            *closed, _ = reply.split("</think>")[-1].split("</tool_call>")
            calls = [part.partition("<tool_call>")[2] for part in closed if "<tool_call>" in part]
            if not calls:
                answers.append(None)
                continue
            answer = "\n<|im_start|>user"
            for call in calls:
                answer += f"\n<tool_response>\n{result(call)}\n</tool_response>"
            begun = prompt.rpartition("<|im_start|>assistant\n")[2]
            answers.append(f"{answer}<|im_end|>\n<|im_start|>assistant\n{begun}")
        return answers

    tool.stop = "<|im_end|>"
    return tool
