import html
import json
import re
import shutil
import subprocess
from types import SimpleNamespace

import pytest
import torch

from conftest import report_args
from report import Report, describe
from report.metrics import token_texts
from report.page import MOST_BYTES, page_data, write_page
from report.text import to_line

HOSTILE = [
    "</script><script>document.title = 'owned'</script>",
    "<img src=http://hostile.invalid/x onerror=\"document.title = 'owned'\"> <!-- <script>",
    "line\u2028break \u202e reversed \ud800 half \x1b[31m red \0",
    "苹果 👩\u200d👧 {{data}} &lt;b&gt;",
]
G = 4


def row(step, text="one", reward=1.0, prompt="What is 1+1?", **more):
    return {"step": step, "answer": "2", "prompt": prompt, "completion": text, "length": 3,
            "ended": True, "rewards": {"tag_reward": 0.5, "accuracy_reward": reward},
            "reward": reward, "advantage": 0.25} | more


def write_run(folder, rows, steps, **args):
    """The files of a run, as Report writes them."""
    folder.mkdir(exist_ok=True)
    args = {"num_generations": G, "reward_funcs": ["tag", "accuracy"], "beta": 0.02,
            "eval_reward_funcs": ["accuracy"], "eval_threshold": 1.0} | args
    (folder / "args.json").write_text(json.dumps(args))
    metrics = [{"step": step, "reward": 0.1 * step, "step_time": 1.0, "kl": float("nan")}
               for step in range(1, steps + 1)]
    for name, lines in (("metrics", metrics), ("completions", rows)):
        (folder / f"{name}.jsonl").write_text("".join(map(to_line, lines)), encoding="utf-8")
    return folder


def hostile_run(folder):
    nan = float("nan")
    rows = [row(step, text, reward, prompt="\n".join(HOSTILE), answer=HOSTILE[1], **more)
            for step in (1, 2)
            for text, reward, more in zip(HOSTILE, (1.0, nan, None, 0.0), (
                {}, {}, {"advantage": nan}, {"ended": False}))]
    return write_run(folder, rows, 2)


def embedded(path):
    """The data in a page, read as a browser does: up to the first thing that looks like its end."""
    page = path.read_text(encoding="utf-8")
    return json.loads(re.search(r'id="data">(.*?)</script', page, re.S)[1])


