"""`tfbig COMMAND ...` is `python -m tfbig.COMMAND ...`."""

import importlib
import importlib.util
import sys

from tfbig.command import EXIT_USER_ERROR, run_command
from tfbig.errors import near_matches

COMMANDS = {
    "prepare": "turn raw text into shards of tokens",
    "train": "train a model, or continue a run",
    "evaluate": "loss, perplexity, bits per byte and accuracy of a run",
    "generate": "write text with a run's model",
    "export": "write a run's model in another format",
    "serve": "answer requests over HTTP",
    "plan": "memory and time of a configuration, before it costs money",
    "report": "a page about one run, or several compared",
    "doctor": "what this machine and cluster lack",
    "data": "inspect and verify a data folder",
    "checkpoints": "list, verify, compare and prune a run's checkpoints",
    "launch": "start a job, again when it fails",
    "install_horovod": "build and install the engine between processes",
}


def available_commands() -> dict[str, str]:
    """Returns {command: description} of those that this version has."""
    return {
        name: text
        for name, text in COMMANDS.items()
        if importlib.util.find_spec(f"tfbig.{name}") is not None
    }


def usage() -> str:
    """Returns the list of commands, a line each."""
    lines = [f"  {name:<16} {text}" for name, text in available_commands().items()]
    return "\n".join(["usage: tfbig COMMAND ...   (COMMAND --help tells its flags)", "", *lines])


def main() -> None:
    """The console script."""
    name, arguments = (sys.argv[1] if len(sys.argv) > 1 else "--help"), sys.argv[2:]
    if name in ("-h", "--help", "help"):
        print(usage())
        return
    commands = available_commands()
    if name not in commands:
        print(
            f"tfbig: error: there is no command {name!r}.{near_matches(name, list(commands))} "
            f"The commands are: {', '.join(commands)}.",
            file=sys.stderr,
        )
        raise SystemExit(EXIT_USER_ERROR)
    # Imported inside run_command, so that an error of the import is reported like any other.
    run_command(name, lambda rest: importlib.import_module(f"tfbig.{name}").main(rest), arguments)


if __name__ == "__main__":
    main()
