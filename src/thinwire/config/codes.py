"""Codes that values travel in over the slow link, by the names users write."""

from typing import Any, NamedTuple

from thinwire.base.errors import ConfigError

EXACT = ("fp32", "bf16")
QUANTIZED = ("int8", "int4", "int2", "bit")
NAMES = (*EXACT, *QUANTIZED, "lowrank:R", "topk:D")


class Code(NamedTuple):
    """A code, with the rank or the density where it has one."""

    kind: str
    number: float = 0.0

    @property
    def is_exact(self) -> bool:
        """Whether it only rounds numbers, and needs no error feedback."""
        return self.kind in EXACT


def parse_code(text: Any) -> Code:
    """What a name such as "int4" or "lowrank:16" stands for."""
    kind, _, number = text.partition(":") if isinstance(text, str) else ("", "", "")
    if kind in (*EXACT, *QUANTIZED) and not number:
        return Code(kind)
    if kind == "lowrank" and number.isdecimal() and int(number):
        return Code(kind, int(number))
    if kind == "topk" and (density := _share(number)):
        return Code(kind, density)
    raise ConfigError(
        f"{text!r} is not a code for the wire, choose from: {', '.join(NAMES)}, with a rank R such as lowrank:16, or "
        "the share D of the values that are sent, such as topk:0.01"
    )


def check_code(config: Any, name: str) -> None:
    try:
        parse_code(getattr(config, name))
    except ConfigError as error:
        raise ConfigError(f"`{name}`={error}") from None


def _share(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if 0 < value <= 1 else None
