"""The structure of a pipeline: precedence, its decomposition, and the dominator tree.

Sets of stages are bit masks. `StageGraph.precedes[i]` are all stages after stage i, directly or
not: the makespan depends on that order alone, not on which of its pairs are written as edges.

**Decomposition.** A set of stages falls apart in exactly one of four ways (Gallai's theorem for
the comparability graph of the order):

- one stage: a *leaf*;
- the comparability graph is not connected: its components are *parallel*;
- its complement is not connected: its components are in *series*, each wholly after the last;
- otherwise the set is *prime*: its maximal modules (sets whose members all have the same
  relation to each stage outside) partition it, and their quotient is neither series nor parallel.

Every series-parallel pipeline consists of the first three, and they compose exactly. The smallest
prime order is an N: a before c, a and b before d.

**Dominator tree.** A stage dominates another if every path to the latter passes through it. Under
each node its children, with all that they dominate, are put into layers by the longest chain of
edges between them. An edge into a subtree from outside ends at the root of the subtree, so the
layers keep every precedence; they may add some, such as a before c and d, and b before c, in the N
above. That makes any pipeline series-parallel at the price of times that are too long, never too
short. ESG (HPDC 2024) groups stages by this tree.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from typing import Literal, final

from headgate.core.errors import ConfigError

Kind = Literal["leaf", "series", "parallel", "prime"]


@dataclass(frozen=True, slots=True)
class Decomposition:
    """A set of stages and the parts that it consists of; a leaf has none."""

    kind: Kind
    stages: int  # bit mask
    parts: tuple[Decomposition, ...] = ()  # in topological order


@final
class StageGraph:
    """Stages 0, 1, 2, ... with the stages that each waits for, in any order.

    Raises `ConfigError` that names the stages of a cycle, or a stage that does not exist.
    """

    __slots__ = ("after", "names", "order", "precedes", "successors")

    def __init__(self, after: Sequence[Sequence[int]], names: Sequence[str] = ()) -> None:
        count = len(after)
        self.names = tuple(names) or tuple(str(index) for index in range(count))
        assert len(self.names) == count
        if count == 0:
            raise ConfigError("the pipeline has no stages")
        for index, before in enumerate(after):
            unknown = [each for each in before if not 0 <= each < count]
            if unknown:
                problem = f"stage {self.names[index]}: waits for stage {unknown[0]}"
                raise ConfigError(problem, allowed=f"0 to {count - 1}")
        self.after = tuple(tuple(sorted(set(before))) for before in after)
        self.order = self._sorted()
        self.successors: list[list[int]] = [[] for _ in after]
        for index in self.order:
            for each in self.after[index]:
                self.successors[each].append(index)
        self.precedes = [0] * count
        for index in reversed(self.order):
            for following in self.successors[index]:
                self.precedes[index] |= 1 << following | self.precedes[following]

    def _sorted(self) -> tuple[int, ...]:
        """Return the stages in topological order, the lowest numbers first among those ready."""
        sorter = TopologicalSorter(dict(enumerate(self.after)))
        try:
            sorter.prepare()
        except CycleError as error:
            cycle = " > ".join(self.names[index] for index in error.args[1])
            raise ConfigError(f"the stages wait for each other: {cycle}") from None
        order: list[int] = []
        while sorter.is_active():
            ready = sorted(sorter.get_ready())
            order += ready
            sorter.done(*ready)
        return tuple(order)

    def __len__(self) -> int:
        return len(self.after)

    def makespan_ns(self, times_ns: Sequence[int]) -> int:
        """Return the length of the longest path, given the time of each stage."""
        return max(self.ends_ns(times_ns))

    def ends_ns(self, times_ns: Sequence[int]) -> list[int]:
        """Return when each stage ends, if the first ones start at 0."""
        ends = [0] * len(self.after)
        for index in self.order:
            start = max([ends[before] for before in self.after[index]], default=0)
            ends[index] = start + times_ns[index]
        return ends

    def longest_path(self, times_ns: Sequence[int]) -> list[int]:
        """Return the stages of the longest path, the first one first.

        >>> StageGraph([[], [0], [0], [1, 2]]).longest_path([1, 2, 5, 1])
        [0, 2, 3]
        """
        ends = self.ends_ns(times_ns)
        path = [max(self.order, key=lambda index: ends[index])]
        while self.after[path[-1]]:
            path.append(max(self.after[path[-1]], key=lambda index: ends[index]))
        return path[::-1]

    def decompose(self, stages: int) -> Decomposition:
        """Return the decomposition of a set of stages.

        O(n**2) steps of bit masks at each level; O(n**4) where it is prime.

        >>> StageGraph([[], [0], [0], [1, 2]]).decompose(0b1111).kind
        'series'
        >>> StageGraph([[], [], [0], [0, 1]]).decompose(0b1111).kind  # an N
        'prime'
        """
        if stages.bit_count() == 1:
            return Decomposition("leaf", stages)
        comparable = {i: stages & (self.precedes[i] | self._preceding(i)) for i in bits(stages)}
        parts = _components(stages, comparable)
        kind: Kind = "parallel"
        if len(parts) == 1:
            others = {i: stages & ~comparable[i] & ~(1 << i) for i in bits(stages)}
            parts, kind = _components(stages, others), "series"
        if len(parts) == 1:
            parts, kind = self._modules(stages), "prime"
        rank = {index: number for number, index in enumerate(self.order)}
        # The first stage of a part in topological order: a valid order of the parts, because
        # all stages of a part have the same relation to a stage outside.
        parts.sort(key=lambda part: min(rank[index] for index in bits(part)))
        return Decomposition(kind, stages, tuple(self.decompose(part) for part in parts))

    def _preceding(self, index: int) -> int:
        return mask_of(i for i, following in enumerate(self.precedes) if following >> index & 1)

    def _modules(self, stages: int) -> list[int]:
        """Return the maximal modules of a prime set: two stages share one if not all do."""
        members = list(bits(stages))
        parts: list[int] = []
        seen = 0
        for x in members:
            if seen >> x & 1:
                continue
            part = 1 << x
            for y in members:
                if not part >> y & 1:
                    module = self._smallest_module(stages, 1 << x | 1 << y)
                    if module != stages:
                        part |= module
            parts.append(part)
            seen |= part
        return parts

    def _smallest_module(self, stages: int, module: int) -> int:
        while True:
            first = (module & -module).bit_length() - 1
            splitters = 0
            for z in bits(stages & ~module):
                after_z = self.precedes[z] & module
                before_z = mask_of(m for m in bits(module) if self.precedes[m] >> z & 1)
                expected_after = module if after_z >> first & 1 else 0
                expected_before = module if before_z >> first & 1 else 0
                if after_z != expected_after or before_z != expected_before:
                    splitters |= 1 << z
            if not splitters:
                return module
            module |= splitters

    def immediate_dominators(self) -> list[int | None]:
        """By stage: the last stage that every path to it passes through; None: there is none.

        Cooper, Harvey and Kennedy, "A Simple, Fast Dominance Algorithm" (2001): on a DAG one pass
        in topological order suffices.

        >>> StageGraph([[], [0], [0], [1, 2]]).immediate_dominators()
        [None, 0, 0, 0]
        """
        dominators: list[int | None] = [None] * len(self.after)
        depth = [0] * len(self.after)  # a virtual entry above all stages has depth 0
        for index in self.order:
            common: int | None = None
            for number, before in enumerate(self.after[index]):
                common = before if number == 0 else self._common(common, before, dominators, depth)
            dominators[index] = common
            depth[index] = 1 if common is None else depth[common] + 1
        return dominators

    def _common(
        self, a: int | None, b: int | None, dominators: Sequence[int | None], depth: Sequence[int]
    ) -> int | None:
        while a != b:
            if a is None or b is None:
                return None
            if depth[a] >= depth[b]:
                a = dominators[a]
            else:
                b = dominators[b]
        return a

    def group_by_dominators(self) -> Decomposition:
        """Return the series-parallel structure that the dominator tree gives to any pipeline.

        It keeps every precedence and may add some (see the module's docstring).
        """
        children: dict[int | None, list[int]] = {}
        for index, dominator in enumerate(self.immediate_dominators()):
            children.setdefault(dominator, []).append(index)
        return self._layered(None, children)

    def _layered(self, root: int | None, children: dict[int | None, list[int]]) -> Decomposition:
        """Return a node of the dominator tree with its subtree, in layers."""
        subtrees = {child: self._layered(child, children) for child in children.get(root, [])}
        owner = {s: child for child, tree in subtrees.items() for s in bits(tree.stages)}
        layer: dict[int, int] = {}
        for child in (index for index in self.order if index in subtrees):
            owners = [owner[before] for before in self.after[child] if before != root]
            layer[child] = max([layer[each] + 1 for each in owners], default=0)
        parts = [] if root is None else [Decomposition("leaf", 1 << root)]
        for number in range(max(layer.values(), default=-1) + 1):
            side_by_side = [subtrees[child] for child in layer if layer[child] == number]
            parts.append(_composed("parallel", side_by_side))
        return _composed("series", parts)


def bits(mask: int) -> Iterator[int]:
    """Yield the members of a bit mask, the smallest first.

    >>> list(bits(0b1011))
    [0, 1, 3]
    """
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest


def mask_of(members: Iterator[int] | Sequence[int]) -> int:
    """Return the bit mask of some numbers."""
    mask = 0
    for member in members:
        mask |= 1 << member
    return mask


def _composed(kind: Kind, parts: Sequence[Decomposition]) -> Decomposition:
    """Return parts as one, without a level of its own for a single part."""
    if len(parts) == 1:
        return parts[0]
    flat: list[Decomposition] = []
    for part in parts:
        flat += part.parts if part.kind == kind else (part,)
    stages = 0
    for part in flat:
        stages |= part.stages
    return Decomposition(kind, stages, tuple(flat))


def _components(stages: int, neighbours: dict[int, int]) -> list[int]:
    components: list[int] = []
    left = stages
    while left:
        component = left & -left
        border = component
        while border:
            reached = 0
            for index in bits(border):
                reached |= neighbours[index]
            border = reached & ~component
            component |= border
        components.append(component)
        left &= ~component
    return components
