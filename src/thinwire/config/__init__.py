"""What configs share: fields, checks, outer steps; and what is set beside a method."""

from thinwire.config.common import Nesterov, Radial

__all__ = ["Nesterov", "Radial"]
