"""A call from Python: `train` with objects and functions does what the command line does."""
import ast
import asyncio
import copy
import datetime
import decimal
import importlib.util
import io
import os
import shutil
import signal
import subprocess
import sys
import threading
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from tqdm import tqdm
from transformers import (
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3Model,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

import errors
import train_grpo
from model.in_memory import rows_of
from pages import blocks as blocks_of
from run.rollout import Rollout
from support import POLICY, ROOT, jsonl
from train_grpo import train

pytestmark = pytest.mark.usefixtures("one_thread")
PROMPTS = ["What is 3 + 4?", [{"role": "user", "content": "What is 5 * 6?"}],
           {"prompt": "What is 7 - 2?", "answer": "5"}]
SHORT = {"max_steps": 2, "num_generations": 4, "max_gen_len": 16, "learning_rate": 1e-3}


def length(completions, **columns):
    return [len(text) / 100 for text in completions]


TOKENIZER, TRAINED = AutoTokenizer.from_pretrained(POLICY), Qwen3ForCausalLM.from_pretrained(POLICY)


def qwen():
    return copy.deepcopy(TRAINED)


def tiny_config(kind=Qwen3Config, **options):
    return kind(**{"vocab_size": len(TOKENIZER), "hidden_size": 32, "intermediate_size": 48,
                   "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
                   "head_dim": 8, "bos_token_id": None, "pad_token_id": None,
                   "eos_token_id": TOKENIZER.eos_token_id} | options)


def tiny():
    return Qwen3ForCausalLM(tiny_config())


def tiny_gpt2():
    return GPT2LMHeadModel(GPT2Config(
        vocab_size=len(TOKENIZER), n_embd=32, n_layer=2, n_head=2, bos_token_id=0,
        eos_token_id=TOKENIZER.eos_token_id))


def in_float8(model):
    """As transformers leaves a checkpoint of eight bits on a GPU: the scales are elsewhere."""
    for layer in model.model.layers:
        weight = layer.mlp.up_proj.weight
        layer.mlp.up_proj.weight = torch.nn.Parameter(
            weight.detach().to(torch.float8_e4m3fn), requires_grad=False)
    return model


def weights(model):
    return torch.cat([weight.detach().flatten() for weight in model.parameters()])


def without_clocks(rows):
    return [{name: value for name, value in row.items()
             if not name.startswith(("timing_s", "step_time", "perf", "eval"))} for row in rows]


def test_train_learns_what_a_command_does_and_returns_the_object_that_was_given(
        tmp_path, small_data):
    flags = {"max_steps": 2, "batch_size": 4, "num_generations": 4, "max_gen_len": 24,
             "micro_batch_size": 8, "reward_weights": [1, 0.5], "eval_interval": 0}
    model, problems = qwen(), str(small_data / "train.jsonl")
    trained, history = train(model, TOKENIZER, reward_funcs=["accuracy", "format"],
                             prompts=problems, **flags)
    assert trained is model and type(model.lm_head) is torch.nn.Linear
    train_grpo.main([
        *(f"--{name}={value}" for name, value in flags.items() if name != "reward_weights"),
        *"--reward_weights 1 0.5 --run_name run --reward_funcs accuracy format".split(),
        "--model_path", str(POLICY), "--data_path", problems, "--out_dir", str(tmp_path)])
    for row, other in zip(history, jsonl(tmp_path / "run/metrics.jsonl"), strict=True):
        for name, value in without_clocks([other])[0].items():
            assert row[name] == value, name
    saved = Qwen3ForCausalLM.from_pretrained(tmp_path / "run/final")
    assert torch.equal(weights(model), weights(saved))
    assert not torch.equal(weights(model), weights(TRAINED))


def test_readme_lines_run_and_are_the_same_in_both_languages(monkeypatch):
    monkeypatch.chdir(ROOT)
    blocks = [code for name in ("README.md", "README_zh.md") for kind, code in blocks_of(
        (ROOT / name).read_text(encoding="utf-8")) if kind == "python" and "train(" in code]
    english, chinese = (ast.unparse(ast.parse(block)) for block in blocks)      # without comments
    assert english == chinese and "max_steps=30" in english
    names = {}
    exec(english.replace("max_steps=30", "max_steps=2"), names)
    assert [row["step"] for row in names["history"]] == [1, 2]
    assert names["history"][-1]["kl"] > 0


@pytest.mark.parametrize("mistake, words", [
    ({"reward_funcs": [lambda completions, **columns: [1.0]]}, "returned [1.0] instead of a list"),
    ({"learning_rat": 1}, "learning_rat is not a flag"),
    ({"max_steps": 1.5}, "--max_steps: invalid int value: '1.5'"),
    ({"model": 7}, "<int> is not a causal model"),
    ({"model": torch.nn.Linear(1, 1), "tokenizer": None}, "pass the tokenizer, too"),
    ({"prompts": []}, "there are no prompts"),
    ({"prompts": [{"answer": "1"}]}, "prompts[0]: no prompt found"),
    ({"prompts": ["one " * 99]}, "prompts[0]: the prompt has"),
    ({"lora_rank": 4}, "lora_rank reads weights from files"),
    ({"resume": True}, "pass the out_dir"),
    ({"model": tiny().requires_grad_(False)}, "all its weights are frozen"),
    ({"swanlab": "offline"}, "pass an out_dir"),
    ({"data_path": "x"}, "data_path is given twice"),
    ({"oversample": 2, "shuffle": 0}, "leaves prompts out"),
    ({"model": Qwen3ForCausalLM}, "<type> is not a causal model"),
    ({"loss_type": "sapo", "loss_options": {"tau_god": 2}}, "has no number tau_god"),
    ({"reference": POLICY, "beta": 0}, "with beta=0 it would not be used"),
    ({"model": None}, "model is None"),
    ({"prompts": None}, "prompts is None"),
    ({"reward_funcs": []}, "reward_funcs is []"),
    ({"model": Qwen3Model(tiny_config())}, "has no head that predicts tokens"),
    ({"tokenizer": 7}, "<int> is no tokenizer of transformers"),
    ({"tokenizer": SimpleNamespace(tokenizer=TOKENIZER, apply_chat_template=print)},
     "<SimpleNamespace> is no tokenizer of transformers"),
    ({"tokenizer": TOKENIZER.backend_tokenizer}, "<Tokenizer> is no tokenizer of transformers"),
    ({"prompts": lambda: PROMPTS}, "prompts: <function> has no rows, or no length"),
    ({"prompts": 7}, "prompts: <int> has no rows, or no length"),
    ({"eval_data_path": 7}, "eval_data_path: <int> has no rows, or no length"),
    ({"prompts": {"train": [{"prompt": "What is 1 + 1?"}]}}, 'such as prompts["train"]'),
    ({"prompts": {"prompt": "What is 1 + 1?", "answer": "2"}}, "has no columns of prompts"),
    ({"prompts": {"prompt": ["one", "two"], "answer": ["1"]}}, "of the same length"),
    ({"prompts": [{"prompt": "What is 1 + 1?", 7: "x"}]}, "the field name 7 is not a text"),
    ({"reference": Qwen3ForCausalLM(tiny_config(vocab_size=200)), "beta": 0.1},
     "the reference has 200 tokens, but the policy 288"),
    ({"model": in_float8(tiny())}, "is quantized"),
])
def test_mistakes_are_one_sentence_and_a_value_error(mistake, words):
    given = {"model": TRAINED, "tokenizer": TOKENIZER, "reward_funcs": [length],
             "prompts": PROMPTS, **SHORT} | mistake
    with pytest.raises(ValueError) as caught:
        train(given.pop("model"), given.pop("tokenizer"), **given)
    assert words in str(caught.value) and "\n" not in str(caught.value)


def state_of_the_process():
    linux = sys.platform == "linux"
    children = subprocess.run(["ps", "--ppid", str(os.getpid()), "-o", "stat="], text=True,
                              capture_output=True).stdout.split() if shutil.which("ps") else []
    return {
        "SIGINT": signal.getsignal(signal.SIGINT), "SIGTERM": signal.getsignal(signal.SIGTERM),
        "precision": torch.get_float32_matmul_precision(), "dtype": torch.get_default_dtype(),
        "random numbers": torch.random.get_rng_state().tolist(), "objects": errors.GIVEN.copy(),
        "threads": threading.active_count(), "files": os.listdir("."),
        "open files": len(os.listdir("/proc/self/fd")) if linux else 0,
        "zombies": [state for state in children if state.startswith("Z")]}


@pytest.mark.parametrize("fails", [None, KeyboardInterrupt])
def test_process_goes_on_as_it_was(tmp_path, monkeypatch, fails):
    def reward(completions, **columns):
        if fails:
            raise fails
        return length(completions)

    monkeypatch.chdir(tmp_path)
    model, _ = qwen(), [*tqdm([], leave=False)]     # a first bar starts a thread that stays
    torch.set_default_dtype(torch.float64)
    before = state_of_the_process()
    rows = [{"prompt": PROMPTS[0], "answer": r"\sqrt{49}"}]        # math-verify's child is asked
    try:
        train(model, TOKENIZER, reward_funcs=["accuracy", reward], prompts=rows, **SHORT)
    except KeyboardInterrupt:
        assert fails
    finally:
        after = state_of_the_process()
        torch.set_default_dtype(torch.float32)
    for name, value in before.items():
        assert after[name] == value, name


def test_peft_adapters_alone_learn_and_the_reference_is_the_model_without_them(tmp_path):
    peft = pytest.importorskip("peft")

    def adapted():
        torch.manual_seed(0)
        model = peft.get_peft_model(qwen(), peft.LoraConfig(r=2, target_modules=["q_proj"]))
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(weight, std=0.1)
        return model

    def run(steps, **flags):
        return train(adapted(), TOKENIZER, reward_funcs=length, prompts=PROMPTS, save_interval=1,
                     **SHORT | {"max_steps": steps, "beta": 0.1}, **flags)

    whole, history = run(2)
    for (name, weight), was in zip(whole.named_parameters(), adapted().parameters(), strict=True):
        assert torch.equal(weight, was) == ("lora_" not in name), name
    assert history[0]["kl"] > 1e-4 and history[0]["clip_ratio/region_mean"] == 0
    run(1, out_dir=tmp_path, run_name="run")
    resumed, rest = run(2, out_dir=tmp_path, run_name="run", resume=True)
    assert torch.equal(weights(resumed), weights(whole))
    assert without_clocks(rest)[0]["loss"] == history[1]["loss"]
    again = peft.PeftModel.from_pretrained(qwen(), tmp_path / "run/final")
    assert torch.equal(weights(again), weights(whole))


def test_frozen_weights_stay_and_a_prompt_may_come_twice():
    model = qwen()
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    for name, weight in model.named_parameters():
        weight.requires_grad_("mlp" in name)
    train(model, TOKENIZER, reward_funcs=length, prompts=PROMPTS[2:] * 2, **SHORT)
    for name, weight in model.named_parameters():
        assert weight.requires_grad == ("mlp" in name), name
        assert torch.equal(weight, before[name]) == ("mlp" not in name), name


class Mapped:
    """A map-style data set, as torch's, with the repr of those of the package datasets."""

    def __init__(self, rows):
        self.rows = rows

    def __repr__(self):
        return "Dataset({features: ['prompt', 'answer'], num_rows: 3})"

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i]


