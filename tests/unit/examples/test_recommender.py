"""The recommender in `examples`: inputs, outputs and accuracy."""

from __future__ import annotations

import sys
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

EXAMPLE = Path(__file__).parents[3] / "examples" / "recommender"
MODEL = EXAMPLE / "recommender.onnx"

onnxruntime = pytest.importorskip("onnxruntime")


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Import the example's modules by their names, as they import each other."""
    monkeypatch.syspath_prepend(str(EXAMPLE))

    def module(name: str) -> ModuleType:
        monkeypatch.delitem(sys.modules, name, raising=False)
        return __import__(name)

    return module


def run(clicks: list[list[int]]) -> tuple[Any, Any]:
    session = onnxruntime.InferenceSession(MODEL, providers=["CPUExecutionProvider"])
    rows = np.zeros((len(clicks), 20), np.int64)
    for row, known in zip(rows, clicks, strict=True):
        row[: len(known)] = known
    items, scores = session.run(["items", "scores"], {"clicks": rows})
    return items, scores


def read_weights() -> dict[str, Any]:
    """Return the weights by the names of the model's parts; two the exporter keeps turned round."""
    onnx = pytest.importorskip("onnx")
    arrays = {
        each.name: onnx.numpy_helper.to_array(each) for each in onnx.load(MODEL).graph.initializer
    }
    weights = {
        name.removeprefix("_niser."): array
        for name, array in arrays.items()
        if name.startswith("_niser.")
    }
    width = weights["items.weight"].shape[1]
    turned = [array.T for name, array in arrays.items() if name.startswith("val_")]
    (weights["attention.weight"],) = (w for w in turned if w.shape == (1, width))
    (weights["attention_each.weight"],) = (w for w in turned if w.shape == (width, width))
    return weights


def naive_scores(clicks: list[int], w: dict[str, Any]) -> Any:
    """NISER, item by item."""

    def sigmoid(x: Any) -> Any:
        return 1 / (1 + np.exp(-x))

    vectors = w["items.weight"]
    vectors = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-3)
    state = {item: vectors[item] for item in clicks}
    edges = set(pairwise(clicks))
    for _ in range(2):  # steps of propagation
        said_in = {i: w["edges_in.weight"] @ h + w["edges_in.bias"] for i, h in state.items()}
        said_out = {i: w["edges_out.weight"] @ h + w["edges_out.bias"] for i, h in state.items()}
        new = {}
        for item, old in state.items():
            before = [said_in[a] for a, b in edges if b == item] or [0 * old]
            after = [said_out[b] for a, b in edges if a == item] or [0 * old]
            heard = np.concatenate([np.mean(before, axis=0), np.mean(after, axis=0)])
            r, z, n = np.split(w["gates.weight_ih"] @ heard + w["gates.bias_ih"], 3)
            r_old, z_old, n_old = np.split(w["gates.weight_hh"] @ old + w["gates.bias_hh"], 3)
            reset, keep = sigmoid(r + r_old), sigmoid(z + z_old)
            new[item] = (1 - keep) * np.tanh(n + reset * n_old) + keep * old
        state = new
    last = state[clicks[-1]]
    led = w["attention_last.weight"] @ last + w["attention_last.bias"]
    about = sum(
        (w["attention.weight"] @ sigmoid(led + w["attention_each.weight"] @ state[item]))
        * state[item]
        for item in clicks
    )
    session = w["session.weight"] @ np.concatenate([last, about])
    return 16 * vectors @ (session / np.linalg.norm(session))


@pytest.mark.parametrize("sessions", [1, 3])
def test_takes_any_number_of_sessions_and_ranks_twenty_items(sessions: int) -> None:
    items, scores = run([[5, 17, 5], [900], list(range(1, 21))][:sessions])
    assert items.shape == scores.shape == (sessions, 20)
    assert items.dtype == np.int64 and scores.dtype == np.float32
    assert np.isfinite(scores).all()
    assert (np.diff(scores, axis=1) <= 0).all()
    assert ((items > 0) & (items <= 4_000)).all()
    assert all(len(set(row)) == 20 for row in items.tolist())


def test_scores_are_cosines_times_sixteen() -> None:
    """Items and sessions are unit vectors, so nothing scores above the sharpness."""
    _, scores = run([[5, 17, 5], [900]])
    assert (np.abs(scores) <= 16).all()


