"""`launch/run describe` says what a folder holds, without weights."""

import dataclasses
import json

import pytest

from core.errors import UserError
from core.hosts import exit_codes
from launch import __main__ as cli
from launch.cli import describe
from models.decoder.experts import Experts
from models.decoder.layer_inputs import LayerInputs
from models.decoder.layers import Attention, Mlp
from models.decoder.published import families
from models.decoder.transformer import Transformer
from models.mixers.latent_attention import LatentAttention

SIZES = {"vocab_size": 385, "embed_dim": 32, "mlp_dim": 48, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8}


@pytest.fixture
def described(tmp_path, capsys, monkeypatch):
    def run(model, family, *generations):
        monkeypatch.setattr(describe, "_GENERATIONS", generations)
        (tmp_path / "config.json").write_text(json.dumps(families.config(model, family)))
        assert cli.main(["describe", str(tmp_path), "--length", "64"]) == exit_codes.DONE
        return capsys.readouterr().out

    return run


def test_a_model_is_described_by_its_configuration(described):
    said = described(Transformer(**SIZES, num_layers=3), "llama", "v5e")
    layer, table = 32 * 8 * (4 + 2 + 2 + 4) + 3 * 32 * 48, 385 * 32
    total = 3 * (layer + 2 * 32) + 2 * table + 32
    assert "family      llama\n" in said
    assert f"parameters  {total:,}; a token is multiplied with {3 * layer + table:,}\n" in said
    assert "layers      3: Attention() + Mlp()\n" in said
    assert "cache       12 KiB for a row of 64 tokens, in bfloat16\n" in said  # 3 layers x 2 x 2 heads x 8 x 2 bytes
    assert " v5e    v5e-1: " in said


def test_rows_are_no_longer_than_the_model_has_positions():
    learned = Transformer(**SIZES, num_layers=1, positions="learned", max_positions=16)
    assert describe._length(learned, None) == 16
    with pytest.raises(UserError, match="--length 17: the model has 16 positions"):
        describe._length(learned, 17)
    assert describe._length(Transformer(**SIZES, num_layers=1), 4096) == 4096


@pytest.mark.slow
def test_slices_that_do_not_divide_the_width_are_left_out():
    """All of the state fits on 64 chips and more, over which 96 does not divide."""
    large = Transformer(**{**SIZES, "embed_dim": 96, "vocab_size": 2**28}, num_layers=1)
    assert describe._smallest(large, "v5e", length=8) == "none of 512 chips or fewer that divide the width"


def test_of_experts_those_count_that_a_token_uses(described):
    sparse = Transformer(**SIZES, num_layers=2, feed_forward=Experts(num_experts=8, top_k=2))
    said = described(sparse, "mixtral")
    assert f"a token is multiplied with {2 * (32 * 8 * 12 + 32 * 8 + 2 * 3 * 32 * 48) + 385 * 32:,}\n" in said


@pytest.mark.parametrize(
    ("layers", "said"),
    [("a", "1: a"), ("aaa", "3: a"), ("aab" * 4, "12: 2 x a, b; 4 times"), ("aabaa", "5: 2 x a, b; 1.67 times"),
     ("aaab", "4: 3 x a, b")],
)  # fmt: skip
def test_patterns_of_layers_are_counted(layers, said):
    assert describe._pattern(layers) == said


def test_parts_are_named_with_what_is_not_the_default():
    assert describe._part(Attention(window=512)) == "Attention(window=512)"


def test_a_folder_without_a_configuration_is_an_error(tmp_path, capsys):
    assert cli.main(["describe", str(tmp_path)]) == exit_codes.USER_ERROR
    assert "config.json" in capsys.readouterr().err


def test_inputs_of_layers_are_described_and_shared_keys_take_no_room_in_the_cache(described):
    """In both layers with keys: 2 heads of 8 with a window of 16 positions, and 2 of 16 without, for 64 positions."""
    usual = {"scale": 1.0, "qk_norm": True, "value_norm": True}
    near, far = Attention(**usual, window=16, rope_theta=1e4), Attention(**usual, head_dim=16)
    model = Transformer(
        **{**SIZES, "activation": "gelu_tanh", "post_norm": True, "layer_scale": True, "scaled_embedding": True},
        num_layers=4,
        tied=True,
        first_mixer=(near, far),
        first_feed_forward=(Mlp(), Mlp()),
        mixer=tuple(dataclasses.replace(part, shares_keys=True) for part in (near, far)),
        feed_forward=Mlp(mlp_dim=96),
        layer_inputs=LayerInputs(width=8),
    )
    said = described(model, "gemma4_text")
    assert "inputs      8 for each layer, from a table of 385 x 32\n" in said
    assert f"cache       {2 * 2 * 2 * (16 * 8 + 64 * 16) / 1024:.3g} KiB for a row of 64 tokens, in bfloat16\n" in said
    feed_forward, inputs = 3 * 32 * 48 * (2 + 4), 3 * 4 * 32 * 8
    queries, keys = 2 * 32 * 4 * (8 + 16) * 2, 2 * 32 * 2 * (8 + 16)
    assert f"a token is multiplied with {feed_forward + inputs + queries + keys + 385 * 32:,}\n" in said


@pytest.mark.slow
def test_first_layers_and_the_cache_of_latent_attention_are_described(described):
    """Adapters of attention are those of its own matrices."""
    latent = LatentAttention(latent_dim=16, plain_dim=8, rotary_dim=4, value_dim=8, query_latent_dim=16)
    experts = Experts(num_experts=4, top_k=2, mlp_dim=48, shared_mlp_dim=48, scores="sigmoid", has_correction=True)
    sizes = {**SIZES, "num_kv_heads": 4, "head_dim": 4}
    model = Transformer(**sizes, num_layers=4, mixer=latent, feed_forward=experts, first_feed_forward=(Mlp(),))
    said = described(model, "deepseek_v3")
    assert "layers      4: LatentAttention(" in said
    assert ") + Mlp(), 3 x LatentAttention(" in said
    assert "cache       10 KiB for a row of 64 tokens, in bfloat16\n" in said  # 4 layers x 20 x 2 bytes
