"""The page about a task of one's own runs as printed; and what it says of a judge behind HTTP."""
import json
import re
import runpy
import shlex
import sys
import threading
import time
from collections import Counter
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.error import HTTPError

import pytest
import torch
import transformers

import train_grpo
from pages import ENGLISH, blocks, commands_of
from reward import llm_judge
from support import POLICY, ROOT, jsonl, turns

PAGE = ENGLISH["docs/own_task.md"]
# Its files by their name, which their first line has; the script runs sorting.py.
FILES = {text.split()[1]: text for language, text in blocks(PAGE) if language == "python"}
SCRIPT = next(text for _, text in blocks(PAGE) if text.startswith("python sorting.py"))

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def here(tmp_path, monkeypatch):
    """The current folder, with the page's files and nothing else, from which they are imported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
        monkeypatch.delitem(sys.modules, name.removesuffix(".py"), raising=False)
    return tmp_path


SMALL = (f"--model_path {POLICY} --data_path {ROOT}/dataset/train.jsonl "
         "--batch_size 2 --num_generations 4 --max_gen_len 16 --max_steps 2 --eval_interval 0 "
         "--beta 0 --run_name run").split()


def test_reward_of_the_page_is_one_of_four_in_a_run(here):
    program = next(words for words in commands_of(PAGE) if "brevity:brevity" in words)
    train_grpo.main([*program[2:], *SMALL, "--max_steps", "1"])
    row = jsonl(here / "out/run/completions.jsonl")[0]
    assert row["rewards"]["brevity"] == pytest.approx(-0.01 * row["length"])
    assert row["reward"] == pytest.approx(sum(row["rewards"].values())) and len(row["rewards"]) == 4


def test_task_from_nothing_runs(here, monkeypatch, capsys):
    # The same commands, of fewer numbers and steps.
    text = FILES["sorting.py"]
    for count, fewer in (("8000", "400"), ("11_500", "500"), ("12_000", "520")):
        text = text.replace(count, fewer)
    (here / "sorting.py").write_text(text)
    for command in SCRIPT.replace("--steps 400", "--steps 2").replace("\\\n", "").splitlines():
        program, *arguments = shlex.split(command)[1:]
        if program == "train_grpo.py":
            train_grpo.main([*arguments, "--max_steps", "1", "--eval_samples", "8"])
        elif program == "-m":
            monkeypatch.setattr(sys, "argv", arguments)
            monkeypatch.delitem(sys.modules, arguments[0], raising=False)
            runpy.run_module(arguments[0], run_name="__main__")
        else:
            runpy.run_path(program, run_name="__main__")
    assert "held-out accuracy" in capsys.readouterr().out
    assert (here / "out/sorting/final").is_dir()


def test_rewards_of_the_page_score(here, server):
    import graded
    import mixed
    from sorting import in_place
    assert in_place([""] * 2, ["01458", "10458"], answer=["01458"] * 2) == [1, 0.6]
    columns = {"answer": ["021", "5"], "task": ["sort", "sum"]}
    assert mixed.digits([""] * 2, ["012", "5"], **columns) == [1 / 3, None]
    assert mixed.sums([""] * 2, ["012", "5"], **columns) == [None, 1]
    server.answer = lambda reply, trial: (200, {}, reply)
    assert graded.good([""] * 3, ["8", "7", "8 of 10"], [turns("Why?")] * 3) == [1, 0, None]
    assert server.body["temperature"] == 0 and "polite" in server.body["messages"][0]["content"]


def test_watching_prints_the_tokens_that_a_step_has_moved(here, monkeypatch, capsys):
    text = next(text for _, text in blocks(ENGLISH["docs/watching.md"]) if "topk" in text)
    (here / "moved.py").write_text(text.replace("STEP = 40", "STEP = 1"))
    monkeypatch.setattr(sys, "argv", ["moved.py", *SMALL, "--max_steps", "1"])
    runpy.run_path("moved.py")
    found = re.findall(r"^[+-](\d\.\d\d)  token \d+, '.*', of '", capsys.readouterr().out, re.M)
    assert len(found) == 20 and float(found[0]) > 0 and found == sorted(found, reverse=True)


MINE = """
from transformers import LlamaConfig, LlamaForCausalLM

class MineConfig(LlamaConfig):
    model_type = "mine"

class MineForCausalLM(LlamaForCausalLM):
    config_class = MineConfig

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, logits_to_keep=0,
                **options):
        out = super().forward(input_ids, attention_mask, position_ids,
                              logits_to_keep=logits_to_keep, **options)
        out.logits = 5 * (out.logits / 5).tanh()
        return out
