"""The page of a report: its structure by a parser that refuses what HTML does not allow, its look in a real browser."""

from __future__ import annotations

import inspect
import os
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import torchcompile
from torchcompile.journal import StageRecord

pytestmark = pytest.mark.expected_eager()
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)

SVG = "{http://www.w3.org/2000/svg}"


def told(x: torch.Tensor, scale: float) -> torch.Tensor:
    hidden = (x * scale).softmax(-1)
    print("halfway")
    return (hidden @ hidden.t()).relu()


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> torchcompile.Report:
    """Two graphs around a break, compiled twice: the second time for another number."""
    torchcompile.reset()
    compiled = torchcompile.compile(told, options={"dump": str(tmp_path_factory.mktemp("dump")), "cache": None})
    for scale in (2.0, 3.0, 4.0):
        compiled(torch.ones(4, 6, requires_grad=True), scale).sum().backward()
    found = torchcompile.report()
    texts = found.texts()  # the folder and the compiled code may be gone when a test asks
    return replace(found, texts=lambda: texts)


@pytest.fixture(scope="module")
def page(report: torchcompile.Report) -> str:
    return report.html()


def parsed(page: str) -> Any:
    html5lib = pytest.importorskip("html5lib", reason="html5lib checks the page's structure")
    return html5lib.HTMLParser(strict=True, namespaceHTMLElements=False).parse(page)


def classes(tree: Any, name: str) -> list[Any]:
    return [element for element in tree.iter() if name in element.get("class", "").split()]


def text_of(element: Any) -> str:
    return " ".join("".join(element.itertext()).split())


def test_the_page_needs_nothing_else(page: str) -> None:
    assert "<script" not in page and "@import" not in page
    loaded = re.findall(r"""(?:src|href)\s*=\s*["']([^"']*)|url\(([^)]*)\)""", page)
    assert all(link.startswith("#") for link, _ in loaded) and not any(url for _, url in loaded)


def test_every_link_leads_somewhere(page: str) -> None:
    tree = parsed(page)
    names = [element.get("id") for element in tree.iter() if element.get("id")]
    assert len(set(names)) == len(names)
    links = {element.get("href")[1:] for element in tree.iter("a")}
    assert links <= set(names) and len(links) > 10


def test_graphs_breaks_and_kernels_stand_beside_the_lines(page: str) -> None:
    tree = parsed(page)
    lines, first = inspect.getsourcelines(told)
    rows = {int(number): row for row in classes(tree, "row") if (number := text_of(row[0])).isdigit()}
    for number, line in enumerate(lines, first):
        if "softmax" in line or "relu" in line:
            assert "graph_" in text_of(rows[number]) and line.strip() in text_of(rows[number])
    (broken,) = [event for event in classes(tree, "event") if "call of builtins.print" in text_of(event)]
    assert "What to do: remove the call" in text_of(broken) and "2 times" in text_of(broken)
    parts = [element for element in tree.iter("tr") if element.get("id", "").startswith("part-graph_0.")]
    assert any("mm_" in text_of(row) or "softmax" in text_of(row) or "exp" in text_of(row) for row in parts)


def test_recompilations_name_the_guard(page: str, report: torchcompile.Report) -> None:
    (event,) = report.recompiles
    assert "2.0" in event.detail
    assert event.detail.split("\n")[0] in text_of(parsed(page))


class Told(torch.nn.Module):
    def forward(self, x: torch.Tensor, scale: float, *, power: int = 1) -> torch.Tensor:
        hidden = x.sin()
        print("halfway")
        return hidden.cos() * scale**power


@torchcompile.compile
class ToldClass(torch.nn.Module):
    def forward(self, x: torch.Tensor, scale: float, *, power: int = 1) -> torch.Tensor:
        return Told.forward(self, x, scale, power=power)  # type: ignore[arg-type]


@pytest.mark.expected_eager("print", "recompiled")
@pytest.mark.parametrize(
    "make", [lambda: torchcompile.compile(Told(), dynamic=False), ToldClass], ids=["module", "class"]
)
def test_recompilations_of_a_module_are_told_in_its_own_words(make: Any) -> None:
    """At its forward, by the names that it has: what stands between it and the call is nobody's business."""
    torchcompile.reset()
    model, x = make(), torch.ones(4, 6)
    for size, scale, power in ((4, 2.0, 1), (5, 2.0, 1), (5, 3.0, 1), (5, 3.0, 2)):
        model(x[:1].expand(size, 6).clone(), scale, power=power)
    events = torchcompile.report().recompiles
    assert len(events) >= 3
    for event in events:
        assert event.line is not None and event.line.file == __file__
        code = type(model).forward.__code__
        assert event.line.line == code.co_firstlineno
        assert not re.search(r"args|view|self\[|\[\d|module\.py", event.detail), event.detail
        lines = event.detail.split("\n")
        assert len(set(lines)) == len(lines)
    assert {
        name
        for name in ("x", "hidden", "scale", "power")
        if any(f"{name}: " in e.detail or f"tensor {name} " in e.detail for e in events)
    } >= {"x", "scale", "power"}


