"""The pages (README, CONTRIBUTING, docs) say what is so: commands, files, links, two languages."""
import argparse
import functools
import itertools
import math
import re
import runpy
import shlex
import warnings
from unittest.mock import patch

import pytest
import torch
from compare_peers import trl_cases
from torch.distributed.run import get_args_parser

import train_grpo
from conftest import ROOT, write
from model.storage import memory
from reward import relatives

PAGES = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in (
    *sorted(ROOT.glob("README*.md")), ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/*.md")))}
CHINESE = {page: text for page, text in PAGES.items() if page.endswith("_zh.md")}
ENGLISH = {page: text for page, text in PAGES.items() if page not in CHINESE}
LANGUAGES = {"English": ENGLISH, "Chinese": CHINESE}
PAIRS = [(page.replace("_zh.md", ".md"), page) for page in CHINESE]
of_each_page = pytest.mark.parametrize("page", PAGES)
of_each_pair = pytest.mark.parametrize("english, chinese", PAIRS)
in_each_language = pytest.mark.parametrize("language", LANGUAGES)

# --- what a page consists of ----------------------------------------------------------------------


def blocks(text):
    """The fenced blocks of code: [(language, what stands in it)]."""
    return re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def without_blocks(text):
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


def paragraphs(text):
    """What stands outside of fenced blocks; a list or a table is one paragraph."""
    return re.split(r"\n\s*\n", without_blocks(text))


def inline(text):
    """The pieces of code within sentences and tables."""
    return [" ".join(code.split()) for part in paragraphs(text)
            for code in re.findall(r"`([^`]+)`", part)]


def tables(text):
    """The tables: rows of cells, without the two lines of the head."""
    return [[[cell.strip(" *") for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
             for line in part.strip().splitlines()[2:]]
            for part in paragraphs(text) if part.lstrip().startswith("|")]


def links(text):
    """[("!" for a picture, its text, where it leads)]."""
    without_code = re.sub(r"`[^`]+`", "code", "\n\n".join(paragraphs(text)))
    return re.findall(r"(!?)\[([^\[\]]*)\]\(([^()\s]+)\)", without_code)


def numbers(text):
    """The numbers in a text; 26M is 2,600 万."""
    text = re.sub(r"([\d,]+) 万", lambda found: f"{int(found[1].replace(',', '')) / 100:g}", text)
    return re.findall(r"\d+(?:[.,]\d+)*", text)


# --- commands -------------------------------------------------------------------------------------

NOT_OURS = {".", "accelerate", "git", "jupyter", "pip", "pytest", "ray", "ruff", "swanlab", "venv",
            "sglang.launch_server", "verl.trainer.main_ppo", "vllm",
            "vllm.entrypoints.openai.api_server"}
MADE_BY_THE_READER = {"sorting.py", "sorting.txt", "train_trl.py", "verl_task.py"}
# A flag without its program is train_grpo.py's, except for these.
FLAGS_OF_OTHERS = {
    **dict.fromkeys(["--draw", "--jobs"], "report/experiments/__main__.py"),
    **dict.fromkeys(["--node_rank", "--nproc_per_node", "--shutdown-timeout"], "torchrun"),
    "--config": "dataset/reasoning_gym.py", "--merge_digits": "model/storage/tokenizer.py"}
STAND_INS = {"k": "2", "NAME": "clip"}      # what a sentence leaves open: `--oversample k`


def commands(script):
    """The commands of a shell script, as words, without `...`; shell variables stay as they are."""
    found = []
    for line in script.replace("\\\n", "").splitlines():
        words = shlex.shlex(line, posix=True, punctuation_chars=";&|")
        words.whitespace_split = True
        for is_operator, part in itertools.groupby(words, lambda word: not word.strip(";&|")):
            part = [word for word in part if word not in ("do", "done", "...")]
            while part and re.match(r"\w+=", part[0]):
                del part[0]
            if part and not is_operator and part[0] != "for":
                found.append(part)
    return found


def commands_in_blocks(text):
    return commands("".join(script for language, script in blocks(text) if language == "bash"))


def commands_in_sentences(text):
    """Inline code that runs a program or is made of flags, as words."""
    starts = re.compile(r"(python3?|torchrun) |\S+\.py [-@]|@\S+\.txt|--")
    return commands("\n".join(code for code in inline(text) if starts.match(code) or " --" in code))


def file_of(module):
    path = module.replace(".", "/")
    return f"{path}/__main__.py" if (ROOT / path).is_dir() else f"{path}.py"


def refuse(message):
    raise ValueError(message)


@functools.cache
def parser_of(program, whole=True):
    """The parser of a program, which runs until it would parse its flags.

    whole: False for a command that may leave out flags that the program needs.
    """
    if program == "torchrun":
        parser = get_args_parser()
    elif "Parser(" not in (ROOT / program).read_text(encoding="utf-8"):
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
        action.required &= whole
    return parser


def check(words, whole):
    """AssertionError or ValueError unless it is a known program that takes these flags."""
    program, *flags = words
    if program.startswith(("-", "@")):
        flag, program, flags = program.partition("=")[0], "train_grpo.py", words
        if flag in FLAGS_OF_OTHERS or words == [flag] and flag[0] == "-":     # only named
            assert flag in parser_of(FLAGS_OF_OTHERS.get(flag, program)).format_help().split()
            return
    elif program == "torchrun":
        flags = flags if any(word.endswith(".py") for word in flags) else [*flags, "train_grpo.py"]
        options = parser_of("torchrun").parse_args(flags)
        program, flags = options.training_script, options.training_script_args
    elif program in ("python", "python3"):
        program = flags.pop(0)
        if program == "-m":
            module = flags.pop(0)
            program = module if module in NOT_OURS else file_of(module)
    if program in NOT_OURS | MADE_BY_THE_READER:
        return
    assert (ROOT / program).is_file(), "there is no such program; if it is not ours, list it above"
    if program.endswith(".py") and "--help" not in flags and (flags or whole):
        flags = [STAND_INS.get(flag, flag) for flag in flags
                 if flag.removeprefix("@") not in MADE_BY_THE_READER]
        args = parser_of(program, whole).parse_args(flags)
        if program == "train_grpo.py":
            train_grpo.parse_args(flags)                # also refuses impossible combinations
        if program == "reward/iterate.py":
            train_grpo.parse_args(args.flags)


def complaints(found, whole=True):
    """What is wrong with these commands."""
    for words in found:
        try:
            check(words, whole)
        except (AssertionError, ValueError) as error:
            yield f"{shlex.join(words)}: {error}"


@of_each_page
def test_the_flags_of_every_command_parse(page, monkeypatch):
    monkeypatch.chdir(ROOT)     # from there, commands are run
    assert list(complaints(commands_in_blocks(PAGES[page]))) == []
    assert list(complaints(commands_in_sentences(PAGES[page]), whole=False)) == []


@of_each_page
def test_the_files_that_a_page_names_exist(page):
    text, rooms = PAGES[page], "(dataset|docs|images|model|report|reward|tests)"
    words = set(sum(commands_in_blocks(text) + commands_in_sentences(text), []))
    files = {word for word in words if re.fullmatch(r"[\w.-]+\.(py|txt|ipynb)", word)}
    files |= {file_of(word) for word in words if re.fullmatch(rf"{rooms}\.\w+", word)}
    files |= {re.sub(r"NAME|\$\w+", "*", word.lstrip("@").rstrip("/"))
              for word in words | {*inline(text)} if re.fullmatch(rf"@?{rooms}/[\w.$*/-]*", word)}
    assert [name for name in sorted(files - MADE_BY_THE_READER) if not any(ROOT.glob(name))] == []


