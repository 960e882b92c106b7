"""How long a step takes over many ranks, and how much of its communication the computation hides: a pure model.

Two streams, as on a device: one computes, one communicates, each doing one thing after the other. A bucket of gradients
is sent once the part of the backward that gives them is done; a unit of FSDP is gathered while the one before it is
computed, and its gradients are reduced and scattered behind its backward. All ranks are alike.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torchdistributed.errors import BucketPlanError

Stream = Literal["compute", "link"]
MOST_RANKS = 1024


@dataclass(frozen=True, slots=True)
class Link:
    """What ranks are joined by: bytes a second out of each rank, and seconds from one to the next."""

    bandwidth: float = 300e9
    latency: float = 5e-6

    def all_reduce(self, nbytes: int, ranks: int) -> float:
        """Seconds: around a ring, or up and down a tree, whichever is faster."""
        if ranks == 1:
            return 0.0
        hops = ranks - 1
        ring = 2 * hops * self.latency + 2 * hops / ranks * nbytes / self.bandwidth
        tree = 2 * math.ceil(math.log2(ranks)) * self.latency + 2 * nbytes / self.bandwidth
        return min(ring, tree)

    def gather(self, nbytes: int, ranks: int) -> float:
        """Seconds to gather `nbytes` of which each rank has its share, or to reduce and scatter them."""
        return (ranks - 1) * self.latency + (ranks - 1) / ranks * nbytes / self.bandwidth if ranks > 1 else 0.0


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a model, in the order of the forward: its seconds, and the bytes of its parameters.

    Attributes:
        own: of the seconds of its backward those for the gradients of its own parameters, which nothing else waits for.
    """

    name: str
    forward: float
    backward: float
    nbytes: int
    own: float = 0.0


@dataclass(frozen=True, slots=True)
class Span:
    """What a stream does from `begin` to `end`, in seconds from the beginning of the step."""

    stream: Stream
    what: str
    begin: float
    end: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """A simulated step."""

    spans: tuple[Span, ...]

    @property
    def seconds(self) -> float:
        """Of the whole step."""
        return max((span.end for span in self.spans), default=0.0)

    def busy(self, stream: Stream) -> float:
        """Seconds in which a stream works."""
        return sum(span.end - span.begin for span in self.spans if span.stream == stream)

    @property
    def hidden(self) -> float:
        """The share of communication beside which something is computed; 1 where there is none."""
        sent = self.busy("link")
        return 1 - (self.seconds - self.busy("compute")) / sent if sent else 1.0

    def __str__(self) -> str:
        return self.draw()

    def draw(self, width: int = 100) -> str:
        """Both streams from left to right; pieces are marked by turns, rests are dots."""
        scale = width / self.seconds if self.spans else 0.0
        lines = []
        for stream, marks in (("compute", "=-"), ("link", "#+")):
            row = ["."] * width
            for number, span in enumerate(s for s in self.spans if s.stream == stream):
                begin = min(width - 1, int(span.begin * scale))
                for place in range(begin, max(begin + 1, min(width, round(span.end * scale)))):
                    row[place] = marks[number % 2]
            lines.append(f"{stream:>8} {''.join(row)}")
        share = f"{self.hidden:.0%} of {self.busy('link') * 1e3:.2f} ms of communication hidden"
        return "\n".join([*lines, f"{self.seconds * 1e3:.2f} ms a step, {share}"])


class _Streams:
    """Both streams as they fill."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.free: dict[Stream, float] = {"compute": 0.0, "link": 0.0}

    def run(self, stream: Stream, what: str, seconds: float, after: float = 0.0) -> Span:
        begin = max(after, self.free[stream])
        span = Span(stream, what, begin, begin + seconds)
        self.free[stream] = span.end
        if seconds > 0:
            self.spans.append(span)
        return span

    def timeline(self) -> Timeline:
        return Timeline(tuple(sorted(self.spans, key=lambda span: (span.begin, span.end))))


def replicas(parts: Sequence[Part], buckets: Sequence[Sequence[str]], link: Link, ranks: int) -> Timeline:
    """A step of DistributedDataParallel: for each bucket the backward of what its gradients need and has not been
    computed, then the gradients of its parameters, which are sent.

    Args:
        parts: in the order of the forward.
        buckets: names of parts, in the order in which they are sent; each part is in one.

    Raises:
        BucketPlanError: buckets that are not the parts, or more ranks than the model is made for.
    """
    _check(ranks)
    if sorted(name for bucket in buckets for name in bucket) != sorted(part.name for part in parts):
        raise BucketPlanError("each part is in one bucket, and a bucket holds parts alone")
    streams = _Streams()
    for part in parts:
        streams.run("compute", part.name, part.forward)
    place = {part.name: number for number, part in enumerate(parts)}
    reached = len(parts)  # what leads to the gradients of parts from here on has been computed
    for number, bucket in enumerate(buckets):
        held = sorted((place[name] for name in bucket), reverse=True)
        for part in reversed(parts[min([reached, *held]) : reached]):
            streams.run("compute", part.name, part.backward - part.own)
        reached = min([reached, *held])
        for part in map(parts.__getitem__, held):
            streams.run("compute", f"weights of {part.name}", part.own)
        nbytes = sum(parts[at].nbytes for at in held)
        streams.run("link", f"bucket {number}", link.all_reduce(nbytes, ranks), streams.free["compute"])
    return streams.timeline()


def shards(units: Sequence[Part], link: Link, ranks: int, *, reshard: bool = True) -> Timeline:
    """A step of FSDP, a unit each: gathered one ahead, gathered again in the backward where `reshard` is set (the last
    unit stays), reduced and scattered behind its backward.

    Raises:
        BucketPlanError: more ranks than the model is made for.
    """
    _check(ranks)
    streams, asked = _Streams(), 0.0
    for unit in units:
        gathered = streams.run("link", f"gather {unit.name}", link.gather(unit.nbytes, ranks), asked).end
        asked = streams.run("compute", unit.name, unit.forward, gathered).begin
    asked, reduce_before, done_before = streams.free["compute"], None, 0.0
    for number, unit in enumerate(reversed(units)):
        gathered = 0.0
        if reshard and number:
            gathered = streams.run("link", f"gather {unit.name}", link.gather(unit.nbytes, ranks), asked).end
        if reduce_before is not None:
            streams.run("link", f"reduce {reduce_before.name}", link.gather(reduce_before.nbytes, ranks), done_before)
        span = streams.run("compute", unit.name, unit.backward, gathered)
        asked, reduce_before, done_before = span.begin, unit, span.end
    if reduce_before is not None:
        streams.run("link", f"reduce {reduce_before.name}", link.gather(reduce_before.nbytes, ranks), done_before)
    return streams.timeline()


def _check(ranks: int) -> None:
    if not 1 <= ranks <= MOST_RANKS:
        raise BucketPlanError(f"the model is made for 1 to {MOST_RANKS} ranks, not {ranks}")
