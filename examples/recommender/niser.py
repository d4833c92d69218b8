"""NISER: recommends the next item from the graph of a session's clicks.

A session is a graph: its items are nodes, and an edge leads from each click to the next. A gated
graph network (SR-GNN) lets the nodes tell each other what they are; soft attention, led by the last
click, sums them up; and the nearest items are recommended. What NISER adds is that items and
sessions are unit vectors, so that items shown often cannot win by being long.

    Gupta, Garg, Malhotra, Vig, Shroff: NISER: Normalized Item and Session Representations to
    Handle Popularity Bias, 2019. Wu, Tang, Zhu, Wang, Xie, Tan: Session-based Recommendation with
    Graph Neural Networks, AAAI 2019.

Plain item ids go in, padded with zeros behind; the graph is built in here, with tensor operations,
so that the exported file does it too. Needs PyTorch; the exported file does not.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

PADDING = 0  # no item has this id


class Niser(nn.Module):
    """Scores of all items, for a batch of sessions."""

    def __init__(self, items: int, width: int, *, steps: int, sharpness: float = 16.0) -> None:
        super().__init__()
        self.items = nn.Embedding(items + 1, width)
        self.edges_in = nn.Linear(width, width)
        self.edges_out = nn.Linear(width, width)
        self.gates = nn.GRUCell(2 * width, width)
        self.attention_last = nn.Linear(width, width)
        self.attention_each = nn.Linear(width, width, bias=False)
        self.attention = nn.Linear(width, 1, bias=False)
        self.session = nn.Linear(2 * width, width, bias=False)
        self.dropout = nn.Dropout(0.1)
        self._steps = steps
        self._sharpness = sharpness
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -(width**-0.5), width**-0.5)

    def forward(self, clicks: Tensor) -> Tensor:
        """Return [batch, items + 1] scores from [batch, length] clicks; padding scores lowest."""
        items = unit(self.items.weight)
        state = self._propagated(self.dropout(items[clicks]), clicks)
        scores = self._sharpness * self._summed(state, clicks) @ items.T
        is_padding = torch.arange(items.shape[0], device=items.device) == PADDING
        return scores.masked_fill(is_padding, -self._sharpness)

    def _propagated(self, state: Tensor, clicks: Tensor) -> Tensor:
        """Return what each click's node knows after it has heard its neighbours."""
        incoming, outgoing = session_graph(clicks)
        batch, length, width = state.shape
        for _ in range(self._steps):
            heard = torch.cat(
                (incoming @ self.edges_in(state), outgoing @ self.edges_out(state)), dim=2
            )
            state = self.gates(
                heard.reshape(batch * length, 2 * width), state.reshape(batch * length, width)
            ).reshape(batch, length, width)
        return state

    def _summed(self, state: Tensor, clicks: Tensor) -> Tensor:
        """Return the session as a unit vector: its last click and what it was about, together."""
        is_click = (clicks != PADDING).unsqueeze(2).to(state.dtype)
        # Padding stands behind, so the last click is the one that no click follows.
        follows = functional.pad(is_click[:, 1:], (0, 0, 0, 1))
        last = (state * is_click * (1 - follows)).sum(dim=1)
        mixed = self.attention_last(last).unsqueeze(1) + self.attention_each(state)
        weights = self.attention(torch.sigmoid(mixed)) * is_click
        about = (weights * state).sum(dim=1)
        return unit(self.session(torch.cat((last, about), dim=1)))


def unit(vectors: Tensor) -> Tensor:
    """Return vectors of length one; what has no length, as padding, stays as it is."""
    return vectors / vectors.square().sum(dim=-1, keepdim=True).clamp(min=1e-6).sqrt()


def session_graph(clicks: Tensor) -> tuple[Tensor, Tensor]:
    """Return the edges into and out of each click's item, [batch, length, length] each.

    Rows sum to one, or are zero where there is no edge. A node stands once for every click on its
    item, all with the same edges; so that it is heard once, each of them says only its share.
    """
    is_click = clicks != PADDING
    same = (clicks.unsqueeze(2) == clicks.unsqueeze(1)) & is_click.unsqueeze(2)
    same = same.to(torch.float32)
    # Row t of `after`: the click after t. From any click on an item, to any on the item after it.
    after = functional.pad(same[:, 1:], (0, 0, 0, 1))
    edges = (same @ after).clamp(max=1.0)
    share = 1 / same.sum(dim=1, keepdim=True).clamp(min=1.0)
    return _rows_of_one(edges.transpose(1, 2) * share), _rows_of_one(edges * share)


def _rows_of_one(matrix: Tensor) -> Tensor:
    return matrix / matrix.sum(dim=2, keepdim=True).clamp(min=1e-6)


class Recommender(nn.Module):
    """What is exported: the best items of each session, best first, and their scores."""

    def __init__(self, niser: Niser, count: int = 20) -> None:
        super().__init__()
        self._niser = niser
        self._count = count

    def forward(self, clicks: Tensor) -> tuple[Tensor, Tensor]:
        """Return ids and scores, [batch, count] each."""
        scores, items = torch.topk(self._niser(clicks), self._count)
        return items, scores
