"""One process of a run: its place among the hosts."""

from __future__ import annotations

from typing import NamedTuple


class Host(NamedTuple):
    """This process among its peers."""

    index: int
    count: int
    simulated: bool

    @property
    def is_zero(self) -> bool:
        """Returns whether this host writes what is written once."""
        return self.index == 0

    @property
    def name(self) -> str:
        """`host 2 of 4`."""
        return f"host {self.index} of {self.count}"
