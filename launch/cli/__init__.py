"""Commands that need no folder of their own, and kinds of `build`; `environment.declared` finds them by `COMMAND`."""
