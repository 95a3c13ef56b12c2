"""From gin files and flags to the root object of a run, with every mistake found at once.

The only folder that imports gin. A configuration is read into statements with their places (sources), and names are
looked up in the code (names). What is reachable from the root is visited, and values are checked against
signatures (checks, signatures). Valid statements are passed to gin, which builds the object (loader).
"""

from launch.config.loader import LoadedConfig, Settings, declared_macros, load, parse
from launch.config.statements import Binding, ConfigError, ConfigProblem, Macro, Reference, leaves, render

__all__ = [
    "Binding",
    "ConfigError",
    "ConfigProblem",
    "LoadedConfig",
    "Macro",
    "Reference",
    "Settings",
    "declared_macros",
    "leaves",
    "load",
    "parse",
    "render",
]
