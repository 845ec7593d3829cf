"""The models that recipes train, one family a file, in plain PyTorch."""

from thinwire.train.models.digits import DigitNet
from thinwire.train.models.gpt import CharGPT

__all__ = ["CharGPT", "DigitNet"]
