import html
import json
import re
import shutil
import subprocess

import pytest

from dataset.jsonl import to_line
from run.report.html_page import write_page

HOSTILE = [
    "</script><script>document.title = 'owned'</script>",
    "<img src=http://hostile.invalid/x onerror=\"document.title = 'owned'\"> <!-- <script>",
    "line\u2028break \u202e reversed \x1b[31m red \0",
    "苹果 👩\u200d👧 {{data}} &lt;b&gt;",
]
G = 4


def row(step, text="one", reward=1.0, prompt="What is 1+1?", **more):
    return {"step": step, "prompt": prompt, "completion": text, "length": 3, "ended": True,
            "rewards": {"tag_reward": 0.5, "accuracy_reward": reward}, "reward": reward,
            "advantage": 0.25, "columns": {"answer": "2", "step": "x", "tokens": 3}} | more


def write_run(folder, rows, steps, **args):
    """The files of a run, as a run writes them."""
    folder.mkdir(exist_ok=True)
    args = {"num_generations": G, "reward_funcs": ["tag", "accuracy"], "beta": 0.02,
            "eval_reward_funcs": ["accuracy"]} | args
    (folder / "args.json").write_text(json.dumps(args))
    metrics = [{"step": step, "reward": 0.1 * step, "step_time": 1.0, "kl": float("nan")}
               for step in range(1, steps + 1)]
    for name, lines in (("metrics", metrics), ("completions", rows)):
        (folder / f"{name}.jsonl").write_text("".join(map(to_line, lines)), encoding="utf-8")
    return folder


def embedded(path):
    """The data in a page, read as a browser does: up to the first thing that looks like its end."""
    page = path.read_text(encoding="utf-8")
    return json.loads(re.search(r'id="data">(.*?)</script', page, re.S)[1])


def test_page_holds_what_the_run_wrote(tmp_path):
    rows = [row(step, HOSTILE[i % 4], float(i % 3 == 0), prompt=f"What is {step}+{i // G}?",
                advantage=i / 7, ended=i != 1)
            for step in range(1, 6) for i in range(2 * G)]
    write_page(write_run(tmp_path / "run", rows, 5), tmp_path / "page.html")
    data = embedded(tmp_path / "page.html")
    shown = [shown | {"step": step["step"], "prompt": group["prompt"]} for step in data["steps"]
             for group in step["groups"] for shown in group["rows"]]
    assert [step["of"] for step in data["steps"]] == [2] * 5 and len(shown) == len(rows)
    for one, written in zip(shown, rows):
        assert one["text"] == written["completion"] and one["right"] == (written["reward"] >= 1)
        assert one["advantage"] == pytest.approx(written["advantage"], rel=1e-3)
        for name in ("step", "prompt", "reward", "rewards", "length", "ended"):
            assert one[name] == written[name]
    assert data["metrics"]["reward"] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5])
    assert data["metrics"]["kl"] == [None] * 5 and data["steps"][0]["groups"][0]["columns"] == {
        "answer": "2", "step": "x", "tokens": "3"}


@pytest.mark.parametrize("text, steps, shown", [("x" * 100, 300, 39), ("x" * 300_000, 5, 5)],
                         ids=["many", "long"])
def test_page_is_small_and_has_more_of_the_early_steps(text, steps, shown, tmp_path):
    rows = [row(step, f"{i} {text} {step}") for step in range(1, steps + 1) for i in range(2 * G)]
    run = write_run(tmp_path / "run", rows, steps)
    with open(run / "completions.jsonl", "a") as file:
        file.write('{"step": ')             # half a line: the run was killed
    write_page(run, tmp_path / "page.html")
    assert (tmp_path / "page.html").stat().st_size < 2_000_000
    data = embedded(tmp_path / "page.html")["steps"]
    numbers = [step["step"] for step in data]
    assert numbers[:3] == [1, 2, 3] and numbers[-1] == steps and len(numbers) == shown
    assert sorted(set(numbers)) == numbers
    last = data[-1]["groups"][0]["rows"]
    assert len(last) == G and re.fullmatch(f"2 x.*x {steps}", last[2]["text"])


