"""`thinwire completion`."""

import click
from click.shell_completion import get_completion_class

_SHELLS = ("bash", "zsh", "fish")


@click.command()
@click.argument("shell", type=click.Choice(_SHELLS))
def completion(shell: str) -> None:
    """Print a script that completes commands and options: source it in your shell's startup file.

    For bash: thinwire completion bash > ~/.thinwire-complete, and `source ~/.thinwire-complete` in ~/.bashrc.
    """
    made = get_completion_class(shell)
    assert made is not None
    click.echo(made(click.get_current_context().find_root().command, {}, "thinwire", "_THINWIRE_COMPLETE").source())
