"""A preset for long context: block-sparse attention, and S5 in place of feed-forward layers."""

from models.mixers.block_sparse import BlockSparse
from models.mixers.s5 import S5

FIELDS = {
    "num_layers": 36,
    "embed_dim": 1536,
    "mlp_dim": 4096,
    "num_heads": 24,
    "num_kv_heads": 24,
    "tied": True,
    "mixer": BlockSparse(block=128, global_blocks=1, window=3, random=3),
    "feed_forward": S5(states=768, min_dt=2**-16, max_dt=0.1),
}
