"""From gin files and flags to the root object of a run, with every mistake found at once.

The only place that knows gin. A configuration is read into statements with their places (sources, statements,
recovery), names are looked up in the code (names, constructors), what is reachable from the root is walked (graph), and
values are held against signatures (types, checks); only what stands is given to gin (loader).
"""

from launch.gin_config.loader import DEFAULTS, ROOT, LoadedConfig, load, parse, problems
from launch.gin_config.statements import ConfigError, ConfigProblem

__all__ = ["DEFAULTS", "ROOT", "ConfigError", "ConfigProblem", "LoadedConfig", "load", "parse", "problems"]