ROWS = [{"prompt": f"What is {i} + 4?", "answer": str(i + 4)} for i in range(3)]


def test_rows_of_tables_columns_and_data_sets_are_read():
    columns = {name: [row[name] for row in ROWS] for name in ROWS[0]}
    table = SimpleNamespace(columns=[*columns], to_dict=lambda orient: ROWS)
    for given in (columns, {name: np.array(values) for name, values in columns.items()}, table,
                  SimpleNamespace(to_dicts=lambda: ROWS), SimpleNamespace(to_pylist=lambda: ROWS),
                  Mapped(ROWS), iter(ROWS), (row for row in ROWS), tuple(ROWS)):
        assert rows_of(given) == ROWS, given


def test_resume_compares_what_objects_hold_and_not_their_repr(tmp_path):
    class Judge:        # has no content to compare, so another one is no reason to refuse
        def get_scores(self, chats):
            return [0.5] * len(chats)

    def run(prompts, model=TRAINED, **flags):
        return train(copy.deepcopy(model), TOKENIZER, prompts=prompts, reward_model=Judge(),
                     reward_funcs=["rm", length], reasoning=0, out_dir=tmp_path, run_name="run",
                     **SHORT | flags)[1]

    run(Mapped(ROWS), max_steps=1)
    other = qwen()
    with torch.no_grad():
        other.model.norm.weight[0] += 1
    changed = Mapped([*ROWS[:2], ROWS[2] | {"answer": "8"}])
    for model, prompts, what in ((other, ROWS, "the weights of --model_path"),
                                 (TRAINED, ROWS[::-1], "the content of --data_path"),
                                 (TRAINED, changed, "the content of --data_path")):
        with pytest.raises(ValueError, match=what):
            run(prompts, model, resume=True)
    assert [row["step"] for row in run(ROWS, resume=True)] == [2]


