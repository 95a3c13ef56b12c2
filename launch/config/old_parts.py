"""Old spellings of the parts of a decoder's layers, such as the name 'attention+s5'.

A part is an object that makes one piece of a layer, such as attention or an MLP. Names become references to parts, with
the settings that belong to them.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from launch.config.statements import Binding, ConfigProblem, Reference, expand, leaves, nearest, render, scoped

_MLP, _EXPERTS = "models.decoder.layers.Mlp", "models.decoder.experts.Experts"
_SUM = "models.decoder.parts.Sum"
_TTT, _TTT_CONFIG = "models.ttt.mixer.TTTMixer", "models.ttt.config.TTTConfig"
_CLASSES = {
    "attention": "models.decoder.layers.Attention",
    "block_sparse": "models.mixers.block_sparse.BlockSparse",
    "s5": "models.mixers.s5.S5",
    "ttt_linear": _TTT,
    "ttt_mlp": _TTT,
    "mlp": _MLP,
    "experts": _EXPERTS,
    "none": "",
}
# Former fields of the decoder: those of all heads, and those of layers with a window.
_OF_HEADS = {"qk_norm": "qk_norm", "query_scale": "scale", "attention_softcap": "softcap"}
_OF_ATTENTION = {"window": "window", "local_rope_theta": "rope_theta", "pattern": "", **_OF_HEADS}
_LOCAL = "local"  # scope of the attention with a window, if only some layers have one
_NAMES = {
    "mixer": ("attention", "block_sparse", "s5", "ttt_linear", "ttt_mlp"),
    "feed_forward": ("mlp", "experts", "s5", "none"),
}
_FIELDS = {"experts": ("experts",), "block_sparse": ("block_sparse",), "s5": ("s5",), "ttt": ("ttt_linear", "ttt_mlp")}

# Gets a binding with an old name or value, and all bindings in order. Returns the statements that replace the binding,
# first the one with its new value (an empty list removes the binding); None if it is current; or a problem if nothing
# can replace it.
Rewrite = Callable[[Binding, Sequence[Binding]], Sequence[str] | ConfigProblem | None]


def values(constructor: str) -> dict[str, Rewrite]:
    """Returns functions that replace old values of a decoder's parameters, by parameter."""
    return {f"{constructor}.{slot}": lambda old, bindings: _Decoder(old, bindings).named() for slot in _NAMES}


def former(constructor: str) -> dict[str, Rewrite]:
    """Returns functions that replace bindings of a decoder's former fields, by field."""
    found: dict[str, Rewrite] = {
        f"{constructor}.{field}": lambda old, bindings: _Decoder(old, bindings).settings() for field in _FIELDS
    }
    found |= {f"{constructor}.{field}": _of_attention for field in _OF_ATTENTION}
    return {**found, f"{constructor}.experts": lambda old, bindings: _Decoder(old, bindings).experts()}