"""


def test_class_of_ones_own_is_registered_and_trained(here, monkeypatch, tokenizer, capsys):
    (here / "modeling_mine.py").write_text(MINE)
    for mapping in (transformers.CONFIG_MAPPING, transformers.MODEL_FOR_CAUSAL_LM_MAPPING):
        monkeypatch.setattr(mapping, "_extra_content", {})
    from modeling_mine import MineConfig, MineForCausalLM
    torch.manual_seed(0)
    MineForCausalLM(MineConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, eos_token_id=tokenizer.eos_token_id)).save_pretrained(here / "mine")
    tokenizer.save_pretrained(here / "tokens")
    monkeypatch.setattr(sys, "argv", [
        "train_mine.py", *SMALL, "--model_path", "mine", "--tokenizer_path", "tokens",
        "--reward_funcs", "brevity:brevity"])
    runpy.run_path("train_mine.py")
    assert "transformers' MineForCausalLM" in capsys.readouterr().out
    assert len(jsonl(here / "out/run/metrics.jsonl")) == 2


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        server = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        reply = re.search("<reply>\n(.*)\n</reply>", body["messages"][1]["content"], re.DOTALL)[1]
        server.tries[reply] += 1
        server.body = body
        with server.counting:
            server.busy += 1
            server.most = max(server.most, server.busy)
        status, headers, text = server.answer(reply, server.tries[reply])
        with server.counting:
            server.busy -= 1
        with suppress(OSError):         # who asked has gone
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            content = {"choices": [{"message": {"content": text}}]}
            self.wfile.write(json.dumps(content).encode())

    def log_message(self, *args):
        pass


@pytest.fixture
def server(monkeypatch):
    """An endpoint whose judge is `server.answer(reply, try) -> (status, headers, text)`."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads, server.counting = True, threading.Lock()
        server.tries, server.busy, server.most = Counter(), 0, 0
        server.answer = lambda reply, trial: (200, {}, "7")
        monkeypatch.setenv("no_proxy", "*")
        monkeypatch.setattr(llm_judge, "URL", f"http://127.0.0.1:{server.server_port}/v1")
        monkeypatch.setattr(llm_judge, "PAUSE", 0.01)
        monkeypatch.setattr(llm_judge, "TASK", llm_judge.TASK)      # which graded.py sets
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server
        server.shutdown()


def ask(*replies):
    return llm_judge.judge([""] * len(replies), list(replies), [turns("Why?")] * len(replies))


def test_judge_that_is_slow_or_fails_costs_single_scores(server, monkeypatch):
    def answer(reply, trial):
        if reply == "slow":
            time.sleep(0.4)
        failing = reply == "broken" or reply == "broken once" and trial == 1
        return 500 if failing else 200, {}, {"chatty": "I like it: 10"}.get(reply, " 7\n")

    server.answer = answer
    monkeypatch.setattr(llm_judge, "TIMEOUT", 0.2)
    assert ask("good", "slow", "broken", "broken once", "chatty") == [0.7, None, None, 0.7, None]
    assert server.tries["good"] == 1 and server.tries["broken once"] == 2
    assert server.tries["broken"] == server.tries["chatty"] == llm_judge.TRIES
    with pytest.raises(HTTPError, match="500"):
        ask("broken", "broken")
    with pytest.raises(TimeoutError):
        ask("slow")


@pytest.mark.parametrize("place", ["head", "body"])
def test_judge_that_sends_a_byte_now_and_then_is_late(place, server, monkeypatch):
    def drip(handler):
        handler.rfile.read(int(handler.headers["Content-Length"]))
        handler.wfile.write(b"HTTP/1.0 200 OK\r\n" + b"X: \r\n\r\n"[:9 if place == "body" else 3])
        with suppress(OSError):         # who asked has gone
            for _ in range(80):
                handler.wfile.write(b" ")
                time.sleep(0.05)

    monkeypatch.setattr(Handler, "do_POST", drip)
    monkeypatch.setattr(llm_judge, "TIMEOUT", 0.2)
    start = time.monotonic()
    with pytest.raises(TimeoutError, match="the judge took more than 0.2 s"):
        ask("a", "b")
    assert time.monotonic() - start < 3


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_judge_is_not_followed_to_another_address_with_the_key(status, server, monkeypatch):
    gone = []
    monkeypatch.setattr(Handler, "do_GET", gone.append, raising=False)
    monkeypatch.setattr(llm_judge, "TRIES", 1)
    port, first = server.server_port, server.answer
    server.answer = lambda reply, trial: (
        status, {"Location": f"http://localhost:{port}/x", "Content-Length": "0"}, "")
    with pytest.raises(HTTPError, match=f"redirects to http://localhost:{port}/x; set JUDGE_U"):
        ask("a")
    server.answer = first
    assert ask("a") == [0.7] and gone == []


def test_judge_whose_response_has_no_end_costs_a_score(server, monkeypatch):
    monkeypatch.setattr(llm_judge, "LONGEST", 1000)
    server.answer = lambda reply, trial: (200, {}, "7" + " " * (2000 if reply == "long" else 10))
    assert ask("long", "short") == [None, 0.7]


def test_judge_is_asked_as_often_as_it_allows(server, monkeypatch):
    monkeypatch.setattr(llm_judge, "AT_ONCE", 3)
    first = {}

    def answer(reply, trial):
        time.sleep(0.02)
        if first.setdefault(reply, time.monotonic()) + 1 > time.monotonic() and reply == "early":
            return 429, {"Retry-After": "1"}, ""
        return 200, {}, "10"

    server.answer = answer
    assert ask("early", *map(str, range(8))) == [1.0] * 9
    assert server.tries["early"] == 2 and server.most == 3
