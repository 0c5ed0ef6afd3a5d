"""Commands run inside the tests' process: quick, and with their errors as exceptions."""

from __future__ import annotations

import typer
from typer.testing import CliRunner

__all__ = ["commands"]


def commands(*modules):
    """A function that runs a command line of these modules and returns exit code and output, or raises its error."""
    app = typer.Typer()
    for module in modules:
        module.register(app)

    def run(*arguments):
        result = CliRunner().invoke(app, [str(argument) for argument in arguments])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    return run
