"""Writes problems from the package reasoning-gym to a jsonl file.

    python -m dataset.reasoning_gym chain_sum --config max_terms=3 --save out/chain_sum.jsonl
"""
import json
from pathlib import Path

from dataset.jsonl import write_new
from errors import COUNT, COUNT_OR_0, Parser, UserError, explained, user_errors


@user_errors("dataset.reasoning_gym")
def main(argv=None):
    parser = Parser(prog="python -m dataset.reasoning_gym", description=__doc__)
    flag = parser.add_argument
    flag("name", help="name of the generator")
    flag("--size", type=COUNT, default=2000, help="problems to train on")
    flag("--heldout", type=COUNT_OR_0, default=200, help="held-out problems, for a second file")
    flag("--seed", type=COUNT_OR_0, default=0, help="seed of the generator")
    flag("--config", nargs="*", default=[], metavar="FIELD=VALUE", help="settings, in JSON")
    flag("--save", type=Path, required=True, help="jsonl file to write")
    args = parser.parse_args(argv)
    if not args.save.name or not all("=" in pair for pair in args.config):
        parser.error("--save needs a file name, and --config needs FIELD=VALUE")
    with explained(args.name, "it makes no problems",
                   "pip install reasoning-gym, or pass another name or --config"):
        # Each generator checks its own configuration, and may raise any exception.
        from reasoning_gym import create_dataset
        pairs = (pair.split("=", 1) for pair in args.config)
        config = {field: json.loads(value) for field, value in pairs}
        data = create_dataset(args.name, size=args.size + args.heldout, seed=args.seed, **config)
        # Score the rows as they come back from JSON. An empty answer can't be stored.
        rows = {row["question"]: json.loads(json.dumps(row)) for row in data if row["answer"] != ""}
        if min(data.score_answer(row["answer"], row) for row in rows.values()) < 1:
            raise ValueError("its own answers to some problems score below 1")
    rows = list(rows.values())
    if len(rows) <= args.heldout:
        raise UserError(f"{args.name}: only {len(rows)} problems are distinct, too few for "
                        f"--heldout {args.heldout}; pass a smaller number, or another --config")
    heldout = args.save.with_stem(f"{args.save.stem}_heldout")
    for path, part in ((args.save, rows[args.heldout:]), (heldout, rows[:args.heldout])):
        if part:
            print(f"wrote {write_new(path, part, same_kind=True)} lines to {path}")


if __name__ == "__main__":
    main()
