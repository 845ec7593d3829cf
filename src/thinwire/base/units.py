"""Parse and format rates, times, sizes and counts: "100Mbit", "25Gbit", "50us", "1.2 MB", "1 layer"."""

import re

from thinwire.base.errors import ConfigError

_RATES = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9, "tbit": 1e12}
_TIMES = {"h": 3600.0, "min": 60.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}
_NUMBER = re.compile(r"([0-9.]+(?:e[-+]?[0-9]+)?)\s*([a-zµ]+)", re.IGNORECASE)


def bits_per_second(text: str) -> float:
    """A rate such as "100Mbit" or "1Gbit/s"; bytes per second are refused to avoid mix-ups with bits."""
    number = _parse(text.strip().removesuffix("/s"), _RATES)
    if not number:
        raise ConfigError(
            f"{text!r} is not a valid rate; write a number above 0 and bit, kbit, Mbit or Gbit, such as 100Mbit"
        )
    return number


def seconds(text: str) -> float:
    """A time such as "50us" or "0.2ms"."""
    number = _parse(text.strip(), _TIMES)
    if number is None:
        raise ConfigError(f"{text!r} is not a valid time; write a number and h, min, s, ms, us or ns: 50us")
    return number


def rate(bits: float) -> str:
    """Format a rate: 100 Mbit/s."""
    for unit, factor in (("Gbit/s", 1e9), ("Mbit/s", 1e6), ("kbit/s", 1e3)):
        if bits >= factor:
            return f"{bits / factor:.4g} {unit}"
    return f"{bits:.4g} bit/s"


def size(count: float) -> str:
    """Format a number of bytes: 1.25 MB."""
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= factor:
            return f"{count / factor:.3g} {unit}"
    return f"{count:.0f} bytes"


def count(number: int, noun: str, plural: str | None = None) -> str:
    """Format a number of things: 1 weight, 2,000 weights."""
    return f"{number:,} {noun if number == 1 else plural or f'{noun}s'}"


def time(value: float) -> str:
    """Format a time, from microseconds to days."""
    for unit, factor, below in (("µs", 1e-6, 1e-3), ("ms", 1e-3, 1.0), ("s", 1.0, 120.0), ("min", 60.0, 7200.0)):
        if value < below:
            return f"{value / factor:.3g} {unit}"
    return f"{value / 3600:.3g} h" if value < 172_800 else f"{value / 86_400:.3g} days"


def _parse(text: str, units: dict[str, float]) -> float | None:
    found = _NUMBER.fullmatch(text)
    if found is None or found[2].lower() not in units:
        return None
    try:
        return float(found[1]) * units[found[2].lower()]
    except ValueError:
        return None
