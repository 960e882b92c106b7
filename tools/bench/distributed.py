"""Training over several processes: eager, torch.compile and this stack in one run.

    torchrun --standalone --nproc-per-node 2 tools/bench/distributed.py --case gpt2-12
    torchrun --standalone --nproc-per-node 2 tools/bench/distributed.py --case llama-1b --compilers eager ours
    torchrun --standalone --nproc-per-node 2 tools/bench/distributed.py --case gpt2-12 --device cpu --tiny
    python tools/bench/distributed.py --case all --processes 2 --write docs/results/NAME.md --seconds 200

Under torchrun each rank trains a case by each compiler from the same weights on the same batches. The last form starts
torchrun for each case, compiles all cases at once, and measures them one after the other; a case that is not done in
time is ended alone. Rows: losses against eager's, the median time of a step (the compilers take turns), the share of
communication that work on any rank's device hides (by CUPTI's records; what a kernel waits for another rank stands by
itself, and so does what is sent while a rank that is ahead has nothing to do: they say how evenly the ranks went; the
step's time while recorded says how far that is from a step without), peak memory, seconds until the graphs are final,
stages of the backward, and whatever ran eagerly beyond what each case expects.
"""

from __future__ import annotations

import argparse
import bisect
import contextlib
import datetime
import functools
import gc
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpu_intervals import Interval, Recorder

# Multicast over NVLink stays off: a program that ends at the wrong moment leaves the switch in a state of its own.
os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")

COMPILERS = ("eager", "ours", "torch")
WARM = 4  # steps in which graphs are made: the reducer makes its buckets behind the first
RECORDED = 6  # steps
Intervals = list[tuple[float, float]]
Events = list[Interval]


@dataclass(frozen=True)
class Case:
    """A model to train. `expected`: kinds of events that its way of sharding is known to bring."""

    model: str
    config: dict[str, Any]
    tiny: dict[str, Any]
    batch: int
    length: int
    sharded: bool = False
    blocks: bool = False  # compiled one by one; sharded models are always
    expected: frozenset[str] = frozenset()


_TINY_GPT = {"n_embd": 128, "n_head": 4, "vocab_size": 1024}
CASES = {
    "gpt2-12": Case("GPT2LMHeadModel", {"n_layer": 12}, {"n_layer": 2, **_TINY_GPT}, 8, 1024),
    "llama-1b": Case(
        "LlamaForCausalLM",
        {"hidden_size": 2048, "num_hidden_layers": 22, "intermediate_size": 5632, "num_attention_heads": 32,
         "num_key_value_heads": 4, "vocab_size": 32000},
        {"hidden_size": 64, "num_hidden_layers": 3, "intermediate_size": 128, "num_attention_heads": 4,
         "num_key_value_heads": 2, "vocab_size": 512},
        4, 2048, sharded=True, expected=frozenset({"distributed"}),
    ),
    "bert-large": Case(
        "BertForMaskedLM",
        {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096},
        {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 512,
         "vocab_size": 512},
        16, 512,
    ),
    "gpt2-48": Case(
        "GPT2LMHeadModel", {"n_layer": 48}, {"n_layer": 4, **_TINY_GPT}, 8, 1024,
        expected=frozenset({"repeated_modules"}),
    ),
    "gpt2-12-blocks": Case("GPT2LMHeadModel", {"n_layer": 12}, {"n_layer": 2, **_TINY_GPT}, 8, 1024, blocks=True),
    "gpt2-48-blocks": Case("GPT2LMHeadModel", {"n_layer": 48}, {"n_layer": 4, **_TINY_GPT}, 8, 1024, blocks=True),
}  # fmt: skip


@dataclass
class Candidate:
    """One compiler's copy of the model."""

    compiler: str
    run: Any
    optimizer: Any
    losses: list[float] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    row: dict[str, Any] = field(default_factory=dict)


# -- what hides what ---------------------------------------------------------------------------


def union(intervals: Intervals) -> Intervals:
    """The same points in intervals that do not meet, in order."""
    found: Intervals = []
    for begin, end in sorted(intervals):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        elif end > begin:
            found.append((begin, end))
    return found


def total(intervals: Intervals) -> float:
    """Of intervals that do not meet."""
    return sum(end - begin for begin, end in intervals)


