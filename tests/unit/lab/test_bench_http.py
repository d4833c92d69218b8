"""`headgate bench http`: both servers answer, and the cases can be lost."""

from __future__ import annotations

import pytest

pytest.importorskip("uvicorn")

from headgate.lab.bench import http


def test_a_short_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The peer accepts two `Host` headers, and drops the response of a client that half-closes."""
    chosen = ("Host twice", "client closes its side", "pipelined requests")
    monkeypatch.setattr(http, "_CASES", {case: http._CASES[case] for case in chosen})
    monkeypatch.setattr(http, "ROUNDS", 1)
    monkeypatch.setattr(http, "ROUND_S", 0.2)
    monkeypatch.setattr(http, "CONNECTIONS", (2,))
    result = http.run(progress=lambda line: None)
    speed, *cases = result.rows
    rates = speed["headgate_per_s"], speed["uvicorn_per_s"], speed["ratio"]
    assert speed["connections"] == 2 and all(isinstance(rate, int | float) for rate in rates)
    assert [(row["case"], row["headgate"]) for row in cases] == [
        ("Host twice", "400, closed"),
        ("client closes its side", "200, closed"),
        ("pipelined requests", "21 of 21 responses"),
    ]
    lost = [str(row["uvicorn"]).endswith("(lost)") for row in cases]
    assert lost == [True, True, False]
    assert result.checks[-1].measured == 3
