"""The command `python -m report.experiments`."""
import argparse
from pathlib import Path

from .. import UserError, experiments, user_errors
from .arms import EXPERIMENTS
from .figures import draw_experiment, draw_lessons, print_table
from .run import ROOT, make_weights, prove, results_of, run_missing


@user_errors("report.experiments")
def main():
    parser = argparse.ArgumentParser(
        prog="python -m report.experiments", description=experiments.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=tuple(EXPERIMENTS))
    parser.add_argument("--draw", action="store_true", help="only draw, from the results so far")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time (default: %(default)s)")
    args = parser.parse_args()
    experiment, out = EXPERIMENTS[args.name], ROOT / "out" / "experiments" / args.name
    path = Path(__file__).parent / "results" / f"{args.name}.jsonl"
    if not args.draw:
        make_weights(experiment.weights, out)
        run_missing(experiment, path, out, args.jobs)
        prove(experiment.changes)
    results = list(results_of(experiment, path).values())
    if not results:
        raise UserError(f"{path}: there are no results yet; run the experiment first")
    picture = ROOT / "images" / f"{args.name}.png"
    if experiment.lessons:
        draw_lessons(results, experiment.lessons, experiment.panels, experiment.legend, picture)
    else:
        draw_experiment(results, experiment.panels, picture)
    print_table(results, experiment.panels)


if __name__ == "__main__":
    main()
