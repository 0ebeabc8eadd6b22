"""Tools: functions that answer while a completion is written (--tool). A tool is, as a reward is,

    f(histories: list[list[str]], **columns) -> list[str | None]

with an entry for each completion that asks now. A history is what the policy wrote and what it was
answered, in turn. f.stop is the text of the token that asks, with which each history ends. A text
is read by the policy, which then goes on; None: nothing follows, and where f.stop ends a reply, it
has ended. `columns` are `prompts`, the data's fields, and `seeds`, a number for each row: random
tools that draw from (seed, number of turns) do the same again when a run is resumed.
"""
import json
import warnings

from errors import UserError, cut, reason

from .load import check_columns, show

MOST_CHARACTERS = 4000      # of an answer


class Tool:
    """Asks a tool. What it raises is its answer, but for a UserError; the first of a kind is shown.

    stop_id: the token that asks; UserError if f.stop is not the text of one token. max_calls: how
    often a completion may ask.
    """

    def __init__(self, function, tokenizer, max_calls):
        self.function, self.tokenizer, self.max_calls = function, tokenizer, max_calls
        self.name = getattr(function, "__name__", type(function).__name__)
        self.stop, self.seen = getattr(function, "stop", ""), set()
        ids = tokenizer(self.stop, add_special_tokens=False)["input_ids"]
        if len(ids) != 1:
            raise UserError(f"--tool {self.name}: its attribute stop is {self.stop!r}, which is no "
                            f"text of exactly one token ({len(ids)} with this tokenizer); set "
                            f"{self.name}.stop to the text of the token that asks it")
        self.stop_id = ids[0]

    def __call__(self, histories, columns):
        """For each history (answer, whether the tool raised); after an error each is asked alone.

        An answer has at most MOST_CHARACTERS: a longer one loses its middle.
        """
        check_columns(f"--tool {self.name}", self.function, columns, histories)
        try:
            answers = self.function(histories, **columns)
            if not isinstance(answers, (list, tuple)) or len(answers) != len(histories):
                raise TypeError(f"it must return a list with an answer to each of {len(histories)} "
                                "histories")
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
        answer.encode()         # half a character is an error, and no token
        return cut(answer, MOST_CHARACTERS)

    def warn(self, error):
        """Shows the first error of a kind, with its traceback."""
        if type(error) not in self.seen:
            self.seen.add(type(error))
            show(error)
            # Not warn(), which would be silent in a second run of the same process.
            warnings.warn_explicit(f"the tool {self.name} raised ({reason(error)}), which is its "
                                   "answer; from now on this is only counted",
                                   UserWarning, __file__, 0)


def tool_calls(functions):
    """A tool that runs these functions where a reply asks in the words of Qwen3 and MiniMind-3:

        <tool_call>
        {"name": "add", "arguments": {"a": 2, "b": 3}}
        </tool_call>

    There may be several, after the reply's thoughts. All results come back in one turn: text as it
    is, else as JSON, and in place of a call that failed a line that says why. The next reply begins
    as the first did: with what the chat template wrote of it, an empty thought perhaps.
    """
    named = {function.__name__: function for function in functions}

    def result(call):
        try:
            call = json.loads(call)
            if call["name"] not in named:
                raise LookupError(f"no tool {call['name']!r}; choose from {', '.join(named)}")
            value = named[call["name"]](**call["arguments"])
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            text.encode()       # as above, of this call alone
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
