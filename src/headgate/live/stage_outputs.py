"""Findings: what stages of open requests gave, for the stages after them and for the answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from headgate.core.model import App
from headgate.functions.tensor import Signature, Tensor
from headgate.live.call import Call


@final
class StageOutputs:
    """Keeps intermediate results, where a pipeline has several stages."""

    def __init__(self, app: App, signatures: Sequence[Signature]) -> None:
        self._pipelines = app.pipelines
        self._signatures = signatures  # by function id
        self._by_request: dict[int, dict[int, list[Tensor]]] = {}  # and then by stage

    def inputs(self, call: Call, stage_index: int) -> list[Tensor]:
        """What a stage reads, in a list of its own: the call's tensors, or what came before."""
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
        """A stage gave this; as far as is known now, the call is answered with `call.outputs`."""
        pipeline = self._pipelines[call.pipeline_id]
        if len(pipeline.stages) == 1:
            call.outputs = outputs
            return
        results = self._by_request.setdefault(call.request_id, {})
        results[stage_index] = outputs
        # What is answered, should nothing follow: results that no stage has used yet.
        used = {before for index in results for before in pipeline.stages[index].after}
        call.outputs = [t for index in results if index not in used for t in results[index]]

    def discard(self, request_id: int) -> None:
        """A request has ended."""
        if self._by_request:
            self._by_request.pop(request_id, None)
