"""`uefl`, the command line. A user's mistake is answered by one line on stderr and exit code 2, not by a traceback."""

from __future__ import annotations

import io
import pkgutil
import sys
from importlib import import_module
from typing import Annotated, NoReturn

import typer

from uefl import __version__, cli
from uefl.cli.argument_help import keep_argument_help
from uefl.cli.usage_errors import UsageError, describe_usage_error, prints_help
from uefl.core.errors import InputError, ResumableError

INTERRUPTED = 130  # exit code after Ctrl-C

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="""Federated learning across silos whose data do not look alike.

Each silo measures the model's uncertainty on its own data; silos with
unusually high uncertainty receive additional codewords.

\b
  uefl demo                        four hospitals and digits, in two minutes
  uefl compare                     FedAvg and UEFL on embedded digits
  uefl run                         UEFL alone on the same digits
  uefl run uefl mnist gamma=0.2    another data set, one setting changed
  uefl list                        methods, data sets and other choices
  uefl list uefl mnist             every setting of a method on a data set
  uefl data show mnist             a figure of the silos, before training
  uefl show runs/*                 tables of finished runs, states of others
  uefl predict RUN new/ --silo A   classes and uncertainty of new images
  uefl calibrate RUN               prediction sets, silo by silo
  uefl watch RUN new/ --silo A     is this still the data of silo A?
  uefl join RUN new/ name=B        a new silo, without touching the others
  uefl export RUN a.onnx --silo A  the model of silo A for other programs

Each run writes to its own folder in `runs/`. Results are never overwritten:
repeating a command shows a finished run or resumes an unfinished one.
`uefl --install-completion` lets Tab complete commands, methods and data sets.""",
)


def _print_version(requested: bool) -> None:
    if requested:
        typer.echo(f"uefl {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


def register_commands() -> None:
    """Register the command of every module of this package that has a function `register`."""
    for module_info in pkgutil.iter_modules(cli.__path__):
        if module_info.name != "main":
            module = import_module(f"{cli.__name__}.{module_info.name}")
            if hasattr(module, "register"):
                module.register(app)


keep_argument_help()
register_commands()


def main() -> None:
    """Run the command line; errors that a user can correct are one line and an exit code."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # shows progress through a pipe or in a log file too
    try:
        code = app(standalone_mode=False)  # else typer answers typing errors with several lines
    except UsageError as e:
        if prints_help(e):
            sys.exit(2)
        _exit(2, describe_usage_error(e))
    except InputError as e:
        _exit(2, str(e))
    except ResumableError as e:
        _exit(3, str(e))
    except typer.Abort:
        _exit(1, "stopped: the input has ended")
    except RuntimeError as e:
        if not _is_out_of_memory(e):
            raise
        reason = str(e).splitlines()[0].partition(". ")[0]  # the rest is advice to developers
        _exit(2, f"the device is out of memory ({reason}); reduce local.batch_size or the network")
    except KeyboardInterrupt:
        _exit(INTERRUPTED, _describe_interrupt())
    if code == INTERRUPTED:  # typer's answer to Ctrl-C
        _exit(INTERRUPTED, _describe_interrupt())
    sys.exit(code if isinstance(code, int) else 0)


def _describe_interrupt() -> str:
    resumes = sys.argv[1:2] in (["run"], ["compare"], ["demo"]) or (
        sys.argv[1:2] == ["join"] and "others=train" in sys.argv
    )
    return "stopped; the same command resumes after the last completed round" if resumes else "stopped"


def _exit(code: int, message: str) -> NoReturn:
    print(f"uefl: {message}", file=sys.stderr)  # noqa: T201
    sys.exit(code)


def _is_out_of_memory(error: RuntimeError) -> bool:
    torch = sys.modules.get("torch")  # not imported here for the sake of commands that do without it
    if torch is None:
        return False
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)  # CUDA, CPU


if __name__ == "__main__":
    main()
