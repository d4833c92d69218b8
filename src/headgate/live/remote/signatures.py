"""What functions take and give that no worker of ours looks at, because they run elsewhere only."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Final

from msgspec.structs import replace

from headgate.app import LoadedApp
from headgate.app.providers import providers_of
from headgate.core.model import Variant
from headgate.functions.tensor import Signature
from headgate.functions.words import words
from headgate.live.messages import FunctionFacts

_LOG: Final = logging.getLogger(__name__)


def elsewhere(loaded: LoadedApp) -> list[Variant]:
    """Return the variants that run on no node of ours."""
    local = {
        id
        for id, provider in enumerate(providers_of(loaded))
        if provider and provider.kind == "local"
    }
    return [variant for variant in loaded.app.variants if local.isdisjoint(variant.pool_ids)]


def look_up(loaded: LoadedApp, base: str) -> list[FunctionFacts]:
    """Return what the application's own files say of variants that run elsewhere.

    Where there is no file, or it cannot be read here, nothing is known: anything is taken.
    """
    return [_facts(loaded, variant, base) for variant in elsewhere(loaded)]


def with_siblings(
    loaded: LoadedApp, facts: Mapping[str, FunctionFacts]
) -> dict[str, FunctionFacts]:
    """Return facts in which what runs elsewhere and is unknown looks as its siblings do."""
    filled = dict(facts)
    for variant in elsewhere(loaded):
        found = facts[variant.name]
        siblings = loaded.app.functions[variant.function_id].variants
        known = [facts[sibling.name].signature for sibling in siblings]
        if found.signature == Signature():
            signature = next((s for s in known if s != Signature()), Signature())
            filled[variant.name] = replace(found, signature=signature)
    return filled


def _facts(loaded: LoadedApp, variant: Variant, base: str) -> FunctionFacts:
    signature = Signature()
    source = loaded.sources[variant.id]
    if source is not None:
        # Here, because they import NumPy, and a gateway usually gets by without.
        from headgate.functions.model import signature_of  # noqa: PLC0415
        from headgate.functions.source import build_model  # noqa: PLC0415

        try:
            model = build_model(source, base, variant.name)
            if source.model is not None:  # what it takes stands in the file
                model.load()
            signature = signature_of(model)
        except Exception as error:  # whatever a model does
            problem = words(error)
            _LOG.warning("%s runs elsewhere, and is not understood here: %s", variant.name, problem)
    return FunctionFacts(variant.name, signature, (), 0, 0)