def test_a_file_that_was_written_to_since_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torchcompile.reset()
    for name in ("kept_as_it_was", "written_anew"):
        file = tmp_path / f"{name}.py"
        file.write_text(f"def {name}(x):\n    return x.sin() + 1\n")
        monkeypatch.setattr("torchcompile.page.listing.IMPORTED", file.stat().st_mtime + 1)
        names: dict[str, Any] = {}
        exec(compile(file.read_text(), str(file), "exec"), names)
        torchcompile.compile(names[name])(torch.ones(3))
    file.write_text("# another line\n" + file.read_text())
    now = file.stat().st_mtime
    os.utime(file, (now + 10, now + 10))
    files = {
        text_of(element[0]).split()[0]: text_of(element)
        for element in classes(parsed(torchcompile.report().html()), "file")
    }
    assert "was written to after this process began" in files["written_anew.py"]
    assert "was written to after" not in files["kept_as_it_was.py"]


def test_the_timeline_has_the_stages_of_each_graph(page: str, report: torchcompile.Report) -> None:
    lanes = [text_of(lane[0]) for lane in classes(parsed(page), "lane")]
    assert {f"{graph.title} {graph.kind}" for graph in report.graphs} <= set(lanes)
    assert {"capture", "trace", "partition", "lower", "build"} <= {span.stage for span in report.spans}


def test_every_dumped_stage_is_in_it(page: str, report: torchcompile.Report) -> None:
    dumps = [text_of(dump[0]) for dump in classes(parsed(page), "dump")]
    for stage in ("bytecode.txt", "joint.py", "forward_loop_ir.txt", "forward_kernels.cpp", "backward_program.txt"):
        assert any(stage in dump for dump in dumps), stage


def test_replicas_stages_are_told_and_drawn(report: torchcompile.Report) -> None:
    first = StageRecord("graph_0", 0, 0, ("out.weight",), 1_000_000, planned=False)
    second = StageRecord("graph_0", 1, 2, ("up.weight", "<lambda>"), 4_000_000, planned=True)
    told = replace(report, stages=(first, second))
    tree = parsed(told.html())
    (section,) = [element for element in tree.iter("section") if element.get("id") == "stages"]
    cells = [text_of(cell) for cell in section.iter("td")][6:]
    assert cells[:5] == ["graph_0", "1", "2 (planned)", "4 MB", "up.weight, <lambda>"]
    assert cells[5].startswith("bucket 2, as the reducer is expected to fill it, has all") and "4 MB" in cells[5]
    computed, sent = ([float(r.get("x")) for r in lane.iter(f"{SVG}rect")] for lane in classes(section, "split"))
    assert computed[1] == sent[0] < sent[1]  # a bucket is sent while the next stage runs
    assert text_of(next(classes(section, "split")[1].iter(f"{SVG}title"))) == "bucket 0: 1 MB of gradients are sent"
    lines = [row[-1] for title, _, rows in told.tables() if title.startswith("Backward in stages") for row in rows]
    assert lines == ["######" + "." * 26, "." * 6 + "#" * 26]


def test_an_empty_report_is_a_page(tmp_path: Path) -> None:
    torchcompile.reset()
    torchcompile.report().html(tmp_path / "page.html")
    assert "Nothing was compiled yet" in text_of(parsed((tmp_path / "page.html").read_text()))


@pytest.mark.skipif(BROWSER is None, reason="no chromium on this machine: the page is not shown")
@pytest.mark.parametrize("width", [500, 1300])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_a_browser_shows_it(page: str, tmp_path: Path, width: int, dark: bool) -> None:
    """A script that only the test adds says what the browser made of the page: nothing is wider than the screen, and
    text stands out from what is behind it."""
    probe = """<script>
      const style = getComputedStyle(document.body), found = document.querySelectorAll(".row pre, .event, .lane rect");
      const wide = [...found].filter(e => e.getBoundingClientRect().right > innerWidth + 1).length;
      document.body.dataset.seen = [innerWidth, document.documentElement.scrollWidth, wide, found.length > 20,
        document.querySelector(".tile").getBoundingClientRect().height > 20, style.color, style.backgroundColor].join("|");
    </script></body>"""
    file = tmp_path / "page.html"
    file.write_text(page.replace("</body>", probe))
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--window-size={width},900", "--dump-dom"]
    command += ["--force-dark-mode", "--blink-settings=preferredColorScheme=0"] if dark else []
    home = {"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
    done = subprocess.run([*command, file.as_uri()], capture_output=True, text=True, timeout=120, env=home)
    seen = re.search(r'data-seen="([^"]*)"', done.stdout)
    assert seen is not None, f"the browser did not show the page:\n{done.stderr[-3000:]}"
    inner, scroll, wide, enough, high, ink, paper = seen[1].split("|")
    assert int(scroll) <= int(inner) and wide == "0" and (enough, high) == ("true", "true")
    brightness = [sum(map(int, re.findall(r"\d+", color)[:3])) / 765 for color in (ink, paper)]
    assert abs(brightness[0] - brightness[1]) > 0.6
    assert (brightness[1] < 0.5) == dark
