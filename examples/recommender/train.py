"""Train the recommender and write it to `recommender.onnx`. Needs PyTorch, onnx and onnxscript.

nice python train.py
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from clicks import LENGTH_MAX, Ids, Shop, padded, sessions
from niser import Niser, Recommender
from torch.nn import functional

HERE = Path(__file__).parent
TRAINING_SEED = 1  # `evaluate.py` holds out another


def main() -> None:
    """Train, and export."""
    options = _options()
    torch.manual_seed(0)
    shop = Shop()
    clicks = sessions(shop, options.sessions, TRAINING_SEED)
    model = Niser(shop.items, options.width, steps=options.steps)
    train(model, clicks, epochs=options.epochs)
    export(model, options.out)
    print(f"{options.out}: {options.out.stat().st_size / 1e6:.1f} MB")


def train(model: Niser, clicks: list[Ids], *, epochs: int, batch: int = 256) -> None:
    """Teach it to guess, from the beginning of a session, the click that comes next."""
    random = np.random.default_rng(0)
    optimiser = torch.optim.Adam(model.parameters(), lr=2e-3, weight_decay=1e-6)
    steps = epochs * -(-len(clicks) // batch)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 4e-3, total_steps=steps)
    model.train()
    for epoch in range(epochs):
        began_s, losses = time.monotonic(), []
        for known, following in _batches(clicks, batch, random):
            loss = functional.cross_entropy(model(known), following)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            schedule.step()
            losses.append(loss.item())
        took_s = time.monotonic() - began_s
        print(f"epoch {epoch + 1}: loss {np.mean(losses):.3f}, {took_s:.0f} s", flush=True)


def export(model: Niser, path: Path) -> None:
    """Write the model as one file that takes any number of sessions at a time."""
    example = torch.zeros((2, LENGTH_MAX), dtype=torch.int64)
    example[:, :2] = 1
    torch.onnx.export(
        Recommender(model).eval(),
        (example,),
        path,
        input_names=["clicks"],
        output_names=["items", "scores"],
        dynamic_shapes=({0: torch.export.Dim("sessions")},),
        external_data=False,
        verbose=False,
    )


def _batches(
    clicks: list[Ids], size: int, random: np.random.Generator
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield beginnings of sessions and what followed, each session cut at a random click.

    Sessions of a like length go together, or most of a batch would be padding.
    """
    cuts = random.integers(1, [len(session) for session in clicks])
    order = np.argsort(cuts + random.random(len(clicks)), kind="stable")
    starts = random.permutation(range(0, len(clicks), size))
    for start in starts:
        chosen = order[start : start + size]
        known = [clicks[index][: cuts[index]] for index in chosen]
        following = np.array([clicks[index][cuts[index]] for index in chosen])
        longest = int(cuts[chosen].max())
        yield torch.from_numpy(padded(known, longest)), torch.from_numpy(following)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sessions", type=int, default=60_000, help="to learn from")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--width", type=int, default=100, help="of a vector")
    parser.add_argument("--steps", type=int, default=2, help="of the graph network")
    parser.add_argument("--out", type=Path, default=HERE / "recommender.onnx")
    return parser.parse_args()


if __name__ == "__main__":
    main()
