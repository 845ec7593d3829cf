"""Options that several commands have."""

from pathlib import Path

import click

DIR = click.Path(path_type=Path, file_okay=False)
DATA = click.Path(path_type=Path)
"""A folder, or a file where the source takes one."""

overwrite = click.option(
    "--overwrite", is_flag=True, help="Replace what an earlier command wrote there, and no other files."
)
data = click.option(
    "--data",
    type=DATA,
    metavar="DIR",
    help="Folder with the data; digits and shakespeare have theirs in the package.",
)
settings = click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="FIELD=VALUE",
    help="A field of the method, or schedule=table|guideline for AB where a recipe has both.",
)
