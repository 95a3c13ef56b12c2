"""Decoders whose gin text names parts in the old spelling are those of the new one."""

import pytest

from core import identity
from launch.config import ConfigError, loader
from models.decoder.layers import Attention, Mlp
from models.mixers.block_sparse import BlockSparse

HEAD = """from __gin__ import dynamic_registration
from models.mixers import block_sparse
from models.decoder import experts
from models.mixers import s5
from models.decoder import transformer
from models.ttt import config

include 'gin/quickstart.gin'

"""
TTT = "from models.ttt import mixer\nmixer.TTTMixer.config = @config.TTTConfig()\n"
PARTS = "from models.decoder import layers\nfrom models.decoder import parts\n"
SPELLINGS = {
    "s5": (
        {"mixer": "'s5'", "s5": "@s5.S5()"},
        {"mixer": "@s5.S5()"},
    ),
    "a sum": (
        {"mixer": "'attention+s5'", "feed_forward": "'s5'", "s5": "@s5.S5()"},
        {"mixer": "@parts.Sum()", "feed_forward": "@s5.S5()"},
    ),
    "a pattern": (
        {
            "mixer": "('attention', 'block_sparse')",
            "feed_forward": "('mlp', 'none')",
            "block_sparse": "@block_sparse.BlockSparse()",
        },
        {
            "mixer": "(@layers.Attention(), @block_sparse.BlockSparse())",
            "feed_forward": "(@layers.Mlp(), None)",
        },
    ),
    "experts": ({"experts": "@experts.Experts()"}, {"feed_forward": "@experts.Experts()"}),
    "experts by name": (
        {"experts": "@experts.Experts()", "feed_forward": "('mlp', 'experts')"},
        {"feed_forward": "(@layers.Mlp(), @experts.Experts())"},
    ),
    "ttt": ({"mixer": "'ttt_linear'", "ttt": "@config.TTTConfig()"}, {"mixer": "@mixer.TTTMixer()"}),
    "ttt_mlp": ({"mixer": "'ttt_mlp'", "ttt": "@config.TTTConfig()"}, {"mixer": "@mixer.TTTMixer()"}),
    "a window": ({"window": "16"}, {"mixer": "@layers.Attention()"}),
    "a window beside": ({"window": "16", "mixer": "'attention+s5'", "s5": "@s5.S5()"}, {"mixer": "@parts.Sum()"}),
    "a window and its base": ({"window": "16", "local_rope_theta": "100.0"}, {"mixer": "@layers.Attention()"}),
    "a base without a window": ({"local_rope_theta": "100.0"}, {}),
    "neutral values": (
        {"window": "None", "pattern": "()", "local_rope_theta": "None", "mixer": "@s5.S5()"},
        {"mixer": "@s5.S5()"},
    ),
    "windows": (
        {"window": "16", "pattern": "('local', 'global')", "local_rope_theta": "100.0"},
        {"mixer": "(@local/layers.Attention(), @layers.Attention())"},
    ),
    "norms and scores": (
        {"qk_norm": "True", "query_scale": "0.5", "attention_softcap": "30.0"},
        {"mixer": "@layers.Attention()"},
    ),
    "norms of both layers": (
        {"qk_norm": "True", "window": "16", "pattern": "('local', 'global')"},
        {"mixer": "(@local/layers.Attention(), @layers.Attention())"},
    ),
    "norms of two kinds of attention": (
        {"qk_norm": "True", "mixer": "('attention', 'block_sparse')", "block_sparse": "@block_sparse.BlockSparse()"},
        {"mixer": "(@layers.Attention(), @block_sparse.BlockSparse())"},
    ),
    "norms of no attention": (
        {"qk_norm": "True", "attention_softcap": "None", "mixer": "@s5.S5()"},
        {"mixer": "@s5.S5()"},
    ),
    "no norms": ({"qk_norm": "False", "query_scale": "None"}, {}),
    "nothing": ({"experts": "None", "mixer": "'attention'"}, {}),
}
MORE = {
    "a window": "layers.Attention.window = 16\n",
    "a window beside": "parts.Sum.parts = (@layers.Attention(), @s5.S5())\nlayers.Attention.window = 16\n",
    "a window and its base": "layers.Attention.window = 16\nlayers.Attention.rope_theta = 100.0\n",
    "windows": "local/layers.Attention.window = 16\nlocal/layers.Attention.rope_theta = 100.0\n",
    "norms and scores": "".join(
        f"layers.Attention.{line}\n" for line in ("qk_norm = True", "scale = 0.5", "softcap = 30.0")
    ),
    "norms of both layers": "local/layers.Attention.window = 16\nlayers.Attention.qk_norm = True\n",
    "norms of two kinds of attention": "layers.Attention.qk_norm = True\nblock_sparse.BlockSparse.qk_norm = True\n",
    "a sum": "parts.Sum.parts = (@layers.Attention(), @s5.S5())\n",
    "ttt_mlp": "config.TTTConfig.inner = 'mlp'\n",
}  # fmt: skip


