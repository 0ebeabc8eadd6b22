"""--teacher_path: of which KL its advantages have the gradient, and a run without any reward."""
import itertools
import json
import shutil
from statistics import fmean
from types import SimpleNamespace

import pytest
import torch
import transformers

import train_grpo
from errors import UserError
from run.extensions.teacher import load_teacher, towards_teacher
from support import POLICY, ROOT, SMALL, edit, jsonl
from train_grpo import World, family_loss, parse_args, token_logps

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("whole", [False, True])
def test_teachers_mean_gradient_is_that_of_each_tokens_kl_or_of_the_whole(whole):
    # A policy over answers of two of four tokens: logits of the first, and for each of the second.
    rng, V = torch.Generator().manual_seed(0), 4
    policy, teacher = torch.randn(2, 1 + V, V, generator=rng, dtype=torch.float64)      # (5, V)
    policy.requires_grad_()
    answers = torch.tensor([*itertools.product(range(V), repeat=2)])                    # (16, 2)
    places = torch.stack((torch.zeros(V * V).long(), 1 + answers[:, 0]), 1)
    ours, theirs = policy.log_softmax(1), teacher.log_softmax(1)
    logps, teacher_logps = ours[places, answers], theirs[places, answers]               # (16, 2)
    mask, p = torch.ones(V * V, 2), logps.sum(1).exp()                                  # (16,)
    rollout = SimpleNamespace(loss_mask=mask, extra={"teacher_logps": teacher_logps})
    advantages = towards_teacher(rollout, logps.detach())
    kl = (ours.exp() * (ours - theirs)).sum(1)[places]                                  # (16, 2)
    expected = (p.detach()[:, None] * kl).sum()                         # the prefix as given
    if whole:
        advantages = advantages.flip(1).cumsum(1).flip(1)
        expected = (p * (logps - teacher_logps).sum(1)).sum()
    # All answers once, instead of each as often as pi would draw it; bnpo divides by their tokens.
    weighted = advantages * p.detach()[:, None] * V * V
    loss, _ = family_loss(logps, logps.detach(), weighted, mask, loss_type="bnpo")
    found, wanted = (torch.autograd.grad(x, policy, retain_graph=True)[0]
                     for x in (loss, expected / 2))
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def test_teacher_teaches_without_a_reward(tmp_path, own_module, recwarn, capsys):
    own_module("no_judge", "def judge(prompts, completions, **columns):\n"
               "    return [None] * len(completions)\n")
    train_grpo.main([*SMALL, *"""--batch_size 1 --max_gen_len 12 --eval_interval 0 --max_steps 12
        --reward_funcs no_judge:judge --run_name taught --learning_rate 3e-3 --teacher_path
        """.split(), str(ROOT / "model/weights/full_sft_128"), "--out_dir", str(tmp_path)])
    metrics = jsonl(tmp_path / "taught/metrics.jsonl")
    assert [line["reward"] for line in metrics] == [None] * 12
    rows = [row for row in jsonl(tmp_path / "taught/completions.jsonl") if row["step"] == 1]
    advantages = [A for row in rows for A in row["token_advantages"]]
    assert metrics[0]["teacher_kl"] == pytest.approx(-fmean(advantages), abs=1e-4)
    assert metrics[-1]["teacher_kl"] < 0.8 * metrics[0]["teacher_kl"]
    said = capsys.readouterr()
    said = said.out + said.err + " ".join(str(warning.message) for warning in recwarn)
    assert "has a reward" not in said and "the same reward" not in said


@pytest.fixture
def loaded(tokenizer):
    """A function that loads the teacher in a folder."""
    return lambda path: load_teacher(SimpleNamespace(
        args=parse_args(["--teacher_path", str(path)]), world=World("cpu"), tokenizer=tokenizer,
        token_logps=token_logps))


def test_teacher_with_other_tokens_is_refused(tmp_path, loaded):
    assert not any(weight.requires_grad for weight in loaded(POLICY).model.parameters())
    shutil.copytree(POLICY, tmp_path / "other")
    file = tmp_path / "other/tokenizer.json"
    tokens = json.loads(file.read_text(encoding="utf-8"))["model"]
    tokens["vocab"]["a"], tokens["vocab"]["b"] = tokens["vocab"]["b"], tokens["vocab"]["a"]
    edit(file, model=tokens)
    with pytest.raises(UserError, match="other: its tokens .* pass a --teacher_path"):
        loaded(tmp_path / "other")


def test_teacher_of_another_family_is_read(tmp_path, tokenizer, loaded):
    config = transformers.GPT2Config(vocab_size=len(tokenizer), n_embd=8, n_layer=1, n_head=1)
    network = transformers.GPT2LMHeadModel(config).eval()
    network.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    ids = torch.tensor([[5, 6, 7]])
    found = loaded(tmp_path).token_logps(ids, torch.ones_like(ids), 2)
    expected = network(ids).logits.log_softmax(-1)[0, [0, 1], [6, 7]]
    torch.testing.assert_close(found[0], expected)
