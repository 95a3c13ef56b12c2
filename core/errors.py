"""The exception for errors that a user can cause and correct."""

from __future__ import annotations


class UserError(ValueError):
    """An error of the user's input; its message says what is wrong, where, what was expected and how to correct it.

    Commands print only the message and end with exit code 2. Any other exception, including a ValueError of a library
    or of the user's own code, is printed with its traceback.
    """
