"""Options override the methods of a step: by name, in a declared order, run by run."""
import itertools
import json
import re
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoTokenizer

import train_grpo
from errors import UserError
from run import extensions
from run.policy import Policy
from run.rollout import MicroBatch, Rollout
from steps import state_of
from support import POLICY, ROOT, SMALL, assert_same_weights, jsonl, measured, refusal
from train_grpo import GRPO

FLAGS = {       # how each is switched on
    "losses": "--loss_type dapo", "advantages": "--scale_rewards batch",
    "process": "--supervision process", "tool": "--tool sampling:dice",
    "teacher": f"--teacher_path {POLICY}", "kl_in_reward": "--kl_in_reward",
    "correction": "--sampler_correction token_mask --off_policy_mask_threshold 1",
    "entropy": "--entropy_coef 0.1", "truncated": "--mask_truncated_completions",
    "oversample": "--oversample 2", "moving_reference": "--ref_model_sync_steps 1 --beta 0.1"}
APART = """advantages process, advantages teacher, process teacher, process tool,
teacher kl_in_reward, teacher oversample"""
TOKENIZER = AutoTokenizer.from_pretrained(POLICY)
SHORT = [*SMALL, "--max_gen_len", "32", "--max_steps", "2", "--eval_interval", "0"]
pytestmark = pytest.mark.usefixtures("one_thread")


def state_with(*names, **fields):
    """A GRPO with these extensions on; its models are stand-ins."""
    args, model = " ".join(FLAGS[name] for name in names).split(), torch.nn.Linear(1, 1)
    return state_of(model, train_grpo.parse_args(args), tokenizer=TOKENIZER, **{
        "reference": Policy(model, None, None, None)} | fields)


def test_no_extension_has_a_mistyped_method_and_a_mistyped_field_is_an_error():
    for option in extensions.EXTENSIONS.values():
        assert {name for name in vars(option) if name[0] != "_"} <= {*vars(GRPO)}, option
    for kind in (Rollout, MicroBatch):
        with pytest.raises(AttributeError, match="advantage_"):
            kind.__new__(kind).advantage_ = 1


def test_an_own_class_is_called_first_and_must_not_undo_an_option():
    class Mine(GRPO):
        def grpo_loss(self, *numbers, **options):
            return 10 * super().grpo_loss(*numbers, **options)

    class Undoes(GRPO):
        def grpo_loss(self, *numbers, **options):
            return 1

    args = train_grpo.parse_args(["--kl_in_reward"])
    kind = extensions.class_of_run(GRPO, args, Mine)
    assert "Mine" in kind.changed["grpo_loss"][-1]
    assert [*kind.__mro__[1:3]] == [Mine, extensions.kl_in_reward.KLInReward]
    assert extensions.class_of_run(GRPO, train_grpo.parse_args([]), Undoes).grpo_loss(None) == 1
    with pytest.raises(UserError, match="Undoes would undo that grpo_loss is wrapped by --kl_in"):
        extensions.class_of_run(GRPO, args, Undoes)


def test_an_own_class_with_a_mistyped_method_gets_a_warning():
    class Mine(GRPO):
        def compute_reward(self, rollout):
            return None

        def my_helper(self):
            return None

    with pytest.warns(UserWarning, match="Mine.compute_reward overrides nothing.*compute_rewards"
                      ) as warned:
        extensions.class_of_run(GRPO, train_grpo.parse_args([]), Mine)
    assert len(warned) == 1


class Doubled(GRPO):
    def compute_advantages(self, rollout):
        return 2 * super().compute_advantages(rollout)


def test_resume_needs_an_own_class_which_files_name(tmp_path):
    flags = [*SHORT, "--max_steps", "1", "--out_dir", str(tmp_path)]
    train_grpo.main(flags, trainer=Doubled)
    run = tmp_path / "grpo_reason_128"
    assert json.loads((run / "args.json").read_text())["trainer"] == "Doubled"
    assert "| trainer | Doubled |" in (run / "final/README.md").read_text()
    line = refusal("train_grpo", *flags, "--resume", "--max_steps", "2")
    assert "is Doubled, and here it is GRPO" in line
    train_grpo.main([*flags, "--resume", "--max_steps", "2"], trainer=Doubled)
    assert len(jsonl(run / "metrics.jsonl")) == 2


