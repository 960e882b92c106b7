"""`python -m primtorch reference`: the page of all prims. `coverage`: what becomes of each ATen overload."""

from __future__ import annotations

import argparse
import sys

from primtorch.reference import reference_page


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="primtorch", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("reference", help="print the reference page of the prims")
    options = parser.parse_args(arguments)
    if options.command == "reference":
        print(reference_page())
    return 0


if __name__ == "__main__":
    sys.exit(main())
