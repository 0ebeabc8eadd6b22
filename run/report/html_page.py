"""Writes an HTML report of a run, with its curves and with completions by step and group.

    python -m run.report.html_page out/run_a                 writes out/run_a/report.html

The report is page.html with the run's data inserted; it needs no network. A long run has too many
completions for one page, so the report shows only some of the steps, more of them near the start,
where most is learned. It shows only the first groups of each step.
"""
import itertools
import json
import math
from pathlib import Path

from dataset.jsonl import columns, rounded, to_line
from errors import Parser, cut, explained, user_errors

from .picture import Run

TEMPLATE = Path(__file__).with_name("page.html")
MOST_STEPS = 40
MOST_BYTES = 40_000         # per step, so that a report has less than 2 MB
MOST_CHARACTERS = 4000      # per text; the middle of a longer text is cut
SHOWN_ARGS = ["reward_funcs", "reward_weights", "num_generations", "learning_rate", "beta",
              "loss_type", "temperature", "max_gen_len", "seed"]


def write_page(run_dir, path):
    """Writes a run's report. Raises a UserError if the run has no finished step or broken files."""
    with explained(run_dir, "its files are not those of a run", "pass a folder such as out/run_a"):
        data = to_script(page_data(Path(run_dir)))
    page = TEMPLATE.read_text(encoding="utf-8").replace("{{data}}", data)
    Path(path).write_text(page, encoding="utf-8")


def to_script(value):
    """Returns JSON for an HTML script element.

    Each "<" is written as \\u003c, so that no text in the JSON can close the element.
    """
    return to_line(value).replace("<", "\\u003c")


def page_data(run_dir):
    """Returns a dict with everything that the report shows."""
    run = Run(run_dir)
    args = run.args
    # Only the last part of each path, because reports are shared with others.
    shown_args = {name: Path(args[f"{name}_path"]).name for name in ("model", "data")
                  if f"{name}_path" in args}
    shown_args |= {name: args[name] for name in SHOWN_ARGS if name in args}
    steps = sample_steps(run_dir, run.steps[-1]["step"], args)
    metrics = {name: values for name, values in columns(run.steps).items()
               if not name.startswith("timing_s/")}
    return {"name": run.name, "headline": run.headline(), "args": shown_args, "metrics": metrics,
            "evaluations": columns(run.evaluations), "steps": steps}


# --- which completions ----------------------------------------------------------------------------


def sample_steps(run_dir, last, args):
    """Returns some steps of the run, including the last one, with the first groups of each step.

    Each line of completions.jsonl begins with its step, so most lines need not be parsed.
    """
    shown = {round(1 + (last - 1) * (i / (MOST_STEPS - 1)) ** 2) for i in range(MOST_STEPS)}
    steps = []
    with open(run_dir / "completions.jsonl", encoding="utf-8") as file:
        whole = (line for line in file if line.endswith("}\n"))     # the last may be incomplete
        for step, lines in itertools.groupby(whole, key=lambda line: line[9:line.index(",")]):
            if last <= MOST_STEPS or int(step) in shown:
                steps.append(shown_step(int(step), list(lines), args))
    return steps


def shown_step(step, lines, args):
    """Returns a step with its first groups: at least one, and as many more as fit in MOST_BYTES."""
    G, most_bytes = args["num_generations"], MOST_BYTES
    groups = []
    for i in range(0, len(lines), G):
        group = shown_group([json.loads(line) for line in lines[i:i + G]], args)
        most_bytes -= len(to_script(group).encode())
        if groups and most_bytes < 0:
            break
        groups.append(group)
    return {"step": step, "groups": groups, "of": math.ceil(len(lines) / G)}


# --- what is shown of them ------------------------------------------------------------------------


def shown_group(rows, args):
    """Returns a prompt and its completions, in the format that page.html expects."""
    prompt, of_data = rows[0]["prompt"], rows[0]["columns"]
    question = of_data["messages"][-1]["content"] if "messages" in of_data else prompt
    others = {name: cut(value if isinstance(value, str) else json.dumps(value), 300)
              for name, value in of_data.items() if name != "messages"}
    return {"question": cut(question, MOST_CHARACTERS), "prompt": cut(prompt, MOST_CHARACTERS),
            "columns": others, "rows": [shown_row(row, args) for row in rows]}


def shown_row(row, args):
    """Returns a dict of what the page shows for a completion: its text or tokens, rewards, etc."""
    shown = {"reward": rounded(row["reward"]), "advantage": rounded(row["advantage"]),
             "rewards": {name: rounded(value) for name, value in row["rewards"].items()},
             "length": row.get("length"), "ended": row.get("ended", True),
             "right": is_right(row, args)}
    room = min(MOST_CHARACTERS, MOST_BYTES // args["num_generations"])
    if "tokens" not in row:
        if "tool_tokens" in row:
            shown["turns"] = [cut(text, room // len(row["turns"])) for text in row["turns"]]
        else:
            shown["text"] = cut(row["completion"], room)
        return shown
    # The middle of a long completion is cut, and a token without numbers takes its place.
    half = max(1, room // 8)        # a text of `room` characters has about room / 4 tokens
    left_out = len(row["tokens"]) - 2 * half
    for name in ("tokens", "token_logps", "token_advantages", "token_drawn", "token_bounded"):
        if name in row:
            values = [round(x, 2) if isinstance(x, float) else x for x in row[name]]
            if left_out > 0:
                gap = f" … [{left_out:,} tokens left out] … " if name == "tokens" else None
                values[half:-half] = [gap]
            shown[name.removeprefix("token_")] = values
    return shown


def is_right(row, args):
    """Returns whether the evaluation rewards add up to at least 1, or None if one is missing."""
    rewards = dict(zip(args["reward_funcs"], row["rewards"].values()))
    judged = [rewards.get(name) for name in args["eval_reward_funcs"]]
    return None if None in judged else sum(judged) >= 1


@user_errors("run.report.html_page")
def main():
    parser = Parser(prog="python -m run.report.html_page",
                    description="Writes report.html, a page with a run's curves and completions.")
    parser.add_argument("run", help="folder of a run, such as out/run_a")
    path = Path(parser.parse_args().run) / "report.html"
    if path.exists() and "<title>GRPO run" not in path.read_text(errors="replace")[:1000]:
        parser.error(f"{path} exists, but is not a run's report; move it away")
    write_page(path.parent, path)
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