NEEDED = {
    "s5.S5(": "s5.S5.states = 8\n",
    "BlockSparse(": "block_sparse.BlockSparse.window = 2\n",
    "Experts(": "experts.Experts.num_experts = 4\nexperts.Experts.top_k = 2\n",
    "TTT": "config.TTTConfig.num_heads = 4\nconfig.TTTConfig.head_dim = 32\n",
}


def load(tmp_path, bindings, *, more=""):
    file = tmp_path / "own.gin"
    lines = "".join(f"transformer.Transformer.{name} = {value}\n" for name, value in bindings.items())
    needed = "".join(statements for mark, statements in NEEDED.items() if mark in lines + more)
    file.write_text(HEAD + more + needed + lines)
    return loader.load(str(file))


@pytest.mark.parametrize("name", SPELLINGS)
def test_an_old_spelling_builds_the_same_model_and_says_the_new_one(name, tmp_path):
    old, new = SPELLINGS[name]
    before = load(tmp_path, old)
    more = MORE.get(name, "")
    after = load(
        tmp_path,
        new,
        more=(TTT if "ttt" in name else "")
        + (PARTS if "parts." in f"{new}{more}" or "layers." in f"{new}{more}" else "")
        + more,
    )
    assert identity.of(before.build().model) == identity.of(after.build().model)
    assert any("the next release will not accept" in note for note in before.notes)
    assert not any("the next release will not accept" in note for note in after.notes)


def test_flags_and_saved_texts_may_have_the_old_spelling(tmp_path):
    flags = ["from models.mixers import s5", "transformer.Transformer.s5 = @s5.S5()", "s5.S5.states = 8"]
    config = loader.load("gin/quickstart.gin", bindings=[*flags, "transformer.Transformer.mixer = 's5'"])
    assert config.build().model.mixer.states == 8
    again = loader.load("config.gin", text=config.text)
    assert identity.of(again.build().model) == identity.of(config.build().model)
    assert not again.notes or "will not accept" not in again.notes[0]


