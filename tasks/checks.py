"""Checks constructor arguments, because gin does not check types."""

from __future__ import annotations

from typing import Any

from core.errors import UserError


def check_integer(value: Any, *, where: str, least: int) -> None:
    """Raises UserError unless `value` is an integer (not a bool) of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise UserError(f"{where} is {value!r}, expected an integer of at least {least}")


def check_text(value: Any, *, where: str) -> None:
    """Raises UserError unless `value` is a non-empty string."""
    if not isinstance(value, str) or not value:
        raise UserError(f"{where} is {value!r}, expected a non-empty string")