def test_values_of_any_type_are_written_as_text(tmp_path):
    values = {"when": datetime.date(2024, 2, 29), "price": decimal.Decimal("1.50"),
              "count": np.int64(7), "image": np.arange(3), "tags": {"b", "a"}, "thing": object(),
              "nested": {("a", 1): [datetime.time(12)]}}
    got = []

    def spy(completions, **columns):
        got.append({name: columns[name][0] for name in values})
        return length(completions)

    rows = [row | values for row in ROWS]
    train(qwen(), TOKENIZER, reward_funcs=spy, prompts=rows, eval_data_path=rows, eval_interval=2,
          out_dir=tmp_path, run_name="run", **SHORT)
    assert got[0]["when"] == values["when"] and got[0]["tags"] == values["tags"]
    written = jsonl(tmp_path / "run/completions.jsonl")[0]["columns"]
    assert {name: written[name] for name in values} == {
        "when": "2024-02-29", "price": "1.50", "count": 7, "image": [0, 1, 2], "tags": ["a", "b"],
        "thing": "<object object>", "nested": {"('a', 1)": ["12:00:00"]}}


def test_messages_are_a_copy_for_each_reward_and_each_completion():
    seen = []

    def appends(completions, messages, **columns):
        for chat, text in zip(messages, completions):
            chat.append({"role": "assistant", "content": text})
            chat[0]["content"] = "changed"
        return length(completions)

    def looks(completions, messages, **columns):
        seen.extend((len(chat), chat[0]["content"]) for chat in messages)
        return length(completions)

    train(qwen(), TOKENIZER, reward_funcs=[appends, looks], prompts=PROMPTS[:1], **SHORT)
    assert seen == [(1, "What is 3 + 4?")] * len(seen) and len(seen) == 8


