"""Builds an experiment from gin files and flags, and reports mistakes in them together."""

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
