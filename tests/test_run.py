"""Whole runs: what they leave, that a resume goes on exactly, that ranks agree, that mistakes end in one sentence."""
import json
import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as multiprocessing
from transformers import AutoModelForCausalLM, AutoTokenizer

import train_grpo
from dataset import PromptCollator, PromptDataset
from model import load_pretrained, sample
from train_grpo import Rollout, World, compare, completion_mask, group_advantages, learn, remember, sync_reference

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
                 "clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean", "ppo_kl", "rollout_probs_diff_mean",
                 "rollout_probs_diff_max", "completions/mean_length", "completions/min_length", "completions/max_length",
                 "completions/clipped_ratio", "num_tokens", "step_time", "timing_s/rollout", "timing_s/reward",
                 "timing_s/ref_logps", "timing_s/update", "perf/throughput", "rewards/accuracy_reward/mean",
                 "rewards/format_reward/mean", "rewards/tag_reward/mean", "rewards/reward_model/std"):
        assert all(isinstance(line[name], float | int) for line in metrics), name
    assert metrics[0]["kl"] == pytest.approx(0, abs=1e-6) and metrics[2]["kl"] > 0         # it starts at the reference
    assert 0 < metrics[0]["rollout_probs_diff_mean"] < metrics[0]["rollout_probs_diff_max"] < 1e-4
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
             "--num_iterations", "2", "--num_minibatches", "2", "--ref_model_sync_steps", "1", "--kl_in_reward",
             "--out_dir", str(tmp_path)]
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


def rollout_of_six(model):
    """Six completions of different lengths for two prompts, one of them padded; old and reference policies near the model."""
    generator = torch.Generator().manual_seed(0)
    completion_ids = torch.randint(3, 280, (6, 12), generator=generator)
    for row, length in enumerate((3, 12, 5, 1, 7, 12)):
        completion_ids[row, length - 1:] = 2 if length < 12 else completion_ids[row, length - 1:]
    prompt_ids = torch.randint(3, 280, (2, 9), generator=generator).repeat_interleave(3, 0)
    prompt_mask = torch.ones_like(prompt_ids)
    prompt_mask[3:, :4] = 0
    mask = completion_mask(completion_ids, 2)
    rollout = Rollout(prompt_ids, prompt_mask, completion_ids, mask, mask.sum(1) < 12, torch.zeros(6, 12),
                      torch.tensor([1.0, -0.5, 0.3, -1.2, 0.0, 0.1]))
    logps = remember(model, rollout, micro_batch_size=6, temperature=1.0)
    return replace(rollout, sampling_logps=logps, **{name: logps + 0.3 * torch.randn(6, 12, generator=generator)
                                                     for name in ("old_logps", "ref_logps")})


OBJECTIVES = [{"loss_type": name, "beta": 0.1} for name in ("grpo", "bnpo", "dapo", "r1")] + [
    {"loss_type": "dr_grpo", "max_completion_length": 12, "entropy_coef": 0.1}, {"loss_type": "cispo", "epsilon_high": 5.0},
    {"importance_sampling_level": "sequence", "mask_truncated_completions": True}]