def test_the_page_holds_what_the_run_wrote(tmp_path):
    rows = [row(step, f"answer {step} {i}", float(i % 3 == 0), prompt=f"What is {step}+{i // G}?",
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
        "answer": "2"}


@pytest.mark.parametrize("text", ["<" * 3000, "果" * 3000])
def test_large_groups_of_long_completions_do_not_make_a_large_page(tmp_path, text):
    numbers = {"token_logps": [-0.12] * 3000, "token_advantages": [-1.2] * 3000}
    rows = [row(step, text, tokens=list(text), **numbers) for step in (1, 2, 3) for _ in range(128)]
    write_page(write_run(tmp_path / "run", rows, 3, num_generations=64), tmp_path / "page.html")
    assert (tmp_path / "page.html").stat().st_size < 2_000_000
    numbers = [step["step"] for step in embedded(tmp_path / "page.html")["steps"]]
    assert numbers[0] == 1 and numbers[-1] == 3


@pytest.mark.parametrize("size, steps, most", [
    (100, 300, 40), (20_000, 200, 40), (1_000_000, 5, 3)])
def test_a_page_is_small_whatever_the_run_and_shows_its_first_and_last_step(
        tmp_path, size, steps, most):
    text = "x" * size
    write_run(tmp_path / "run", [], steps)
    half = max(steps // 2, 3)       # an older half of its own, as --completions_limit leaves it
    for name, some in (("completions.1", range(3, half)), ("completions", range(half, steps + 1))):
        with open(tmp_path / "run" / f"{name}.jsonl", "w") as file:
            for step in some:
                file.writelines(to_line(row(step, f"{i} {text} {step}")) for i in range(G))
            file.write('{"step": ' * (name == "completions"))       # a run that was killed
    write_page(tmp_path / "run", tmp_path / "page.html")
    assert (tmp_path / "page.html").stat().st_size < MOST_BYTES + 200_000
    shown = embedded(tmp_path / "page.html")["steps"]
    numbers = [step["step"] for step in shown]
    assert numbers[0] == 3 and numbers[-1] == steps and numbers == sorted(set(numbers))
    assert 0.9 * most <= len(numbers) <= most
    assert shown[-1]["groups"][0]["rows"][2]["text"].startswith("2 x")
    assert shown[-1]["groups"][0]["rows"][2]["text"].endswith(f"x {steps}")


def test_a_run_writes_its_page_and_outlives_a_page_that_fails(tmp_path, monkeypatch, capsys):
    def run(folder):
        with Report(folder, report_args(num_generations=G), total_steps=2) as report:
            for step in (1, 2):
                report.step(step, {"reward": 0.5, "tokens": 9}, [row(step)] * G)

    run(tmp_path / "good")
    assert [step["step"] for step in embedded(tmp_path / "good/report.html")["steps"]] == [1, 2]
    assert "report.html" in capsys.readouterr().out
    monkeypatch.setattr("report.page.write_page", lambda *_: 1 / 0)
    run(tmp_path / "bad")
    out = capsys.readouterr().out
    assert "report.html could not be drawn (ZeroDivisionError" in out and "report.page" in out
    assert {path.name for path in (tmp_path / "bad").iterdir()} == {
        "args.json", "metrics.jsonl", "eval.jsonl", "completions.jsonl", "curves.png"}


def test_each_token_keeps_its_log_probability():
    class Bytes:
        def decode(self, ids, skip_special_tokens):
            return bytes(i for i in ids if i).decode(errors="replace")

    ids = [*"a果b".encode(), 0]         # three bytes make one character; 0 is the EOS
    assert token_texts(ids, Bytes()) == ["a", "", "", "果", "b", ""]
    assert token_texts(ids[:3], Bytes()) == ["a", "", "\ufffd"]     # cut off within a character
    rollout = SimpleNamespace(
        prompts=["p"], completions=["a果b"], columns={}, mask=torch.tensor([[1] * 6 + [0]]),
        ended=torch.tensor([True]), advantages=torch.arange(7.0)[None], token_ids=lambda: [ids],
        rewards_per_func={}, rewards=torch.ones(1), sampling_logps=-torch.arange(7.0)[None] / 8)
    assert "tokens" not in describe(rollout)[0]
    found = describe(rollout, Bytes())[0]
    assert "".join(found["tokens"]) == found["completion"] and len(found["tokens"]) == 6
    assert found["token_logps"] == [0.0, -0.125, -0.25, -0.375, -0.5, -0.625]
    assert found["token_advantages"] == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]


def test_long_completions_lose_the_middle_of_their_tokens(tmp_path):
    tokens = [f"{i} " for i in range(5000)]
    rows = [row(1, "".join(tokens), tokens=tokens, token_logps=[-i / 100 for i in range(5000)])]
    shown = page_data(write_run(tmp_path / "run", rows, 1))["steps"][0]["groups"][0]["rows"][0]
    gap = shown["tokens"].index(next(token for token in shown["tokens"] if "left out" in token))
    assert gap == 500 and "4,000 tokens" in shown["tokens"][gap] and shown["logps"][gap] is None
    assert len(shown["logps"]) == len(shown["tokens"]) == 1001 and shown["left_out"]
    assert shown["tokens"][-1] == "4999 " and shown["logps"][-1] == -49.99


# --- in a browser ---------------------------------------------------------------------------------


def dom_after(page, fragment, tmp_path):
    """The page's DOM once its script has run, and what the browser logged."""
    chromium = next(filter(None, map(shutil.which, (
        "chromium", "chromium-browser", "google-chrome", "chrome"))), None)
    if chromium is None:
        pytest.skip("no Chromium here: apt-get install chromium")
    process = subprocess.run(
        [chromium, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run",
         "--disable-background-networking", "--disable-component-update", "--disable-sync",
         f"--user-data-dir={tmp_path / 'browser'}", "--enable-logging=stderr", "--v=0",
         f"--log-net-log={tmp_path / 'net.json'}", "--dump-dom", f"{page.as_uri()}{fragment}"],
        capture_output=True, text=True, encoding="utf-8", timeout=120)
    assert process.returncode == 0, process.stderr
    return process.stdout, process.stderr


def test_hostile_completions_are_only_text_in_a_browser(tmp_path):
    page = tmp_path / "page.html"
    write_page(hostile_run(tmp_path / "run"), page)
    dom, log = dom_after(page, "#step=2&group=1", tmp_path)
    assert "CONSOLE" not in log, log    # which also has what the page's policy refused to load
    assert "hostile.invalid" not in (tmp_path / "net.json").read_text()
    body = dom[:dom.index('<script type="application/json"')]
    assert "<title>run</title>" in dom and "<img" not in body and "<script" not in body
    cards = re.findall(r"<article[^>]*>(.*?)</article>", body, re.S)
    assert len(cards) == 3 * G          # the group, and then and now
    assert [re.search("<b>(.*?)</b>", card)[1] for card in cards[:G]] == [
        "1.00", "0.00", "–", "–"]
    assert "✓ right" in cards[0] and "✗ wrong · cut off" in re.sub("<[^>]+>", "", cards[1])
    assert "&lt;/script&gt;&lt;script&gt;document.title = 'owned'" in cards[0]
    assert "苹果 👩\u200d👧 {{data}} &amp;lt;b&amp;gt;" in cards[1]
    assert "line·break · reversed" in body and ">step 2</label>" in body
    assert body.count("<figure>") >= 1 and 'd="M' in body


KEYS = """<script>
const seen = [], see = () => seen.push([current.step, current.place, $("found").textContent]);
const press = key => {
  document.body.dispatchEvent(new KeyboardEvent("keydown", {key, bubbles: true}));
  see();
};
["ArrowRight", "ArrowDown", "ArrowDown", "End", "ArrowUp", "Home", "ArrowLeft"].forEach(press);
$("filter").value = "cut off"; $("filter").onchange(); see();
$("filter").value = "dead groups"; $("filter").onchange(); see();
press("Escape");
$("search").value = "ANSWER 3 5"; $("search").oninput(); see();
seen.push(document.querySelector("mark").textContent, $("then").querySelectorAll("h3").length);
press("/");
seen.push(document.activeElement.id);
document.title = JSON.stringify(seen);
</script>"""


def test_keys_filters_and_search_move_through_the_groups(tmp_path):
    rows = [row(step, f"answer {step} {i}", float(i % 3 == 0 and step < 3),
                prompt=f"{step}, {i // G}", ended=(step, i) != (2, 6))
            for step in (1, 2, 3) for i in range(2 * G)]
    page = tmp_path / "page.html"
    write_page(write_run(tmp_path / "run", rows, 3), page)
    page.write_text(page.read_text().replace("</body>", f"{KEYS}</body>"))
    dom, log = dom_after(page, "", tmp_path)
    assert "CONSOLE" not in log, log
    assert json.loads(html.unescape(re.search("<title>(.*?)</title>", dom)[1])) == [
        [2, 0, ""], [2, 1, ""], [3, 0, ""], [3, 0, ""], [2, 1, ""], [1, 1, ""], [1, 1, ""],
        [2, 1, "1 answers in 1 of 6 groups"], [3, 0, "8 answers in 2 of 6 groups"], [3, 0, ""],
        [3, 1, "1 answers in 1 of 6 groups"], "answer 3 5", 2,
        [3, 1, "1 answers in 1 of 6 groups"], "search"]
