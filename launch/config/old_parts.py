"""Old spellings of the parts of a decoder's layers: names such as 'attention+s5', with settings in fields of their own.

They become references to parts, and settings that no name used go.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from launch.config.statements import Reference, render

_SETTINGS = ("experts", "block_sparse", "s5", "ttt")  # former fields
_OF = {
    "attention": "@models.decoder_parts.Attention()",
    "mlp": "@models.decoder_parts.Mlp()",
    "none": "None",
    "experts": "@models.experts.Experts()",
    "block_sparse": "@models.block_sparse.BlockSparse()",
    "s5": "@models.s5.S5()",
}
_TTT = "models.ttt.mixer.TTTMixer"
_SUM = "models.parts.Sum"


def rewrites(constructor: str) -> dict[str, Callable[[Any, Mapping[str, Any]], Sequence[str] | None]]:
    """Returns what replaces the old values of a decoder's constructor, by the names of its parameters."""

    def of_parts(parameter: str) -> Callable[[Any, Mapping[str, Any]], Sequence[str] | None]:
        return lambda value, bound: _parts(f"{constructor}.{parameter}", value, bound)

    def of_experts(value: Any, bound: Mapping[str, Any]) -> Sequence[str]:
        replaces_default = value is not None and "feed_forward" not in bound
        return [f"{constructor}.feed_forward = {render(value)}"] if replaces_default else []

    unused = {f"{constructor}.{name}": lambda value, bound: [] for name in _SETTINGS}
    parts = {f"{constructor}.{name}": of_parts(name) for name in ("mixer", "feed_forward")}
    return {**unused, **parts, f"{constructor}.experts": of_experts}


def _parts(name: str, value: Any, bound: Mapping[str, Any]) -> Sequence[str] | None:
    """Returns the statements for a name of parts, or a tuple of names; None if the value has no names."""
    names = value if isinstance(value, tuple) else (value,)
    if not all(isinstance(one, str) for one in names):
        return None
    added: list[str] = []

    def part(one: str) -> str:
        if "+" in one:
            scope = f"sum{len(added)}/" if added else ""
            added.append(f"{scope}{_SUM}.parts = ({', '.join(map(part, one.split('+')))})")
            return f"@{scope}{_SUM}()"
        if one.startswith("ttt_"):
            settings = bound.get("ttt")
            scope = f"{settings.scope}/" if isinstance(settings, Reference) and settings.scope else ""
            added.append(f"{_TTT}.config = {render(settings)}")
            if one == "ttt_mlp":
                added.append(f"{scope}models.ttt.config.TTTConfig.inner = 'mlp'")
            return f"@{_TTT}()"
        if isinstance(settings := bound.get(one), Reference):
            return render(settings)
        return _OF.get(one, repr(one))

    found = {one: part(one) for one in dict.fromkeys(names)}
    written = ", ".join(found[one] for one in names)
    return [f"{name} = {f'({written},)' if isinstance(value, tuple) else written}", *added]
