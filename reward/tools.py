"""Tools (--tool) answer the policy while a completion is being sampled. A tool is a function

    f(histories: list[list[str]], **columns) -> list[str | None]

A completion calls the tool by sampling the token whose text is f.stop. Each history belongs to a
completion that has called the tool, and alternates between texts of the policy and answers of the
tool. If the tool returns a text, the text is added to the completion, and sampling continues. If
the tool returns None, nothing is added, and the completion ends if f.stop is an EOS token.
Control tokens in the text, such as <|im_end|>, become tokens, since a turn of a chat needs them.
`columns` holds `prompts`, the data's fields, and `seeds`, one number per completion. A tool that
uses these seeds for its random numbers gives the same answers when a run is resumed.
"""
import json
from contextlib import suppress

from errors import UserError, cut, reason
from model.load import spelled_out

from .load import COROUTINES, check_columns, copied, show, warn_first

MOST_CHARACTERS = 4000      # per answer


class Answer(str):
    """An answer of tool_calls. error: the first exception among its results, or None."""

    def __new__(cls, parts, error):
        """parts: texts that belong to the chat's format, alternating with results."""
        answer = super().__new__(cls, "".join(parts))
        answer.parts, answer.error = parts, error
        return answer


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
        added = [token.content for token in tokenizer.added_tokens_decoder.values()]
        self.markers = [text for text in added if text.strip()[1:]]     # not spaces and characters

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
            return [self.checked(answer) for answer in answers]
        except UserError:
            raise
        except (Exception, SystemExit) as error:
            if len(histories) == 1:
                self.warn(error)
                return [(self.quote(reason(error)), True)]
        return [self([history], {name: values[i:i + 1] for name, values in columns.items()})[0]
                for i, history in enumerate(histories)]

    def checked(self, answer):
        if isinstance(answer, Answer):
            if answer.error is not None:
                self.warn(answer.error)
            # Each result is cut and quoted on its own. A plain str has no error, and no frames.
            return "".join(self.quote(part) if i % 2 else part
                           for i, part in enumerate(answer.parts)), answer.error is not None
        if answer is None:
            return None, False
        if not isinstance(answer, str):
            raise TypeError(f"an answer must be a text or None, not {answer!r}")
        answer.encode()         # raises for an unpaired surrogate, which no token can represent
        return cut(answer, MOST_CHARACTERS), False

    def quote(self, text):
        """Cuts a long text, and makes control tokens in it ordinary text."""
        return spelled_out(cut(text, MOST_CHARACTERS), self.markers)

    def warn(self, error):
        """Prints a warning and the traceback for the first error of each type."""
        if type(error) not in self.seen:
            self.seen.add(type(error))
            if not isinstance(error, json.JSONDecodeError):     # of what the policy wrote
                show(error)
            warn_first(f"the tool {self.name} raised ({reason(error)}), which is now its answer")


def tool_calls(functions):
    """Returns a tool that runs these functions when a completion calls them in Qwen3's format:

        <tool_call>
        {"name": "add", "arguments": {"a": 2, "b": 3}}
        </tool_call>

    MiniMind-3 uses the same format. The arguments may also be JSON in a string, or missing. A
    completion may contain several calls after its thinking. All results are returned in one turn.
    A result that is not a string is written as JSON. For a call that failed, the result is the
    error message. A Tool makes control tokens in a result ordinary text.
    """
    named = {function.__name__: function for function in functions}

    def result(call):
        """Returns (text, error), where error is None if the call succeeded."""
        try:
            call = json.loads(call, strict=False)       # which accepts line breaks in strings
            if call["name"] not in named:
                raise LookupError(f"no tool {call['name']!r}; choose from {', '.join(named)}")
            arguments = call.get("arguments")
            if isinstance(arguments, str):
                arguments = json.loads(arguments.strip() or "{}", strict=False)
            value = named[call["name"]](**(arguments or {}))
            text = as_text(COROUTINES.result(value))
            text.encode()       # as in Tool.checked, but for this call alone
            return text, None
        except (Exception, SystemExit) as error:
            return reason(error), error

    def tool(histories, prompts, **columns):
        answers = []
        for (*_, reply), prompt in zip(histories, prompts):
            *closed, _ = reply.split("</think>")[-1].split("</tool_call>")
            calls = [part.partition("<tool_call>")[2] for part in closed if "<tool_call>" in part]
            if not calls:
                answers.append(None)
                continue
            texts, errors = zip(*map(result, calls))
            begun = prompt.rpartition("<|im_start|>assistant\n")[2]
            parts = ["\n<|im_start|>user"]
            for text in texts:
                parts[-1] += "\n<tool_response>\n"
                parts += text, "\n</tool_response>"
            parts[-1] += f"<|im_end|>\n<|im_start|>assistant\n{begun}"
            answers.append(Answer(parts, next(filter(None, errors), None)))
        return answers

    tool.stop = "<|im_end|>"
    return tool


def as_text(value):
    """Returns a result as text: a string as it is, other values as JSON or else as str() does."""
    with suppress(TypeError, ValueError):       # a list that holds itself, or keys unknown to JSON
        text = json.dumps(value, ensure_ascii=False,
                          default=lambda x: x.tolist() if hasattr(x, "tolist") else str(x))
        return json.loads(text) if text.startswith('"') else text
    return str(value)
