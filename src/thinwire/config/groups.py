"""What every config has."""

from typing import Literal

GroupSize = int | Literal["world"] | None
"""Workers to a group: None is one node a group."""