def _of_attention(old: Binding, bindings: Sequence[Binding]) -> Sequence[str] | ConfigProblem:
    of_decoder = [b for b in bindings if b.selector == old.selector]
    fields = [b for b in of_decoder if b.parameter in _OF_ATTENTION and b.scope == old.scope]
    mixers = [b for b in of_decoder if b.parameter == "mixer"]
    macros = {b.name: b for b in bindings if b.is_macro}
    found = {b.parameter: expand(b.value, macros) for b in fields}  # the last ones apply
    is_default = not found[old.parameter]  # None, () and False were the defaults
    same = [old.parameter] if is_default else ["mixer", *_OF_ATTENTION]
    references = [leaf for b in mixers for leaf in leaves(expand(b.value, macros)) if isinstance(leaf, Reference)]
    short, new = _short(old.selector), _OF_ATTENTION[old.parameter]
    example = "(@local/layers.Attention(), @layers.Attention())"
    what = ""
    if old.selector.endswith(".preset"):
        what = "and the preset has a mixer of its own"
    elif any(b.scope != old.scope and expand(b.value, macros) for b in of_decoder if b.parameter in same):
        what = "and other scopes bind it or the mixer, too"
    elif is_default:
        return []
    elif mixers and found.get("pattern"):
        what = "and the layers have a mixer"
    elif old.scope and any(reference.scope for reference in references):
        what = "and the parts of the mixer have scopes of their own"
    if what:
        if old.parameter in _OF_HEADS:
            example = "@layers.Attention()"
        if new:
            example += f", with layers.Attention.{new} = {render(old.value)}"
        fix = f"write the attention of the layers in {short}.mixer, such as {example}"
        return old.problem(f"{short}.{old.parameter} is an old name, {what}", fix=fix)
    attention, mixer = _CLASSES["attention"], f"{old.selector}.mixer"
    usual, local = (scoped(scope, attention) for scope in (old.scope, scoped(old.scope, _LOCAL)))
    if old.parameter == "pattern":
        pattern = found["pattern"]
        if unknown := [kind for kind in leaves(pattern) if kind not in ("local", "global")]:
            return old.problem(f"{unknown[0]!r} is no kind of layer", expected="'local' or 'global'")
        parts = (f"@{local}(), " if kind == "local" else f"@{attention}(), " for kind in pattern)
        return [f"{scoped(old.scope, mixer)} = ({''.join(parts)})"] if pattern else []
    if not found.get("window") and old.parameter == "local_rope_theta":
        return []  # `local_rope_theta` was for layers with a window
    if old.parameter not in _OF_HEADS:
        homes = [local if found.get("pattern") else usual]
    else:
        homes = _heads(old, bindings, mixers) if mixers else [usual]
    values = [f"{home}.{_OF_ATTENTION[old.parameter]} = {render(old.value)}" for home in homes]
    own = [b for b in fields if b.parameter != "local_rope_theta" and expand(b.value, macros)]
    has_mixer = mixers or found.get("pattern") or old is not own[0]
    return values if has_mixer else [f"{scoped(old.scope, mixer)} = @{attention}()", *values]


def _heads(old: Binding, bindings: Sequence[Binding], mixers: Sequence[Binding]) -> list[str]:
    decoder, known = _Decoder(old, bindings), ("attention", "block_sparse")
    parts = dict.fromkeys(part for binding in mixers for part in decoder.parts(binding))
    classes = [_CLASSES.get(part, part) for part in parts]
    return [scoped(old.scope, name) for name in dict.fromkeys(classes) if name in [_CLASSES[one] for one in known]]