@pytest.mark.parametrize("script, complaint", [
    ("python train_grpo.py --max_step 2", "unrecognized arguments: --max_step 2"),
    ("torchrun --nproc_per_nod=2 train_grpo.py", "unrecognized arguments"),
    ("torchrun train_grpo.py --beta x", "--beta: invalid float value"),
    ("for x in 1; do\n  A=B python train_grpo.py --loss_type \\\n    no\ndone", "choice: 'no'"),
    ("python train_grpo.py --delta 1", "undoes the clip"),
    ("python -m model.train_sft --steps 3", "arguments are required: --data"),
    ("python -m reward.iterate -- --reward_funcs", "--reward_funcs: expected at least one"),
    ("python tests/bench.py --quick", "unrecognized arguments: --quick"),
    ("cd out && python -m model.storage.memory", "no such program"),
    ("--beta", None), ("--beta 0", None), ("--betas", "assert"), ("--oversample k", None),
    ("python train_grpo.py @dataset/countdown.txt --reward_funcs ... overlong  # it's", None)])
def test_a_wrong_command_is_noticed(script, complaint, monkeypatch):
    monkeypatch.chdir(ROOT)
    found = list(complaints(commands(script)))
    assert len(found) == bool(complaint) and (not complaint or complaint in found[0]), found