def is_communication(name: str) -> bool:
    """By a device kernel's name. Copies into and out of the buffers are work like any other."""
    return name.startswith(("ncclDevKernel", "ncclKernel"))


def transfers(ranks: Sequence[Events]) -> list[Intervals]:
    """When each rank's communication was under way in all of them: a kernel that comes first waits for the others'.

    Kernels of one name are the same calls in the same order on every rank.
    """
    calls: list[dict[str, Intervals]] = []
    for events in ranks:
        of_name: dict[str, Intervals] = {}
        for name, begin, end in sorted(events, key=lambda event: event[1]):
            if is_communication(name):
                of_name.setdefault(name, []).append((begin, end))
        calls.append(of_name)
    found: list[Intervals] = []
    for own in calls:
        under_way = []
        for name, intervals in own.items():
            for i, (begin, end) in enumerate(intervals):
                others = [of_name[name][i][0] for of_name in calls if len(of_name.get(name, ())) == len(intervals)]
                under_way.append((min(max(begin, *others), end), end))
        found.append(union(under_way))
    return found


def outside(first: Intervals, second: Intervals) -> Intervals:
    """What of the first is in none of the second; both are unions."""
    found: Intervals = []
    for begin, end in first:
        at = begin
        for other_begin, other_end in second:
            if other_end > at and other_begin < end:
                if other_begin > at:
                    found.append((at, other_begin))
                at = other_end
        if at < end:
            found.append((at, end))
    return found


def intersection(first: Intervals, second: Intervals) -> Intervals:
    """What is in both; they are unions, and so is it."""
    found: Intervals = []
    starts = [begin for begin, _ in second]
    for begin, end in first:
        for other in second[max(0, bisect.bisect_right(starts, begin) - 1) :]:
            if other[0] >= end:
                break
            if min(end, other[1]) > max(begin, other[0]):
                found.append((max(begin, other[0]), min(end, other[1])))
    return found


def hidden(ranks: Sequence[Events]) -> dict[str, Any]:
    """What ran on the devices in `RECORDED` steps, in milliseconds a step.

    Communication is what is under way in all ranks. It is hidden while any of them computes beside it: a rank that
    came first waits for that one in any case. Beside it, means of the ranks: `idle_ms`, communication under way where
    the rank itself computes nothing; the wait of its kernels for other ranks; all other kernels. `alone`: the longest
    of what nothing runs beside, as (milliseconds from the first kernel, milliseconds).
    """
    scale = 1e-3 / RECORDED
    sent_by = transfers(ranks)
    computed_by = [
        union([(begin, end) for name, begin, end in events if not is_communication(name)]) for events in ranks
    ]
    sent = functools.reduce(intersection, sent_by)
    computed = union([interval for intervals in computed_by for interval in intervals])
    row = {"sent_ms": total(sent) * scale, "hidden_ms": total(intersection(sent, computed)) * scale}
    row |= dict.fromkeys(("idle_ms", "waited_ms", "computed_ms"), 0.0)
    for events, own_sent, own_computed in zip(ranks, sent_by, computed_by, strict=True):
        kernels = union([(begin, end) for name, begin, end in events if is_communication(name)])
        row["idle_ms"] += (total(own_sent) - total(intersection(own_sent, own_computed))) * scale / len(ranks)
        row["waited_ms"] += (total(kernels) - total(own_sent)) * scale / len(ranks)
        row["computed_ms"] += total(own_computed) * scale / len(ranks)
    start = min((event[1] for events in ranks for event in events), default=0.0)
    pieces = sorted(outside(sent, computed), key=lambda piece: piece[0] - piece[1])[:12]
    alone = sorted(((begin - start) * 1e-3, (end - begin) * 1e-3) for begin, end in pieces)
    row["exposed_ms"] = row["sent_ms"] - row["hidden_ms"]
    return {**row, "alone": [[round(at, 2), round(ms, 3)] for at, ms in alone]}


# -- a rank ------------------------------------------------------------------------------------