def test_async_rewards_and_tools_share_an_event_loop_beside_one_that_runs():
    at_once, loops = asyncio.Semaphore(1), set()

    async def counted(text):
        async with at_once:
            loops.add(asyncio.get_running_loop())
            await asyncio.sleep(0)
            return text

    async def judge(completions, **columns):
        await asyncio.gather(*map(counted, completions))
        return length(completions)

    async def tool(histories, **columns):
        return await asyncio.gather(*(counted(" 7\n") for _ in histories))

    tool.stop = "="
    async def within_a_loop():
        histories.append(train(qwen(), TOKENIZER, reward_funcs=judge, prompts=PROMPTS, tool=tool,
                               **SHORT | {"max_gen_len": 40})[1])

    histories = []
    thread = threading.Thread(target=lambda: asyncio.run(within_a_loop()))
    thread.start()
    thread.join()
    history, = histories
    assert len(history) == 2 and len(loops) == 1
    for row in history:
        assert row["reward"] > 0 and not row["tools/failure_frequency"]
    assert sum(row["tools/call_frequency"] for row in history) > 0


# --- models with code of their own ----------------------------------------------------------------


class Steered(Qwen3ForCausalLM):
    """A subclass whose logits are not those of its class."""

    def __init__(self, config):
        super().__init__(config)
        self.steer = torch.nn.Parameter(torch.zeros(config.hidden_size))

    def forward(self, *args, **options):
        self.calls = getattr(self, "calls", 0) + 1
        out = super().forward(*args, **options)
        out.logits = out.logits + self.steer.sum()
        return out


