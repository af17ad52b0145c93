"""The command line: `speedkit hardware | train | profile | tune | compare | dry-run | cache | run | lab | publish`."""

from typing import NoReturn

import click

from speedkit import __version__
from speedkit.cli.ending import run_command
from speedkit.cli.measuring import compare, dry_run, hardware, profile
from speedkit.cli.options import DEBUG
from speedkit.cli.training import train, tune
from speedkit.cli.upkeep import cache, lab, publish, run


def main() -> NoReturn:
    """Run the command line, and end this process."""
    run_command(commands, "speedkit")


def as_hyphens(word: str) -> str:
    """Return an option as it is spelled here, whose words others join by underscores."""
    return word.replace("_", "-")


@click.group(
    commands=[hardware, train, profile, tune, compare, dry_run, cache, run, lab, publish],
    context_settings={
        "help_option_names": ["-h", "--help"],
        "max_content_width": 110,
        "show_default": True,
        "token_normalize_func": as_hyphens,
    },
)
@click.version_option(__version__)
def commands() -> None:
    """Make PyTorch training as fast as this machine allows, with proof."""


# Known before and after every command; `run_command` looks for it where a run fails. publish hands it on.
for command in (commands, *commands.commands.values()):
    if command is not publish:
        command.params.append(DEBUG)
