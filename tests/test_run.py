"""Whole runs and their steps.

What a run leaves, that a resume goes on exactly, that neither ranks nor micro-batches nor the pair
of functions change a gradient, and that a user's mistake ends in one sentence.
"""
import itertools
import json
import os
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.multiprocessing as multiprocessing
from huggingface_hub import ModelCard
from PIL import Image
from tqdm import tqdm
from transformers import AutoTokenizer

import train_grpo
from dataset import PromptCollator, prompts
from errors import UserError
from model import eos_token_ids, fast, load_pretrained
from pages import PAGES
from reward.load import RewardFunction
from run.evaluate import evaluate, measure
from run.extensions import teacher
from sampling import wide
from steps import arguments, gradient, rollout_of_six, state_of
from support import (
    PLACE,
    POLICY,
    ROOT,
    SMALL,
    START,
    assert_same_weights,
    free_ports,
    jsonl,
    measured,
    turns,
    write,
)
from train_grpo import GRPO, World, completion_mask, token_logps

NAN = float("nan")

pytestmark = pytest.mark.usefixtures("one_thread")


def test_a_run_leaves_all_its_files(tmp_path, capsys, monkeypatch, all_prompts, pictures):
    """The first two steps of the default as it is shipped; evaluated on fewer problems."""
    train_grpo.main(["--max_steps", "2", "--eval_samples", "16", "--out_dir", str(tmp_path)])
    folder = tmp_path / "grpo_reason_128"
    first, second = metrics = jsonl(folder / "metrics.jsonl")
    assert [line["step"] for line in metrics] == [1, 2]
    for name in """loss reward_std frac_reward_zero_std entropy grad_norm learning_rate
            clip_ratio/region_mean completions/mean_length completions/clipped_ratio step_time
            timing_s/rollout timing_s/reward timing_s/ref_logps timing_s/update perf/throughput
            rewards/reward_model/std""".split():
        assert all(isinstance(line[name], float | int) for line in metrics), name
    for line in metrics:                    # the sampler has the weights of each step
        assert 0 < line["rollout_probs_diff_mean"] < line["rollout_probs_diff_max"] < 1e-4
        assert 1 < line["reward"] < 3 and line["ppo_kl"] == 0
    assert first["kl"] == pytest.approx(0, abs=1e-6) and second["kl"] > 1e-5
    assert 0 < first["num_tokens"] < second["num_tokens"]
    before, after = jsonl(folder / "eval.jsonl")
    assert (before["step"], after["step"]) == (0, 2)
    assert before["measure"] == after["measure"]
    assert before["measure"].startswith("accuracy on 16 problems, ")
    assert second["eval/accuracy"] == after["eval/accuracy"] and "eval/accuracy" not in first
    rows = jsonl(folder / "completions.jsonl")
    group, total = rows[:8], [sum(row["rewards"].values()) for row in rows[:8]]
    assert len(rows) == 2 * 16 * 8 and len({row["prompt"] for row in group}) == 1
    assert len({row["prompt"] for row in rows}) == 2 * 16
    assert [row["reward"] for row in group] == pytest.approx(total, abs=1e-5)
    advantages = train_grpo.group_advantages(torch.tensor(total), 8).tolist()
    assert [row["advantage"] for row in group] == pytest.approx(advantages, abs=1e-3)
    assert json.loads((folder / "args.json").read_text())["num_generations"] == 8
    width, height = Image.open(folder / "curves.png").size
    assert min(width, height) > 300
    page = (folder / "report.html").read_text(encoding="utf-8")
    questions = {re.search("What is (.*)[?]", row["prompt"])[1] for row in rows if row["step"] == 2}
    assert any(question in page for question in questions) and page.endswith("</html>\n")
    assert (folder / "checkpoint/optimizer.pt").is_file()
    assert_same_weights(folder / "final", folder / "checkpoint")
    card = ModelCard.load(folder / "final/README.md")
    ends = before["eval/accuracy"], after["eval/accuracy"]
    assert "held-out accuracy {:.1%} → {:.1%}, ".format(*ends) in card.text
    assert str(tmp_path) not in card.text
    printed = capsys.readouterr().out
    assert printed.count("What is 24 + 33*8?") == 2     # at each evaluation the same problem
    for text in (PAGES["README.md"], PAGES["README_zh.md"], printed):       # elsewhere it may round
        line = re.search("^step +1/.* reward +(.*)  accuracy +(.*)%  length +(.*)  kl 0.0000$",
                         text, re.MULTILINE)
        shown = [float(value) for value in line.groups()]
        expected = [first["reward"], 100 * first["rewards/accuracy_reward/mean"],
                    first["completions/mean_length"]]
        assert shown == pytest.approx(expected, rel=0.05)
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)        # the card samples
    exec(card.text.split("```python\n")[1].partition("```")[0], {})
    assert capsys.readouterr().out.startswith("<think>\n")


