"""Builds an experiment from gin files and flags, and reports all mistakes in them at once.

No other folder imports gin. `loader` shows the steps from a file to the object that it builds. `trust` says what the
configuration of a run may name, `differences` compares configurations, and `changes` writes statements.
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
