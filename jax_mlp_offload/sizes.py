"""Sizes in bytes, as people write them."""

from __future__ import annotations

import re

_UNITS = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGTP", start=1):
    _UNITS[f"{_letter}B"] = 1000**_power
    _UNITS[f"{_letter}iB"] = 1024**_power
_PATTERN = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def parse_bytes(value: int | float | str, what: str) -> int:
    """Returns ``value`` in bytes.

    Args:
      value: a number of bytes, or text such as ``"16GiB"``, ``"500MB"`` or ``"4096"``.
      what: the argument's name, for the message.

    Raises:
      ValueError: if the text is no size, or the size is negative.
      TypeError: if it is neither number nor text.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise TypeError(f"{what} is {value!r}; give bytes as a number, or text such as '16GiB'")
    if isinstance(value, str):
        match = _PATTERN.fullmatch(value)
        units = {name.lower(): factor for name, factor in _UNITS.items()}
        if not match or match[2].lower() not in units:
            raise ValueError(f"{what}={value!r} is not a size; write bytes, or for example '16GiB', '500MB'")
        return int(float(match[1]) * units[match[2].lower()])
    if not 0 <= value < float("inf"):
        raise ValueError(f"{what}={value!r} must be a finite number of bytes, 0 or more")
    return int(value)


def format_bytes(size: float) -> str:
    """``size`` in bytes as text with a binary unit, such as ``1.5 GiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
