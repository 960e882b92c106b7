"""Collectives that a program begins, and waits for later: what stands between, and where their work goes."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist

import torchcompile
import torchdynamo
from primtorch.communication import communicates
from torchdynamo.errors import Unsupported

warnings.filterwarnings("ignore", category=FutureWarning)
Program = Callable[[torch.Tensor], Any]


def _other() -> int:
    return 1 - dist.get_rank()


def _exchanged(x: torch.Tensor) -> torch.Tensor:
    """Each rank begins to receive, sends, and then waits: who waits at once, waits forever."""
    y = torch.empty_like(x)
    work = dist.irecv(y, _other())
    dist.send(x * (dist.get_rank() + 2), _other())
    wave = x.sin()
    work.wait()
    return y + wave


def _in_between(x: torch.Tensor) -> torch.Tensor:
    """One rank begins the collective before it sends what the other one needs to begin."""
    total, y = x * (dist.get_rank() + 1), torch.empty_like(x)
    if dist.get_rank() == 0:
        work = dist.all_reduce(total, async_op=True)
        dist.send(x.cos(), 1)
    else:
        dist.recv(y, 0)
        work = dist.all_reduce(total, async_op=True)
    assert isinstance(work, dist.Work) and type(work) is dist.Work
    rest = (x @ x.t()).softmax(0).sum()
    return total * rest if work.wait() and work.is_completed() else rest


def _many(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """All kinds at once, waited for backwards, one of them twice."""
    place = dist.get_rank()
    reduced, sent, gathered = x + place, (x * (place + 2)).exp(), x.new_empty(2 * len(x), x.shape[1])
    parts, turned, part = [torch.empty_like(x) for _ in range(2)], torch.empty_like(x), x[: len(x) // 2].clone()
    scattered = torch.empty_like(x)
    works = [
        dist.all_reduce(reduced, dist.ReduceOp.MAX, async_op=True),
        dist.broadcast(sent, 1, async_op=True),
        dist.all_gather_into_tensor(gathered, x.sin(), async_op=True),
        dist.all_gather(parts, x.cos() + place, async_op=True),
        dist.all_to_all_single(turned, x.tanh() * place, async_op=True),
        dist.reduce_scatter_tensor(part, x.neg(), async_op=True),
        dist.scatter(scattered, [x * 2, x * 5] if place == 0 else None, async_op=True),
        dist.barrier(async_op=True),
    ]
    rest = x
    for turn in range(3):
        rest = (rest * turn + (x @ x.t()) @ rest).tanh() / len(x)  # in memory of the same sizes
    for work in reversed([*works, works[2]]):
        work.wait()
    return reduced * 2, sent + 1, gathered.sin(), parts[0] - parts[1], turned + rest, part, scattered


def _in_a_buffer(x: torch.Tensor) -> torch.Tensor:
    """Parts of one buffer, each on its way while the next one is filled."""
    buffer, works = x.new_zeros(3, *x.shape), []
    for place in range(3):
        buffer[place] = x * (place + dist.get_rank())
        works.append(dist.all_reduce(buffer[place], async_op=True))
    return sum(buffer[place] * place for place, work in enumerate(works) if work.wait())  # type: ignore[return-value]


def _input_written(x: torch.Tensor) -> torch.Tensor:
    work = dist.broadcast(x, 1, async_op=True)
    rest = torch.ones_like(x).cumsum(0)
    work.wait()
    x.mul_(2)
    return rest + x


def _batch(x: torch.Tensor) -> torch.Tensor:
    first, second = torch.empty_like(x), x.new_empty(2)
    moves = [
        dist.P2POp(dist.isend, x * 2, _other()),
        dist.P2POp(dist.irecv, first, _other()),
        dist.P2POp(dist.isend, x[0, :2].cos().contiguous(), group_peer=_other(), group=dist.group.WORLD, tag=3),
        dist.P2POp(dist.irecv, second, group_peer=_other(), group=dist.group.WORLD, tag=3),
    ]
    works = dist.batch_isend_irecv(moves)
    rest = x.sin()
    for work in works:
        work.wait()
    return first + rest + second.sum()


def _from_anybody(x: torch.Tensor) -> torch.Tensor:
    y = torch.empty_like(x)
    work = dist.irecv(y)
    other = dist.isend(x + dist.get_rank(), _other())
    work.wait()
    other.wait()
    return y * 2


def _by_future(x: torch.Tensor) -> torch.Tensor:
    y = x * (dist.get_rank() + 1)
    future = dist.all_reduce(y, async_op=True).get_future()
    rest = x.sin()
    (total,) = future.wait()
    assert total is y and future.done() and future.value()[0] is y
    return total + rest


def _under_autograd(x: torch.Tensor) -> torch.Tensor:
    """A mean over the ranks of what has no history, beside what has."""
    w = x.detach().clone().requires_grad_()
    mean = w.detach().mean(0)
    work = dist.all_reduce(mean, async_op=True)
    loss = (w.sin() * 2).sum()
    work.wait()
    (gradient,) = torch.autograd.grad(loss + (w * mean).sum(), w)
    return gradient


class _Waits:
    def __init__(self, work: dist.Work) -> None:
        self.work = work

    def __enter__(self) -> None: ...

    def __exit__(self, *raised: object) -> None:
        self.work.wait()


def _in_a_block(x: torch.Tensor) -> torch.Tensor:
    """What waits is a function of its own, and the block that it closes is left by an exception."""
    y = x + dist.get_rank()
    try:
        with _Waits(dist.all_reduce(y, async_op=True)):
            rest = x.exp()
            raise KeyError
    except KeyError:
        return y + rest


WHOLE: Mapping[str, Program] = {
    program.__name__.strip("_"): program
    for program in (
        _exchanged, _in_between, _many, _in_a_buffer, _input_written, _batch, _from_anybody, _by_future,
        _under_autograd, _in_a_block,
    )
}  # fmt: skip


def whole(name: str, backend: str) -> None:
    """One graph, with eager's results, whatever the ranks wait for in between, in all sizes."""
    program = WHOLE[name]
    torchcompile.reset()
    compiled = torchcompile.compile(program, backend=backend, fullgraph=True)
    for call, rows in enumerate((4, 4, 6, 8)):
        torch.manual_seed(call + 10 * dist.get_rank())
        x = torch.rand(rows, 6, dtype=torch.float64)
        given = x.clone()
        torch.testing.assert_close((compiled(given), given), (program(x), x), msg=lambda m, c=call: f"call {c}: {m}")
    assert torchcompile.report().clean


