"""Tools (--tool) answer the policy while a completion is being sampled. A tool is a function

    f(histories: list[list[str]], **columns) -> list[str | None]

A completion calls the tool by sampling the token whose text is f.stop. Each history belongs to a
completion that has called the tool, and alternates between texts of the policy and answers of the
tool. If the tool returns a text, the text is added to the completion, and sampling continues. If
the tool returns None, nothing is added, and the completion ends if f.stop is an EOS token.
`columns` holds `prompts`, the data's fields, and `seeds`, one number per completion. A tool that
uses these seeds for its random numbers gives the same answers when a run is resumed.
"""
import json

from errors import UserError, cut, reason

from .load import COROUTINES, check_columns, copied, show, warn_first

MOST_CHARACTERS = 4000      # per answer


class Tool:
    """Calls a tool function. If the function raises an exception, the answer is the error message.

    stop_id: the id of the token that calls the tool.
    max_calls: the maximum number of calls per completion.
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
        """Returns (answer, is_error) for each history. After an error, each history is tried alone.

        The middle of an answer longer than MOST_CHARACTERS is cut out.
        """
        check_columns(f"--tool {self.name}", self.function, columns, histories)
        try:
            answers = COROUTINES.result(self.function(histories, **copied(columns)))
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
        """Prints a warning and the traceback for the first error of each type."""
        if type(error) not in self.seen:
            self.seen.add(type(error))
            show(error)
            warn_first(f"the tool {self.name} raised ({reason(error)}), which is now its answer")


def tool_calls(functions):
    """Returns a tool that runs these functions when a completion calls them in Qwen3's format:

        <tool_call>
        {"name": "add", "arguments": {"a": 2, "b": 3}}
        </tool_call>

    MiniMind-3 uses the same format. A completion may contain several calls after its thinking. All
    results are returned in one turn. A result that is not a string is written as JSON. For a call
    that failed, the result is the error message.
    """
    named = {function.__name__: function for function in functions}

    def result(call):
        try:
            call = json.loads(call)
            if call["name"] not in named:
                raise LookupError(f"no tool {call['name']!r}; choose from {', '.join(named)}")
            value = COROUTINES.result(named[call["name"]](**call["arguments"]))
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
