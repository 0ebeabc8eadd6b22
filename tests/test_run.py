"""Whole runs: what they leave, that a resume goes on exactly, that ranks agree, that mistakes end in one sentence."""
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as multiprocessing
from transformers import AutoModelForCausalLM, AutoTokenizer

import train_grpo
from dataset import PromptCollator, PromptDataset
from model import load_pretrained, sample
from train_grpo import Rollout, World, completion_mask, group_advantages, learn

ROOT = Path(__file__).resolve().parent.parent
SMALL = ["--batch_size", "4", "--num_generations", "4", "--eval_samples", "16", "--max_gen_len", "64"]


def run(*flags):
    return subprocess.run([sys.executable, "train_grpo.py", *map(str, flags)], cwd=ROOT, capture_output=True, text=True)


def jsonl(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def three_steps(tmp_path_factory):
    out = tmp_path_factory.mktemp("out")
    process = run("--max_steps", 3, "--eval_interval", 2, "--out_dir", out, "--run_name", "short", *SMALL)
    assert process.returncode == 0, process.stderr
    return out / "short", process.stdout


def test_a_run_leaves_all_its_files(three_steps):
    folder, printed = three_steps
    metrics = jsonl(folder / "metrics.jsonl")
    assert [line["step"] for line in metrics] == [1, 2, 3]
    for name in ("loss", "reward", "reward_std", "frac_reward_zero_std", "kl", "entropy", "grad_norm", "learning_rate",
                 "clip_ratio/region_mean", "completions/mean_length", "completions/min_length", "completions/max_length",
                 "completions/clipped_ratio", "num_tokens", "step_time", "timing_s/rollout", "timing_s/reward",
                 "timing_s/ref_logps", "timing_s/update", "perf/throughput", "rewards/accuracy_reward/mean",
                 "rewards/format_reward/mean", "rewards/tag_reward/mean", "rewards/reward_model/std"):
        assert all(isinstance(line[name], float | int) for line in metrics), name
    assert metrics[0]["kl"] == pytest.approx(0, abs=1e-6) and metrics[2]["kl"] > 0         # it starts at the reference
    assert metrics[0]["num_tokens"] < metrics[1]["num_tokens"] < metrics[2]["num_tokens"]
    assert [line["step"] for line in jsonl(folder / "eval.jsonl")] == [0, 2, 3]
    assert "eval/accuracy" in metrics[1] and "eval/accuracy" not in metrics[0]
    rows = jsonl(folder / "completions.jsonl")
    assert len(rows) == 3 * 16
    group = rows[:4]
    total = [sum(row["rewards"].values()) for row in group]
    assert [row["reward"] for row in group] == pytest.approx(total, abs=1e-5)
    assert [row["advantage"] for row in group] == pytest.approx(group_advantages(torch.tensor(total), 4).tolist(), abs=1e-3)
    assert len({row["prompt"] for row in group}) == 1 and rows[4]["prompt"] != rows[0]["prompt"]
    assert json.loads((folder / "args.json").read_text())["num_generations"] == 4
    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert (folder / "checkpoint" / "optimizer.pt").is_file()
    assert "loss will read about 0" in printed and "held-out accuracy" in printed


def test_final_is_a_transformers_model_with_the_same_greedy_text(three_steps):
    final = three_steps[0] / "final"
    theirs, tokenizer, ours = AutoModelForCausalLM.from_pretrained(final), AutoTokenizer.from_pretrained(final), load_pretrained(final)
    batch = PromptCollator(tokenizer, 66)(PromptDataset(ROOT / "dataset/heldout.jsonl")[:5])
    generated = theirs.generate(batch["prompt_ids"], attention_mask=batch["prompt_mask"], max_new_tokens=40, do_sample=False,
                                eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    ids, _ = sample(ours, batch["prompt_ids"], batch["prompt_mask"], num_generations=1, max_new_tokens=40, greedy=True,
                    eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    assert torch.equal(generated[:, batch["prompt_ids"].shape[1]:], ids)


def test_a_resumed_run_ends_where_an_unbroken_one_does(tmp_path, monkeypatch):
    (tmp_path / "interrupting.py").write_text(
        "calls, stop_at = 0, None\n"
        "def judge(prompts, completions, **columns):\n"
        "    global calls\n"
        "    calls += 1\n"
        "    if calls == stop_at: raise KeyboardInterrupt\n"
        "    return [len(completion) / 10 for completion in completions]\n")
    monkeypatch.syspath_prepend(tmp_path)
    import interrupting
    flags = [*SMALL, "--max_steps", "4", "--save_interval", "2", "--eval_interval", "0", "--reward_funcs", "interrupting:judge",
             "--num_iterations", "2", "--out_dir", str(tmp_path)]
    train_grpo.main([*flags, "--run_name", "unbroken"])
    interrupting.calls, interrupting.stop_at = 0, 4
    with pytest.raises(KeyboardInterrupt):
        train_grpo.main([*flags, "--run_name", "broken"])
    assert len(jsonl(tmp_path / "broken/metrics.jsonl")) == 3           # step 3 was reported, its checkpoint is that of step 2
    train_grpo.main([*flags, "--run_name", "broken", "--resume"])
    for name, tensor in load_pretrained(tmp_path / "unbroken/final").state_dict().items():
        assert torch.equal(tensor, load_pretrained(tmp_path / "broken/final").state_dict()[name]), name
    measured = [[{key: value for key, value in line.items() if not key.startswith(("timing_s", "perf", "step_time"))}
                 for line in jsonl(tmp_path / name / "metrics.jsonl")] for name in ("unbroken", "broken")]
    assert measured[0] == measured[1]


def rollout_of_six():
    """Six completions of different lengths for two prompts, one of them padded."""
    generator = torch.Generator().manual_seed(0)
    completion_ids = torch.randint(3, 280, (6, 12), generator=generator)
    for row, length in enumerate((3, 12, 5, 1, 7, 12)):
        completion_ids[row, length - 1:] = 2 if length < 12 else completion_ids[row, length - 1:]
    prompt_ids = torch.randint(3, 280, (2, 9), generator=generator).repeat_interleave(3, 0)
    prompt_mask = torch.ones_like(prompt_ids)
    prompt_mask[3:, :4] = 0
    return Rollout(prompt_ids, prompt_mask, completion_ids, completion_mask(completion_ids, 2),
                   torch.tensor([1.0, -0.5, 0.3, -1.2, 0.9, 0.1]), ref_logps=torch.full((6, 12), -3.0))


def gradient_after_learning(rank, world_size, port, micro_batch_size, folder):
    """Saves the gradient of this rank's share of the six completions, and the weights three optimizer steps later."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size), "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    world, model = World("cpu"), load_pretrained(ROOT / "model/weights/reason_128", dtype=torch.float32)
    share = rollout_of_six().rows(*((0, 6) if world_size == 1 else (0, 3) if rank == 0 else (3, 6)))
    metrics = learn(model, torch.optim.SGD(model.parameters(), lr=0.0), share, world, num_iterations=1, grad_clip=1e9, beta=0.1,
                    micro_batch_size=micro_batch_size, temperature=1.0)
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    learn(model, torch.optim.AdamW(model.parameters(), lr=1e-3), share, world, num_iterations=3, grad_clip=1.0, beta=0.1,
          micro_batch_size=micro_batch_size, temperature=1.0)
    torch.save((gradients, metrics, model.state_dict()), Path(folder) / f"{rank}.pt")
    world.close()


def free_port():
    with socket.socket() as server:
        server.bind(("localhost", 0))
        return server.getsockname()[1]


def test_the_gradient_depends_neither_on_ranks_nor_on_micro_batches(tmp_path, monkeypatch):
    results = []
    for world_size, micro_batch_size in ((1, 6), (1, 1), (1, 4), (2, 2)):
        port = free_port()
        if world_size == 1:
            with monkeypatch.context() as patch:
                for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
                    patch.setenv(name, "")              # so that what the call sets is undone
                threads = torch.get_num_threads()
                gradient_after_learning(0, 1, port, micro_batch_size, tmp_path)
                torch.set_num_threads(threads)
        else:
            multiprocessing.spawn(gradient_after_learning, (2, port, micro_batch_size, tmp_path), nprocs=2)
        results.append(torch.load(tmp_path / "0.pt"))
    whole, whole_metrics, _ = results[0]
    scale = max(gradient.abs().max() for gradient in whole.values())
    for gradients, metrics, _ in results[1:]:
        for name in whole:
            assert torch.allclose(gradients[name], whole[name], rtol=0, atol=1e-6 * scale), name
        assert metrics == pytest.approx(whole_metrics, rel=1e-5)
    gradients, _, weights = torch.load(tmp_path / "1.pt")       # of two ranks: they agree to the bit, after three steps too
    assert all(torch.equal(gradients[name], results[-1][0][name]) for name in whole)
    assert all(torch.equal(weights[name], results[-1][2][name]) for name in weights)


@pytest.mark.parametrize("flags, words", [
    (["--num_generations", "1"], ["--num_generations"]),
    (["--model_path", "nowhere"], ["nowhere", "config.json"]),
    (["--data_path", "nowhere.jsonl"], ["nowhere.jsonl"]),
    (["--reward_funcs", "praise"], ["--reward_funcs", "praise"]),
    (["--reward_weights", "1"], ["--reward_weights"]),
    (["--resume", "--run_name", "never_started"], ["--resume", "never_started"]),
    (["--num_hidden_layers", "9"], ["--num_hidden_layers", "4"]),
])
def test_a_users_mistake_is_one_sentence_and_exit_code_2(flags, words, capsys, tmp_path):
    with pytest.raises(SystemExit) as exit:
        train_grpo.main([*SMALL, "--out_dir", str(tmp_path), *flags])
    message = capsys.readouterr().err.strip().splitlines()[-1]
    assert exit.value.code == 2
    assert "error: " in message and all(word in message for word in words), message
