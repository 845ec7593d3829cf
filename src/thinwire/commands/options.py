"""Options that several commands have."""

from pathlib import Path

import click

DIR = click.Path(path_type=Path, file_okay=False)
DATA = click.Path(path_type=Path)
"""A folder, or a file where the source takes one."""

overwrite = click.option(
    "--overwrite", is_flag=True, help="Replace what an earlier command wrote there; other files stay."
)
data = click.option(
    "--data",
    type=DATA,
    metavar="DIR",
    help="Folder with the data; that of digits and shakespeare is in the package.",
)
settings = click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="FIELD=VALUE",
    help="A field of the method, or schedule=table|guideline for AB if the recipe has both.",
)
