"""Trains one vision transformer on one rank, on a grid of 2 x 2 ranks, and on two such grids: the accuracy is the same.

python examples/08_vit_on_grids.py [EPOCHS] [DIRECTORY]

The correctness figure of Tesseract (arXiv 2105.14500), on handwritten digits. Starts its own ranks, one layout after
the other, and writes the accuracy on digits that were not learnt from, after every epoch, into the directory, by
default `benchmarks/results`: `vit-on-grids.json`, and as a picture `.svg` and `.html`.
"""

import json
import math
import sys
from pathlib import Path

import torch
from inputs import digits
from plotly.graph_objects import Figure, Scatter
from torch import Tensor
from transformers import ViTConfig, ViTForImageClassification

import rotorch
from rotorch.bench.record import describe_origin
from rotorch.strategies import num_ranks, parse_parallel
from rotorch.testing.ranks import run_ranks

LAYOUTS = ["single", "tesseract=2x2x1", "tesseract=2x2x2"]
BATCH = 160
COLOURS = ["#7f7f7f", "#1f77b4", "#d62728"]


def train(layout: str, images: Tensor, labels: Tensor, num_tested: int, num_epochs: int) -> dict[str, list[float]]:
    """On one rank, per epoch: the last loss, and the part of the last `num_tested` digits that its share gets right."""
    with rotorch.on_meta():
        vit = ViTForImageClassification(
            ViTConfig(
                image_size=28, patch_size=7, num_channels=1, num_labels=10, hidden_size=64, intermediate_size=128,
                num_hidden_layers=2, num_attention_heads=4,
            )
        )  # fmt: skip
    model = rotorch.parallelize(vit, layout, device="cpu").materialize(seed=0)
    mine = slice(model.batch_rank, None, model.num_batch_ranks)
    num_learnt = len(labels) - num_tested
    steps_per_epoch = num_learnt // BATCH
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    decay = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / (num_epochs * steps_per_epoch))
    found: dict[str, list[float]] = {"loss": [], "accuracy": []}
    for epoch in range(num_epochs):
        order = torch.randperm(num_learnt, generator=torch.Generator().manual_seed(epoch))
        for step in range(steps_per_epoch):
            rows = order[step * BATCH : (step + 1) * BATCH][mine]
            optimizer.zero_grad()
            loss = model.forward_backward({"pixel_values": images[rows], "labels": labels[rows]})
            optimizer.step()
            decay.step()
        tested = labels[num_learnt:][mine]
        logits = model.predict({"pixel_values": images[num_learnt:][mine]}).logits
        found["loss"].append(float(loss))
        found["accuracy"].append(float((logits.argmax(-1) == tested).float().mean()))
    model.close()
    return found


def curves(
    images: Tensor, labels: Tensor, *, layouts: list[str] = LAYOUTS, num_tested: int = 1000, num_epochs: int = 15
) -> dict[str, dict[str, list[float]]]:
    """Per layout and epoch: the last loss, and the accuracy over all digits that are tested."""
    found = {}
    for layout in layouts:
        args = (layout, images, labels, num_tested, num_epochs)
        by_rank = run_ranks(train, *args, num_ranks=num_ranks(parse_parallel(layout)), timeout_s=1800)
        # Shares are equally large, and as many ranks have each: the mean over ranks is the mean over digits.
        each = zip(*(rank["accuracy"] for rank in by_rank), strict=True)
        found[layout] = {"loss": by_rank[0]["loss"], "accuracy": [sum(epoch) / len(epoch) for epoch in each]}
        print(f"{layout}: " + " ".join(f"{a:.3f}" for a in found[layout]["accuracy"]), flush=True)
    return found


def as_page(found: dict[str, dict[str, list[float]]]) -> str:
    """The accuracy over epochs, to look at closely."""
    figure = Figure()
    for (layout, curve), colour in zip(found.items(), COLOURS, strict=False):
        epochs = list(range(1, 1 + len(curve["accuracy"])))
        figure.add_trace(Scatter(x=epochs, y=curve["accuracy"], name=layout, line={"color": colour}))
    figure.update_xaxes(title_text="epoch").update_yaxes(title_text="accuracy").update_layout(template="plotly_white")
    return str(figure.to_html(include_plotlyjs="cdn"))


def as_picture(found: dict[str, dict[str, list[float]]]) -> str:
    """The same as an SVG; where curves coincide, a later one is thinner and lies above."""
    width, height = 480, 260
    low = math.floor(10 * min(min(curve["accuracy"]) for curve in found.values())) / 10
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width + 90} {height + 60}" font-family="sans-serif" '
        'font-size="11">',
        f'<rect width="{width + 90}" height="{height + 60}" fill="white"/>',
    ]
    for tick in range(6):
        y = 20 + height * tick / 5
        parts += [
            f'<line x1="50" y1="{y}" x2="{width + 50}" y2="{y}" stroke="#e5e5e5"/>',
            f'<text x="44" y="{y + 4}" text-anchor="end">{1 - (1 - low) * tick / 5:.2f}</text>',
        ]
    for number, ((layout, curve), colour) in enumerate(zip(found.items(), COLOURS, strict=False)):
        last = max(len(curve["accuracy"]) - 1, 1)
        points = " ".join(
            f"{50 + width * epoch / last:.1f},{20 + height * (1 - max(a, low)) / (1 - low):.1f}"
            for epoch, a in enumerate(curve["accuracy"])
        )
        parts += [
            f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="{7 - 2.5 * number}"/>',
            f'<text x="{width - 60}" y="{height - 60 + 18 * number}" fill="{colour}">{layout}: '
            f"{curve['accuracy'][-1]:.1%}</text>",
        ]
    axis = f'<text x="{50 + width / 2}" y="{height + 45}" text-anchor="middle">accuracy after each epoch</text>'
    return "\n".join([*parts, axis, "</svg>"]) + "\n"


if __name__ == "__main__":
    torch.set_num_threads(1)  # a process that has threads cannot be forked into ranks
    epochs = int(sys.argv[1]) if len(sys.argv) > 1 else 15
    folder = Path(sys.argv[2]) if len(sys.argv) > 2 else Path(__file__).resolve().parents[1] / "benchmarks" / "results"
    origin = describe_origin()
    by_layout = curves(*digits(), num_epochs=epochs)
    (folder / "vit-on-grids.json").write_text(json.dumps({**by_layout, "origin": origin}, indent=1) + "\n")
    (folder / "vit-on-grids.html").write_text(as_page(by_layout))
    (folder / "vit-on-grids.svg").write_text(as_picture(by_layout))
