"""Decoders whose gin text names parts in the old spelling are those of the new one."""

import pytest

from core import identity
from launch.config import loader

HEAD = """from __gin__ import dynamic_registration
from models import block_sparse
from models import experts
from models import s5
from models import transformer
from models.ttt import config

include 'gin/quickstart.gin'

"""
TTT = "from models.ttt import mixer\nmixer.TTTMixer.config = @config.TTTConfig()\n"
PARTS = "from models import decoder_parts\nfrom models import parts\n"
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
            "mixer": "(@decoder_parts.Attention(), @block_sparse.BlockSparse())",
            "feed_forward": "(@decoder_parts.Mlp(), None)",
        },
    ),
    "experts": ({"experts": "@experts.Experts()"}, {"feed_forward": "@experts.Experts()"}),
    "experts by name": (
        {"experts": "@experts.Experts()", "feed_forward": "('mlp', 'experts')"},
        {"feed_forward": "(@decoder_parts.Mlp(), @experts.Experts())"},
    ),
    "ttt": ({"mixer": "'ttt_linear'", "ttt": "@config.TTTConfig()"}, {"mixer": "@mixer.TTTMixer()"}),
    "ttt_mlp": ({"mixer": "'ttt_mlp'", "ttt": "@config.TTTConfig()"}, {"mixer": "@mixer.TTTMixer()"}),
    "nothing": ({"experts": "None", "mixer": "'attention'"}, {}),
}
MORE = {
    "a sum": "parts.Sum.parts = (@decoder_parts.Attention(), @s5.S5())\n",
    "ttt_mlp": "config.TTTConfig.inner = 'mlp'\n",
}  # fmt: skip


NEEDED = {
    "s5.S5(": "s5.S5.states = 8\n",
    "BlockSparse(": "block_sparse.BlockSparse.window = 2\n",
    "Experts(": "experts.Experts.number = 4\nexperts.Experts.top_k = 2\n",
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
        tmp_path, new, more=(TTT if "ttt" in name else "") + (PARTS if "parts" in f"{new}{more}" else "") + more
    )
    assert identity.of(before.build().model) == identity.of(after.build().model)
    assert any("the next release will not accept" in note for note in before.notes)
    assert not any("the next release will not accept" in note for note in after.notes)


def test_flags_and_saved_texts_may_have_the_old_spelling(tmp_path):
    flags = ["from models import s5", "transformer.Transformer.s5 = @s5.S5()", "s5.S5.states = 8"]
    config = loader.load("gin/quickstart.gin", bindings=[*flags, "transformer.Transformer.mixer = 's5'"])
    assert config.build().model.mixer.states == 8
    again = loader.load("config.gin", text=config.text)
    assert identity.of(again.build().model) == identity.of(config.build().model)
    assert not again.notes or "will not accept" not in again.notes[0]