def test_a_session_is_answered_alike_alone_and_in_a_batch() -> None:
    alone, alone_scores = run([[5, 17, 5]])
    beside, beside_scores = run([[900], [5, 17, 5], [1] * 20])
    assert alone[0].tolist() == beside[1].tolist()
    np.testing.assert_allclose(alone_scores[0], beside_scores[1], rtol=1e-4)


def test_what_was_clicked_before_the_last_click_matters() -> None:
    """Otherwise the model would be a mere Markov chain."""
    first, second = run([[5, 17], [3_000, 17]])[0]
    assert first.tolist() != second.tolist()


def test_recommends_better_than_popularity_and_nearly_as_well_as_possible(example: Any) -> None:
    clicks, evaluate = example("clicks"), example("evaluate")
    shop = clicks.Shop()
    learned = clicks.sessions(shop, 1_000, evaluate.TRAINING_SEED)
    held_out = clicks.sessions(shop, 300, evaluate.HELD_OUT_SEED)
    recall, rank = evaluate.measured(evaluate.niser(MODEL), held_out)
    popular, _ = evaluate.measured(evaluate.popularity(shop, learned), held_out)
    best, best_rank = evaluate.measured(evaluate.best_possible(shop), held_out)
    assert recall > 4 * popular
    assert 0.8 * best < recall < best + 0.03
    assert 0.7 * best_rank < rank


def test_the_shop_is_the_same_for_every_seed_and_its_visitors_are_not(example: Any) -> None:
    clicks = example("clicks")
    shop = clicks.Shop()
    one, again, other = (clicks.sessions(shop, 200, seed) for seed in (1, 1, 2))
    assert all((a == b).all() for a, b in zip(one, again, strict=True))
    assert any(len(a) != len(b) for a, b in zip(one, other, strict=True))
    lengths = [len(session) for session in one]
    assert min(lengths) >= 2 and max(lengths) <= 20
    assert all(session.min() >= 1 and session.max() <= shop.items for session in one)


def test_predicted_probabilities_are_calibrated(example: Any) -> None:
    """The generator's own probabilities match the observed frequencies."""
    clicks = example("clicks")
    shop = clicks.Shop(categories=3, tastes=2, cell=2, followers=1)
    sessions = clicks.sessions(shop, 2_000, seed=3)
    message = np.array([clicks.chances(shop, session[:-1]) for session in sessions])
    np.testing.assert_allclose(message.sum(axis=1), 1)
    happened = np.zeros_like(message)
    happened[np.arange(len(sessions)), [session[-1] for session in sessions]] = 1
    for low, high in ((0.0, 0.05), (0.05, 0.15), (0.15, 0.3), (0.3, 1.0)):
        is_in_bin = (message >= low) & (message < high)
        assert happened[is_in_bin].mean() == pytest.approx(message[is_in_bin].mean(), abs=0.03)


def test_the_file_does_what_the_paper_says() -> None:
    """Loops over the distinct items of a session, with the weights of the file, score the same."""
    weights = read_weights()
    for clicks in ([7], [5, 17, 5, 17, 3], [1, 2, 3, 1, 4, 2, 2, 9]):
        (items,), (scores,) = run([clicks])
        wanted = naive_scores(clicks, weights)
        np.testing.assert_allclose(scores, wanted[items], atol=1e-3)
        np.testing.assert_allclose(scores, np.sort(wanted[1:])[::-1][:20], atol=1e-3)


def test_the_graph_is_that_of_the_clicked_items(example: Any) -> None:
    """Built by tensors over clicks, it says what loops over the distinct items say."""
    torch = pytest.importorskip("torch")
    niser = example("niser")
    rng = np.random.default_rng(0)
    for length in (1, 2, 5, 9):
        clicks = rng.integers(1, 5, length).tolist()
        rows = torch.tensor([clicks + [0] * (9 - length)])
        incoming, outgoing = (matrix[0].numpy() for matrix in niser.session_graph(rows))
        assert not incoming[length:].any() and not outgoing[:, length:].any()
        state = rng.random(5)  # by item; 0 is padding
        by_click = state[rows[0].numpy()]
        for position, item in enumerate(clicks):
            before = {a for a, b in pairwise(clicks) if b == item}
            after = {b for a, b in pairwise(clicks) if a == item}
            for matrix, heard in ((incoming, before), (outgoing, after)):
                wanted = np.mean([state[other] for other in heard]) if heard else 0.0
                assert matrix[position] @ by_click == pytest.approx(wanted, abs=1e-5)