def hooked():
    model = tiny()
    model.calls = 0

    def hook(module, args, output):
        model.calls += 1
        return output * 1.5

    model.model.layers[0].register_forward_hook(hook)
    return model


class Bottleneck(torch.nn.Linear):
    pass


def other_head():
    model, calls = Qwen3ForCausalLM(tiny_config(tie_word_embeddings=False)), []
    model.lm_head.__class__ = Bottleneck
    model.lm_head.register_forward_pre_hook(lambda module, args: calls.append(1))
    return model


def experts():
    return Qwen3MoeForCausalLM(tiny_config(
        Qwen3MoeConfig, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16))


@pytest.mark.parametrize("make", [lambda: Steered(tiny_config()), hooked, other_head, experts],
                         ids=["subclass", "hooks", "head", "experts"])
def test_a_model_with_code_of_its_own_runs_in_its_class_and_resumes(make, tmp_path, capsys):
    torch.manual_seed(0)
    model = make()
    state = {name: one.clone() for name, one in model.state_dict().items()}
    flags = SHORT | {"out_dir": tmp_path, "reward_funcs": length, "prompts": PROMPTS,
                     "max_gen_len": 8}
    train(model, TOKENIZER, run_name="run", **flags | {"max_steps": 1})
    assert "without model/fast" in capsys.readouterr().out and getattr(model, "calls", 1) > 0
    again = make()
    again.load_state_dict(state)
    resumed, history = train(again, TOKENIZER, run_name="run", resume=True, **flags)
    whole = make()
    whole.load_state_dict(state)
    train(whole, TOKENIZER, run_name="whole", **flags)
    assert [row["step"] for row in history] == [2] and type(resumed) is type(model)
    torch.testing.assert_close(weights(resumed), weights(whole))


@pytest.mark.parametrize("enabled", [False, True])
def test_generate_says_after_a_call_what_it_would_have_said(enabled):
    torch.manual_seed(0)
    model = tiny_gpt2().eval()
    if enabled:
        model.activation_checkpointing_enable()

    def modes():
        return [(layer.training, layer.gradient_checkpointing) for layer in model.transformer.h]

    before, ids = modes(), torch.tensor([[5, 6, 7]])
    train(model, TOKENIZER, reward_funcs=length, prompts=PROMPTS, gradient_checkpointing=True,
          **SHORT)
    assert modes() == before and model.is_activation_checkpointing == enabled
    said = model.generate(ids, max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0)
    for t in range(8):
        assert said[0, 3 + t] == model(said[:, :3 + t]).logits[0, -1].argmax()


def test_stdout_of_any_encoding_prints_every_reply(monkeypatch):
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", out)
    prompts = ["Was ist drei plus vier? \u6570"]
    train(qwen(), TOKENIZER, reward_funcs=length, prompts=prompts, **SHORT)
    out.flush()
    assert b"drei plus vier? ?" in out.buffer.getvalue()


