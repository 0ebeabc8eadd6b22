"""The pages (README, CONTRIBUTING, docs) say what is so: commands, files, links, two languages."""
import argparse
import functools
import os
import re
import runpy
import warnings
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
    tables,
    without_blocks,
)
from support import ROOT

FLAGS = "docs/zh/flags.md"       # of no English page
PAIRS = [(page.replace("/zh/", "/").replace("_zh.", "."), page) for page in CHINESE
         if page != FLAGS]
of_each_page = pytest.mark.parametrize("page", PAGES)

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
def test_commands_run_what_there_is_with_flags_that_it_has(page, monkeypatch):
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


def test_flags_in_sentences_are_those_of_programs_that_the_pages_run():
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
def test_files_that_a_page_names_exist(page):
    text, rooms = PAGES[page], "(dataset|docs|lab|model|reward|run|tests)"
    words = {*sum(commands_of(text), [])}
    files = {word for word in words if re.fullmatch(r"[\w.-]+\.(py|txt|ipynb)", word)}
    files |= {file_of(word) for word in words if re.fullmatch(rf"{rooms}\.\w+", word)}
    files |= {re.sub(r"NAME|\$\w+", "*", word.lstrip("@").rstrip("/"))
              for word in words | {*inline(text)} if re.fullmatch(rf"@?{rooms}/[\w.$*/-]*", word)}
    files -= MADE_BY_THE_READER | OF_EARLIER_COMMITS | {"eval_llm.py"}
    assert [name for name in sorted(files) if not any(ROOT.glob(name))] == []


# --- two languages, links, pictures ---------------------------------------------------------------


def test_pages_are_in_both_languages():
    assert {english for english, _ in PAIRS} | {".github/CONTRIBUTING.md"} == {*ENGLISH}


def test_flags_of_the_chinese_table_are_all_with_their_defaults():
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
def test_code_and_pictures_are_the_same_in_both_languages(english, chinese):
    def pictures(text):         # one may have a twin with Chinese labels
        return [Path(target).name.replace("_zh.", ".") for picture, _, target in links(text)
                if picture]

    assert blocks(PAGES[english]) == blocks(PAGES[chinese])
    assert pictures(PAGES[english]) == pictures(PAGES[chinese])


@pytest.mark.parametrize("english, chinese", PAIRS)
def test_links_lead_from_each_language_to_the_other(english, chinese):
    for page, other in ((english, chinese), (chinese, english)):
        path = os.path.relpath(other, os.path.dirname(page) or ".")
        assert path in [target for _, _, target in links(PAGES[page])], page


def anchors(text):
    """The names under which GitHub links to the headings of a page."""
    titles = re.findall(r"^#+ (.*)$", without_blocks(text), re.MULTILINE)
    return [re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles]


@of_each_page
def test_links_lead_to_files_and_headings(page):
    for _, _, target in links(PAGES[page]):
        if re.match(r"[a-z]+:", target):        # https:, mailto:
            continue
        path, _, anchor = target.partition("#")
        file = (ROOT / page).parent / path if path else ROOT / page
        assert file.exists(), target
        assert not anchor or anchor in anchors(file.read_text(encoding="utf-8")), target


# --- what pages compute ---------------------------------------------------------------------------


@pytest.mark.parametrize("page, code", [
    (page, code) for page in ("derivation", "ladder", "questions", "real_models")
    for kind, code in blocks(PAGES[f"docs/{page}.md"])      # but for what reads a reader's files
    if kind == "python" and "open(" not in code and "from_pretrained(" not in code])
def test_python_of_a_page_prints_what_its_last_comment_says(page, code, capsys):
    exec(code, {})
    promised = floats(code.rpartition("#")[2])
    assert floats(capsys.readouterr().out) == pytest.approx(promised, abs=1e-4) and promised
