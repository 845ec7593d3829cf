"""What every config has."""

from typing import Literal

GroupSize = int | Literal["world"] | None
"""Workers per group: None is one group per node."""