def test_what_scripts_take_from_train_grpo_is_there():
    text = "".join(path.read_text(encoding="utf-8") for path in ROOT.glob("tests/*.py"))
    names = set(re.findall(r"\btrain_grpo\.(?!py\b)(\w+)", text))
    assert {name for name in names if not hasattr(train_grpo, name)} == set()


# --- two languages, links, pictures ---------------------------------------------------------------


def test_every_page_is_in_both_languages():
    assert set(CHINESE) == {page.replace(".md", "_zh.md") for page in ENGLISH} - {
        "CONTRIBUTING_zh.md"}


@of_each_pair
def test_both_languages_begin_alike(english, chinese):
    names = [page.rpartition("/")[2] for page in (english, chinese)]
    for page, line in ((english, f"English | [中文]({names[1]})"),
                       (chinese, f"[English]({names[0]}) | 中文")):
        title, _, switch, *_ = PAGES[page].splitlines()
        assert title.startswith("# ") and switch == line


@of_each_pair
def test_both_languages_have_the_same_code_pictures_and_numbers_in_tables(english, chinese):
    assert blocks(PAGES[english]) == blocks(PAGES[chinese])
    # A picture may have a twin with Chinese labels.
    first, second = (([target.replace("_zh.", ".")
                       for picture, _, target in links(PAGES[page]) if picture],
                      [[[numbers(cell) for cell in row] for row in table]
                       for table in tables(PAGES[page])]) for page in (english, chinese))
    assert first == second


@of_each_page
def test_blocks_are_of_a_kind_that_is_read_here(page):
    assert "```" not in without_blocks(PAGES[page])     # every block has two fences
    for kind, code in blocks(PAGES[page]):
        assert kind in ("bash", "diff", "mermaid", "python", "text"), code
        if kind == "python":
            compile(code, page, "exec")


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


@of_each_page
def test_a_linked_function_is_in_its_file(page):
    found = re.findall(r"\[`(\w+)`\]\(([^()\s]+\.py)\)", without_blocks(PAGES[page]))
    missing = [(name, path) for name, path in found if not re.search(
        rf"^ *(def|class) {name}\b|^{name}\b.* =", ((ROOT / page).parent / path).read_text(
            encoding="utf-8"), re.MULTILINE)]
    assert missing == []


@in_each_language
def test_the_readme_links_to_every_page(language):
    readme, *pages = LANGUAGES[language]
    linked = {target.partition("#")[0] for _, _, target in links(PAGES[readme])}
    assert {page for page in pages if page.startswith("docs/")} <= linked


@of_each_page
def test_a_picture_says_what_one_sees(page):
    assert "<img" not in PAGES[page], "write pictures in Markdown, which is read here"
    for picture, text, target in links(PAGES[page]):
        assert not picture or len(text) >= (5 if page in CHINESE else 10), target


def test_every_picture_is_shown():
    shown = {target.rpartition("/")[2] for text in PAGES.values()
             for picture, _, target in links(text) if picture}
    assert {path.name for path in ROOT.glob("images/*")} <= shown


@pytest.mark.parametrize("page", ["README.md", "README_zh.md"])
def test_a_readme_has_at_most_150_lines(page):
    assert len(PAGES[page].splitlines()) <= 150     # the rest belongs into docs/


# --- docs/questions.md: what the code computes ----------------------------------------------------

QUESTIONS = PAGES["docs/questions.md"]