def forgotten(backend: str, breaks: bool) -> None:
    """Where nobody waits, the graph does, at its end."""

    def program(x: torch.Tensor, later: bool) -> torch.Tensor:
        y = x * (dist.get_rank() + 1)
        dist.all_reduce(y, async_op=later)
        if breaks:
            torchdynamo.graph_break()
        return y

    torchcompile.reset()
    compiled = torchcompile.compile(program, backend=backend, fullgraph=not breaks)
    for call in range(3):
        x = torch.arange(4.0) + call
        torch.testing.assert_close(compiled(x, True), program(x, False))


def order() -> list[str]:
    """What a graph begins, computes and waits for, in order."""

    def program(x: torch.Tensor) -> torch.Tensor:
        y, z = x + 1, torch.empty_like(x)
        total = dist.all_reduce(y, async_op=True)
        message = dist.irecv(z, _other())
        wave = x.sin()
        sent = dist.isend(wave, _other())
        message.wait()
        z = z.cos()
        total.wait()
        sent.wait()
        return y.exp() + z

    nodes: list[Any] = []
    torchdynamo.optimize(lambda gm, inputs: nodes.extend(gm.graph.nodes) or gm.forward)(program)(torch.ones(3))
    kept = [n for n in nodes if communicates(n.target) or n.name.partition("_")[0] in ("sin", "cos", "exp")]
    return [str(getattr(n.target, "__name__", n.target)).partition(".")[0] for n in kept]