class _Decoder:
    def __init__(self, old: Binding, bindings: Sequence[Binding]):
        self._old, self._all = old, bindings
        self._macros = {b.name: b for b in bindings if b.is_macro}
        same = [b for b in bindings if b.selector == old.selector and b.parameter in (*_NAMES, *_FIELDS)]
        beside = {(b.file, b.scope) for b in same if b.parameter == "experts"}
        # None was the default of `feed_forward` where `experts` was a field; now it means that there is none.
        former = [b for b in same if b.parameter == "feed_forward" and b.value is None and (b.file, b.scope) in beside]
        self._is_former_default = any(b is old for b in former)
        self._same = [b for b in same if b not in former]

    def named(self) -> Sequence[str] | ConfigProblem | None:
        old, value = self._old, self._value(self._old)
        if self._is_former_default:
            return []
        names = [name for text in _texts(value) for name in text.split("+")]
        if wrong := [name for name in names if name not in _NAMES[old.parameter]]:
            return self._unknown(wrong[0])
        if not names:
            return None
        added: list[str] = []
        if not isinstance(value, tuple):
            return [f"{old.selector}.{old.parameter} = {self._part(value, added)}", *dict.fromkeys(added)]
        parts = {text: self._part(text, added) for text in dict.fromkeys(_texts(value))}
        pairs = zip(old.value, value, strict=True)
        written = "".join(f"{parts[now] if isinstance(now, str) else render(was)}, " for was, now in pairs)
        return [f"{old.selector}.{old.parameter} = ({written})", *dict.fromkeys(added)]

    def settings(self) -> Sequence[str] | ConfigProblem:
        old, names = self._old, _FIELDS[self._old.parameter]
        if self._value(old) is not None:
            return [] if self._is_named(names) else self._without_effect()
        merged = self._merged()
        if merged.get(old.parameter) is not old:
            return []  # a later binding says otherwise
        parts = [part for slot in _NAMES if slot in merged for part in self.parts(merged[slot])]
        is_used = any(part in (*names, *(_CLASSES[name] for name in names)) for part in parts)
        return self._still_used() if is_used else []

    def experts(self) -> Sequence[str] | ConfigProblem:
        """Replaces the field `experts`, which was used in place of `feed_forward` unless that was set too."""
        old, is_none = self._old, self._value(self._old) is None
        if self._is_named(("experts",)):
            return [] if not is_none or self._merged().get("experts") is not old else self._still_used()
        if any((b.parameter, b.file, b.scope) == ("feed_forward", old.file, old.scope) for b in self._same):
            return [] if is_none else self._without_effect()  # `feed_forward` in the same source decides
        before = self._merged(before=old.order)
        both = [before[name] for name in ("feed_forward", "experts") if name in before]
        last = max(both, key=lambda b: b.order, default=None)
        if not is_none:
            is_pattern = last is not None and isinstance(self._value(last), tuple)
            return self._without_effect() if is_pattern else [f"{old.selector}.feed_forward = {render(old.value)}"]
        if last is None:
            parts = [_EXPERTS] if old.selector.endswith(".preset") else []  # a preset may have experts
        else:
            parts = [_EXPERTS] if self._is_set(last, "experts") else self.parts(last)
        if parts == [_EXPERTS]:
            return [f"{old.selector}.feed_forward = @{_MLP}()"]
        known = (*_NAMES["feed_forward"], _MLP, _CLASSES["s5"])
        return [] if all(part in known for part in parts) else self._still_used()

    def _part(self, text: str, added: list[str]) -> str:
        if "+" in text:
            number = sum(f"{_SUM}.parts" in statement for statement in added)
            scope = scoped(self._old.scope, f"sum{number}") if number else ""
            parts = ", ".join(self._part(name, added) for name in text.split("+"))
            added.append(f"{scoped(scope or self._old.scope, _SUM)}.parts = ({parts})")
            return f"@{scoped(scope, _SUM)}()"
        if text.startswith("ttt_"):
            return self._ttt(text, added)
        settings = self._merged().get(text)
        if settings is not None and isinstance(self._value(settings), Reference):
            return render(settings.value)
        return f"@{_CLASSES[text]}()" if _CLASSES[text] else "None"

    def _ttt(self, name: str, added: list[str]) -> str:
        inner, outside = name.removeprefix("ttt_"), self._old.scope
        named = {one for b in self._same for text in _texts(self._value(b)) for one in text.split("+")}
        said = [b for b in self._all if (b.selector, b.parameter) == (_TTT_CONFIG, "inner")]
        scope = scoped(outside, name) if said or {"ttt_linear", "ttt_mlp"} <= named else ""
        bound = [b for b in self._all if (b.selector, b.parameter) == (_TTT, "config")]
        former = self._merged().get("ttt")
        settings = next((v for b in (former, *bound[-1:]) if b and isinstance(v := self._value(b), Reference)), None)
        home = settings.scope if settings else ""
        if scope and home and settings:
            home = scoped(home, name)
            added.append(f"{scope}/{_TTT}.config = @{home}/{settings.selector}()")
        elif former and isinstance(self._value(former), Reference):
            added.append(f"{scoped(outside, _TTT)}.config = {render(former.value)}")
        if scope or inner != "linear":
            added.append(f"{scoped(home or scope or outside, _TTT_CONFIG)}.inner = '{inner}'")
        return f"@{scoped(scope, _TTT)}()"

    def _value(self, binding: Binding) -> Any:
        return expand(binding.value, self._macros)

    def _is_set(self, binding: Binding, parameter: str) -> bool:
        return binding.parameter == parameter and self._value(binding) is not None

    def _merged(self, *, before: int | None = None) -> dict[str, Binding]:
        seen = [b for b in self._same if _is_within(self._old.scope, b.scope) and (before is None or b.order < before)]
        return {b.parameter: b for b in sorted(seen, key=lambda b: len(b.scope))}

    def _is_named(self, names: Sequence[str]) -> bool:
        old = self._old
        slots = [b for b in self._same if b.parameter in _NAMES and _is_within(b.scope, old.scope)]
        last = {b.name: b for b in slots if b.order < old.order}
        near = [*last.values(), *(b for b in slots if b.order > old.order or b.file == old.file)]
        return any(name in names for b in near for text in _texts(self._value(b)) for name in text.split("+"))

    def parts(self, slot: Binding) -> list[str]:
        return list(self._found(self._value(slot)))

    def _found(self, value: Any) -> Iterator[str]:
        for leaf in leaves(value):
            if isinstance(leaf, Reference) and leaf.selector == _SUM:
                sums = {b.name: b for b in self._all if (b.selector, b.parameter) == (_SUM, "parts")}
                yield from itertools.chain.from_iterable(self._found(self._value(b)) for b in sums.values())
            elif isinstance(leaf, Reference):
                yield leaf.selector
            elif isinstance(leaf, str):
                yield from leaf.split("+")

    def _unknown(self, name: str) -> ConfigProblem:
        slot = self._old.parameter
        close = "" if name in _CLASSES else nearest(name, _NAMES[slot])
        expected, fix = f"a part such as {'@s5.S5()' if slot == 'mixer' else '@experts.Experts()'}", ""
        if close and (new := _CLASSES[close]):
            package, module, _ = new.rsplit(".", 2)
            fix = f"write @{_short(new)}(), for which the old name is '{close}' (from {package} import {module})"
        elif close:
            fix = f"write None, for which the old name is '{close}'"
        return self._old.problem(f"'{name}' is not a {slot.replace('_', '-')}", expected=expected, fix=fix)

    def _without_effect(self) -> ConfigProblem:
        old, value = self._old, self._value(self._old)
        short = _short(old.selector)
        part = _short(_CLASSES.get(old.parameter, _TTT_CONFIG))
        if isinstance(value, Reference):
            part = scoped(value.scope, _short(value.selector))
        if old.parameter == "ttt":
            fix = f"write mixer.TTTMixer.config = @{part}(), and {short}.mixer = @mixer.TTTMixer()"
        elif old.parameter == "experts":
            fix = f"write @{part}() in {short}.feed_forward"
        else:
            fix = f"write @{part}() where {short}.mixer, {short}.feed_forward or parts.Sum.parts has the part"
        what = f"{short}.{old.parameter} is an old name, and has no effect beside the mixer and feed_forward given"
        return old.problem(what, fix=fix)

    def _still_used(self) -> ConfigProblem:
        old, short = self._old, _short(self._old.selector)
        slot = "feed_forward" if old.parameter == "experts" else "mixer"
        example = f"@{_short(_MLP if slot == 'feed_forward' else _CLASSES['attention'])}()"
        what = f"{short}.{old.parameter} is an old name, and None does not remove the part from {short}"
        return old.problem(what, fix=f"write {short}.{slot} without the part, such as {short}.{slot} = {example}")


def _texts(value: Any) -> list[str]:
    return [leaf for leaf in (value if isinstance(value, tuple) else (value,)) if isinstance(leaf, str)]


def _is_within(scope: str, outer: str) -> bool:
    return not outer or f"{scope}/".startswith(f"{outer}/")


def _short(name: str) -> str:
    return ".".join(name.split(".")[-2:])
