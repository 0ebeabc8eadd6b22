"""The command lines of all programs: one table of what they refuse; files of flags, streams."""
import io
import sys

import pytest
from safetensors import SafetensorError

import train_grpo
from errors import sentence, user_errors
from run.report import picture
from support import POLICY, ROOT, assert_refused, refusal, write_files

FILES = {"itself": b"@other", "other": b"# again\n@itself", "quote": b"'a",
         "empty.jsonl": b"", "chats.jsonl": b'{"prompt": "1+1", "answer": "2"}',
         "pairs.jsonl": b'{"conversations": [], "chosen": 2, "rejected": "3"}',
         "good.jsonl": b'{"conversations": [{"role": "user", "content": "1+1"}], "chosen": "2", '
                       b'"rejected": "3"}',
         "full/args.json": b"{}", "README": b"text", "half/curves.png": b"",
         "junk/metrics.jsonl": b'{"step": 1}\njunk\n', "list/metrics.jsonl": b"[1]",
         "stepless/metrics.jsonl": b'{"kl": 1}', "word/metrics.jsonl": b'{"step": "x"}',
         "run/metrics.jsonl": b'{"step": 1}\n', "run/args.json": b'{"num_generations": 4}',
         "run/completions.jsonl": b'{"step": 1, junk}\n',
         "no_reply.jsonl": b'{"messages": []}', "no_prompt.jsonl": b'{"answer": "5"}',
         "blank.jsonl": b'{"prompt": "1+1?", "answer": " "}',
         "half.jsonl": b'{"prompt": "1", "answer": "2"}\n{'}
SFT = f"model.train_sft --data chats.jsonl --save new --init {POLICY}"
JUDGE = f"reward.train_reward_model --save new --init {POLICY}"
CHAT, GYM = f"model.chat {POLICY}", "dataset.reasoning_gym chain_sum --save new"


@pytest.mark.parametrize("command, words", [
    (f"{SFT} --learning_rate inf", "--learning_rate"), (f"{SFT} --heldout -3", "--heldout -3"),
    (f"{SFT} --hidden_size 100", "--hidden_size 64"), (f"{SFT} --init _", "--init empty"),
    (f"{SFT} --data no_reply.jsonl", "no_reply.jsonl, line 1: assistant answer"),
    (f"{SFT} --data blank.jsonl", "blank.jsonl, line 1: assistant answer"),
    (f"{SFT} --data no_prompt.jsonl", "no_prompt.jsonl, line 1: prompt conversations"),
    (f"{SFT} --data half.jsonl", "half.jsonl, line 2: JSON"),
    (f"{SFT} --data empty.jsonl", "empty.jsonl: empty"),
    (f"{SFT} --data nowhere.jsonl", "nowhere.jsonl: file"),
    ("model.train_sft --data chats.jsonl --save new", "--init --tokenizer"),
    (f"{JUDGE} --data pairs.jsonl --heldout pairs.jsonl --steps -1", "--steps -1"),
    (f"{JUDGE} --data pairs.jsonl", "--heldout"),
    (f"{JUDGE} --data pairs.jsonl --heldout pairs.jsonl", "pairs.jsonl, 1: chosen"),
    (f"{JUDGE} --data empty.jsonl --heldout pairs.jsonl", "empty.jsonl: pair"),
    (f"{CHAT} --temperature nan", "--temperature nan"), (f"{CHAT} --max_new_tokens -1", "-1;"),
    (f"{GYM} --size -1", "--size -1"), (f"{GYM} --heldout -1", "--heldout -1"),
    ("train_grpo --temperature 1e-45", "--temperature 0.001"),
    ("train_grpo --data_path _", "--data_path empty"), ("train_grpo --model_path _", "empty"),
    ("train_grpo --data_path nowhere.jsonl", "nowhere.jsonl: file"),
    ("train_grpo @itself", "@itself itself"),
    ("train_grpo @quote", "@quote quotation"), ("train_grpo @nowhere", "@nowhere: file"),
    ("run.report.picture _", "runs empty"), ("run.report.picture junk", "metrics.jsonl, line 2"),
    ("run.report.picture list", "metrics.jsonl"), ("run.report.picture stepless", "step"),
    ("run.report.picture word", "metrics.jsonl"), ("run.report.picture run -o .", ".png"),
    ("run.report.picture run -o new.doc", "new.doc .png"),
    ("run.report.html_page run", "run JSON"), ("run.report.html_page nowhere", "nowhere folder"),
    # What is there stays.
    ("run.report.picture run -o README", "README picture"), (f"{SFT} --save full", "--save full"),
    (f"{JUDGE} --data good.jsonl --heldout good.jsonl --save full", "--save full"),
    ("train_grpo --out_dir . --run_name full", "--run_name full"),
    ("train_grpo --out_dir . --run_name half --resume", "half/args.json"),
    # What the flags alone tell.
    ("train_grpo --num_generations 1", "--num_generations 2"),
    ("train_grpo --learning_rate nan", "--learning_rate nan"),
    ("train_grpo --reward_weights 1", "--reward_weights"),
    ("train_grpo --loss_type cispo --epsilon_high 0.2", "--epsilon_high cispo"),
    ("train_grpo --loss_type cispo --delta 3", "--delta cispo"),
    ("train_grpo --delta 1.1", "--delta epsilon_high"),
    ("train_grpo --loss_type gmpo --importance_sampling_level sequence", "gmpo --importance_s"),
    ("train_grpo --loss_type dppo --importance_sampling_level sequence", "dppo --importance_s"),
    ("train_grpo --advantage_estimator gdpo --scale_rewards batch", "gdpo --scale_rewards"),
    ("train_grpo --advantage_estimator gdpo --kl_in_reward", "gdpo --kl_in_reward"),
    ("train_grpo --advantage_estimator praise", "praise grpo, rloo, grpo_passk, gdpo, module:f"),
    ("train_grpo --advantage_estimator math:gcd --scale_rewards mean", "math:gcd --scale_rewards"),
    ("train_grpo --fast 0", "--fast unrecognized"),
    ("train_grpo --reward_funcs tag tag", "--reward_funcs tag_reward"),
    ("train_grpo --loss_type praise", "--loss_type praise module:function"),
    ("train_grpo --loss_type gspo", "gspo --importance_sampling_level sequence"),
    ("train_grpo --chat_template_kwargs 5", "--chat_template_kwargs 5"),
    ("train_grpo --from_weight nobody", "nobody_128 config.json"),
    ("train_grpo --from_resume 1 --save_weight never_started", "--resume never_started"),
    ("train_grpo --sampler_correction token_mask --loss_type gmpo", "token_mask gmpo sequence_"),
    ("train_grpo --sampler_correction token_mask --sampler_ratio 0 0.9", "--sampler_ratio 0 0.9"),
    ("train_grpo --supervision process --loss_type r1", "--supervision ratio"),
    ("train_grpo --teacher_path x --importance_sampling_level sequence", "--teacher_path ratio"),
    ("train_grpo --teacher_path x --oversample 2", "--teacher_path --oversample"),
    ("train_grpo --supervision process --reward_weights 0 0 0 0", "--reward_weights --supervision"),
    ("train_grpo --kl_in_reward --kl_type k3", "--kl_type --kl_in_reward"),
    ("train_grpo --kl_in_reward --beta 0", "--kl_in_reward --beta"),
    ("train_grpo --ref_model_sync_steps 5 --beta 0", "--ref_model_sync_steps --beta"),
    ("train_grpo --eval_only --data_path my.jsonl", "--eval_only --eval_data_path"),
    ("train_grpo --eval_interval 9 --data_path my.jsonl", "--eval_interval --eval_data_path"),
    ("train_grpo --oversample 0", "--oversample 1"),
    ("train_grpo --ref_model_mixup_alpha 0", "--ref_model_mixup_alpha 0 1"),
    ("train_grpo --vllm_gpu_memory_utilization 0", "--vllm_gpu_memory_utilization 0 1"),
    ("train_grpo --reward_model_path x --reward_funcs tag", "--reward_model_path x --reward_funcs"),
    ("train_grpo --loss_type sapo --epsilon_high 0.3", "--loss_type sapo --epsilon_high"),
    ("train_grpo --loss_type cispo --epsilon_low 0.1", "--loss_type cispo --epsilon_low"),
    ("train_grpo --tool gess", "--tool gess module:function"),
    ("train_grpo --run_name a/b", "--run_name a/b without"), ("train_grpo --run_name ..", ".. /"),
    # What the run finds.
    ("train_grpo --model_path nowhere", "nowhere config.json"),
    ("train_grpo --resume --out_dir never_started", "--resume never_started"),
    ("train_grpo --num_hidden_layers 9", "--num_hidden_layers 4"),
])
def test_refused_commands_end_in_one_sentence_and_change_no_file(
        command, words, tmp_path):
    write_files(tmp_path, FILES)
    assert_refused(command, words, tmp_path)