def gradients_of_learning(rank, world_size, port, micro_batch_size, folder):
    """Saves the gradient of this rank's share of the six under each objective, and the weights some steps later. In float64: the
    logits then differ by nothing that float32 shows."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size), "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    world, model = World("cpu"), load_pretrained(ROOT / "model/weights/reason_128", dtype=torch.float64)
    share = rollout_of_six(model).rows(torch.arange(6) if world_size == 1 else torch.arange(3) + 3 * rank)
    options = {"micro_batch_size": micro_batch_size, "temperature": 1.0}
    results = []
    for objective in OBJECTIVES:
        rollout = replace(share, ref_logps=share.ref_logps if "beta" in objective else None)
        model.zero_grad()
        metrics = learn(model, torch.optim.SGD(model.parameters(), lr=0.0), rollout, world, grad_clip=1e9, **options, **objective)
        results.append((torch.cat([parameter.grad.flatten() for parameter in model.parameters()]), metrics))
    learn(model, torch.optim.AdamW(model.parameters(), lr=1e-3), share, world, num_iterations=2, num_minibatches=2, grad_clip=1.0,
          beta=0.1, **options)
    torch.save((results, model.state_dict()), Path(folder) / f"{rank}.pt")
    world.close()


def free_port():
    with socket.socket() as server:
        server.bind(("localhost", 0))
        return server.getsockname()[1]


def test_the_gradient_depends_neither_on_ranks_nor_on_micro_batches(tmp_path, monkeypatch):
    runs = []
    for world_size, micro_batch_size in ((1, 6), (1, 1), (1, 3), (2, 2)):
        if world_size == 1:
            with monkeypatch.context() as patch:
                for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
                    patch.setenv(name, "")              # so that what the call sets is undone
                threads = torch.get_num_threads()
                gradients_of_learning(0, 1, free_port(), micro_batch_size, tmp_path)
                torch.set_num_threads(threads)
        else:
            multiprocessing.spawn(gradients_of_learning, (2, free_port(), micro_batch_size, tmp_path), nprocs=2)
        runs.append(torch.load(tmp_path / "0.pt"))
    for results, _ in runs[1:]:
        for (gradient, metrics), (whole, whole_metrics), objective in zip(results, runs[0][0], OBJECTIVES):
            assert (gradient - whole).abs().max() < 1e-6 * whole.abs().max(), objective
            assert metrics == pytest.approx(whole_metrics, rel=1e-5, abs=1e-7), objective
    norms = [gradient.norm().item() for gradient, _ in runs[0][0]]
    assert len({round(norm, 6) for norm in norms}) == len(norms) - 1           # bnpo and dapo are the same here, by design
    results, weights = torch.load(tmp_path / "1.pt")            # the two ranks agree to the bit, after four updates too
    assert all(torch.equal(results[i][0], runs[-1][0][i][0]) for i in range(len(OBJECTIVES)))
    assert all(torch.equal(weights[name], runs[-1][1][name]) for name in weights)


def test_what_has_no_gradient_is_not_computed_but_counts():
    model = load_pretrained(ROOT / "model/weights/reason_128", dtype=torch.float32)
    share = rollout_of_six(model)
    share.advantages = torch.tensor([1.0, -0.5, 0.0, 0.0, 0.0, 0.0])
    seen, forward, gradients = [], model.forward, []
    model.forward = lambda ids, *args, **kwargs: seen.append(len(ids)) or forward(ids, *args, **kwargs)
    for ref_logps in (None, share.ref_logps):                   # a reference, even of weight 0, wants all rows for its metric
        share.ref_logps = ref_logps
        model.zero_grad()
        metrics = learn(model, torch.optim.SGD(model.parameters(), lr=0.0), share, World("cpu"), grad_clip=1e9, micro_batch_size=6,
                        temperature=1.0)
        gradients.append(torch.cat([parameter.grad.flatten() for parameter in model.parameters()]))
    assert seen == [1, 2, 2, 6]                                 # the prompts, then their completions
    assert (gradients[0] - gradients[1]).norm() < 1e-6 * gradients[1].norm()
    learned = share.old_logps[share.mask.bool()] - share.sampling_logps[share.mask.bool()]
    assert metrics["ppo_kl"] == pytest.approx(learned.mean().item(), abs=1e-5)
    difference = (share.old_logps.exp() - share.sampling_logps.exp())[share.mask.bool()].abs()
    assert metrics["rollout_probs_diff_mean"] == pytest.approx(difference.mean().item(), rel=1e-5)
    assert metrics["rollout_probs_diff_max"] == pytest.approx(difference.max().item(), rel=1e-5)
    share.advantages[:4], share.advantages[4:], share.ref_logps = torch.tensor([1.0, -1.0, 1.0, 0.0]), 0.0, None
    seen.clear()
    metrics = learn(model, torch.optim.SGD(model.parameters(), lr=0.0), share, World("cpu"), grad_clip=1e9, micro_batch_size=6,
                    temperature=1.0, num_minibatches=2)                     # the second has nothing to learn
    assert seen == [1, 3] and metrics["entropy"] > 0 and "clip_ratio/low_mean" in metrics
    share.advantages[:] = 0.0
    assert learn(model, torch.optim.SGD(model.parameters(), lr=0.0), share, World("cpu"), grad_clip=1.0, micro_batch_size=6,
                 temperature=1.0)["grad_norm"] == 0 and seen == [1, 3]


def test_truncated_completions_count_nothing_but_as_sequences():
    model = load_pretrained(ROOT / "model/weights/reason_128", dtype=torch.float32)
    share, gradients = replace(rollout_of_six(model), ref_logps=None), []
    assert share.ended.tolist() == [True, False, True, True, True, False]
    share.advantages = torch.tensor([1.0, 5.0, 0.3, -1.2, 0.9, -7.0])
    kept = share.rows(torch.tensor([0, 2, 3, 4]))
    for rollout, options in ((share, {"mask_truncated_completions": True}), (kept, {})):
        model.zero_grad()
        learn(model, torch.optim.SGD(model.parameters(), lr=0.0), rollout, World("cpu"), grad_clip=1e9, micro_batch_size=6,
              temperature=1.0, **options)
        gradients.append(torch.cat([parameter.grad.flatten() for parameter in model.parameters()]))
    assert torch.allclose(gradients[0], gradients[1] * 4 / 6, atol=1e-6 * gradients[1].abs().max())


def test_the_kl_in_the_reward_is_beta_times_the_sum_of_k1():
    mask = completion_mask(torch.tensor([[5, 5, 2], [5, 2, 0], [2, 0, 0], [2, 0, 0], [5, 5, 5], [5, 2, 0]]), 2)
    rollout = Rollout(None, None, None, mask, None, None, old_logps=torch.full((6, 3), -1.0), ref_logps=torch.full((6, 3), -3.0))
    rollout.old_logps[3] = -3.5                                             # k1 = -0.5 at its one token, 2 elsewhere
    rewards = torch.tensor([1.0, 0.0, 0.0, 1.0, 2.0, 3.0])
    options = {"num_generations": 3, "scale_rewards": "none", "supervision": "outcome", "total_weight": 1.0}
    penalised = rewards + 0.1 * torch.tensor([-2.0 * 3, -2.0 * 2, -2.0 * 1, 0.5 * 1, -2.0 * 3, -2.0 * 2])
    assert compare(rollout, rewards, None, World("cpu"), kl_coef=0.1, **options).tolist() == pytest.approx(
        group_advantages(penalised, 3, scale_rewards="none").tolist(), abs=1e-5)
    assert compare(rollout, rewards, None, World("cpu"), kl_coef=0.0, **options).tolist() == pytest.approx([2 / 3, -1 / 3, -1 / 3, -1, 0, 1])


def test_the_reference_moves_towards_the_policy():
    reference, policy = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
    expected = 0.6 * policy.weight + 0.4 * reference.weight
    sync_reference(reference, policy, alpha=0.6)
    assert torch.allclose(reference.weight, expected) and not torch.equal(policy.weight, reference.weight)


@pytest.mark.parametrize("flags, words", [
    (["--num_generations", "1"], ["--num_generations"]),
    (["--model_path", "nowhere"], ["nowhere", "config.json"]),
    (["--data_path", "nowhere.jsonl"], ["nowhere.jsonl"]),
    (["--reward_funcs", "praise"], ["--reward_funcs", "praise"]),
    (["--reward_weights", "1"], ["--reward_weights"]),
    (["--resume", "--run_name", "never_started"], ["--resume", "never_started"]),
    (["--num_hidden_layers", "9"], ["--num_hidden_layers", "4"]),
    (["--loss_type", "cispo", "--epsilon_high", "0.2"], ["--epsilon_high", "cispo"]),
    (["--loss_type", "cispo", "--delta", "3"], ["--delta", "cispo"]),
    (["--delta", "1.1"], ["--delta", "epsilon_high"]),
    (["--loss_type", "r1", "--importance_sampling_level", "sequence"], ["r1", "--importance_sampling_level"]),
    (["--supervision", "process", "--loss_type", "r1"], ["--supervision", "r1"]),
    (["--supervision", "process", "--scale_rewards", "none"], ["--scale_rewards", "--supervision"]),
    (["--kl_in_reward", "--beta", "0"], ["--kl_in_reward", "--beta"]),
    (["--kl_in_reward", "--kl_type", "k3"], ["--kl_type", "--kl_in_reward"]),
    (["--ref_model_sync_steps", "5", "--beta", "0"], ["--ref_model_sync_steps", "--beta"]),
    (["--num_minibatches", "17"], ["--num_minibatches", "16"]),
])
def test_a_users_mistake_is_one_sentence_and_exit_code_2(flags, words, capsys, tmp_path):
    with pytest.raises(SystemExit) as exit:
        train_grpo.main([*SMALL, "--out_dir", str(tmp_path), *flags])
    message = capsys.readouterr().err.strip().splitlines()[-1]
    assert exit.value.code == 2
    assert "error: " in message and all(word in message for word in words), message
