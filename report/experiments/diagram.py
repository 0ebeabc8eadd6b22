"""Draws a step of GRPO, with the shapes of the tensors and the functions of train_grpo.py.

    python -m report.experiments.diagram        writes images/loop.svg and images/loop_zh.svg
"""
from pathlib import Path

from ..curves import BLUE, GREEN, GREY, INK, ORANGE

IMAGES = Path(__file__).parents[2] / "images"
CHINESE = {
    "One step of GRPO": "GRPO 的一步",
    "B prompts, G completions of each (here 4), N = B*G; a completion has R tokens":
        "B 个 prompt，每个 G 个回答（图中 4 个），N = B*G；一个回答有 R 个 token",
    "prompts": "prompt", "completions": "回答", "rewards": "奖励", "advantages": "优势",
    "policy pi": "策略 pi", "weights that learn": "学习中的权重", "log-probs": "对数概率",
    "reference": "参考模型", "starting weights": "起始权重", "one number": "一个数",
    "1. ask": "1. 提问", "2. remember": "2. 记录", "3. judge": "3. 打分", "4. learn": "4. 学习",
    "mean over tokens, then over completions": "先对 token 取平均，再对回答取平均",
    "an optimizer step; the next step samples anew": "优化器更新一次；下一步重新采样",
}
GROUP = [       # the README's table: what it thinks → its answer, reward, advantage
    ("I guess 70. → 70", "0.1", "-0.86"), ("3*7=21, 7+21=28 → 28", "1.1", "+0.95"),
    ("28", "1.0", "+0.77"), ("7+3=10, 10*7=70 → 70", "0.1", "-0.86")]
HEAD = f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 972 470" font-family="sans-serif">
<style>
text {{ font-size: 13px }} .title {{ font-size: 14px; font-weight: bold }}
.code {{ font-family: monospace }} .function {{ font-family: monospace; font-weight: bold }}
.box {{ fill: #f6f8fa; stroke: #c4c9d0 }}
.arrow {{ fill: none; stroke: {GREY}; stroke-width: 1.6; marker-end: url(#head) }}
</style>
<marker id="head" viewBox="0 0 8 8" refX="6" refY="4" markerWidth="6" markerHeight="6"
 orient="auto"><path d="M0 0 L8 4 L0 8 z" fill="{GREY}"/></marker>
<rect width="972" height="470" rx="8" fill="#ffffff"/>
"""


def diagram(words):
    """The picture as SVG. words: what to write instead, {English: Chinese}."""
    drawn = []

    def text(x, y, content, kind="", color=GREY, anchor="start"):
        if content:
            drawn.append(f'<text x="{x}" y="{y}" class="{kind}" fill="{color}" '
                         f'text-anchor="{anchor}">{words.get(content, content)}</text>')

    def box(x, y, width, height, title, below, kind="code", sheets=1):
        for shift in range(6 * sheets - 6, -1, -6):     # a sheet of paper for each group
            drawn.append(f'<rect x="{x + shift}" y="{y + shift}" width="{width}" '
                         f'height="{height}" rx="6" class="box"/>')
        text(x + 10, y + 22, title, "title", INK)
        text(x + 10, y + 41, below, kind)

    def arrow(path, middle, y, function, step, note=""):
        drawn.append(f'<path d="{path}" class="arrow"/>')
        text(middle, y - 26, step, anchor="middle")
        text(middle, y - 9, function, "function", BLUE, "middle")
        text(middle, y + 19, note, anchor="middle")

    text(24, 32, "One step of GRPO", "title", INK)
    text(180, 32, "B prompts, G completions of each (here 4), N = B*G; a completion has R tokens")
    box(24, 54, 136, 140, "prompts", "(B, P)", sheets=3)
    box(250, 54, 182, 140, "completions", "(N, R)", sheets=3)
    box(578, 54, 78, 140, "rewards", "(N,)", sheets=3)
    box(826, 54, 116, 140, "advantages", "(N,)", sheets=3)
    text(34, 128, "What is 7 + 3*7?", color=INK)
    for y, (completion, reward, advantage) in zip((120, 141, 162, 183), GROUP):
        for x, content in ((260, completion), (588, reward), (836, advantage)):
            text(x, y, content, "code", GREEN if float(reward) >= 1 else ORANGE)
    arrow("M176 124 H246", 211, 124, "generate", "1. ask")
    arrow("M448 124 H574", 510, 124, "compute_rewards", "3. judge")
    arrow("M672 124 H822", 746, 124, "compute_advantages", "3. judge")

    box(24, 264, 136, 54, "policy pi", "weights that learn", "")
    box(24, 346, 136, 54, "reference", "starting weights", "")
    box(286, 264, 146, 136, "log-probs", "(N, R)")
    box(826, 302, 116, 60, "loss", "one number", "")
    text(296, 337, "log pi, log pi_old", color=INK)
    text(296, 377, "log pi_ref", color=INK)
    for path in ("M92 264 V238 H211 V132", "M365 210 V260", "M884 210 V298"):
        drawn.append(f'<path d="{path}" class="arrow"/>')       # what a function also reads
    arrow("M160 291 H282", 221, 291, "token_logps", "4. learn")
    arrow("M160 373 H282", 221, 373, "compute_logps", "2. remember")
    arrow("M432 332 H822", 627, 332, "grpo_loss", "4. learn",
          "mean over tokens, then over completions")
    arrow("M884 362 V434 H10 V291 H20", 627, 434, "update_policy", "4. learn",
          "an optimizer step; the next step samples anew")
    return HEAD + "\n".join(drawn) + "\n</svg>\n"


if __name__ == "__main__":
    for name, words in (("loop", {}), ("loop_zh", CHINESE)):
        (IMAGES / f"{name}.svg").write_text(diagram(words), encoding="utf-8")
