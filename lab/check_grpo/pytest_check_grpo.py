"""The fixture of check-grpo, which pytest finds where the package is installed."""
import pytest


@pytest.fixture
def grpo_report():
    """check of check_grpo: `report = grpo_report(loss, advantages=...)`, `assert not report.bugs`.

    A test without torch is skipped.
    """
    pytest.importorskip("torch")
    from check_grpo import check
    return check
