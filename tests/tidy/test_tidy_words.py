"""The words of the field: private words that the project once had do not come back."""

from __future__ import annotations

import re

from tidy_sources import ROOT, kept_files, name_of

# Each with the word of the field that stands for it now.
PRIVATE_WORDS = {
    "spillway": "circuit breaker",
    "outpost": "remote pool",
    "errand": "remote call",
    "vigil": "busy poll",
    "agenda": "event queue",
    "happening": "queue item",
    "ledger": "state writer",
    "narrator": "event formatter",
    "janitor": "cleanup process",
    "contestant": "peer",
    "straggler": "drain watcher",
    "idler": "idle instance",
    "awakening": "keep-warm tick",
    "keyring": "API keys",
    "judgement": "error classification",
    "crew": "worker links",
    "company": "concurrency",
    "pulse": "heartbeat",
    "outlet": "FaaS target",
    "warmth": "warm pool",
    "findings": "stage outputs",
    "catalogue": "model registry",
    "headline": "summary",
    "envelope": "payload",
    "foretold": "predicted",
}
# The change log tells of names as they were, and decision 14 of why they went.
HISTORY = ("CHANGELOG.md", "docs/adr/0014-the-fields-words-and-a-layout-one-can-guess.md")
SUFFIXES = (".py", ".md", ".yaml", ".json", ".toml", ".template")


def test_private_words_are_gone() -> None:
    pattern = re.compile("|".join(PRIVATE_WORDS), re.IGNORECASE)
    found = []
    for path in kept_files():
        name = name_of(path)
        if path.suffix not in SUFFIXES or name in HISTORY or path.samefile(__file__):
            continue
        matches = pattern.findall(f"{name}\n{path.read_text(encoding='utf-8')}")
        found += [f"{name}: {word}: {PRIVATE_WORDS[word]}" for word in {m.lower() for m in matches}]
    assert not found, "\n".join(found)
    assert (ROOT / HISTORY[1]).exists()