def test_resume_ends_where_an_unbroken_run_does(tmp_path, monkeypatch):
    # Eight prompts, and a step reserves four: the resume begins a second pass.
    data = write(tmp_path / "eight.jsonl", jsonl(ROOT / "dataset/train.jsonl")[:8])
    flags = [*SMALL, *"""--max_steps 4 --save_interval 2 --eval_interval 0 --num_iterations 2
        --num_minibatches 2 --ref_model_sync_steps 1 --kl_in_reward --oversample 2 --batch_size 2
        --max_gen_len 32""".split(), "--data_path", str(data), "--out_dir", str(tmp_path)]
    train_grpo.main([*flags, "--run_name", "unbroken"])
    compute_rewards = GRPO.compute_rewards

    def interrupted(state, *args):
        if state.current_step == 4:
            raise KeyboardInterrupt
        return compute_rewards(state, *args)

    with monkeypatch.context() as until, pytest.raises(SystemExit, match="130"):
        until.setattr(GRPO, "compute_rewards", interrupted)
        train_grpo.main([*flags, "--run_name", "broken"])
    # Step 3 was reported, but the checkpoint is that of step 2.
    assert len(jsonl(tmp_path / "broken/metrics.jsonl")) == 3
    train_grpo.main([*flags, "--run_name", "broken", "--resume"])
    assert_same_weights(tmp_path / "unbroken/final", tmp_path / "broken/final")
    whole, parts = measured(tmp_path / "unbroken"), measured(tmp_path / "broken")
    for ours, theirs in zip(parts, whole, strict=True):
        assert ours == theirs
    asked = [[row["prompt"] for row in jsonl(tmp_path / name / "completions.jsonl")]
             for name in ("unbroken", "broken")]
    assert asked[0] == asked[1] and len(asked[0]) == 4 * 8


@pytest.mark.parametrize("flags, steps", [
    ("", 4), ("--epochs 2", 8), ("--epochs 99", 396), ("--max_steps 0", 4),         # a pass is 4
    ("--max_steps 50", 50), ("--max_steps 50 --epochs 2", 8), ("--max_steps 5 --epochs 2", 5),
    ("--max_steps 0 --epochs 99", 396)])
def test_how_many_steps_a_run_makes(flags, steps):
    args = train_grpo.parse_args(flags.split())
    assert prompts.last_step_of(4, 1, World("cpu"), args) == steps


def test_evaluation_alone_prints_the_results(tmp_path, capsys):
    train_grpo.main([*SMALL, "--eval_only", "--out_dir", str(tmp_path)])
    results = json.loads(capsys.readouterr().out)
    assert 0 < results["eval/accuracy"] <= results["eval/pass@2"] <= 1
    assert results["eval/greedy_accuracy"] > 0 and results["eval/mean_length"] > 1


