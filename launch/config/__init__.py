"""Builds an experiment from gin files and flags, and reports all mistakes in them at once.

No other folder imports gin. `sources` reads files and flags into statements with their lines. `names` resolves names
to Python objects, and `trust` says which of them the configuration of a run may name. `checks` and `signatures` check
the statements that are reachable from the root, with the types of their values. `loader` passes valid statements to
gin, which builds the object.
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
