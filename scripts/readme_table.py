"""Puts the measured table into README, between its two markers, from results files of `tilerelay bench`.

python scripts/readme_table.py benchmarks/results/bench-*.json            writes README.md
python scripts/readme_table.py --check benchmarks/results/bench-*.json    exits with 1 if README.md says something else
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tilerelay.bench.report_tables import readme_table
from tilerelay.bench.results import load_all
from tilerelay.errors import InvalidInput

BEGIN = "<!-- measured table: begin (scripts/readme_table.py) -->"
END = "<!-- measured table: end -->"
README = Path(__file__).resolve().parent.parent / "README.md"


def replace_table(text: str, table: str) -> str:
    """The text with what stands between the markers replaced.

    Raises:
        InvalidInput: the markers are not there exactly once, in order.
    """
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise InvalidInput(f"the page needs the line {BEGIN!r} once and, after it, {END!r} once")
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n\n{table}\n\n{END}{after}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Puts the measured table into README.")
    parser.add_argument("results", nargs="+", type=Path)
    parser.add_argument("--readme", type=Path, default=README)
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 1 if README is out of date")
    given = parser.parse_args(arguments)
    try:
        table = readme_table(load_all(given.results))
        if not table:
            raise InvalidInput("the results files hold no cell on two GPUs or more")
        try:
            old = given.readme.read_text()
        except OSError as error:
            raise InvalidInput(f"{given.readme}: cannot be read ({error.strerror})") from None
        new = replace_table(old, table)
    except InvalidInput as error:
        print(f"readme_table: {error}", file=sys.stderr)
        return 2
    if given.check:
        if old != new:
            print(f"readme_table: {given.readme} is out of date", file=sys.stderr)
        return int(old != new)
    given.readme.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main())
