"""Formats counts, quantities and long lists for people: `1 host`, `75.3 GiB`, `9.52 µs`, `20.9 GFLOP`, `4:05`."""

from collections.abc import Sequence

_BYTES = ((2.0**40, "TiB"), (2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB"), (1.0, "B"))
_SECONDS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))
_FLOPS = ((1e18, "EFLOP"), (1e15, "PFLOP"), (1e12, "TFLOP"), (1e9, "GFLOP"), (1e6, "MFLOP"), (1.0, "FLOP"))


def counted(count: int, noun: str, plural: str | None = None) -> str:
    """Formats a count with a noun: `1 host`, `1,024 hosts`."""
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"


def size(count: float, *, digits: int = 3) -> str:
    """Formats a number of bytes in binary units: `45.6 MiB`."""
    return _scaled(count, _BYTES, digits)


def seconds(number: float, *, digits: int = 3) -> str:
    """Formats seconds in a suitable unit: `9.52 µs`, `1,230 s`."""
    return _scaled(number, _SECONDS, digits)


def seconds_between(low: float, high: float) -> str:
    """Formats a range of seconds: `0.907 to 1.28 s`; one number if both round to it."""
    text = seconds(high)
    number, name = text.split()
    first = significant(low / next(factor for factor, unit in _SECONDS if unit == name))
    return text if first == number else f"{first} to {text}"


def flops(number: float) -> str:
    """Formats a number of floating-point operations: `20.9 GFLOP`."""
    return _scaled(number, _FLOPS, 3)


def significant(number: float, digits: int = 3) -> str:
    """Formats a number to `digits` significant digits, a larger one as an integer: `35.5`, `1,018`."""
    return f"{number:,.0f}" if abs(number) >= 10**digits * (1 - 0.5 * 10**-digits) else f"{number:.{digits}g}"


def clock(number: float) -> str:
    """Formats a number of seconds, rounded to whole ones, as `1:02:03` or `4:05`."""
    minutes, rest = divmod(round(number), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def shortened(items: Sequence[str], *, most: int) -> list[str]:
    """Returns the first `most` items of a list and, if there are more, `… and 3 more`."""
    return [*items[:most], *([f"… and {len(items) - most} more"] if len(items) > most else [])]


def _scaled(number: float, units: Sequence[tuple[float, str]], digits: int) -> str:
    if number == 0:
        return "0 " + next(name for factor, name in units if factor == 1)
    factor, name = next((unit for unit in units if float(f"{number / unit[0]:.{digits}g}") >= 1), units[-1])
    return f"{significant(number / factor, digits)} {name}"
