"""Eight threads, shared and own compiled functions, until the time is up: `python stressed_threads.py SECONDS SEED`.

What each call gives is compared with eager's, errors with their text; sizes and numbers change, so that functions are
compiled again all the time, some calls raise, and now and then a thread resets everything.
"""

from __future__ import annotations

import faulthandler
import random
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import torchcompile
from primtorch import ambient

THREADS, DTYPE = 8, torch.float64
OPTIONS = {"recompile_limit": 40}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm, self.outer = nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 3)
        self.to(DTYPE)

    def forward(self, x: Tensor, flag: int = 0) -> Tensor:
        y = self.norm(F.gelu(self.inner(x)))
        if flag == 1:
            y = y * 2
        if flag == 2:
            raise ValueError(f"flag of {x.shape[0]}")
        return self.outer(y)


def unrolled(x: Tensor, y: Tensor, k: int) -> tuple[Tensor, Tensor]:
    z = x.sin() * y.cos()
    if k > 2:
        z = z + k
    for _ in range(min(k, 3)):
        z = z * 0.5 + x
    return z.sum(0), z


def raises_at(x: Tensor, n: int) -> Tensor:
    if n == x.shape[0]:
        raise KeyError(n)
    return (x[:n] @ x[:n].mT).softmax(-1)


def breaks(x: Tensor, log: list[float]) -> Tensor:
    y = x * 2
    log.append(float(y.sum()))
    return y.exp().sum(-1)


def refused(x: Tensor) -> Tensor:
    return x.reshape(7, x.shape[0] + 1)


def written(x: Tensor) -> Tensor:
    x = x.clone()
    x[0] = 1.0
    return x.add_(x.sum())


def cube(x: Tensor) -> Tensor:
    return (x**3).sum()


def compiled(function: Any, **options: Any) -> Any:
    return torchcompile.compile(function, options=OPTIONS, **options)


model = Net()
SHARED = {f: compiled(f) for f in (unrolled, raises_at, breaks, refused, written, cube)} | {model: compiled(model)}
of_any_size = compiled(unrolled, dynamic=True)


def same(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def outcome(call: Callable[..., Any], *args: Any) -> Any:
    try:
        return call(*args)
    except (ValueError, KeyError, RuntimeError) as error:
        return type(error).__name__, str(error)


def agree(program: Callable[..., Any], *args: Any) -> None:
    found, expected = outcome(SHARED[program], *args), outcome(program, *args)
    if isinstance(expected, tuple) and isinstance(expected[0], str):
        assert found == expected, (found, expected)
    else:
        same(found, expected)


def slopes(call: Callable[..., Any], leaves: list[Any], *args: Any) -> tuple[Tensor, ...]:
    found = call(*args)
    return torch.autograd.grad((found[1] if isinstance(found, tuple) else found).square().sum(), leaves)


def second(call: Callable[..., Any], x: Tensor) -> Tensor:
    (slope,) = torch.autograd.grad(call(x), x, create_graph=True)
    return torch.autograd.grad(slope.sin().sum(), x)[0]


class Thread:
    def __init__(self, seed: int) -> None:
        self.random, self.drawn = random.Random(seed), torch.Generator().manual_seed(seed)
        self.make()

    def make(self) -> None:
        self.own, self.net = compiled(lambda x: F.gelu(x @ x.mT).sum(-1)), compiled(Net())

    def tensor(self, n: int) -> Tensor:
        return torch.randn(n, 6, dtype=DTYPE, generator=self.drawn)

    def step(self, action: str) -> None:
        n, k = self.random.choice((1, 2, 3, 4, 5, 7, 9)), self.random.choice((0, 1, 2, 3, 5))
        x, y = self.tensor(n), self.tensor(n)
        match action:
            case "infer":
                agree(model, x, self.random.choice((0, 0, 1, 2)))
            case "infer without grad":
                with torch.no_grad():
                    agree(model, x)
            case "train":
                leaves = [x.requires_grad_(), *model.parameters()]
                same(slopes(SHARED[model], leaves, x), slopes(model, leaves, x))
            case "unroll":
                agree(unrolled, x, y, k)
                same(of_any_size(x, y, k), unrolled(x, y, k))
            case "unroll and train":
                leaves = [x.requires_grad_(), y.requires_grad_()]
                same(slopes(SHARED[unrolled], leaves, x, y, k), slopes(unrolled, leaves, x, y, k))
            case "raise":
                agree(raises_at, x, self.random.choice((1, 2, n)))
                agree(refused, x)
            case "break":
                ours: list[float] = []
                eagers: list[float] = []
                same(SHARED[breaks](x, ours), breaks(x, eagers))
                same(ours, eagers)
            case "derive twice":
                x.requires_grad_()
                same(second(SHARED[cube], x), second(cube, x))
            case "write":
                agree(written, x)
            case "own":
                same(self.own(x), F.gelu(x @ x.mT).sum(-1))
                self.net(x).sum().backward()
            case "seldom":
                match self.random.randrange(12):
                    case 0:
                        torchcompile.reset()
                    case 1:
                        self.make()
                    case 2:
                        str(torchcompile.report())
        assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
        assert not torch._C._len_torch_dispatch_stack() and not torch._C._len_torch_function_stack()


ACTIONS = ("infer", "infer without grad", "train", "unroll", "unroll and train", "raise", "break", "derive twice",
           "write", "own", "seldom")  # fmt: skip


def main(seconds: float, seed: int) -> None:
    warnings.simplefilter("ignore")
    faulthandler.dump_traceback_later(seconds + 300, exit=True)
    wrong: list[str] = []
    done: list[int] = []
    end = time.monotonic() + seconds

    def work(place: int) -> None:
        thread, count = Thread(seed * THREADS + place), 0
        while time.monotonic() < end and not wrong:
            action = thread.random.choice(ACTIONS)
            try:
                thread.step(action)
            except BaseException:  # of any kind: it is what the test is about
                wrong.append(f"{action}, seed {seed}: {traceback.format_exc()}")
            count += 1
        done.append(count)

    before = ambient.snapshot()
    sys.setswitchinterval(1e-5)
    threads = [threading.Thread(target=work, args=(place,)) for place in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, wrong[0]
    assert not ambient.changed(before), ambient.changed(before)
    print(f"{sum(done)} steps")


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]))
