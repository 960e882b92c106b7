"""Writes the generated pages of docs/, or says which of them are stale.

python tools/docs.py            writes them
python tools/docs.py --check    exits with 1 and shows the difference where a page is not what would be written

The walkthrough and the page of back ends are `tools/pages/*.md` with these lines replaced:
    {{source FILE}}    a file of examples/
    {{dump FILE}}      what examples/score.py writes for a stage (file name without its number)
    {{output FILE}}    what a script of examples/ prints
"""

from __future__ import annotations

import argparse
import difflib
import functools
import importlib
import os
import re
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import FunctionType

import architecture
import torchcompile.events
import torchcompile.options
from primtorch.ledger import REFUSED, Effect
from primtorch.reference import reference_page
from torchcompile.events import TABLES
from torchdynamo.reasons import REASONS

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples"
PAGES = ROOT / "tools" / "pages"


# What exports something, as it is imported.
MODULES = ("primtorch", "aotautograd", "torchdynamo", "torchinductor", "torchdistributed", "torchcompile")

# The walkthrough shows bytecode, which differs between versions of Python.
WALKTHROUGH_PYTHON = (3, 11)

LANGUAGES = {".py": "python", ".cpp": "c++", ".txt": "text"}


def run_example(*arguments: str) -> str:
    """What a script of examples/ prints."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("TORCHCOMPILE_")}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=EXAMPLES, env=env, capture_output=True, text=True, check=False, timeout=300
    )
    if done.returncode != 0:
        raise SystemExit(f"examples/{arguments[0]} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def stages() -> dict[str, str]:
    """File name without number -> text, of everything that examples/score.py dumps."""
    with tempfile.TemporaryDirectory() as folder:
        run_example("score.py", folder)
        return {path.name.split("_", 1)[1]: path.read_text() for path in sorted(Path(folder).iterdir())}


def block(text: str, suffix: str) -> str:
    return f"```{LANGUAGES[suffix]}\n{text.strip(chr(10))}\n```"


def without_prelude(text: str) -> str:
    """A generated file from its first kernel on: what stands before is the same in every file."""
    if "@triton.jit" in text:
        parts = re.split(r"(?m)^# kernel ", text)[1:]
        return "\n".join(
            f"# kernel {p.split(chr(10))[0]}\n@triton.jit\n{p.rsplit('@triton.jit', 1)[1].strip()}\n" for p in parts
        )
    first = text.find('extern "C" void kernel_')
    if first < 0:
        return text
    start = text.rfind("//", 0, first)
    return text[start if start >= 0 else first :]


def from_template(name: str) -> str:
    template = (PAGES / f"{name}.md").read_text()
    dumps = stages() if "{{dump" in template else {}

    def replaced(match: re.Match[str]) -> str:
        kind, file = match.groups()
        suffix = Path(file).suffix
        if kind == "source":
            return block((EXAMPLES / file).read_text(), suffix)
        if kind == "output":
            return block(without_prelude(run_example(file)), suffix)
        if file not in dumps:
            raise SystemExit(f"tools/pages/{name}.md asks for the dump {file!r}; there are {', '.join(dumps)}")
        return block(without_prelude(dumps[file]), suffix)

    return re.sub(r"(?m)^\{\{(source|dump|output) (\S+)\}\}$", replaced, template)


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join(lines)


def options_page() -> str:
    options = [(f"`{name}`", f"`{default}`", doc) for name, default, doc in torchcompile.options.describe()]
    modes = [
        (f"`{mode}`", ", ".join(f"`{k}={v!r}`" for k, v in values.items()) or "the options' defaults")
        for mode, values in torchcompile.options.MODES.items()
    ]
    variables = [(f"`{variable}`", f"`{option}`") for variable, option in torchcompile.options.ENVIRONMENT.items()]
    return page(
        "# Options and modes",
        "`torchcompile.compile(model, mode=..., options={...})`. An option given in the call wins over the mode's, and "
        "the mode's over the environment's. An unknown name or value raises `InvalidArgument` with the known ones.",
        "## Options",
        table(("option", "default", "meaning"), options),
        "## Modes",
        table(("mode", "options that it sets"), modes),
        "## Environment",
        table(("variable", "sets"), variables),
    )


def graph_breaks_page() -> str:
    parts = [
        "# Graph breaks",
        "Where capture cannot go on, the graph ends, the instruction runs as Python runs it, and capture starts again "
        "behind it. Nothing is wrong then, but kernels are not fused across the place. `torchcompile.report()` lists "
        "the breaks with the user's lines; `fullgraph=True` raises at the first; `torchdynamo.explain(f)(*args)` tells "
        "about one call. A break in a function that the program called keeps the graph of its callers: one graph ends "
        "there, and one begins behind it, in all the frames. In a loop the first rounds get code of their own, the "
        "others share theirs.",
        "`torchdynamo.graph_break()` asks for a break; `disable(f, recursive=, reason=)`, `skip_frame(f)`, "
        "`allow_in_graph(f)` and `assume_constant_result(f)` say what calls of a function are; "
        "`error_on_graph_break()` makes breaks errors in a region. Each break has one of these reasons.",
    ]
    for reason in REASONS.values():
        parts += [f"## {reason.id}", _sentence(reason.explanation), f"What to do: {reason.remedy}."]
    return page(*parts)


def ledger_page() -> str:
    parts = [
        "# The ledger",
        "Whatever does not run as one compiled program, once, is an event of the ledger: "
        "`torchcompile.report()` lists the events with what they happened to, the user's line, the detail of the case "
        "and how often it was met; `report().clean` is true where nothing ran eagerly, twice or differently. "
        "`fullgraph=True` raises, with the event as its message, where one under "
        f"{', '.join(f'*{e.value}*' for e in Effect if e in REFUSED)} would happen. `torchcompile.reset()` empties "
        "the ledger.",
    ]
    for effect in Effect:
        of_effect = [kind for table_ in TABLES for kind in table_.values() if kind.effect is effect]
        parts.append(f"## {effect.value[0].upper()}{effect.value[1:]}")
        if effect is Effect.BREAK:
            names = ", ".join(f"[{kind.id}](graph_breaks.md#{kind.id})" for kind in of_effect)
            parts.append(f"The reasons are on [a page of their own](graph_breaks.md): {names}.")
            continue
        rows = [(f"`{kind.id}`", _sentence(kind.explanation), _sentence(kind.remedy)) for kind in of_effect]
        parts.append(table(("kind", "what happens", "what to do"), rows))
    return page(*parts)


def reference(module: str) -> str:
    """The page that mkdocstrings fills from the docstrings of what a package exports."""
    package = importlib.import_module(module)
    found = [(name, getattr(package, name)) for name in package.__all__]
    names = [name for name, value in found if isinstance(value, (type, FunctionType)) and value.__doc__]
    options = ("show_root_heading: false", "show_root_toc_entry: false", "show_if_no_docstring: false", "members:")
    lines = [f"# {module}", "", f"::: {module}", "    options:", *(f"      {option}" for option in options)]
    return "\n".join([*lines, *(f"        - {name}" for name in names)]) + "\n"


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:] + "."


def page(*parts: str) -> str:
    """Paragraphs, filled; tables and headings as they are."""
    return "\n\n".join(p if p.startswith(("|", "#")) else textwrap.fill(p, 118) for p in parts) + "\n"


GENERATED: dict[str, Callable[[], str]] = {
    "prims.md": lambda: reference_page().rstrip("\n") + "\n",
    "options.md": options_page,
    "graph_breaks.md": graph_breaks_page,
    "ledger.md": ledger_page,
    "architecture.md": lambda: architecture.page((PAGES / "architecture.md").read_text()),
    "backends.md": lambda: from_template("backends"),
    "walkthrough.md": lambda: from_template("walkthrough"),
    **{f"reference/{module}.md": functools.partial(reference, module) for module in MODULES},
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail where a page is stale")
    parser.add_argument("pages", nargs="*", default=list(GENERATED), help="names of pages (all of them)")
    arguments = parser.parse_args()
    stale = False
    for name in arguments.pages:
        if name == "walkthrough.md" and sys.version_info[:2] != WALKTHROUGH_PYTHON:
            print(f"docs/{name} is made with Python {'.'.join(map(str, WALKTHROUGH_PYTHON))}: left as it is")
            continue
        path = ROOT / "docs" / name
        fresh, old = GENERATED[name](), path.read_text() if path.exists() else ""
        if fresh == old:
            continue
        if not arguments.check:
            path.write_text(fresh)
            print(f"wrote docs/{name}")
            continue
        stale = True
        changes = difflib.unified_diff(
            old.splitlines(), fresh.splitlines(), f"docs/{name}", "what docs.py writes", "", "", 1, ""
        )
        print("\n".join(list(changes)[:60]))
    if stale:
        print("run `make docs`")
    return int(stale)


if __name__ == "__main__":
    sys.exit(main())