def test_a_file_of_flags_may_name_another(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "outer").write_text("--tool 'a b'   # not a file\n\n@inner\n")
    (tmp_path / "inner").write_text("--eval_only --reward_funcs format tag")
    args = train_grpo.parse_args(["@outer", "--reward_weights", "1", "-1e-3"])
    assert (args.tool, args.eval_only, args.reward_weights) == ("a b", True, [1, -0.001])


def test_a_home_folder_is_found_where_no_shell_writes_it_out(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "flags").write_text("--data_path ~/data.jsonl")
    args = train_grpo.parse_args(["--out_dir=~/runs", "@" + str(tmp_path / "flags")])
    assert (args.out_dir, args.data_path) == (f"{tmp_path}/runs", f"{tmp_path}/data.jsonl")
    assert f"{tmp_path}/flags exists" in refusal("run.report.picture", "x", "-o", "~/flags")
    assert not (ROOT / "~").exists()


def test_a_stream_that_knows_few_characters_ends_no_command(monkeypatch):
    heard = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(heard, encoding="ascii"))
    with user_errors("chat"):
        print("7 →")
    assert heard.getvalue() == b"7 ?\n"


def test_a_full_disk_is_one_sentence_as_each_library_says_it(monkeypatch):
    monkeypatch.delenv("MINIGRPO_TRACEBACK", raising=False)
    full = "No space left on device (os error 28)"      # as safetensors and tokenizers say it
    assert sentence(SafetensorError(full)) == sentence(Exception(full)) == full


def test_curves_leave_out_what_is_no_number(monkeypatch, tmp_path, pictures):
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 1, "reward": 1.0}\n{"step": 2, "kl": "x", "timing_s/learn": [1]}\n')
    picture.draw_curves([tmp_path], tmp_path / "curves.png")
    assert (tmp_path / "curves.png").stat().st_size > 1000
