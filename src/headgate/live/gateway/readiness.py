"""Whether the server and its models are ready, and why not, in words that anybody may see."""

from __future__ import annotations

from headgate.live.serving import Model, Phase, Serving, without_details


def problems(serving: Serving) -> dict[str, str]:
    """Why models cannot be asked just now, by name."""
    found = {name: serving.problem(model) for name, model in serving.models.items()}
    return {name: without_details(problem) for name, problem in found.items() if problem}


def server_problem(serving: Serving) -> str:
    """Why balancers should send nothing here just now; nothing if everything can be asked."""
    if serving.phase is not Phase.READY:
        return f"the server is {serving.phase.value}"
    broken = problems(serving)
    return f"not ready: {', '.join(broken)}" if broken else ""


def model_problem(serving: Serving, model: Model, *, in_full: bool) -> str:
    """Why a model cannot be asked just now; nothing if it is ready.

    `in_full`: with what an exception says, for clients that are to see such things.
    """
    if serving.phase is not Phase.READY:
        return f"the server is {serving.phase.value}"
    problem = serving.problem(model)
    return problem if in_full else without_details(problem)
