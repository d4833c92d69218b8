"""Which answers of a cascade are unsure, so that its next stage runs."""

from __future__ import annotations

from headgate.core.model import App
from headgate.core.records import STAGES_MAX
from headgate.sim.recorder import Recorder


def has_cascades(app: App) -> bool:
    """Whether any stage runs only for some requests."""
    return any(s.only_if_unsure for p in app.pipelines for s in p.stages)


def unsure_tasks(app: App, recorder: Recorder, task_ids: list[int]) -> tuple[int, ...]:
    """Which of these tasks a cascade should go on with; drawn by hashing, so order is no matter."""
    return tuple(task_id for task_id in task_ids if _is_unsure(app, recorder, task_id))


def _is_unsure(app: App, recorder: Recorder, task_id: int) -> bool:
    row = task_id // STAGES_MAX
    pipeline = app.pipelines[recorder.pipeline[row]]
    for index in pipeline.successors[task_id % STAGES_MAX]:
        stage = pipeline.stages[index]
        if stage.only_if_unsure:
            drawn = (task_id * 2654435761 % 4294967296) / 4294967296
            return drawn < stage.unsure_probability
    return False
