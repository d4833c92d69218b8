"""Intermediate tensors of pipeline stages, for the stages after them and for the response."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from headgate.core.model import App
from headgate.functions.tensor import Signature, Tensor
from headgate.live.call import Call


@final
class StageOutputs:
    """Stores the outputs of stages while their request is open."""

    def __init__(self, app: App, signatures: Sequence[Signature]) -> None:
        self._pipelines = app.pipelines
        self._signatures = signatures  # by function id
        self._by_request: dict[int, dict[int, list[Tensor]]] = {}  # then by stage

    def inputs(self, call: Call, stage_index: int) -> list[Tensor]:
        """Return the inputs of a stage in a new list: those of the call, or outputs of earlier
        stages.
        """
        stage = self._pipelines[call.pipeline_id].stages[stage_index]
        if not stage.after:
            tensors = call.inputs
        else:
            results = self._by_request[call.request_id]
            tensors = [t for index in stage.after for t in results.get(index, ())]
        wanted = self._signatures[stage.function.id].inputs
        if len(wanted) == len(tensors) or not wanted:
            return list(tensors)
        names = {spec.name for spec in wanted}
        return [tensor for tensor in tensors if tensor.name in names]

    def store(self, call: Call, stage_index: int, outputs: list[Tensor]) -> None:
        """Store the outputs of a stage and update `call.outputs`, the response as far as known."""
        pipeline = self._pipelines[call.pipeline_id]
        if len(pipeline.stages) == 1:
            call.outputs = outputs
            return
        results = self._by_request.setdefault(call.request_id, {})
        results[stage_index] = outputs
        # The response, if no stage follows: outputs that no finished stage has consumed.
        used = {before for index in results for before in pipeline.stages[index].after}
        call.outputs = [t for index in results if index not in used for t in results[index]]

    def discard(self, request_id: int) -> None:
        """Drop the outputs of a request that has ended."""
        if self._by_request:
            self._by_request.pop(request_id, None)