def test_tokens_and_turns_that_are_long_lose_their_middle(tmp_path):
    tokens = {"tokens": [*"<" * 999, "end"], "token_advantages": [-1.2] * 1000,
              "token_logps": [-i / 100 for i in range(1000)], "token_drawn": [1] * 999 + [0]}
    turns = row(1, turns=["a" * 900, "b" * 9, "c" * 9, "d" * 900, "e"], tool_tokens=9)
    rows = [*[row(1, **tokens)] * 31, turns]
    write_page(write_run(tmp_path / "run", rows, 1, num_generations=32), tmp_path / "page.html")
    *_, last, turns = embedded(tmp_path / "page.html")["steps"][0]["groups"][0]["rows"]
    assert len(last["tokens"]) == len(last["logps"]) == len(last["advantages"]) == 313
    assert "688 tokens" in last["tokens"][156] and last["logps"][156] is None
    assert last["tokens"][-1] == "end" and last["logps"][-1] == -9.99
    assert last["drawn"] == [1] * 156 + [None] + [1] * 155 + [0]
    gap = " … [690 characters left out] … "         # each has a fifth of the room
    assert turns["turns"] == [
        "a" * 105 + gap + "a" * 105, "b" * 9, "c" * 9, "d" * 105 + gap + "d" * 105, "e"]


# --- in a browser ---------------------------------------------------------------------------------


def dom_after(page, fragment=""):
    """The page's DOM once its script has run, without a word from the browser's console."""
    chromium = next(filter(None, map(shutil.which, (
        "chromium", "chromium-browser", "google-chrome", "chrome"))), None)
    if chromium is None:
        pytest.skip("no Chromium here: apt-get install chromium")
    process = subprocess.run(
        [chromium, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run",
         "--disable-background-networking", "--disable-component-update", "--disable-sync",
         f"--user-data-dir={page.parent / 'browser'}", "--enable-logging=stderr", "--v=0",
         f"--log-net-log={page.parent / 'net.json'}", "--dump-dom", f"{page.as_uri()}{fragment}"],
        capture_output=True, text=True, encoding="utf-8", timeout=120)
    # The console also has what the page's policy refused to load.
    assert process.returncode == 0 and "CONSOLE" not in process.stderr, process.stderr
    return process.stdout


def test_hostile_completions_are_only_text_in_a_browser(tmp_path):
    page, nan = tmp_path / "page.html", float("nan")
    rows = [row(1, text, reward, prompt="\n".join(HOSTILE), answer=HOSTILE[1], **more)
            for text, reward, more in zip(HOSTILE, (1.0, nan, None, 0.0), (
                {}, {}, {"advantage": nan}, {"ended": False}))]
    write_page(write_run(tmp_path / "run", rows, 1), page)
    dom = dom_after(page, "#step=1&group=1")
    assert "hostile.invalid" not in (tmp_path / "net.json").read_text()
    body = dom[:dom.index('<script type="application/json"')]
    assert "<title>run</title>" in dom and "<img" not in body and "<script" not in body
    cards = re.findall(r"<article[^>]*>(.*?)</article>", body, re.S)[:G]
    assert [re.search("<b>(.*?)</b>", card)[1] for card in cards] == ["1.00", "0.00", "–", "–"]
    assert "✓ right" in cards[0] and "✗ wrong · cut off" in re.sub("<[^>]+>", "", cards[1])
    assert "&lt;/script&gt;&lt;script&gt;document.title = 'owned'" in cards[0]
    assert "苹果 👩\u200d👧 {{data}} &amp;lt;b&amp;gt;" in cards[1]
    assert "line·break · reversed" in body and 'd="M' in body and "not learned" not in body


