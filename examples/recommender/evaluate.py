"""How good the shipped recommender is, beside simple ones and beside the best there can be.

    python evaluate.py

Needs NumPy and ONNX Runtime. Each recommends 20 items for sessions nobody learned from; Recall@20
is how often the next click is among them, and MRR@20 the mean of 1/place, 0 where it is not.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnxruntime
from clicks import Ids, Shop, chances, padded, sessions
from numpy.typing import NDArray

HERE = Path(__file__).parent
TRAINING_SEED = 1  # as in `train.py`
HELD_OUT_SEED = 2
TOP = 20

# From the known clicks of sessions to the recommended items, [sessions, TOP].
Recommends = Callable[[list[Ids]], Ids]
Table = NDArray[np.float32]


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=HERE / "recommender.onnx")
    parser.add_argument("--sessions", type=int, default=5_000, help="to be tried with")
    options = parser.parse_args()
    shop = Shop()
    learned = sessions(shop, 60_000, TRAINING_SEED)
    held_out = sessions(shop, options.sessions, HELD_OUT_SEED)
    print(f"{'':<22}Recall@{TOP}  MRR@{TOP}")
    for name, recommends in {
        "popularity": popularity(shop, learned),
        "last click (Markov)": markov(shop, learned),
        "items seen together": neighbours(shop, learned),
        "NISER": niser(options.model),
        "the best possible": best_possible(shop),
    }.items():
        recall, rank = measured(recommends, held_out)
        print(f"{name:<22}{recall:9.1%}  {rank:6.3f}")


def measured(recommends: Recommends, held_out: list[Ids]) -> tuple[float, float]:
    """Return Recall@20 and MRR@20 of guessing each session's last click from those before."""
    is_hit = recommends([session[:-1] for session in held_out]) == np.array(
        [[session[-1]] for session in held_out]
    )
    places = np.argmax(is_hit, axis=1) + 1
    hits = is_hit.any(axis=1)
    return float(hits.mean()), float(np.where(hits, 1 / places, 0).mean())


def popularity(shop: Shop, learned: list[Ids]) -> Recommends:
    """Recommend to everybody what is clicked most."""
    top = _top(_counts(shop, learned)[None])
    return lambda known: np.repeat(top, len(known), axis=0)


def markov(shop: Shop, learned: list[Ids]) -> Recommends:
    """Recommend what followed most often on the last click, and then what is popular."""
    following = np.zeros((shop.items + 1, shop.items + 1), np.float32)
    for session in learned:
        np.add.at(following, (session[:-1], session[1:]), 1)
    following += _counts(shop, learned) / 1e6  # decides ties only
    return lambda known: _top(following[[clicks[-1] for clicks in known]])


def neighbours(shop: Shop, learned: list[Ids]) -> Recommends:
    """Recommend what is often in the same sessions as the clicked items (item-kNN, cosine)."""
    together = np.zeros((shop.items + 1, shop.items + 1), np.float32)
    for session in learned:
        items = np.unique(session)
        together[np.ix_(items, items)] += 1
    often = np.sqrt(together.diagonal() + 20)  # a prior, or two rare items would be inseparable
    np.fill_diagonal(together, 0)
    likeness = together / often / often[:, None]
    return lambda known: np.concatenate([_top(likeness[clicks].sum(0)[None]) for clicks in known])


def niser(model: Path) -> Recommends:
    """Recommend what the trained model says."""
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])

    def recommends(known: list[Ids]) -> Ids:
        parts = [
            session.run(["items"], {"clicks": padded(known[start : start + 64])})[0]
            for start in range(0, len(known), 64)
        ]
        return np.concatenate(parts)

    return recommends


def best_possible(shop: Shop) -> Recommends:
    """Recommend what one would who knows how the shop was made: no one can do better."""
    return lambda known: np.concatenate([_top(chances(shop, clicks)[None]) for clicks in known])


def _counts(shop: Shop, learned: list[Ids]) -> Table:
    return np.bincount(np.concatenate(learned), minlength=shop.items + 1).astype(np.float32)


def _top(scores: NDArray[np.floating]) -> Ids:
    """Return the ids with the highest scores, the best first."""
    best = np.argpartition(-scores, TOP, axis=1)[:, :TOP]
    order = np.argsort(-np.take_along_axis(scores, best, axis=1), axis=1, kind="stable")
    return np.take_along_axis(best, order, axis=1)


if __name__ == "__main__":
    main()
