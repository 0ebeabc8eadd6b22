"""A run as one page to look into: its curves, and what was answered, step by step, group by group.

    python -m report.page out/run_a                 writes out/run_a/report.html

The page is page.html with the data of the run in it. It needs no network, and what a model wrote is
only ever text in it. A long run has more completions than a page can hold: it shows some steps,
closer together at the start, where most is learned, and the first groups of each (batches are
shuffled), and says what it leaves out.
"""
import argparse
import json
import math
import os
from bisect import bisect_left
from contextlib import suppress
from pathlib import Path

from .command_line import user_errors
from .curves import Run
from .text import columns, cut, rounded, to_line

TEMPLATE = Path(__file__).with_name("page.html")
MOST_BYTES = 1_600_000      # of completions, so that a page stays under 2 MB
MOST_STEPS = 40
MOST_CHARACTERS = 4000      # of a text: a longer one loses its middle
SHOWN_ARGS = ["model_path", "data_path", "reward_funcs", "reward_weights", "num_generations",
              "learning_rate", "beta", "loss_type", "temperature", "max_gen_len", "seed"]
OWN_FIELDS = {"step", "messages", "prompt", "completion", "length", "ended", "rewards", "reward",
              "advantage", "tokens", "token_logps", "token_advantages"}


def write_page(run_dir, path):
    """Write the page of a run; UserError if the run has not finished a step."""
    data = to_script(page_data(Path(run_dir)))
    page = TEMPLATE.read_text(encoding="utf-8").replace("{{data}}", data)
    Path(path).write_text(page, encoding="utf-8")


def to_script(value):
    """JSON that may stand in a script element, which no text in it can close.

    "<" appears in strings only, where JSON may escape it.
    """
    return to_line(value).replace("<", "\\u003c")


def page_data(run_dir):
    """All that the page shows, as one dict for JSON."""
    run = Run(run_dir)
    args = json.loads((run_dir / "args.json").read_text(encoding="utf-8"))
    steps = sample_steps(run_dir, run.steps[-1]["step"], args)
    rows = [row for step in steps for group in step["groups"] for row in group["rows"]]
    return {
        "name": run.name,
        "headline": run.headline(),
        # Of paths only the last part, since pages are passed on.
        "args": {name.removesuffix("_path"): Path(args[name]).name if name.endswith("_path") else
                 args[name] for name in SHOWN_ARGS if args.get(name) is not None},
        "metrics": {name: values for name, values in columns(run.steps).items()
                    if not name.startswith("timing_s/")},
        "evaluations": columns(run.evaluations[::math.ceil(len(run.evaluations) / 500) or 1]),
        "steps": steps,
        "shortened": sum("left_out" in row for row in rows),
        "completions": len(rows),
    }


# --- which completions ----------------------------------------------------------------------------


