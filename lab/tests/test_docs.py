"""The pages (README, CONTRIBUTING, docs) say what is so: commands, files, links, two languages."""
import argparse
import functools
import importlib.util
import os
import re
import runpy
import subprocess
import sys
import warnings
from collections import Counter
from pathlib import Path
from unittest.mock import patch

import pytest
from torch.distributed.run import get_args_parser

import train_grpo
from errors import Parser
from pages import (
    CHINESE,
    ENGLISH,
    PAGES,
    blocks,
    commands_of,
    floats,
    inline,
    links,
    numbers,
    tables,
    without_blocks,
)
from support import ROOT

FLAGS = "docs/zh/flags.md"       # of no English page
PAIRS = [(page.replace("/zh/", "/").replace("_zh.", "."), page) for page in CHINESE
         if page != FLAGS]
of_each_page = pytest.mark.parametrize("page", PAGES)

# --- what a page consists of ----------------------------------------------------------------------


# --- commands -------------------------------------------------------------------------------------

NOT_OURS = {".", "accelerate", "cd", "curl", "git", "hf", "jupyter", "modelscope", "pip", "pytest",
            "ray", "ruff", "swanlab", "tensorboard", "venv", "sglang.launch_server",
            "verl.trainer.main_ppo", "vllm", "vllm.entrypoints.openai.api_server"}
MADE_BY_THE_READER = {"sorting.py", "train_mine.py", "after.py", "hopeful.py", "restarts.py",
                      "echo.py", "behind.py"}
# Measurements that a page names with the commit which had them.
OF_EARLIER_COMMITS = {f"tests/{name}.py" for name in (
    "bench_curves", "bench_loading", "bench_memory", "gradients", "pass_at_k")}


def file_of(module):
    path = module.replace(".", "/")
    return f"{path}/__main__.py" if (ROOT / path).is_dir() else f"{path}.py"


def refuse(message):
    raise ValueError(message)


@functools.cache
def parser_of(program):
    """The parser of a program, which runs until it would parse its flags."""
    if program == "torchrun":
        parser = get_args_parser()
    elif not re.search(r"Parser\(|argv", (ROOT / program).read_text(encoding="utf-8")):
        parser = argparse.ArgumentParser()      # takes no flags
    else:
        with (patch.object(argparse.ArgumentParser, "parse_args", autospec=True,
                           side_effect=SystemExit) as parse_args,
              patch("sys.argv", [program]), pytest.raises(SystemExit), warnings.catch_warnings()):
            warnings.simplefilter("ignore", RuntimeWarning)     # the module is imported already
            if re.match("train_grpo|tests/", program):
                runpy.run_path(str(ROOT / program), run_name="__main__")
            else:
                runpy.run_module(program.removesuffix(".py").replace("/", "."), run_name="__main__")
        parser = parse_args.call_args.args[0]
    parser.allow_abbrev, parser.error = False, refuse
    for action in parser._actions:
        action.required = False                 # a sentence may leave out what a program needs
    return parser


def program_of(words):
    """The file that a command runs, and its flags; ("", []) if it is not ours."""
    program, *flags = words
    if program == "torchrun":
        flags = flags if any(word.endswith(".py") for word in flags) else [*flags, "train_grpo.py"]
        options = parser_of("torchrun").parse_args(flags)
        program, flags = options.training_script, options.training_script_args
    elif program in ("python", "python3"):
        program = flags.pop(0)
        if program == "-m":
            module = flags.pop(0)
            program = module if module in NOT_OURS else file_of(module)
    elif program == "check-grpo":       # once its package is installed
        program = "lab/check_grpo/check_grpo.py"
    is_theirs = program in NOT_OURS | MADE_BY_THE_READER | {"eval_llm.py"}      # MiniMind's
    return ("", []) if is_theirs else (program, flags)