def floats(text):
    return [float(x) for x in re.findall(r"-?\d+\.?\d*(?:e-\d+)?", text)]


def test_the_loss_is_0_and_its_gradient_is_not(capsys):
    code, _ = (code for kind, code in blocks(QUESTIONS) if kind == "python")
    exec(code, {})
    value, *gradient = floats(capsys.readouterr().out)
    promised, *promised_gradient = floats(code.split("#")[-1])
    assert abs(value) < 1e-6 and abs(promised) < 1e-6
    assert gradient == pytest.approx(promised_gradient, abs=1e-4)


def test_worked_answers_are_those_with_a_sum_in_their_thought(tmp_path, monkeypatch, capsys):
    _, code = (code for kind, code in blocks(QUESTIONS) if kind == "python")
    worked, guessed, summed = ("<think>\n2*3=6\n</think>\n6", "<think>\n6\n</think>\n6",
                               "<think>\n</think>\n2*3=6")
    rows = [(1, worked, 0.0), (3, worked, 1.0), (2, guessed, 1.0), (2, summed, 1.0),
            (4, worked, 1.0), (300, worked, 1.0)]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out/grpo_reason_128").mkdir(parents=True)
    write(tmp_path / "out/grpo_reason_128/completions.jsonl", [
        {"step": step, "completion": text, "rewards": {"accuracy_reward": right}}
        for step, text, right in rows])
    exec(code, {})
    assert capsys.readouterr().out == "0.5 0.5\n1.0 1.0\n"


# --- docs/real_models.md: the memory ----------------------------------------------------------


def test_the_memory_table_is_what_the_command_prints(capsys):
    memory.main(["--rollout_batch_size", "16"])
    printed = capsys.readouterr().out.splitlines()
    table = next(table for table in tables(PAGES["docs/real_models.md"]) if "LoRA" in table[1][0])
    assert len(table) == 10
    for name, *cells in table:
        model, _, lora = name.partition(", ")
        flags = "--lora_rank 16" if lora else "--beta above 0"
        row, = (line for line in printed
                if line.startswith(f"{model}, {flags}, --gradient_checkpointing "))
        *_, host = row.split()
        assert cells == row.split()[-8:-1]
        assert model != "Qwen3-8B" or f" {host}" in PAGES["docs/scaling.md"]    # 12 bytes x 8.19e9


# --- docs/losses.md: the map ----------------------------------------------------------------------

MAP = pytest.mark.parametrize("page", ["docs/losses.md", "docs/losses_zh.md"])


@MAP
@pytest.mark.parametrize("flag, names", [
    ("loss_type", {*train_grpo.LOSS_TYPES} - {"grpo"}), ("scale_rewards", train_grpo.SCALES),
    ("kl_type", {*train_grpo.KL_TYPES} - {"k3"}), ("advantage_estimator", train_grpo.BASELINES)])
def test_every_relative_is_on_the_map(page, flag, names):
    cells = " ".join(cell for table in tables(PAGES[page]) for row in table for cell in row)
    missing = {name for name in names
               if not re.search(rf"`--{flag} {re.escape(name)}[ `]", cells)}
    assert missing == set()


@MAP
def test_the_figures_of_the_map(page):
    text = PAGES[page]
    assert f"{sum(1 for _ in trl_cases()):,}" in text
    assert f"{relatives.TAU_BAD:g}" in text
    one, seven = (train_grpo.group_advantages((torch.arange(8) < right).float(), 8,
                                              scale_rewards="mean")[0] for right in (1, 7))
    assert f"A = {one:g}" in text and f"1/{1 / seven:g}" in text
    assert f"{math.exp(0.4):.2f}" in text


@MAP
def test_our_defaults_are_those_of_the_map(page):
    args = train_grpo.parse_args([])
    table = next(table for table in tables(PAGES[page]) if table[2][1:3] == ["64", "8"])
    assert [floats(table[i][-1])[0] for i in (2, 3, 4, 5, 7)] == [
        args.num_generations, args.num_iterations * args.num_minibatches, args.epsilon_low,
        args.beta, args.learning_rate]
    assert args.loss_type in table[1][-1] and args.kl_type == table[6][-1]