def test_evaluation_by_a_reward_of_ones_own(capsys):
    """Four problems, two samples each; the reward is the sample's number in the batch."""
    def judge(prompts, completions, target, **columns):
        tqdm.write("a line of a log, before which no bar stays")
        if len(prompts) == 4:                       # greedy
            return [0.5, 1.0, None, 0.0]
        assert target == [1, 1, 2, 2, 3, 3, 4, 4]
        return [0.5, 3.0, 1.0, 1.0, 9.0, None, 0.0, 0.5]

    rows = [{"messages": [{"role": "user", "content": "?"}], "target": i} for i in (1, 2, 3, 4)]
    args = arguments("--max_gen_len", "2")
    tokenizer = AutoTokenizer.from_pretrained(POLICY)
    state = state_of(load_pretrained(POLICY), args, tokenizer=tokenizer,
                     eval_funcs=[RewardFunction(judge)])
    with pytest.warns(match="only 3 of 4 held-out problems were scored"):
        results, first = evaluate(state, rows, PromptCollator(tokenizer, 99), 0)
    assert results["eval/judged"] == 0.75 and not capsys.readouterr().err
    assert first.rewards.tolist() == pytest.approx([0.5, 1.0, NAN, 0.0], nan_ok=True)
    # The third problem was not judged. Sampled right: 1 of 2, 2 of 2, 0 of 2.
    assert results["eval/accuracy"] == pytest.approx(1.5 / 3)
    assert results["eval/pass@2"] == pytest.approx(2 / 3)
    assert results["eval/greedy_accuracy"] == pytest.approx(1 / 3)
    assert results["eval/reward"] == pytest.approx((1.75 + 1 + 0.25) / 3)


def test_ranks_steps_evaluations_and_seeds_draw_other_numbers():
    def drawn(*how, rank=0, seed=1, **options):
        world = World("cpu", seed=seed)
        world.rank = rank
        return torch.rand(1, generator=world.rng(*how, **options)).item()

    found = [drawn(1), drawn(2), drawn(1, rank=1), drawn(1, seed=2), drawn(1, evaluating=True)]
    assert len(set(found)) == 5 and drawn(1) == found[0]


def test_evaluation_counts_a_problem_once_if_ranks_have_unequal_shares():
    """Of three problems the second rank has one, number 1; it also answers number 0, unrecorded."""
    def generate(state, batch, rng, num_generations, greedy=False):
        rows = [number for number in batch for _ in range(num_generations)]
        return SimpleNamespace(numbers=torch.tensor(rows), lengths=torch.ones(len(rows)))

    def compute_rewards(state, rollout, *how):
        return rollout.numbers.float(), {}

    world = World("cpu")
    world.rank, world.size, world.gather = 1, 2, lambda rows: rows
    state = state_of(torch.nn.Linear(1, 1), arguments(), world, generate=generate,
                     compute_rewards=compute_rewards)
    results, replies = evaluate(state, [0, 1, 2], list, 0)
    assert replies.numbers.tolist() == [1, 0]
    assert results["eval/accuracy"] == results["eval/greedy_accuracy"] == 1


def test_evaluation_of_other_rewards_problems_or_sampling_have_another_measure():
    rows = [{"messages": turns("1+1?"), "answer": "2"}] * 2
    one = measure(arguments(), rows)
    others = [(rows[:1], {}), ([rows[0], rows[0] | {"answer": "3"}], {}),
              (rows, {"eval_reward_funcs": ["a:good"]}), (rows, {"temperature": 0.5}),
              (rows, {"eval_reward_funcs": ["b:good"]}), (rows, {"system_prompt": "r1"})]
    found = {measure(arguments(**changes), problems) for problems, changes in others}
    assert len(found | {one}) == 7 and one.startswith("accuracy on 2 problems, ")
    assert one == measure(arguments(eval_data_path="moved", seed=7), list(rows))


def test_the_eos_is_learned_with_the_rest_and_padding_is_not():
    policy, tokenizer = load_pretrained(POLICY), AutoTokenizer.from_pretrained(POLICY)
    tokenizer.pad_token, eos = None, tokenizer.eos_token_id
    items = [{"messages": [{"role": "user", "content": text}]} for text in ("2?", "What is 3 + 4?")]
    state = state_of(policy, arguments(max_gen_len=28), tokenizer=tokenizer,
                     eos_ids=eos_token_ids(policy, tokenizer))
    rollout = state.generate(
        PromptCollator(tokenizer, 99)(items), torch.Generator().manual_seed(0), 4)
    assert rollout.ended.any() and not rollout.ended.all()
    for ids, mask, ended in zip(rollout.completion_ids, rollout.loss_mask, rollout.ended):
        learned = ids[mask.bool()].tolist()
        assert eos not in learned[:-1] and (learned[-1] == eos) == ended
    for ids, mask in ((rollout.prompt_ids, rollout.prompt_mask),
                      (rollout.completion_ids, rollout.completion_mask)):
        assert (mask == 0).any() and not ids[mask == 0].any()