class _Kept:
    work: Any = None


_KEPT = _Kept()


def _returned(x: torch.Tensor) -> tuple[torch.Tensor, Any]:
    y = x * (dist.get_rank() + 1)
    return y, dist.all_reduce(y, async_op=True)


def _stored(x: torch.Tensor) -> tuple[torch.Tensor, Any]:
    y = x * (dist.get_rank() + 1)
    _KEPT.work = dist.all_reduce(y, async_op=True)
    return y, None


def _in_a_list(x: torch.Tensor) -> tuple[torch.Tensor, Any]:
    y = torch.stack([x, x + dist.get_rank()])
    return y, [dist.all_reduce(part, async_op=True) for part in y]


def _kept_though_waited_for(x: torch.Tensor) -> tuple[torch.Tensor, Any]:
    y = x * (dist.get_rank() + 1)
    work = dist.all_reduce(y, async_op=True)
    work.wait()
    return y, work


def _over_a_break(x: torch.Tensor) -> tuple[torch.Tensor, Any]:
    y, z = x * (dist.get_rank() + 1), x.sin()
    first = dist.all_reduce(y, async_op=True)
    second = dist.all_reduce(z, async_op=True)
    second.wait()
    torchdynamo.graph_break()
    first.wait()
    return y + z, None


def _polled(x: torch.Tensor) -> tuple[torch.Tensor, Any]:
    y = x * (dist.get_rank() + 1)
    work = dist.all_reduce(y, async_op=True)
    turns = 0
    while not work.is_completed():
        turns += 1
    work.wait()
    return y.sin(), None


def _with_a_limit(x: torch.Tensor) -> tuple[torch.Tensor, Any]:
    import datetime

    y = x * (dist.get_rank() + 1)
    dist.all_reduce(y, async_op=True).wait(datetime.timedelta(seconds=20))
    return y.sin(), None


def _behind_it(x: torch.Tensor) -> tuple[torch.Tensor, Any]:
    y = x * (dist.get_rank() + 1)
    future = dist.all_reduce(y, async_op=True).get_future().then(lambda done: done.value()[0] / 2)
    return future.wait(), None


def _whose(x: torch.Tensor) -> tuple[torch.Tensor, Any]:
    y = torch.empty_like(x)
    sent = dist.isend(x + dist.get_rank(), _other())
    work = dist.irecv(y)
    work.wait()
    sent.wait()
    return y * (work._source_rank() + 2), None


LEAVES: Mapping[str, Program] = {
    program.__name__.strip("_"): program
    for program in (
        _returned, _stored, _in_a_list, _kept_though_waited_for, _over_a_break, _polled,
        _with_a_limit, _behind_it, _whose,
    )
}  # fmt: skip


def leaves(name: str, backend: str) -> None:
    """Work that outlives the graph is eager's own, and that is told."""
    program = LEAVES[name]
    torchcompile.reset()
    compiled = torchcompile.compile(program, backend=backend)
    for call in range(3):
        torch.manual_seed(call + 10 * dist.get_rank())
        x = torch.rand(4, 3, dtype=torch.float64)
        results = []
        for run in (program, compiled):
            y, work = run(x)
            for one in work if isinstance(work, list) else [work or _KEPT.work]:
                assert one is None or (type(one) is dist.Work and one.wait() and one.is_completed())
            results.append(y)
            _KEPT.work = None
        torch.testing.assert_close(*results)
    told = [event.kind.id for event in torchcompile.report().breaks]
    assert "distributed" in told, told
    with pytest.raises(Unsupported):
        torchcompile.compile(program, backend=backend, fullgraph=True)(x)
