"""What a run reports: `Report`, while it trains.

`python -m report.curves out/run_a` draws the curves from the command line, and
`python -m report.page out/run_a` writes the page to look into a run.
"""
from .command_line import Parser, folder_name, sentence, user_errors
from .metrics import describe, rollout_metrics
from .report import Report
from .text import UserError, printable, reason

__all__ = ["Parser", "Report", "UserError", "describe", "folder_name", "printable", "reason",
           "rollout_metrics", "sentence", "user_errors"]
