"""The models of the recipes that come with the library, and first values for any model."""

from thinwire.train.models import initial
from thinwire.train.models.digits import DigitNet
from thinwire.train.models.gpt import CharGPT

__all__ = ["CharGPT", "DigitNet", "initial"]