def test_weights_that_give_no_probabilities_are_refused(policy):
    tokenizer = AutoTokenizer.from_pretrained(POLICY)
    batch = PromptCollator(tokenizer, 99)([{"messages": turns("2+3?")}])
    policy.model.layers[1].mlp.up_proj.weight.data[0, 0] = NAN
    state = state_of(policy, arguments(), tokenizer=tokenizer)
    with pytest.raises(UserError, match="not finite.*--model_path"):
        state.generate(batch, torch.Generator().manual_seed(0))


# --- rollouts -------------------------------------------------------------------------------------


@pytest.mark.parametrize("times, spreads, theirs, kept, rounds, flat", [
    (3, "-+.+++", [0, 1, 1], [1, 3], 3, 3 / 8),     # two ranks, each with the other's numbers of
    (3, "++-+++", [1, 2, 2], [0, 1], 3, 3 / 8),     # groups without a spread: it samples along
    (2, "--+-", [], [0, 2], 2, 3 / 4), (2, "++-.++", [], [0, 1, 2], 2, 1 / 2),  # no third round
    (2, "-.+", [], [0, 2], 2, 2 / 3), (3, "++----", [], [0, 1], 1, 0)])
def test_oversample_goes_on_until_each_rank_has_enough_groups_with_a_spread(
        six, recwarn, times, spreads, theirs, kept, rounds, flat):
    """Of each prompt: two rewards with a spread (+), equal ones (-), or a single one (.)."""
    six, rows = six.only(torch.arange(6).repeat(2)), torch.arange(12).view(6, 2)
    each = {"+": [0.0, 1.0], "-": [0.1, 0.1], ".": [NAN, 1.0]}
    rewards, asked = torch.tensor([each[one] for one in spreads]).flatten(), []
    six.failed_calls, six.rewards = list(range(12)), None

    def generate(state, batch, rng, *how):
        part = six.only(torch.tensor(batch["columns"]["rows"]).flatten())
        R = part.loss_mask.sum(1).max()
        cut = {name: getattr(part, name)[:, :R] for name in (
            "completion_ids", "completion_mask", "loss_mask", "sampling_logps")}
        return replace(part, **cut, extra={"x": part.extra["teacher_logps"][:, :R]})

    def compute_rewards(state, rollout, *how):
        asked.extend(rollout.failed_calls)
        return rewards[rollout.failed_calls], {"half": rewards[rollout.failed_calls] / 2}

    world, others = World("cpu"), iter(theirs)
    world.size, world.gather = 1 + bool(theirs), lambda rows: rows + [*itertools.islice(others, 1)]
    state = state_of(None, arguments(oversample=times, num_generations=2), world,
                     generate=generate, compute_rewards=compute_rewards,
                     update_policy=lambda *_: {}, num_prompts=-(-len(spreads) // times))
    batch = {"prompts": [*spreads], "columns": {"rows": rows[:len(spreads)].tolist()}}
    for how in ((2,), (None, True)):        # an evaluation
        assert len(state.generate(batch, None, *how).prompts) == 2 * len(spreads)
    rollout, wanted = state.generate(batch, None), six.only(rows[kept].flatten())
    found, by_name = state.compute_rewards(rollout, [], [])
    assert asked == list(range(len(asked)))                 # nothing is judged twice
    assert torch.equal(found, rewards[rows[kept]].flatten()) and (by_name["half"] <= found).all()
    assert state.update_policy(rollout) == {
        "oversample/rounds": rounds, "oversample/frac_zero_std": flat}
    assert rollout.token_ids() == wanted.token_ids() and rollout.columns == wanted.columns
    logps = wanted.extra["teacher_logps"]
    for i, length in enumerate(wanted.lengths):
        assert torch.equal(rollout.extra["x"][i, :length], logps[i, :length])
    warned = [one for one in recwarn if "only 3 prompts, so it trains on 2" in str(one.message)]
    assert len(warned) == (spreads == "-.+")


# --- the gradient ---------------------------------------------------------------------------------

OBJECTIVES = [{"loss_type": name, "beta": 0.1} for name in ("grpo", "bnpo", "dapo", "r1")] + [
    {"loss_type": "dr_grpo", "entropy_coef": 0.1}, {"loss_type": "cispo", "epsilon_high": 5.0},
    {"importance_sampling_level": "sequence", "mask_truncated_completions": True},
    {"beta": 0.1, "use_bias_correction_kl": True}, {"beta": 0.1, "kl_type": "k3+"},
    {"loss_type": "sapo"}, {"loss_type": "gmpo"}, {"off_policy_mask_threshold": 0.2},
    {"loss_type": "dppo", "epsilon_low": 3e-4, "epsilon_high": 3e-4},   # of tokens with p = 1/300
    {"loss_type": "luspo", "importance_sampling_level": "sequence"},
    {"sampler_correction": "token_mask", "sampler_ratio": [0.0, 1.2]},
    {"sampler_correction": "sequence_truncate", "sampler_ratio": [0.8, 3.0]},
    {"teacher_path": "t", "loss_type": "bnpo"}]
ADVANTAGES = [{"advantage_estimator": "gdpo", "reward_weights": [1.0, 3.0]},
              {"scale_rewards": "mean"}, {"advantage_estimator": "grpo_passk"},
              {"scale_rewards": "batch"}, {"advantage_estimator": "rloo"}]


def gradients_of_learning(rank, world_size, port, micro_batch_size, token_logps, folder):
    """Saves the gradient of this rank's share of the six under each objective, the weights some
    updates later, and its advantages; in float64, so that rounding hides nothing."""
    os.environ |= zip(PLACE, (str(rank), str(world_size), "localhost", str(port)))
    torch.set_num_threads(1)
    world = World.join(arguments("--device", "cpu"))
    model = wide(vocab_size=300, hidden_size=32, intermediate_size=48, head_dim=8,
                 initializer_range=0.2).double()
    rows, six = torch.arange(6).tensor_split(world_size)[rank], rollout_of_six(model, token_logps)
    six.loss_mask = six.loss_mask.clone()
    six.loss_mask[[1, 4], 2:5] = 0              # these are a tool's
    share, results = six.only(rows), []
    for objective in OBJECTIVES:
        part = replace(share, ref_logps=share.ref_logps if "beta" in objective else None)
        if "teacher_path" in objective:
            part.advantages = teacher.towards_teacher(part, part.sampling_logps)
        results.append(gradient(model, part, token_logps, world,
                                micro_batch_size=micro_batch_size, **objective))
    args = arguments(num_iterations=2, num_minibatches=2, grad_clip=1.0, beta=0.1,
                     micro_batch_size=micro_batch_size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    state_of(model, args, world, token_logps, optimizer=optimizer,
             every_row_has_gradient=True).update_policy(share)
    share.rewards = share.rewards / 2           # from 0 to 1
    share.rewards_per_func["half"] = (share.rewards > 0.3).float()
    advantages = torch.stack([
        state_of(None, arguments(num_generations=3, **options), world).compute_advantages(share)
        for options in ADVANTAGES])
    torch.save((results, model.state_dict(), advantages), Path(folder) / f"{rank}.pt")
    world.close()


def test_bounded_tokens_are_marked_in_their_own_rows(policy, six):
    six.rewards[2] = 0.3                                # all have one
    ratio = (six.sampling_logps - six.old_logps).exp()
    A = six.advantages[:, None].expand_as(ratio)
    expected = ((ratio > 1.02) & (A > 0) | (ratio < 0.98) & (A < 0)) & six.loss_mask.bool()
    assert expected.any(1).sum() > 2
    for micro_batch_size in (1, 2, 6):
        gradient(policy, six, fast.token_logps, loss_type="bnpo", epsilon_low=0.02,
                 epsilon_high=0.02, micro_batch_size=micro_batch_size)
        assert torch.equal(six.extra.pop("bounded").bool(), expected), micro_batch_size


def test_ranks_micro_batches_and_the_pair_change_no_gradient(tmp_path, monkeypatch):
    for name in PLACE:
        monkeypatch.setenv(name, "")            # so that what the call sets is undone
    runs = []
    for pair, world_size, rows in ((fast, 1, 6), (train_grpo, 1, 6), (fast, 2, 2)):
        given = world_size, *free_ports(1), rows, pair.token_logps, tmp_path
        if world_size == 1:
            gradients_of_learning(0, *given)
        else:
            multiprocessing.start_processes(gradients_of_learning, given, 2, start_method=START)
        runs.append(torch.load(tmp_path / "0.pt"))
    first, _, advantages = runs[0]
    for results, *_ in runs[1:]:
        for (part, metrics), (whole, whole_metrics), objective in zip(results, first, OBJECTIVES):
            assert (part - whole).abs().max() < 1e-6 * whole.abs().max(), objective
            assert metrics == pytest.approx(whole_metrics, rel=1e-5, abs=1e-7), objective
    norms = {round(whole.norm().item(), 6) for whole, _ in first}
    assert len(norms) == len(OBJECTIVES) - 1    # bnpo and dapo are the same here, by design
    # The two ranks agree to the bit, after four updates too; their advantages are one process's.
    ours, weights, share = runs[-1]
    theirs, others, other_share = torch.load(tmp_path / "1.pt")
    for (one, _), (other, _), objective in zip(ours, theirs, OBJECTIVES):
        assert torch.equal(one, other), objective
    for name in weights:
        assert torch.equal(weights[name], others[name]), name
    torch.testing.assert_close(torch.cat((share, other_share), 1), advantages, atol=1e-6, rtol=0)
    assert len(advantages.unique(dim=0)) == len(ADVANTAGES)


def test_rows_without_a_gradient_are_not_read_but_count(policy, six):
    read = []

    def reader(model, ids, mask, *rest, **options):
        read.append(len(mask))
        return fast.token_logps(model, ids, mask, *rest, **options)

    # A reference, even of weight 0, wants all rows for its metric.
    six.advantages = torch.tensor([1.0, -0.5, 0.0, 0.0, 0.0, 0.0])
    few, _ = gradient(policy, replace(six, ref_logps=None), reader)
    whole, metrics = gradient(policy, six, reader)
    assert read == [2, 6] and (few - whole).norm() < 1e-6 * whole.norm()
    counted = six.loss_mask.bool()
    moved = (six.old_logps - six.sampling_logps)[counted]
    difference = (six.old_logps.exp() - six.sampling_logps.exp())[counted].abs()
    for name, value in {"ppo_kl": moved.mean(), "rollout_probs_diff_mean": difference.mean(),
                        "rollout_probs_diff_max": difference.max()}.items():
        assert metrics[name] == pytest.approx(value.item(), rel=1e-4, abs=1e-6), name
    six.ref_logps, six.advantages = None, torch.zeros(6, 12)
    vector, metrics = gradient(policy, six, reader)
    assert vector is None and metrics["grad_norm"] == 0 and read == [2, 6]


def test_entropy_has_a_gradient_in_rows_without_an_advantage(policy, six):
    six.ref_logps, six.advantages = None, torch.zeros(6)
    found, _ = gradient(policy, six, fast.token_logps, entropy_coef=0.1)
    _, entropy = token_logps(policy, *six.sequences(), with_entropy=True)
    mean = entropy[six.loss_mask.bool()].mean()         # over all tokens
    expected = torch.autograd.grad(-0.1 * mean, [*policy.parameters()])
    torch.testing.assert_close(found, torch.cat([one.flatten() for one in expected]), atol=1e-7,
                               rtol=1e-4)


def test_gradients_of_a_rank_without_rows_are_zeros_for_the_others_to_add_to():
    layer = torch.nn.Linear(2, 3)
    layer.bias.requires_grad_(False)
    World("cpu").sum_gradients(layer)
    assert layer.weight.grad.equal(torch.zeros(3, 2)) and layer.bias.grad is None


def test_momentum_moves_nothing_in_an_update_without_a_gradient(policy, six):
    state = state_of(policy, arguments(),
                     optimizer=torch.optim.AdamW(policy.parameters(), lr=1e-3))
    six.ref_logps, start = None, policy.lm_head.weight.clone()
    state.update_policy(six)
    moved = policy.lm_head.weight.clone()
    six.advantages = torch.zeros(6)
    state.update_policy(six)
    assert not torch.equal(start, moved)
    assert torch.equal(moved, policy.lm_head.weight)


def test_an_update_that_reads_no_row_clips_nothing_and_counts(policy, six):
    def reader(*sequences, with_entropy=False, **options):      # pi_old is the one that six has
        found = token_logps(*sequences, with_entropy=with_entropy, **options)
        return found if with_entropy else six.old_logps[:3]

    six.ref_logps, six.advantages = None, torch.tensor([-1.0, 1.0, 1.0, 0.0, 0.0, 0.0])
    both = gradient(policy, six, reader, num_minibatches=2)[1]
    alone = gradient(policy, six.only(torch.arange(3)), token_logps)[1]
    for name in ("low", "high", "region"):
        name = f"clip_ratio/{name}_mean"
        assert both[name] == pytest.approx(alone[name] / 2)
    assert alone["clip_ratio/region_mean"] > 0


def test_truncated_completions_count_nothing_but_as_sequences(policy, six):
    assert six.ended.tolist() == [True, False, True, True, True, False]
    six.ref_logps, ended = None, six.ended.nonzero().flatten()
    six.advantages = torch.tensor([1.0, 5.0, 0.3, -1.2, 0.9, -7.0])
    masked, _ = gradient(policy, six, token_logps, mask_truncated_completions=True)
    kept, _ = gradient(policy, six.only(ended), token_logps)
    torch.testing.assert_close(masked, kept * 4 / 6, atol=1e-6 * kept.abs().max().item(), rtol=1e-5)
    six.advantages = torch.tensor([-1.0, 5.0, -0.3, -1.2, -0.9, -7.0])
    # Clipped completions are a share of all completions; clipped tokens are one of those that end.
    for share, flags in ((4 / 6, {"importance_sampling_level": "sequence", "epsilon_low": 0.01}),
                         (1, {"delta": 1.21})):
        _, of_all = gradient(policy, six, token_logps, mask_truncated_completions=True, **flags)
        _, of_kept = gradient(policy, six.only(ended), token_logps, **flags)
        for name in of_all:
            if name.startswith("clip_ratio/") and "high" not in name:
                assert of_all[name] == pytest.approx(of_kept[name] * share) and of_all[name] > 0


# Judges the completions of its first call, and no others.
JUDGES_ONCE = """
calls = 0
def judge(prompts, completions, **columns):
    global calls
    calls += 1
    if calls == 5:
        raise RuntimeError("asleep")
    return [float(i) if calls == 1 else None for i in range(len(completions))]
"""


def test_unjudged_steps_move_nothing_and_ten_in_a_row_end_the_run(tmp_path, own_module, capsys):
    flags = ["--batch_size", "2", "--num_generations", "2", "--max_gen_len", "4",
             "--eval_interval", "0", "--reward_funcs", "judges_once:judge",
             "--out_dir", str(tmp_path)]
    own_module("judges_once", JUDGES_ONCE)
    train_grpo.main([*flags, "--run_name", "one", "--max_steps", "1"])
    own_module("judges_once", JUDGES_ONCE)
    with pytest.raises(SystemExit, match="2"):
        train_grpo.main([*flags, "--run_name", "many", "--max_steps", "20"])
    one, many = (torch.load(tmp_path / name / "checkpoint/optimizer.pt")
                 for name in ("one", "many"))
    assert (one["step"], many["step"]) == (1, 11)       # saved, with the weights of step 1
    torch.testing.assert_close(many["optimizer"]["state"], one["optimizer"]["state"], atol=0,
                               rtol=0)
    assert_same_weights(tmp_path / "one/checkpoint", tmp_path / "many/checkpoint")
    lines = jsonl(tmp_path / "many/metrics.jsonl")
    assert [line["reward"] is None for line in lines] == [False] + [True] * 10
    assert ["loss" in line for line in lines] == [True] + [False] * 10
    printed, error = capsys.readouterr()
    assert "judge scored nothing in this step: RuntimeError: asleep" in printed
    assert "--reward_funcs" in error


def test_unjudged_rank_learns_with_the_others(policy, six):
    six.rewards, weight = torch.full((6,), NAN), policy.lm_head.weight.clone()
    state = state_of(policy, arguments(),
                     optimizer=torch.optim.SGD(policy.parameters(), lr=1e-3))
    assert state.update_policy(six) == {} and torch.equal(weight, policy.lm_head.weight)
    state.world.sum = lambda tensor: tensor + 1         # another rank has a judged one
    assert "loss" in state.update_policy(six) and not torch.equal(weight, policy.lm_head.weight)


def test_kl_in_the_reward_is_beta_times_the_sum_of_k1_and_not_in_the_loss(policy, six):
    without, in_reward = (gradient(policy, six, token_logps, beta=beta, kl_in_reward=True)[0]
                          for beta in (0.0, 0.5))
    assert torch.equal(without, in_reward)
    ids = torch.tensor([[5, 5, 2], [5, 2, 0], [2, 0, 0], [2, 0, 0], [5, 5, 5], [5, 2, 0]])
    rollout = replace(
        six, loss_mask=completion_mask(ids, 2), ref_logps=torch.full((6, 3), -3.0),
        rewards=torch.tensor([1.0, 0.0, 0.0, 1.0, 2.0, 3.0]))
    # k1 is -0.5 at the one token of this row, and 2 elsewhere.
    policy_logps = torch.full((6, 3), -1.0)
    policy_logps[3] = -3.5
    kl = torch.tensor([2.0 * 3, 2.0 * 2, 2.0 * 1, -0.5 * 1, 2.0 * 3, 2.0 * 2])
    args = arguments(beta=0.1, kl_in_reward=True, num_generations=3, scale_rewards="none")
    advantages = state_of(policy, args, compute_logps=lambda *unused: policy_logps
                          ).compute_advantages(rollout)
    rewards = rollout.rewards - 0.1 * kl
    expected = rewards - rewards.view(2, 3).mean(1).repeat_interleave(3)
    assert advantages.tolist() == pytest.approx(expected.tolist(), abs=1e-5)


def test_reference_moves_towards_the_policy(policy, six):
    state = state_of(policy, arguments(ref_model_sync_steps=3, ref_model_mixup_alpha=0.6),
                     optimizer=torch.optim.SGD(policy.parameters(), lr=0.0),
                     reference=SimpleNamespace(model=torch.nn.Linear(2, 1)))
    state.policy.model, reference = torch.nn.Linear(2, 1), state.reference.model
    before, ours = reference.weight.clone(), state.policy.model.weight.clone()
    for step, alpha in ((2, 0.0), (3, 0.6)):
        state.current_step = step
        six.rewards.fill_(NAN)              # the policy stays
        state.update_policy(six)
        assert torch.allclose(reference.weight, alpha * ours + (1 - alpha) * before)
    assert torch.equal(state.policy.model.weight, ours)


def test_defaults_follow_the_data(tmp_path):
    def of(name, *flags):
        return getattr(train_grpo.parse_args(flags), name)

    own = ["--data_path", "my.jsonl"]
    assert of("eval_interval") == 30 and of("eval_interval", *own) == 0
    assert of("eval_interval", *own, "--eval_data_path", "other.jsonl") == 30
    (tmp_path / "run").mkdir()              # a run without evaluations, which is to have some
    saved = {name: of(name, *own) for name in ("data_path", "eval_interval", "eval_data_path")}
    (tmp_path / "run/args.json").write_text(json.dumps(saved))
    resume = ["--resume", "--run_name", "run", "--out_dir", str(tmp_path)]
    assert of("data_path", *resume) == "my.jsonl"
    with pytest.raises(UserError, match="--eval_interval would evaluate on our"):
        of("eval_interval", *resume, "--eval_interval", "5")
    # The shipped reward model judges nothing but our data.
    assert of("reward_funcs") == ["format", "tag", "rm", "accuracy"]
    assert of("reward_funcs", *own) == ["format", "tag", "accuracy"]
    assert of("reward_funcs", *own, "--reward_model_path", "mine")[2] == "rm"
    assert (of("loss_type"), of("beta")) == ("grpo", 0.02)
    assert [of(name, "--teacher_path", "x") for name in ("loss_type", "beta")] == ["bnpo", 0.0]
    assert of("scale_rewards") == "group"
    assert of("scale_rewards", "--advantage_estimator", "rloo") == "none"
