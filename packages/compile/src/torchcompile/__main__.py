"""The command line: `python -m torchcompile --help` lists its commands."""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from primtorch.ledger import total
from torchcompile.errors import CompileError, InvalidArgument
from torchcompile.faults.minify import minify_script
from torchcompile.health import findings
from torchcompile.moved import export_cache, import_cache
from torchcompile.options import resolve
from torchcompile.store import Entry, Store

_WIDTH = 500


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m torchcompile", description="torchcompile's tools")
    commands = parser.add_subparsers(dest="command", required=True)
    cache = commands.add_parser("cache", help="the folder of compiled programs and kernels")
    cache.add_argument("--folder", help="another one than the option `cache` has where it is not given")
    actions = cache.add_subparsers(dest="action", required=True)
    for name, text in (("list", "what is in it, by file, with its bytes"), ("clear", "delete it all")):
        actions.add_parser(name, help=text, description=text)
    for name, text in (("export", "write it into one file"), ("import", "take such a file, of somebody you trust, in")):
        action = actions.add_parser(name, help=text, description=text)
        action.add_argument("file", type=Path, help="a zip archive, for machines of the same kind")
    verify = "whether this machine can compile, and what to do if not"
    commands.add_parser("verify", help=verify, description=f"{verify}; status 1 where it cannot")
    told = "find the first wrong or failing graph of a script, and reduce it"
    minify = commands.add_parser("minify", help=told, description=f"{told}; status 1 where there is one")
    minify.add_argument("--folder", type=Path, default=Path(), help="where the file that shows it is written")
    minify.add_argument("script", type=Path, help="a Python file, which is run as it would be alone")
    minify.add_argument("arguments", nargs=argparse.REMAINDER, help="the script's own")
    given = parser.parse_args(arguments)
    console = Console()
    if not console.is_terminal:
        console = Console(width=_WIDTH)  # a file and a pipe have no right edge: names stay on one line
    try:
        match given.command:
            case "verify":
                return _verify(console)
            case "minify":
                return _minify(console, given)
        return _cache(console, given)
    except (CompileError, OSError) as error:
        Console(stderr=True).print(str(error), markup=False, highlight=False, soft_wrap=True)
        return 1


def _cache(console: Console, given: argparse.Namespace) -> int:
    folder = Path(given.folder or resolve(None, None).cache or "")
    if folder.exists() and not folder.is_dir():
        raise InvalidArgument(f"{folder} is no folder")
    store = Store(str(folder))
    match given.action:
        case "list":
            _list(console, store)
        case "clear":
            console.print(f"{store.cache}: {_size(store.clear())} deleted")
        case "export":
            console.print(f"{export_cache(store, given.file)} files written to {given.file}")
        case "import":
            console.print(f"{import_cache(store, given.file)} files taken into {store.cache}")
    return 0


def _size(entries: Sequence[Entry]) -> str:
    return f"{len(entries)} files, {sum(entry.nbytes for entry in entries) / 1e6:.1f} MB"


def _list(console: Console, store: Store) -> None:
    entries = store.entries()
    table = Table(title=f"{store.cache}: {_size(entries)}")
    for column in ("file", "bytes", "last used"):
        table.add_column(column, overflow="fold")
    for entry in entries:
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.used))
        table.add_row(entry.path.relative_to(store.cache).as_posix(), str(entry.nbytes), used)
    console.print(table)


def _verify(console: Console) -> int:
    well = True
    for finding in findings():
        well &= finding.well
        line = f"{'ok ' if finding.well else 'NOT'} {finding.what}: {finding.found}"
        console.print(line, markup=False, highlight=False)
        if not finding.well:
            console.print(f"    {finding.remedy}", markup=False, highlight=False)
    return 0 if well else 1


def _minify(console: Console, given: argparse.Namespace) -> int:
    if not given.script.is_file():
        raise InvalidArgument(f"{given.script} is no file: minify takes a Python script, and its arguments behind it")
    # It has no thread, and leaves the streams to the script: the process is forked beneath it.
    line = Live(console=console, auto_refresh=False, transient=True, redirect_stdout=False, redirect_stderr=False)
    with line if console.is_terminal else contextlib.nullcontext():

        def progress(text: str) -> None:
            if console.is_terminal:
                line.update(Text(text, no_wrap=True, overflow="ellipsis"), refresh=True)
            else:
                console.print(text, markup=False, highlight=False)

        found = minify_script(given.script, given.arguments, given.folder, progress)
    if found.fault is None:
        console.print("nothing that the script compiles differs from eager, and no stage raised an error")
        if found.left_out:
            why = "; ".join(dict.fromkeys(event.detail for event in found.left_out))
            text = f"{total(found.left_out)} calls and graphs could not be held to eager: {why}"
            console.print(text, markup=False, highlight=False)
        if found.ended:
            console.print(f"the script itself ended with {found.ended}", markup=False, highlight=False)
        return int(found.died)
    console.print(str(found.fault), markup=False, highlight=False)
    where = found.path or "no file can: it, or the back end, is made of objects of the program's own"
    console.print(f"{found.lines} lines left: {where}", markup=False, highlight=False)
    return 1


if __name__ == "__main__":
    sys.exit(main())
