"""Maximum flow by blocking flows (Dinic 1970), for the cut between what is kept and what is computed again."""

from __future__ import annotations

from collections import deque

INFINITE = 1 << 62


class FlowNetwork:
    """A directed graph with integer capacities; vertices are 0 .. vertices - 1."""

    def __init__(self, vertices: int) -> None:
        self.edges_of: list[list[int]] = [[] for _ in range(vertices)]
        self.head: list[int] = []  # where edge e goes; edge e ^ 1 is its reverse
        self.capacity: list[int] = []

    def add(self, tail: int, head: int, capacity: int) -> None:
        """Adds an edge of a capacity, and its reverse of none, which the residual network needs."""
        self.edges_of[tail].append(len(self.head))
        self.head.append(head)
        self.capacity.append(capacity)
        self.edges_of[head].append(len(self.head))
        self.head.append(tail)
        self.capacity.append(0)

    def unused(self) -> FlowNetwork:
        """A network of the same edges, with capacities of its own; before `run`, those that were given to this one."""
        copy = FlowNetwork(0)
        copy.edges_of, copy.head, copy.capacity = self.edges_of, self.head, list(self.capacity)
        return copy

    def run(self, source: int, sink: int) -> int:
        """Sends as much as fits; afterwards `capacity` holds the residual network. Returns the flow."""
        total = 0
        while True:
            level = self._levels(source, sink)
            if level[sink] < 0:
                return total
            places = [0] * len(self.edges_of)
            while (sent := self._augment(source, sink, level, places)) > 0:
                total += sent

    def _levels(self, source: int, sink: int) -> list[int]:
        edges_of, head, capacity = self.edges_of, self.head, self.capacity
        level = [-1] * len(edges_of)
        level[source] = 0
        queue = deque([source])
        while queue and level[sink] < 0:
            v = queue.popleft()
            following = level[v] + 1
            for e in edges_of[v]:
                w = head[e]
                if level[w] < 0 and capacity[e] > 0:
                    level[w] = following
                    queue.append(w)
        return level

    def _augment(self, source: int, sink: int, level: list[int], places: list[int]) -> int:
        """One path of the level graph, found without recursion; dead ends are passed once."""
        edges_of, head, capacity = self.edges_of, self.head, self.capacity
        path: list[int] = []
        v = source
        while v != sink:
            edges, place, following = edges_of[v], places[v], level[v] + 1
            count = len(edges)
            while place < count:
                e = edges[place]
                if level[head[e]] == following and capacity[e] > 0:
                    break
                place += 1
            places[v] = place
            if place == count:
                if v == source:
                    return 0
                v = head[path.pop() ^ 1]
                places[v] += 1
                continue
            path.append(edges[place])
            v = head[path[-1]]
        sent = min([capacity[e] for e in path])
        for e in path:
            capacity[e] -= sent
            capacity[e ^ 1] += sent
        return sent

    def sink_side(self, sink: int) -> set[int]:
        """After `run`: vertices from which the sink can still be reached. Edges into this set are the minimum cut
        that is nearest to the sink."""
        side = {sink}
        queue = deque([sink])
        while queue:
            v = queue.popleft()
            for e in self.edges_of[v]:
                w = self.head[e]
                if w not in side and self.capacity[e ^ 1] > 0:
                    side.add(w)
                    queue.append(w)
        return side
