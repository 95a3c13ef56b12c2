"""The error that a user can cause and mend."""

from __future__ import annotations


class UserError(ValueError):
    """A deliberate refusal: its message says what is wrong, where, what was expected and how to mend it.

    A command prints the message alone and ends with exit code 2. Any other exception, a ValueError of a library or of a
    user's own code among them, is printed with its traceback.
    """