T = "transformer.Transformer"
EXPERTS, TTT_FILE = ("include 'gin/models/quickstart_experts.gin'",), ("include 'gin/models/quickstart_ttt.gin'",)
OWN = {
    "own experts": [
        f"{T}.experts = @experts.Experts()",
        "experts.Experts.num_experts = 4",
        "experts.Experts.top_k = 2",
    ],
    "own pattern": [
        f"{T}.feed_forward = ('mlp', 'experts')",
        f"{T}.experts = @experts.Experts()",
        "experts.Experts.num_experts = 4",
        "experts.Experts.top_k = 2",
    ],
    "own s5": [f"{T}.mixer = 's5'", f"{T}.s5 = @s5.S5()", "s5.S5.states = 8"],
    "former default": [f"{T}.feed_forward = None", f"{T}.experts = None"],
    "former default over": [
        "include 'gin/models/quickstart_experts.gin'",
        f"{T}.feed_forward = None",
        f"{T}.experts = None",
    ],
    "experts by default": [
        f"{T}.feed_forward = None",
        f"{T}.experts = @experts.Experts()",
        "experts.Experts.num_experts = 4",
        "experts.Experts.top_k = 2",
    ],
    "both": [f"{T}.experts = @experts.Experts()", f"{T}.feed_forward = 'mlp'", "experts.Experts.num_experts = 4"],
    "a misspelled macro": ["MIXER = 'atention'", f"{T}.mixer = %MIXER"],
    "own ttt": [
        f"{T}.mixer = 'ttt_linear'",
        f"{T}.ttt = @config.TTTConfig()",
        "config.TTTConfig.inner = 'mlp'",
        "config.TTTConfig.num_heads = 4",
        "config.TTTConfig.head_dim = 32",
    ],
}
MINE = (
    f"{T}.experts = @mine/experts.Experts()",
    "mine/experts.Experts.num_experts = 6",
    "mine/experts.Experts.top_k = 3",
)
BIG = (f"{T}.s5 = @big/s5.S5()", "big/s5.S5.states = 4")


def load_over(tmp_path, base, flags):
    """Loads flags over the quickstart, a file of the workspace, or own lines."""
    if base.endswith(".gin"):
        return loader.load(base, bindings=flags)
    (tmp_path / "own.gin").write_text(HEAD + "\n".join(OWN.get(base, [])) + "\n")
    return loader.load(str(tmp_path / "own.gin"), bindings=flags)


CHANGED = {  # what the model has: by a base, and flags over it
    "no experts, over the new spelling": ("quickstart", (*EXPERTS, f"{T}.experts = None"), {"feed_forward": Mlp()}),
    "no experts, over an old file": ("own experts", (f"{T}.experts = None",), {"feed_forward": Mlp()}),
    "no experts, where there are none": ("quickstart", (f"{T}.experts = None",), {"feed_forward": Mlp()}),
    "no settings of a part that is gone": (
        "own s5",
        (f"{T}.mixer = 'attention'", f"{T}.s5 = None"),
        {"mixer": Attention()},
    ),
    "no experts and the former default": ("former default", EXPERTS, {"feed_forward.num_experts": 8}),
    "no experts and the former default, over the new spelling": ("former default over", (), {"feed_forward": Mlp()}),
    "experts and the former default": ("experts by default", (), {"feed_forward.num_experts": 4}),
    "other experts, over the new spelling": ("quickstart", (*EXPERTS, *MINE), {"feed_forward.num_experts": 6}),
    "other experts, over an old file": ("own experts", MINE, {"feed_forward.num_experts": 6}),
    "other experts in a pattern": ("own pattern", MINE, {"feed_forward.1.num_experts": 6}),
    "other settings of a name": ("own s5", BIG, {"mixer.states": 4}),
    "the name of a mixer wins": ("own ttt", (), {"mixer.config.inner": "linear"}),
    "a flag names another one": ("own ttt", (f"{T}.mixer = 'ttt_mlp'",), {"mixer.config.inner": "mlp"}),
    "two names share settings": (
        "own ttt",
        (f"{T}.mixer = ('ttt_linear', 'ttt_mlp')",),
        {"mixer.0.config.inner": "linear", "mixer.1.config.inner": "mlp", "mixer.1.config.num_heads": 4},
    ),
    "two names share settings in a scope": (
        "own ttt",
        (
            f"{T}.mixer = ('ttt_linear', 'ttt_mlp')",
            f"{T}.ttt = @mine/config.TTTConfig()",
            "mine/config.TTTConfig.num_heads = 2",
        ),
        {"mixer.0.config.inner": "linear", "mixer.1.config.inner": "mlp", "mixer.1.config.num_heads": 2},
    ),
    "a name over the new spelling": (
        "quickstart",
        (*TTT_FILE, f"{T}.mixer = 'ttt_mlp'"),
        {"mixer.config.inner": "mlp", "mixer.config.num_heads": 4},
    ),
    "settings outside of the scope": (
        "quickstart",
        (
            "MODEL = @big/transformer.Transformer()",
            f"big/{T}.mixer = 's5'",
            f"{T}.s5 = @mine/s5.S5()",
            "mine/s5.S5.states = 4",
        ),
        {"mixer.states": 4},
    ),
    "names without imports": (
        "quickstart",
        (f"{T}.block_sparse = @block_sparse.BlockSparse()", f"{T}.mixer = ('attention', 'block_sparse')"),
        {"mixer.0": Attention(), "mixer.1": BlockSparse()},
    ),
    "no experts of a preset": (
        "quickstart",
        (
            "MODEL = @transformer.preset()",
            "transformer.preset.name = 'mixtral-8x7b'",
            "transformer.preset.experts = None",
        ),
        {"feed_forward": Mlp()},
    ),
}


