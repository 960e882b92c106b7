"""The command line: `python -m primtorch --help` lists its commands."""

from __future__ import annotations

import argparse
import sys

from primtorch.coverage import html_page, report
from primtorch.reference import reference_page


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m primtorch", description="What the set of prims is, and what becomes of ATen."
    )
    commands = parser.add_subparsers(dest="command", title="commands", metavar="command")
    commands.add_parser("reference", help="print the reference page of the prims, as markdown")
    coverage = commands.add_parser("coverage", help="count what becomes of each ATen overload, by family")
    shown = coverage.add_mutually_exclusive_group()
    shown.add_argument("--missing", action="store_true", help="list the overloads that nothing covers")
    shown.add_argument("--html", action="store_true", help="print all overloads as an HTML page")
    commands.add_parser("help", help="print this list")
    return parser


def main(arguments: list[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.command == "reference":
        print(reference_page())
    elif options.command == "coverage":
        print(html_page() if options.html else report(missing=options.missing))
    else:
        parser.print_help()
    return 0


if __name__ == "__main__":
    sys.exit(main())