def test_every_pair_of_extensions_is_refused_or_can_be_installed():
    changed, refused = {name: {*state_with(name).changed} for name in FLAGS}, []
    for one, other in itertools.combinations(FLAGS, 2):
        try:
            state = state_with(one, other)
        except UserError:
            refused.append(f"{one} {other}")
        else:
            assert changed[one] | changed[other] == {*state.changed}, (one, other)
    assert {*refused} == {*APART.replace("\n", " ").split(", ")}


@pytest.mark.parametrize("method, names", [
    ("update_policy", ("moving_reference", "truncated")),
    ("compute_loss", ("correction", "entropy", "teacher"))])
def test_overrides_are_called_in_the_declared_order(method, names):
    order = [one for one in type(state_with(*names)).__mro__ if method in vars(one)]
    assert [one.__module__.rpartition(".")[2] for one in order[:len(names)]] == [*names]


def test_two_runs_do_not_meet_and_each_says_whose_functions_it_calls(tmp_path, capsys):
    metrics, printed = [], []
    for name, flags in (("first", ""), ("other", "--kl_in_reward --loss_type dapo"), ("again", "")):
        train_grpo.main([*SHORT, *flags.split(), "--out_dir", str(tmp_path), "--run_name", name])
        metrics.append(measured(tmp_path / name))
        printed.append(" ".join(capsys.readouterr().out.split()))
    assert metrics[0] == metrics[2] and metrics[0][0]["loss"] != metrics[1][0]["loss"]
    in_reward = "wrapped by --kl_in_reward (run/extensions/kl_in_reward.py)"
    assert f"compute_advantages {in_reward}" in printed[1]
    assert "grpo_loss replaced by --loss_type, --kl_type (run/extensions/losses.py)" in printed[1]
    assert "run/extensions" not in printed[0] + printed[2]


BOUND = """def own(ratio, advantages, logps, mask, **options):
    loss, far = -ratio * advantages, ratio > 2
    return """
WHOLE = """def own(logps, old_logps, advantages, mask, **options):
    loss = -(logps * mask).sum()
    return """
SIDES = '{"low": far, "high": far}'


@pytest.mark.parametrize("before, returned, words", [       # the words of the sentence
    (BOUND, "ratio.nothing", "nothing above"), (BOUND, "loss", "unpack write"),
    (BOUND, "__import__('sys').exit(0)", "SystemExit above"), (BOUND, "None", "NoneType write"),
    (BOUND, f"loss.sum(), {SIDES}", "bound [()"), (BOUND, f"loss.sum(1), {SIDES}", "bound [(3,)"),
    (BOUND, f"loss.bfloat16(), {SIDES}", "torch.float32, torch.bfloat16"),
    (BOUND, "loss, far", "'Tensor' mapping"), (BOUND, 'loss, {"low": far}', "KeyError 'high'"),
    (BOUND, 'loss, {"low": far.any(), "high": far}', "[(3, 4), (), (3, 4)"),
    (BOUND, 'loss, {"low": loss, "high": loss}', "'Float' write"),
    (BOUND, f"loss.detach(), {SIDES}", "no gradient"), (BOUND, f"loss / 0, {SIDES}", "value inf"),
    (WHOLE, "-logps, {}", "whole loss [(), (1,)] [(3, 4)]"), ("own = ", "3", "3 is not a function"),
    (WHOLE, "loss.item(), {}", "no gradient"), (WHOLE, "loss * float('nan'), {}", "value nan"),
    (WHOLE, 'loss, {"step": 1}', "step rename"), (WHOLE, 'loss, {"loss": loss}', "loss rename"),
    (WHOLE, 'loss, {"kl": -logps}', "[(), (3, 4)]"), ("own = lambda x: ", "0", "keyword write")])
def test_a_mistake_in_an_own_loss_is_one_sentence(before, returned, words, own_module, capsys):
    own_module("mine", before + returned)
    logps, mask = torch.zeros(3, 4, requires_grad=True), torch.ones(3, 4).int()
    with pytest.raises(UserError) as error:
        train_grpo.parse_args(["--loss_type", "mine:own"])
        train_grpo.family_loss(logps, logps.detach(), torch.tensor([1.0, -1, 0]), mask,
                               loss_type="mine:own")
    for word in ["--loss_type mine:own", *words.split()]:
        assert word in str(error.value)
    shown = capsys.readouterr().err         # from the user's file on
    assert ("mine.py" in shown) == ("above" in words) == bool(shown) and "losses.py" not in shown


