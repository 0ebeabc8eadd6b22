"""lab/hunt: every bug is noticed, and an edit is judged rightly."""
import pytest

from lab.hunt import __main__ as hunt
from lab.hunt import checks
from lab.hunt.__main__ import BUGS, RUNS, source_of
from support import jsonl

LAST = "def report("         # of the page: no check reads what it prints


@pytest.fixture
def game(tmp_path, monkeypatch, capsys):
    """Runs the command with these flags and returns what it printed; files go to tmp_path."""
    monkeypatch.setattr(hunt, "COPY", tmp_path / "hunt.py")
    monkeypatch.setattr(hunt, "STATE", tmp_path / "hunt.json")
    monkeypatch.setenv("LC_ALL", "C")

    def run(*flags):
        code = 0
        try:
            hunt.main([str(flag) for flag in flags])
        except SystemExit as ended:
            code = ended.code
        out, error = capsys.readouterr()
        assert code == 2 or ("--check" in flags and "Found" not in out) == (code == 1)
        return out + error
    return run


@pytest.mark.usefixtures("one_thread")
def test_bugs_change_what_a_function_computes():
    right = checks.computed(source_of(0))
    assert not [text for text in right.values() if isinstance(text, str)]
    for number in range(1, len(BUGS) + 1):
        page = checks.page_of(source_of(number))
        assert any(not checks.alike(probe(page), right[probe.__name__])
                   for probe in checks.PROBES), number


def test_bugs_have_three_hints_in_both_languages_and_a_run_each():
    for bug in BUGS:
        assert len(bug["en"]["hints"]) == len(bug["zh"]["hints"]) == 3, bug["en"]
    assert [run["bug"] for run in jsonl(RUNS)] == [*range(len(BUGS) + 1)]


@pytest.mark.parametrize("edits, verdict", [
    ([], "The bug is still there: each"),
    ([("x = logps - ref_logps", "x = ref_logps - logps"), (LAST, "def other():\n    1\n\n" + LAST)],
     "Found: k3 the wrong way round."),
    ([("x = logps - ref_logps", "x = ref_logps - logps"), ("std + 1e-4", "std + 1e-7")],
     "Found: k3 the wrong way round."),
    ([("x = logps - ref_logps", "x = ref_logps - logps"), ("std + 1e-4", "std + 1e-2")],
     "The bug is gone, but group_advantages, or something"),
    ([("std + 1e-4", "std + 1e-2")],
     "The bug is still there, and group_advantages, which was right,"),
    ([("x.expm1() - x", "x.expm1() + x")], "grpo_loss computes something else than before"),
    ([("is_eos = ", "is_eos = 1 / 0 + ")], "completion_mask: ZeroDivisionError"),
    ([("is_eos = ", "is_eos = = ")], "out/hunt.py, line 53: invalid syntax")])
def test_edit_is_judged_by_what_the_functions_compute(edits, verdict, game, monkeypatch):
    monkeypatch.setattr(checks, "PROBES", checks.PROBES[:3])        # those without a model
    game(13)
    source = hunt.COPY.read_text(encoding="utf-8")
    for old, new in edits:
        assert source.count(old) == 1
        source = source.replace(old, new)
    hunt.COPY.write_text(source, encoding="utf-8")
    assert verdict in game("--check")
    assert ("k3 the wrong way round" in game("--list")) == verdict.startswith("Found")


def test_game_writes_a_bug_shows_hints_and_keeps_what_the_reader_edits(game):
    shown = game()
    assert shown.startswith("Bug 1 of 16, level 1") and "the right page" in shown
    assert hunt.COPY.read_text(encoding="utf-8") == source_of(1)
    hunt.COPY.write_text("edited", encoding="utf-8")
    game()
    assert hunt.COPY.read_text() == "edited"
    for count in (1, 2, 3, 3):
        shown = game("--hint")
        assert [hint in shown for hint in BUGS[0]["en"]["hints"]] == [i < count for i in range(3)]
    assert "第 1 个 bug" in game(1, "--language", "zh")
    assert hunt.COPY.read_text(encoding="utf-8") == source_of(1)
    assert "invalid choice: 17" in game(17) and "not allowed with" in game(3, "--check")
    hunt.COPY.unlink()
    assert "there is no out/hunt.py yet" in game("--check")