@of_each_page
def test_every_command_runs_what_there_is_with_flags_that_it_has(page, monkeypatch):
    monkeypatch.chdir(ROOT)     # from there, commands are run
    for words in commands_of(PAGES[page]):
        program, flags = program_of(words)
        assert not program or (ROOT / program).is_file(), f"{program}: if not ours, list it above"
        if not program.endswith(".py") or not flags or "--help" in flags or "recipes" in page:
            continue            # those of recipes need a diff: test_recipes.py parses them
        flags = ["clip" if flag == "NAME" else flag for flag in flags
                 if flag.removeprefix("@") not in MADE_BY_THE_READER]
        parser_of(program).parse_args(flags)
        if program == "train_grpo.py":
            train_grpo.parse_args(flags)                # also refuses impossible combinations


def test_every_flag_in_a_sentence_is_one_of_a_program_that_the_pages_run():
    run = [program_of(words) for text in PAGES.values() for words in commands_of(text)]
    programs = {program for program, flags in run if program.endswith(".py") and flags}
    programs |= {"torchrun", "lab/experiments/__main__.py"}
    known = {flag for program in programs
             for action in parser_of(program)._actions for flag in action.option_strings}
    named = {flag for text in PAGES.values() for code in inline(text)
             if code.split()[0] not in NOT_OURS and "eval_llm.py" not in code
             for flag in re.findall(r"(?<![\w-])--\w[\w-]*", code)}
    # vLLM's; torchrun's, of late; Slurm's
    assert named - known <= {"--model", "--shutdown-timeout", "--signal"}


@of_each_page
def test_the_files_that_a_page_names_exist(page):
    text, rooms = PAGES[page], "(dataset|docs|lab|model|reward|run|tests)"
    words = {*sum(commands_of(text), [])}
    files = {word for word in words if re.fullmatch(r"[\w.-]+\.(py|txt|ipynb)", word)}
    files |= {file_of(word) for word in words if re.fullmatch(rf"{rooms}\.\w+", word)}
    files |= {re.sub(r"NAME|\$\w+", "*", word.lstrip("@").rstrip("/"))
              for word in words | {*inline(text)} if re.fullmatch(rf"@?{rooms}/[\w.$*/-]*", word)}
    files -= MADE_BY_THE_READER | OF_EARLIER_COMMITS | {"eval_llm.py"}
    assert [name for name in sorted(files) if not any(ROOT.glob(name))] == []


# --- two languages, links, pictures ---------------------------------------------------------------


def test_every_page_is_in_both_languages():
    assert {english for english, _ in PAIRS} | {".github/CONTRIBUTING.md"} == {*ENGLISH}


def test_the_chinese_table_of_flags_has_all_flags_and_their_defaults():
    """--help is in English."""
    with patch.object(Parser, "parse_args", autospec=True, side_effect=KeyboardInterrupt) as parse:
        with pytest.raises(KeyboardInterrupt):
            train_grpo.parse_args([])
    actions = {action.option_strings[0]: action for action in parse.call_args[0][0]._actions}
    rows = {row[0].strip("`"): row[1] for table in tables(CHINESE[FLAGS]) for row in table}
    known = actions.keys() - {"-h"}
    missing = [f"| `{name}` | {actions[name].help}（{actions[name].default}） |"
               for name in actions if name in known - rows.keys()]
    assert not missing, "\n".join(["translate these lines and paste them:", *missing])
    assert rows.keys() == known
    for name in rows:
        action = actions[name]
        if isinstance(action.default, int | float) and not isinstance(action.default, bool):
            (default,) = re.findall(r"（([^（）]*)）$", rows[name])
            assert float(default) == action.default, name


@pytest.mark.parametrize("english, chinese", PAIRS)
def test_both_languages_have_the_same_headings_code_pictures_and_tables(english, chinese):
    def skeleton(text):
        # A picture may have a twin with Chinese labels.
        return (re.findall(r"^#+(?= )", without_blocks(text), re.MULTILINE), blocks(text),
                [Path(target).name.replace("_zh.", ".") for picture, _, target in links(text)
                 if picture],
                [[[numbers(cell) for cell in row] for row in table] for table in tables(text)])

    assert skeleton(PAGES[english]) == skeleton(PAGES[chinese])
    here, there = (os.path.relpath(to, os.path.dirname(page) or ".") for page, to in (
        (english, chinese), (chinese, english)))
    assert f"English | [中文]({here})" in PAGES[english].splitlines()
    assert f"[English]({there}) | 中文" in PAGES[chinese].splitlines()


