"""Bars of what ladder_beside_torch.py printed, as SVG: python plot_ladder.py LINES.jsonl OUT.svg."""

import json
import sys
from html import escape

UNITS = {"attention": ("tflops", "TFLOP/s"), "decode": ("tbps", "TB/s"), "linear": ("tflops", "TFLOP/s"), "backward": ("tflops", "TFLOP/s")}
COLOURS = {"sdpa_flash": "#999", "eager_f32": "#999", "eager_tf32": "#bbb", "eager_bf16": "#ccc"}
LABELS, BAR, STEP, WIDE = 330, 12, 15, 420


def groups(lines):
    """Title and bars of each line that was measured."""
    for line in lines:
        if line["kind"] in UNITS:
            key, unit = UNITS[line["kind"]]
            shape = " x ".join(str(part) for part in line["shape"])
            yield f"{line['kind']} {shape}, {unit}", line[key]


def svg(lines):
    parts, y = [], 20
    for title, rates in groups(lines):
        parts.append(f'<text x="8" y="{y}" font-weight="bold">{escape(title)}</text>')
        y += 6
        most = max(rates.values())
        for name, rate in rates.items():
            width = max(1, rate / most * WIDE)
            colour = COLOURS.get(name, "#37c")
            parts.append(f'<text x="{LABELS - 8}" y="{y + BAR - 2}" text-anchor="end">{escape(name)}</text>')
            parts.append(f'<rect x="{LABELS}" y="{y}" width="{width:.1f}" height="{BAR}" fill="{colour}"/>')
            parts.append(f'<text x="{LABELS + width + 6:.1f}" y="{y + BAR - 2}">{rate:g}</text>')
            y += STEP
        y += 22
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{LABELS + WIDE + 80}" height="{y}" font-family="sans-serif" font-size="11">'
    back = f'<rect width="100%" height="{y}" fill="#fff"/>'
    return "\n".join([head, back, *parts, "</svg>", ""])


def main():
    source, target = sys.argv[1:]
    with open(source, encoding="utf-8") as file:
        lines = [json.loads(line) for line in file if line.startswith("{")]
    with open(target, "w", encoding="utf-8") as file:
        file.write(svg(lines))


if __name__ == "__main__":
    main()