def sample_steps(run_dir, last, args):
    """Some steps with as many of their first groups as fit; always the first and the last step."""
    paths = [run_dir / "completions.1.jsonl", run_dir / "completions.jsonl"]
    paths = [path for path in paths if path.exists() and path.stat().st_size]
    if not paths:
        return []
    with open(paths[0], "rb") as file:
        first = step_from(file, 0)
    if first > last:
        return []
    found, left = {}, MOST_BYTES

    def take(step, share, least):
        """Take the step, if at least this many of its groups can be had; its mean group's bytes."""
        nonlocal left
        rows = next(filter(None, (rows_of(step, path) for path in paths)), [])
        G = args["num_generations"]
        groups, sizes = [], []
        for i in range(0, len(rows), G):
            group = shown_group(rows[i:i + G], args)
            sizes.append(len(to_script(group).encode()))
            if sum(sizes) > share and len(groups) >= least:
                break
            groups.append(group)
        if groups:
            left -= sum(sizes[:len(groups)])
            found[step] = {"step": step, "groups": groups, "of": math.ceil(len(rows) / G)}
        return sum(sizes) / max(len(sizes), 1)

    largest = max(take(step, MOST_BYTES // 8, least=1) for step in {first, last})
    count = max(2, min(MOST_STEPS, last - first + 1, int(left / max(largest, 1))))
    power = 2 if last - first >= count else 1       # 2: closer together at the start
    between = {round(first + (last - first) * (i / (count - 1)) ** power) for i in range(count)}
    between = sorted(between - {first, last})
    for number, step in enumerate(between):
        take(step, left / (len(between) - number), least=0)
    return [found[step] for step in sorted(found)]


def step_from(file, offset):
    """Go to the first line that begins at this byte or later; its step, infinity at the end."""
    file.seek(max(offset - 1, 0))
    if offset:
        file.readline()
    start = file.tell()
    try:
        return json.loads(file.readline())["step"]
    except ValueError:      # the end, or half a line there
        return math.inf
    finally:
        file.seek(start)


def rows_of(step, path):
    """The rows of a step, found by halving: in a gigabyte as quickly as in a megabyte."""
    rows = []
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        start = bisect_left(range(size), step, key=lambda offset: step_from(file, offset))
        while step_from(file, start) == step:
            rows.append(json.loads(file.readline()))
            start = file.tell()
    return rows


# --- what of them ---------------------------------------------------------------------------------


def shown_group(rows, args):
    """A prompt and its completions, as the page reads them."""
    prompt = question = rows[0]["prompt"]
    with suppress(LookupError, TypeError):      # the data may have no messages
        question = str(rows[0]["messages"][-1]["content"])
    others = {name: cut(value if isinstance(value, str) else json.dumps(value), 300)
              for name, value in rows[0].items() if name not in OWN_FIELDS}
    return {"question": cut(question, MOST_CHARACTERS), "prompt": cut(prompt, MOST_CHARACTERS),
            "columns": others, "rows": [shown_row(row, args) for row in rows]}


def shown_row(row, args):
    """A completion: its text, or its tokens with their log-probabilities, and all its numbers."""
    shown = {"reward": rounded(row["reward"]), "advantage": rounded(row["advantage"]),
             "rewards": {name: rounded(value) for name, value in row["rewards"].items()},
             "length": row.get("length"), "ended": row.get("ended", True),
             "right": is_right(row, args)}
    room = min(MOST_CHARACTERS, 100_000 // args["num_generations"])
    if "tokens" not in row:
        shown["text"] = cut(row["completion"], room)
        if shown["text"] != row["completion"]:
            shown["left_out"] = True
        return shown
    # A long one loses its middle, as a text does; in its place stands a token without numbers.
    half = max(1, room // 8)        # of a quarter as many tokens as a text has characters
    left_out = len(row["tokens"]) - 2 * half
    for name in ("tokens", "token_logps", "token_advantages"):
        if name in row:
            short = name.removeprefix("token_")
            shown[short] = [round(x, 2) if isinstance(x, float) else x for x in row[name]]
            if left_out > 0:
                gap = f" … [{left_out:,} tokens left out] … " if name == "tokens" else None
                shown[short][half:-half] = [gap]
                shown["left_out"] = True
    return shown


def is_right(row, args):
    """Whether the evaluation rewards call it right; None unless they are among the rewards."""
    names = args.get("reward_funcs", [])
    rewards = dict(zip(names, row["rewards"].values())) if len(names) == len(row["rewards"]) else {}
    judged = [rewards.get(name) for name in args.get("eval_reward_funcs") or [None]]
    if None in judged:
        return None
    return sum(judged) >= args.get("eval_threshold", 1.0)


@user_errors("report.page")
def main():
    parser = argparse.ArgumentParser(prog="python -m report.page",
                                     description="Write report.html, a page to look into a run.")
    parser.add_argument("run", help="the folder of a run, such as out/run_a")
    parser.add_argument("-o", "--output", help="the page to write (default: RUN/report.html)")
    args = parser.parse_args()
    output = args.output or str(Path(args.run) / "report.html")
    write_page(args.run, output)
    print(f"wrote {output}")


if __name__ == "__main__":
    main()