@pytest.mark.parametrize("name", CHANGED)
def test_old_spellings_over_other_sources(name, tmp_path):
    base, flags, expected = CHANGED[name]
    model = load_over(tmp_path, base, list(flags)).build().model
    for path, value in expected.items():
        found = model
        for step in path.split("."):
            found = found[int(step)] if step.isdigit() else getattr(found, step)
        assert found == value, path


MACROS = {
    "experts": (["EXPERTS = @experts.Experts()", f"{T}.experts = %EXPERTS"], "feed_forward.num_experts", 4),
    "no experts": (["EXPERTS = None", f"{T}.experts = %EXPERTS"], "feed_forward", Mlp()),
    "settings": (["S5 = @s5.S5()", f"{T}.s5 = %S5", f"{T}.mixer = 's5'"], "mixer.states", 8),
    "a name": (["MIXER = %OTHER", "OTHER = 's5'", f"{T}.mixer = %MIXER"], "mixer.states", 8),
    "a name in a tuple": (["A = 'attention'", f"{T}.mixer = (%A, 's5')"], "mixer.1.states", 8),
    "a part in a tuple": (["A = @s5.S5()", f"{T}.mixer = ('attention', %A)"], "mixer.1.states", 8),
}


@pytest.mark.parametrize("name", MACROS)
def test_macros_may_stand_for_old_spellings(name, tmp_path):
    lines, path, expected = MACROS[name]
    text = "\n".join(lines)
    needed = [NEEDED["Experts("]] if "Experts(" in text else [NEEDED["s5.S5("]] if "s5" in text.lower() else []
    (tmp_path / "own.gin").write_text(HEAD + "\n".join([*lines, *needed]) + "\n")
    found = loader.load(str(tmp_path / "own.gin")).build().model
    for step in path.split("."):
        found = found[int(step)] if step.isdigit() else getattr(found, step)
    assert found == expected