def seen_by(page, script):
    """What a script that is added to the page leaves in `seen`; and the page's DOM."""
    script = f"<script>const seen = [];\n{script}document.title = JSON.stringify(seen);</script>"
    page.write_text(page.read_text().replace("</body>", f"{script}</body>"))
    dom = dom_after(page)
    return json.loads(html.unescape(re.search("<title>(.*?)</title>", dom)[1])), dom


MARKED = """
const marked = () => [...$("group").children].map(card =>
  [...card.querySelectorAll(".tool")].map(span => span.innerHTML));
seen.push(marked());
$("search").value = "e"; $("search").oninput(); seen.push(marked());
"""


def test_tools_words_are_marked_with_and_without_tokens(tmp_path):
    page = tmp_path / "page.html"
    of_tool = row(1, turns=["5 ", "low\n", "7 ", "yes\n", ""], tool_tokens=3)
    tokens = {"tokens": ["5 ", "low", "\n", "7 ", "yes\n", ""], "token_logps": [-1.0] * 6,
              "token_drawn": [1, 0, 0, 1, 0, 1]}
    write_page(write_run(tmp_path / "run", [of_tool | tokens, of_tool], 1), page)
    seen, dom = seen_by(page, MARKED)
    assert seen == [
        [["low", "\n", "yes\n"], ["low\n", "yes\n"]], [["low\n", "y<mark>e</mark>s\n"]] * 2]
    assert "the tool's words: read, not learned" in dom


BOUND = """
const under = [...document.querySelectorAll(".bounded")];
seen.push(...under.map(token => token.innerHTML));
under[0].onpointerenter();
seen.push($("readout").textContent);
"""


def test_bounded_tokens_are_underlined(tmp_path):
    page, tokens = tmp_path / "page.html", {"tokens": ["5", "7", ""], "token_logps": [-1.0] * 3}
    rows = [row(1, **tokens, token_bounded=marks) for marks in ([0, 1, 0], [0, 0, 0])]
    write_page(write_run(tmp_path / "run", rows, 1), page)
    assert [one["bounded"] for one in embedded(page)["steps"][0]["groups"][0]["rows"]] == [
        [0, 1, 0], [0, 0, 0]]
    (token, readout), _ = seen_by(page, BOUND)
    assert token == "7" and '"7"' in readout and "removed its gradient" in readout


KEYS = """
const see = () => seen.push([current.step, current.place, $("found").textContent]);
const press = key => {
  document.body.dispatchEvent(new KeyboardEvent("keydown", {key, bubbles: true}));
  see();
};
["ArrowRight", "ArrowDown", "ArrowDown", "End", "ArrowUp", "Home", "ArrowLeft"].forEach(press);
$("filter").value = "cut off"; $("filter").onchange(); see();
$("filter").value = "zero-variance groups"; $("filter").onchange(); see();
press("Escape");
$("search").value = "ANSWER 3 5"; $("search").oninput(); see();
seen.push(document.querySelector("mark").textContent, $("then").querySelectorAll("h3").length);
press("/");
seen.push(document.activeElement.id);
"""


def test_keys_filters_and_search_move_through_the_groups(tmp_path):
    rows = [row(step, f"answer {step} {i}", float(i % 3 == 0 and step < 3),
                prompt=f"{step}, {i // G}", ended=(step, i) != (2, 6))
            for step in (1, 2, 3) for i in range(2 * G)]
    page = tmp_path / "page.html"
    write_page(write_run(tmp_path / "run", rows, 3), page)
    assert seen_by(page, KEYS)[0] == [
        [2, 0, ""], [2, 1, ""], [3, 0, ""], [3, 0, ""], [2, 1, ""], [1, 1, ""], [1, 1, ""],
        [2, 1, "1 answers in 1 of 6 groups"], [3, 0, "8 answers in 2 of 6 groups"], [3, 0, ""],
        [3, 1, "1 answers in 1 of 6 groups"], "answer 3 5", 2,
        [3, 1, "1 answers in 1 of 6 groups"], "search"]