def anchors(text):
    """The names under which GitHub links to the headings of a page."""
    titles = re.findall(r"^#+ (.*)$", without_blocks(text), re.MULTILINE)
    return [re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles]


@of_each_page
def test_links_lead_somewhere(page):
    for _, _, target in links(PAGES[page]):
        if re.match(r"[a-z]+:", target):        # https:, mailto:
            continue
        path, _, anchor = target.partition("#")
        file = (ROOT / page).parent / path if path else ROOT / page
        assert file.exists(), target
        assert not anchor or anchor in anchors(file.read_text(encoding="utf-8")), target


def headings_linked_to(page):
    """How often a page leads to each heading: the page without its language, the number there."""
    found = Counter()
    for _, _, target in links(PAGES[page]):
        path, _, anchor = target.partition("#")
        if anchor and ":" not in path:
            file = (ROOT / page).parent.joinpath(path).resolve() if path else ROOT / page
            text = file.read_text(encoding="utf-8")
            found[file.name.replace("_zh.", "."), anchors(text).index(anchor)] += 1
    return found


@pytest.mark.parametrize("english, chinese", PAIRS)
def test_what_leads_to_a_heading_in_english_does_so_in_chinese(english, chinese):
    assert not headings_linked_to(english) - headings_linked_to(chinese)


def test_chinese_pages_use_the_words_that_people_search_for():
    """Not a translation's: a KL is one 约束, a probability is 提高 or 降低, a run is 训练."""
    notebook = (ROOT / "docs/zh/grpo_in_ten_cells.ipynb").read_text(encoding="utf-8")
    words = """换来什么 划算 拿得定主意 什么也教不会 牵绳 弹簧 缰绳 朴素循环 动过手脚 逐比特
        往上推 往下推 往下压 一次运行 默认运行 这次运行 大家都会问的问题
        死组 裁判 奖励作弊 钻空子 留出题 起始权重 对拍""".split()
    for page, text in {**CHINESE, "notebook": notebook}.items():
        assert [word for word in words if word in text] == [], page


# --- what pages compute ---------------------------------------------------------------------------


def test_the_readmes_lines_of_python_take_an_answer_from_a_trained_model(capsys):
    code, _ = [code for kind, code in blocks(PAGES["README.md"]) if kind == "python"]
    final, shipped = "out/grpo_reason_128/final", ROOT / "model/weights/reason_128"
    assert code.count(final) == 1
    exec(code.replace(final, shipped.as_posix()), {})
    answer = capsys.readouterr().out.strip()
    # The weights before training; what their first evaluation prints, the page has, too.
    assert f"<answer>⏎ {answer}⏎ </answer>" in PAGES["README.md"] and answer == "272"


@pytest.mark.parametrize("page, code", [
    (page, code) for page in ("docs/derivation.md", "docs/ladder.md", "docs/questions.md")
    for kind, code in blocks(PAGES[page])
    if kind == "python" and "open(" not in code])       # what a run of the reader's has left
def test_a_block_prints_what_its_last_comment_says(page, code, capsys):
    exec(code, {})
    promised = floats(code.rpartition("#")[2])
    assert floats(capsys.readouterr().out) == pytest.approx(promised, abs=1e-4) and promised


@pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="needs wandb")
def test_the_lines_for_weights_and_biases_take_a_run_there(tmp_path):
    (code,) = (block for block in re.findall(r"```python\n(.*?)```", PAGES["docs/in_practice.md"],
                                             re.DOTALL) if "wandb" in block)
    (tmp_path / "out/run").mkdir(parents=True)
    (tmp_path / "out/run/metrics.jsonl").write_text('{"step": 1, "reward": 0.5, "kl": null}\n')
    (tmp_path / "take.py").write_text(code)
    subprocess.run([sys.executable, "take.py", "run"], cwd=tmp_path, check=True)
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))
