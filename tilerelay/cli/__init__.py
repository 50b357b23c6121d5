"""The command `tilerelay`: bad input is one line and status 2, never a traceback."""

from __future__ import annotations

import sys

import typer

from tilerelay.cli.bench import bench, bench_report
from tilerelay.cli.demo import demo
from tilerelay.cli.doctor import doctor
from tilerelay.cli.run import run
from tilerelay.cli.trace import trace
from tilerelay.errors import TilerelayError

BAD_INPUT = 2
INTERRUPTED = 130

app = typer.Typer(
    help="One batch through a chain of dependent kernels on several GPUs, tile by tile.",
    add_completion=False,
    pretty_exceptions_enable=False,
)
for command in (run, demo, doctor, bench):
    app.command()(command)
app.command("bench-report")(bench_report)
app.add_typer(trace, name="trace")


def main() -> None:
    """Entry point of the console script."""
    try:
        status = app(standalone_mode=False)
    except (TilerelayError, typer.TyperException) as error:
        text = error.format_message() if isinstance(error, typer.TyperException) else str(error)
        print(f"tilerelay: {text}", file=sys.stderr)
        status = BAD_INPUT
    except typer.Abort:
        status = INTERRUPTED
    sys.exit(status)