HYBRID = "gin/long/text/hybrid.gin"
MISTAKES = {  # each with the flags that have a mistake, and the new spelling in its fix
    "no settings of a part in use": (HYBRID, [f"{T}.s5 = None"], {1: f"{T}.mixer"}),
    "no settings of a name in use": ("own s5", [f"{T}.s5 = None"], {1: f"{T}.mixer"}),
    "no experts in a pattern": ("own pattern", [f"{T}.experts = None"], {1: f"{T}.feed_forward"}),
    "settings over the new spelling": (HYBRID, [*BIG], {1: "@big/s5.S5()"}),
    "settings of no name": ("quickstart", [f"{T}.s5 = @s5.S5()", "s5.S5.states = 8"], {1: "@s5.S5()"}),
    "a misspelled mixer": ("quickstart", [f"{T}.mixer = 'atention'"], {1: "@layers.Attention()"}),
    "a misspelled feed-forward": ("quickstart", [f"{T}.feed_forward = ('mlp', 'expert')"], {1: "@experts.Experts()"}),
    "experts beside a feed-forward": ("both", [], {10: "@experts.Experts()"}),
    "a misspelled mixer in a macro": ("a misspelled macro", [], {10: "@layers.Attention()"}),
    "a feed-forward as a mixer": ("quickstart", [f"{T}.mixer = 'attention+mlp'"], {1: ""}),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_what_has_no_new_spelling_is_a_mistake_that_says_what_to_write(name, tmp_path):
    base, flags, expected = MISTAKES[name]
    with pytest.raises(ConfigError) as error:
        load_over(tmp_path, base, flags)
    where = "--gin #" if flags else f"{tmp_path}/own.gin:"
    assert [p.place for p in error.value.problems] == [f"{where}{number}" for number in expected]
    for problem, fix in zip(error.value.problems, expected.values(), strict=True):
        assert problem.actual in (flags or OWN[base])
        assert fix in problem.fix


def test_flags_may_remove_a_window_by_its_old_name(tmp_path):
    old = {"window": "16", "pattern": "('local', 'global')", "local_rope_theta": "100.0"}
    (tmp_path / "own.gin").write_text(HEAD + "".join(f"{T}.{name} = {value}\n" for name, value in old.items()))
    flags = [f"{T}.window = None", f"{T}.pattern = ()"]
    assert loader.load(str(tmp_path / "own.gin"), bindings=flags).build().model.mixer == Attention()


def test_a_former_default_before_another_field_is_dropped():
    flags = [f"{T}.attention_softcap = None", f"{T}.qk_norm = True"]
    assert loader.load("gin/quickstart.gin", bindings=flags).build().model.mixer == Attention(qk_norm=True)


@pytest.mark.parametrize(
    ("flags", "wrong"),
    [
        ([f"{T}.pattern = ('local', 'global')", f"a/{T}.window = 8"], "other scopes"),
        (
            [
                "MODEL = @transformer.preset()",
                "transformer.preset.name = 'gemma-3-1b'",
                "transformer.preset.window = 8",
            ],
            "preset",
        ),
        (
            [
                "from models.decoder import layers",
                f"{T}.mixer = @layers.Attention()",
                f"{T}.pattern = ('local', 'global')",
            ],
            "@local/layers.Attention()",
        ),
        ([f"{T}.pattern = ('near',)"], "'local' or 'global'"),
        (
            [
                "MODEL = @transformer.preset()",
                "transformer.preset.name = 'qwen3-0.6b'",
                "transformer.preset.qk_norm = False",  # which the preset has
            ],
            "layers.Attention.qk_norm",
        ),
        ([f"{T}.qk_norm = True", f"x/{T}.qk_norm = False"], "other scopes"),
        (
            [
                "from models.decoder import layers",
                f"x/{T}.mixer = (@local/layers.Attention(), @layers.Attention())",
                f"x/{T}.qk_norm = True",
            ],
            "scopes of their own",
        ),
    ],
)
def test_a_pattern_that_cannot_be_replaced_is_a_mistake(flags, wrong):
    with pytest.raises(ConfigError) as error:
        loader.load("gin/quickstart.gin", bindings=flags)
    problem = error.value.problems[-1]
    assert problem.place == f"--gin #{len(flags)}"
    assert problem.actual == flags[-1]
    assert wrong in problem.what + problem.fix + problem.expected


def test_a_note_says_the_imports_that_the_new_spelling_needs(tmp_path):
    (note,) = load(tmp_path, SPELLINGS["a sum"][0]).notes
    assert "add from models.decoder import layers" in note
    assert "add from models.decoder import parts" in note
    assert "import s5" not in note
    (note,) = loader.load("gin/quickstart.gin", bindings=[f"{T}.experts = None", *EXPERTS]).notes
    assert "import" not in note  # flags need none
