"""Soak: do memory and time per step stay the same in a long run? By hand, a minute:

    python tests/soak.py

A small run of 1,000 steps, with evaluations, checkpoints, pictures and completions that rotate.
Its resident memory at the end is compared with that at step 100, and the median step time of the
last 200 steps with that of the steps 100 to 300. Both may grow by 5%.
"""
import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FLAGS = """--batch_size 2 --num_generations 4 --max_gen_len 16 --save_interval 25 --eval_interval 50
--eval_samples 16 --completions_limit 1 --epochs 9 --log_interval 100 --run_name soak""".split()


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    args = parser.parse_args()
    memory = {}                             # step -> MB
    with tempfile.TemporaryDirectory() as out:
        metrics = Path(out) / "soak/metrics.jsonl"
        process = subprocess.Popen(
            [sys.executable, "train_grpo.py", *FLAGS, "--max_steps", str(args.steps),
             "--out_dir", out], cwd=ROOT, stdout=subprocess.DEVNULL,
            env=os.environ | {"OMP_NUM_THREADS": "1"})
        while process.poll() is None:
            step = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
            if 0 < step < args.steps:
                status = Path(f"/proc/{process.pid}/status").read_text()
                memory[step] = int(re.search(r"VmRSS:\s*(\d+)", status)[1]) / 1024
            time.sleep(0.1)
        assert process.returncode == 0
        times = [json.loads(line)["timing_s/rollout"] + json.loads(line)["timing_s/update"]
                 for line in metrics.read_text().splitlines()]
        files = {path.name: round(path.stat().st_size / 1e6, 1)
                 for path in metrics.parent.iterdir() if path.is_file()}
    early = statistics.median(mb for step, mb in memory.items() if 100 <= step < 110)
    late = statistics.median(mb for step, mb in memory.items() if step > args.steps - 20)
    for step in range(100, args.steps, 100):
        print(f"step {step:>5}  {memory[min(memory, key=lambda s: abs(s - step))]:,.0f} MB")
    first, last = statistics.median(times[100:300]), statistics.median(times[-200:])
    print(f"memory     {early:,.0f} MB at step 100, {late:,.0f} MB at the end: {late / early:.3f}")
    print(f"step time  {first * 1e3:.0f} ms, at the end {last * 1e3:.0f} ms: {last / first:.3f}")
    print(f"files, MB  {files}")
    sys.exit(late > 1.05 * early or last > 1.05 * first)


if __name__ == "__main__":
    main()
