"""`python -m primtorch reference`: the page of all prims. `coverage`: what becomes of each ATen overload."""

from __future__ import annotations

import argparse
import sys

from primtorch.coverage import html_page, report
from primtorch.reference import reference_page


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="primtorch", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("reference", help="print the reference page of the prims")
    coverage = commands.add_parser("coverage", help="count what becomes of each ATen overload")
    coverage.add_argument("--missing", action="store_true", help="list the overloads that nothing covers")
    coverage.add_argument("--html", action="store_true", help="the census as an HTML page")
    options = parser.parse_args(arguments)
    if options.command == "reference":
        print(reference_page())
    elif options.html:
        print(html_page())
    else:
        print(report(missing=options.missing))
    return 0


if __name__ == "__main__":
    sys.exit(main())