def test_a_right_own_loss_is_left_alone(own_module):
    def gradient(source, name="mine:own", factor=1, advantages=(1.0, -1, 0)):
        own_module("mine", source)
        logps = (torch.arange(12.0).view(3, 4) / 9 * factor).requires_grad_()
        given = logps, torch.ones(3, 4), torch.tensor(advantages), torch.ones(3, 4)
        loss, _ = train_grpo.family_loss(*given, beta=0.1, ref_logps=given[1], loss_type=name)
        return torch.autograd.grad(loss, logps)[0]

    clip = "from run.extensions.losses import ppo_clip as own"
    assert torch.equal(gradient(clip), gradient(clip, "grpo"))
    assert gradient(f"{BOUND}loss, {SIDES}", factor=torch.nan).isnan().all()
    gradient(f"{BOUND}loss.detach().double().mean(1, True), {SIDES}", advantages=(0.0, 0, 0))
    gradient(f"{WHOLE}loss[None], {{'a': 1, 'b': loss.detach()}}")


def test_each_call_of_an_own_loss_is_checked(own_module, tmp_path, capsys):
    own_module("mine", f"once = [1.0]\n\n{WHOLE}loss * once.pop(), {{}}")
    with pytest.raises(SystemExit, match="2"):
        train_grpo.main([*SHORT, "--loss_type", "mine:own", "--out_dir", str(tmp_path),
                         "--run_name", "own"])
    shown = capsys.readouterr().err
    assert len(jsonl(tmp_path / "own/metrics.jsonl")) == 1 and "losses.py" not in shown
    assert 'mine.py", line 5, in own' in shown and "mine:own failed: IndexError: pop " in shown


def own_advantages(returned, own_module, rewards):
    own_module("mine", f"def own(rewards, num_generations):\n    return {returned}")
    flags = ["--advantage_estimator", "mine:own", "--num_generations", "2"]
    state = state_of(None, train_grpo.parse_args(flags))
    return state.compute_advantages(SimpleNamespace(rewards=rewards, loss_mask=torch.ones(4, 1)))


def test_an_own_estimator_is_called_with_rewards_of_its_own(own_module):
    rewards = torch.tensor([1.0, torch.nan, 0, 3])
    found = own_advantages("rewards.nan_to_num_(num_generations).double()", own_module, rewards)
    assert found.tolist() == [1, 2, 0, 3] and found.dtype == torch.float32
    assert rewards.isnan().tolist() == [False, True, False, False]


@pytest.mark.parametrize("returned, words", [
    ("rewards.nothing", "nothing above"), ("__import__('sys').exit(0)", "SystemExit above"),
    ("rewards.tolist()", "'list' write"), ("rewards.nan_to_num().view(2, -1)", "[[1., 4 finite"),
    ("rewards", "nan finite write"), ("rewards.nan_to_num().double() + 1e300", "+300, 4 finite"),
    ("rewards.nan_to_num().long()", "[1, 0, 4 finite floats")])
def test_a_mistake_in_an_own_estimator_is_one_sentence(returned, words, own_module, capsys):
    with pytest.raises(UserError, match="--advantage_estimator mine:own failed: ") as error:
        own_advantages(returned, own_module, torch.tensor([1.0, torch.nan, 0, 3]))
    for word in words.split():
        assert word in str(error.value)
    shown = capsys.readouterr().err
    assert ("mine.py" in shown) == ("above" in words) == bool(shown) and "advantages" not in shown


def test_unused_options_change_no_number(tmp_path, monkeypatch):
    for name in ("whole", "bare"):
        train_grpo.main([*SHORT, "--out_dir", str(tmp_path), "--run_name", name])
        # The script itself fills in the defaults of these two.
        monkeypatch.setattr(extensions, "EXTENSIONS", {
            extensions.advantages: extensions.advantages.OtherAdvantages,
            extensions.losses: extensions.losses.OtherLoss})
    assert measured(tmp_path / "whole") == measured(tmp_path / "bare")
    assert_same_weights(tmp_path / "whole/final", tmp_path / "bare/final")


ROOMS = ["errors", "dataset", "model", "reward", "run", "train_grpo", "lab"]    # the ground first


def test_imports_go_from_the_script_down_and_never_back():
    """So no extension imports the script, which runs as __main__ and would be loaded twice."""
    for place, room in enumerate(ROOMS[:-1]):
        paths = [*ROOT.glob(f"{room}.py"), *ROOT.glob(f"{room}/**/*.py")]
        assert paths, room
        for path in paths:
            text = path.read_text(encoding="utf-8")
            imported = re.findall(r"^\s*(?:from|import) (\w+)", text, re.MULTILINE)
            assert not {*imported} & {*ROOMS[place + 1:]}, path
