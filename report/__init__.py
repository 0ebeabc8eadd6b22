"""What a run tells: `Report` while it trains, `draw_curves` at any time (also `python -m report.curves out/run_a`)."""

from .metrics import add_metrics, describe, mean_metrics, rollout_metrics
from .report import Report

__all__ = ["Report", "add_metrics", "describe", "draw_curves", "mean_metrics", "rollout_metrics"]


def __getattr__(name):
    # On first use, not at import: matplotlib is slow to load, and `python -m report.curves` would load that module twice.
    if name == "draw_curves":
        from .curves import draw_curves
        return draw_curves
    raise AttributeError(f"module 'report' has no attribute '{name}'")
