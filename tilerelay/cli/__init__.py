"""The command `tilerelay`: bad input is one line and status 2, never a traceback."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from tilerelay import __version__
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


@app.callback(invoke_without_command=True)
def about(
    context: typer.Context, version: Annotated[bool, typer.Option("--version", help="print the version")] = False
) -> None:
    if version:
        print(__version__)
    elif context.invoked_subcommand is None:
        print(context.get_help())


def main() -> None:
    """Entry point of the console script."""
    try:
        status = app(standalone_mode=False)
        sys.stdout.flush()
    except (typer.Abort, KeyboardInterrupt):
        status = INTERRUPTED
    except (TilerelayError, typer.TyperException, MemoryError, OSError) as error:
        text = error.format_message() if isinstance(error, typer.TyperException) else str(error)
        print(f"tilerelay: {' '.join(text.split()) or type(error).__name__}", file=sys.stderr)
        status = BAD_INPUT
        if isinstance(error, OSError):  # standard output itself may be what failed: say nothing more on it
            sys.stderr.flush()
            os._exit(status)
    sys.exit(status)