class Bench:
    """One case in one rank."""

    def __init__(
        self, name: str, device: str, tiny: bool, compilers: Sequence[str], steps: int, events: Path | None = None
    ) -> None:
        import torch
        import torch.distributed as dist

        self.torch, self.dist = torch, dist
        self.name, self.case, self.tiny, self.steps = name, CASES[name], tiny, steps
        self.events = events
        self.rank, self.world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.cuda = device == "cuda"
        local = int(os.environ["LOCAL_RANK"])
        self.device = torch.device("cuda", local) if self.cuda else torch.device("cpu")
        if self.cuda:
            torch.cuda.set_device(self.device)
        timeout = datetime.timedelta(seconds=150)
        where = {"device_id": self.device} if self.cuda else {}
        dist.init_process_group("nccl" if self.cuda else "gloo", timeout=timeout, **where)
        self.on_hosts = dist.new_group(backend="gloo", timeout=timeout)
        self.batches = self._batches()
        self.candidates = [self._candidate(compiler) for compiler in compilers]

    def _batches(self) -> list[Any]:
        torch, case = self.torch, self.case
        generator = torch.Generator().manual_seed(100 + self.rank)
        vocabulary = {**case.config, **(case.tiny if self.tiny else {})}.get("vocab_size", 30000)
        shape = (2, 32) if self.tiny else (case.batch, case.length)
        return [torch.randint(3, vocabulary, shape, generator=generator).to(self.device) for _ in range(4)]

    def _model(self) -> Any:
        from zoo import import_torchvision

        import_torchvision()
        import transformers

        torch = self.torch
        cls = getattr(transformers, self.case.model)
        config = cls.config_class(**{**self.case.config, **(self.case.tiny if self.tiny else {})})
        config.use_cache = False
        for key, value in list(vars(config).items()):
            if ("drop" in key or "pdrop" in key) and isinstance(value, float):
                setattr(config, key, 0.0)  # losses are compared
        for key in ("pad_token_id", "eos_token_id", "bos_token_id"):
            if isinstance(getattr(config, key, None), int):
                setattr(config, key, 1)
        torch.manual_seed(0)
        with self.device:
            return cls(config).train()

    def _candidate(self, compiler: str) -> Candidate:
        """Builds, compiles and warms one copy; notes what it takes to have."""
        torch = self.torch
        gc.collect()
        before = torch.cuda.memory_allocated() if self.cuda else 0
        model = self._model()
        run = self._sharded(model, compiler) if self.case.sharded else self._replicated(model, compiler)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=self.cuda)
        candidate = Candidate(compiler, run, optimizer)
        self.say(f"{compiler}: built")
        self.synchronize()
        start = time.perf_counter()
        for step in range(WARM):
            candidate.losses.append(self.step(candidate, step))
            self.synchronize()
            self.say(f"{compiler}: step {step} at {time.perf_counter() - start:.1f} s")
            if step == 0:
                candidate.row["first_s"] = time.perf_counter() - start
        candidate.row["warm_s"] = time.perf_counter() - start
        optimizer.zero_grad()
        gc.collect()
        if self.cuda:
            torch.cuda.empty_cache()  # for other cases, which compile on this device at the same time
        candidate.row["held"] = (torch.cuda.memory_allocated() if self.cuda else 0) - before
        candidate.row["parameters"] = sum(p.numel() for p in model.parameters())
        if compiler == "ours":
            candidate.row.update(self._told())
        return candidate

    def _replicated(self, model: Any, compiler: str) -> Any:
        from torch.nn.parallel import DistributedDataParallel

        settings = {"device_ids": [self.device.index], "gradient_as_bucket_view": True} if self.cuda else {}
        if self.tiny:
            settings["bucket_cap_mb"] = 1
        if self.case.blocks:
            _compile_blocks(list(model.transformer.h), compiler)
        elif compiler == "ours":
            import torchcompile

            model = torchcompile.compile(model)
        replicated = DistributedDataParallel(model, **settings)
        return self.torch.compile(replicated) if compiler == "torch" and not self.case.blocks else replicated

    def _sharded(self, model: Any, compiler: str) -> Any:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        torch = self.torch
        mesh = init_device_mesh(self.device.type, (self.world,))
        settings = {"mesh": mesh, "mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}
        blocks = list(model.model.layers)
        _compile_blocks(blocks, compiler)
        for block in blocks:
            fully_shard(block, **settings)
        return fully_shard(model, **settings)

    def _told(self) -> dict[str, Any]:
        import torchcompile

        report = torchcompile.report()
        surprises = [e.short for e in report.surprises if e.kind.id not in self.case.expected]
        stages = len({(s.title, s.stage) for s in report.stages})
        capture = report.capture_seconds
        kernels = sum(graph.seconds for graph in report.graphs)
        return {
            "graphs": report.captured, "kernels": report.kernels, "stages": stages, "surprises": surprises,
            "stage_bytes": [s.nbytes for s in report.stages],
            "capture_s": capture, "kernels_s": kernels, "recompiles": sum(e.count for e in report.recompiles),
        }  # fmt: skip

    def step(self, candidate: Candidate, number: int) -> float:
        torch, ids = self.torch, self.batches[number % len(self.batches)]
        candidate.optimizer.zero_grad()
        amp = contextlib.nullcontext() if self.case.sharded else torch.autocast(self.device.type, torch.bfloat16)
        with amp:
            loss = candidate.run(input_ids=ids, labels=ids).loss
        loss.backward()
        candidate.optimizer.step()
        return loss.detach()  # type: ignore[no-any-return]

    def synchronize(self) -> None:
        if self.cuda:
            self.torch.cuda.synchronize()

    def say(self, text: str) -> None:
        if self.rank == 0:
            print(f"[{self.name}] {text}", file=sys.stderr, flush=True)

    def measure(self) -> list[dict[str, Any]]:
        """Times in turns, then memory and what runs when in each."""
        for _ in range(self.steps):
            for candidate in self.candidates:
                for number in range(3):
                    self.dist.barrier()
                    self.synchronize()
                    start = time.perf_counter()
                    self.step(candidate, number)
                    self.synchronize()
                    if number:  # the first step behind another compiler's is not timed
                        candidate.times.append(time.perf_counter() - start)
        for candidate in self.candidates:
            self._row(candidate)
        rows = [candidate.row for candidate in self.candidates]
        rows[-1]["link"] = self._link()
        eager = next((row for row in rows if row["compiler"] == "eager"), None)
        for row in rows if eager else ():
            row["ratio"] = eager["ms"] / row["ms"]  # type: ignore[index]
            pairs = zip(row["losses"], eager["losses"], strict=True)  # type: ignore[index]
            row["off"] = max(abs(a - b) / abs(b) for a, b in pairs)
        self._print(rows)
        if self.cuda:
            self.recorder = Recorder()
            for candidate in self.candidates:
                candidate.row.update(self._recorded(candidate))
                self.say(f"{candidate.compiler}: recorded")
            self._print(rows)
        return rows

    def _print(self, rows: list[dict[str, Any]]) -> None:
        """What is known so far; a later line of the same compiler replaces an earlier one."""
        for row in rows if self.rank == 0 else ():
            print("ROW " + json.dumps(row), flush=True)

    def _row(self, candidate: Candidate) -> None:
        torch, row = self.torch, candidate.row
        losses = [float(self._mean(loss)) for loss in candidate.losses]
        times = torch.tensor(candidate.times)
        row.update(case=self.name, compiler=candidate.compiler, world=self.world, losses=losses)
        row["ms"] = float(self._slowest(times).median()) * 1e3
        if self.cuda:
            candidate.optimizer.zero_grad()
            gc.collect()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            self.step(candidate, 0)
            self.synchronize()
            row["peak_mb"] = (torch.cuda.max_memory_allocated() - before + row["held"]) / 2**20

    def _recorded(self, candidate: Candidate) -> dict[str, Any]:
        self.step(candidate, 0)  # behind another compiler's
        self.synchronize()
        self.recorder.take()
        started = time.perf_counter()
        for number in range(RECORDED):
            self.dist.barrier(self.on_hosts)  # a rank whose host is slower would fall back further in every step
            self.step(candidate, number)
        self.synchronize()
        recorded = (time.perf_counter() - started) * 1e3 / RECORDED
        ranks: list[Any] = [None] * self.world
        self.dist.all_gather_object(ranks, self.recorder.take())
        if self.events and self.rank == 0:
            (self.events / f"{self.name}-{candidate.compiler}.json").write_text(json.dumps(ranks))
        return {**hidden(ranks), "recorded_ms": recorded}

    def _link(self) -> dict[int, float]:
        """Milliseconds of an all-reduce by its bytes, with nothing beside it."""
        found = {}
        for mib in (1,) if self.tiny else (1, 8, 25, 100):
            buffer, times = self.torch.ones(mib << 18, device=self.device), []
            for _ in range(6):
                self.dist.barrier()
                self.synchronize()
                start = time.perf_counter()
                self.dist.all_reduce(buffer)
                self.synchronize()
                times.append(time.perf_counter() - start)
            found[mib << 20] = min(times) * 1e3
        return found

    def _mean(self, loss: Any) -> Any:
        total = loss.float().clone()
        self.dist.all_reduce(total)
        return total / self.world

    def _slowest(self, times: Any) -> Any:
        """Of each step, the time of the rank that took longest."""
        moved = times.to(self.device)
        self.dist.all_reduce(moved, self.dist.ReduceOp.MAX)
        return moved.cpu()


def _compile_blocks(blocks: Sequence[Any], compiler: str) -> None:
    if compiler == "torch":
        for block in blocks:
            block.compile()
    if compiler == "ours":
        import torchcompile

        torchcompile.compile_in_place(*blocks)


def work(arguments: argparse.Namespace) -> None:
    """What torchrun starts: one case, in this rank. With --hold, waits between compiling and measuring."""
    sys.path.insert(0, str(Path(__file__).parent))
    compilers = [c for c in COMPILERS if c in arguments.compilers]
    bench = Bench(arguments.case, arguments.device, arguments.tiny, compilers, arguments.steps, arguments.events)
    bench.dist.barrier()
    if arguments.hold:
        folder = Path(arguments.hold)
        if bench.rank == 0:
            (folder / f"ready.{arguments.case}").touch()
        end = time.monotonic() + arguments.seconds
        while not (folder / f"go.{arguments.case}").exists() and time.monotonic() < end:
            time.sleep(0.05)
        bench.dist.barrier()
    rows = bench.measure()
    if bench.rank == 0 and not arguments.hold:
        print(table(rows))
    bench.dist.barrier()
    sys.stdout.flush()
    os._exit(1 if not arguments.hold and any(row.get("surprises") for row in rows) else 0)


# -- all cases ---------------------------------------------------------------------------------


@contextlib.contextmanager
def started(name: str, arguments: argparse.Namespace, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """torchrun for one case, with caches of its own; ended with all of its processes."""
    caches = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "XDG_CACHE_HOME", "TORCHCOMPILE_CACHE")
    env = dict(os.environ, **{cache: f"{folder}/{name}/{cache.lower()}" for cache in caches})
    env.setdefault("OMP_NUM_THREADS", "1" if arguments.device == "cpu" else "4")
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={arguments.processes}",
        __file__, "--case", name, "--device", arguments.device, "--steps", str(arguments.steps),
        "--hold", str(folder), "--seconds", str(arguments.seconds), "--compilers", *arguments.compilers,
        *(["--tiny"] if arguments.tiny else []),
        *(["--events", str(arguments.events)] if arguments.events else []),
    ]  # fmt: skip
    with (folder / f"{name}.out").open("wb") as out, (folder / f"{name}.err").open("wb") as err:
        process = subprocess.Popen(command, env=env, stdout=out, stderr=err, start_new_session=True)
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)  # torchrun ends its workers, which have sessions of their own
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(5)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(5)