def test_functions_and_models_stand_for_names_and_paths(capsys):
    class Judge:
        def get_scores(self, chats):
            return [len(chat[-1]["content"]) / 100 for chat in chats]

    def bound(ratio, advantages, logps, mask, *, epsilon_low, **options):
        nowhere = torch.zeros_like(ratio, dtype=torch.bool)
        return -ratio * advantages, {"low": nowhere, "high": nowhere}

    _, history = train(
        tiny_gpt2(), TOKENIZER, reference=tiny_gpt2(), prompts=PROMPTS, reward_model=Judge(),
        reasoning=0, loss_type=bound, **SHORT,
        reward_funcs=["rm", length, lambda completions, **columns: length(completions)])
    first = history[0]
    assert first["rewards/reward_model/mean"] == first["rewards/length/mean"]
    assert first["reward"] == pytest.approx(3 * first["rewards/function/mean"])
    assert first["kl"] > 1e-4 and "grpo_loss replaced by --loss_type" in " ".join(
        capsys.readouterr().out.split())


def test_a_file_that_hides_one_of_our_folders_is_named(monkeypatch):
    theirs = ModuleType("model")
    theirs.__spec__ = importlib.util.spec_from_file_location("model", "/theirs/model.py")
    monkeypatch.setitem(sys.modules, "model", theirs)
    spec = importlib.util.spec_from_file_location("errors_again", ROOT / "errors.py")
    with pytest.raises(ImportError, match=r"/theirs/model.py hides the folder model of MiniGRPO"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def test_trls_quickstart_learns_the_same(tmp_path, monkeypatch):
    trl, datasets = (pytest.importorskip(name) for name in ("trl", "datasets"))
    torch.manual_seed(0)
    model = tiny()
    model.save_pretrained(tmp_path / "model")
    texts = ["Tell me a joke.", "What is a group?"]
    trainer = trl.GRPOTrainer(
        model=str(tmp_path / "model"), processing_class=TOKENIZER, reward_funcs=length,
        train_dataset=datasets.Dataset.from_list(
            [{"prompt": TOKENIZER.apply_chat_template(
                [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True)}
             for text in texts]),
        args=trl.GRPOConfig(
            output_dir=tmp_path, num_generations=4, per_device_train_batch_size=8, beta=0.1,
            max_completion_length=16, loss_type="grpo", use_cpu=True, report_to=[], max_steps=1,
            logging_steps=1, shuffle_dataset=False, bf16=False, learning_rate=1e-3))
    scored, score = [], trainer._generate_and_score_completions
    monkeypatch.setattr(trainer, "_generate_and_score_completions",
                        lambda inputs: scored.append(score(inputs)) or scored[-1])
    trainer.train()
    (theirs,), log = scored, trainer.state.log_history[0]

    ours = []

    def the_same(state, batch, rng):
        ids = theirs["completion_ids"].cpu()
        order = [texts.index(turns[0]["content"]) for turns in batch["columns"]["messages"]]
        rows = torch.cat([torch.arange(4) + 4 * place for place in order])
        ours.append(Rollout.of(batch, ids[rows], theirs["completion_mask"][rows].int(),
                               torch.zeros(ids.shape), state.eos_ids, state.tokenizer))
        ours[-1].extra["theirs"] = theirs["advantages"][rows][:, None].expand(ids.shape)
        return ours[-1]

    monkeypatch.setattr(train_grpo.GRPO, "generate", the_same)
    _, history = train(model, TOKENIZER, reward_funcs=length, prompts=texts, num_generations=4,
                       beta=0.1, max_steps=1, learning_rate=1e-3)
    rollout = ours[0]
    torch.testing.assert_close(rollout.advantages, rollout.extra["theirs"][:, 0])
    assert rollout.advantages.abs().sum() > 1
    assert history[0]["loss"] == pytest.approx(log["loss"], abs=1e-6)
    assert history[0]["grad_norm"] == pytest.approx(log["grad_norm"], rel=1e-4)
