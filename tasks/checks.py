"""Checks of constructor arguments: gin knows no types, so a constructor refuses what is not meant."""

from __future__ import annotations

from typing import Any

from core.errors import UserError


def check_integer(value: Any, *, where: str, least: int) -> None:
    """Raises ValueError unless `value` is an integer (and no bool) of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise UserError(f"{where} is {value!r}, expected an integer of at least {least}")


def check_text(value: Any, *, where: str) -> None:
    """Raises ValueError unless `value` is text that is not empty."""
    if not isinstance(value, str) or not value:
        raise UserError(f"{where} is {value!r}, expected text")