def launch(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Compiles all cases at once, and lets each measure alone. Cases that come too late have no row."""
    names = list(CASES) if arguments.case == "all" else arguments.case.split(",")
    end = time.monotonic() + arguments.seconds
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as made, contextlib.ExitStack() as stack:
        folder = Path(made)
        running = {name: stack.enter_context(started(name, arguments, folder)) for name in names}
        compiled_by = end - arguments.seconds * 0.35
        waiting = lambda: [n for n in running if running[n].poll() is None and not (folder / f"ready.{n}").exists()]
        _wait(lambda: not waiting(), compiled_by)
        for name in sorted(names, key=lambda n: (not (folder / f"ready.{n}").exists(), names.index(n))):
            process = running[name]
            _wait(lambda n=name, p=process: (folder / f"ready.{n}").exists() or p.poll() is not None, end)
            (folder / f"go.{name}").touch()
            _wait(lambda p=process: p.poll() is not None, end)
            lines = (folder / f"{name}.out").read_text().splitlines()
            printed = [json.loads(line[4:]) for line in lines if line.startswith("ROW ")]
            found = list({row["compiler"]: row for row in printed}.values())
            log = (folder / f"{name}.err").read_text()
            if not found:
                rows.append({"case": name, "compiler": "-", "failed": log[-1500:]})
            rows += found
            print(table(found) if found else f"{name} failed\n{log[-3000:]}", flush=True)
            if arguments.log:
                (arguments.log / f"{name}.log").write_text(log + "\n".join(lines))
    return rows


def _wait(done: Callable[[], bool], end: float) -> None:
    while not done() and time.monotonic() < end:
        time.sleep(0.1)


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as a Markdown table."""
    head = (
        "| case | compiler | ms a step | recorded | eager's / it | loss off eager's | communication ms | hidden "
        "| exposed ms | idle beside ms | waits ms | compute ms | peak MiB | first step s | four steps s "
        "| graphs, stages, surprises |"
    )
    lines = [head, "|---" * 16 + "|"]
    for row in rows:
        if "failed" in row:
            last = row["failed"].strip().splitlines()[-1:] or ["no output"]
            lines.append(f"| {row['case']} | failed: {last[0][:200]} |" + " |" * 14)
            continue
        told = f"{row['graphs']}, {row['stages']}, {len(row['surprises'])}" if "graphs" in row else "-"
        share = f"{row['hidden_ms'] / row['sent_ms']:.0%}" if row.get("sent_ms") else "-"
        names = ("exposed_ms", "idle_ms", "waited_ms", "computed_ms")
        sent, *others = (f"{row[name]:.2f}" if name in row else "-" for name in ("sent_ms", *names))
        recorded = f"{row['recorded_ms']:.2f}" if "recorded_ms" in row else "-"
        peak = f"{row['peak_mb']:.0f}" if "peak_mb" in row else "-"
        lines.append(
            f"| {row['case']} | {row['compiler']} | {row['ms']:.2f} | {recorded} | {row.get('ratio', 1):.2f} "
            f"| {row.get('off', 0):.1e} "
            f"| {sent} | {share} | {' | '.join(others)} | {peak} | {row['first_s']:.1f} "
            f"| {row['warm_s']:.1f} | {told} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", default="gpt2-12", help=f"of {', '.join(CASES)}; without torchrun several, or all")
    parser.add_argument("--compilers", nargs="*", default=list(COMPILERS), choices=COMPILERS)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--tiny", action="store_true", help="the same models, small enough for a laptop")
    parser.add_argument("--steps", type=int, default=8, help="rounds of two timed steps")
    parser.add_argument("--processes", type=int, default=2, help="ranks, without torchrun")
    parser.add_argument("--seconds", type=float, default=600, help="for all of it, without torchrun")
    parser.add_argument("--write", type=Path, help="Markdown file to write the table to, without torchrun")
    parser.add_argument("--log", type=Path, help="folder for each case's output, without torchrun")
    parser.add_argument("--events", type=Path, help="folder for what was recorded: each rank's [name, begin, end], us")
    parser.add_argument("--hold", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    for folder in filter(None, (arguments.log, arguments.events)):
        folder.mkdir(parents=True, exist_ok=True)
    if "RANK" in os.environ:
        return work(arguments)
    import torch

    rows = launch(arguments)
    machine = torch.cuda.get_device_name() if arguments.device == "cuda" else platform.machine()
    versions = f"torch {torch.__version__}, Python {platform.python_version()}, {arguments.processes} x {machine}"
    text = f"{table(rows)}\n\n{versions}\n\n`python {' '.join(sys.argv)}`\n"
    print(text)
    if arguments.write:
        arguments.write.write_text(text)
    wrong = [f"{row['case']}: {event}" for row in rows for event in row.get("surprises", ())]
    wrong += [f"{row['case']}: no result" for row in rows if "failed" in row]
    if wrong:
        raise SystemExit("\n".join(["not as expected:", *wrong]))


if __name__ == "__main__":
    main()
