"""Training steps of one small Llama by different programs, each in a process of its own.

`tests.lab.peers` starts this file with the Python of the environment that has the program:

    python peer_steps.py PROGRAM DEVICES DTYPE

It compiles, takes one step, and answers with a line of JSON. Then it reads lines from standard input, each a number of
steps, and answers with the mean seconds of a step, those of processors, its page faults, and the peak of its resident
memory. Every program trains the same decoder with the same AdamW on fixed rows; parameters, softmax, norms and losses
are float32.

B batch, T length, D embed, H query heads, N key/value heads, G = H / N, K head_dim, F mlp, V vocab, L layers.
"""

import functools
import json
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

VOCAB, LAYERS, EMBED, MLP, HEADS, KV_HEADS, HEAD_DIM = 3072, 6, 256, 768, 4, 2, 64  # 6.3M parameters
ROWS, LENGTH = 8, 256
RATE, B1, B2, EPS, DECAY, CLIP = 1e-4, 0.9, 0.95, 1e-8, 0.1, 1.0
THETA, NORM_EPS = 10000.0, 1e-5

Step = Callable[[], Any]  # dispatches a step; the result has its loss
Wait = Callable[[Any], Any]  # waits for a step


def ours(devices: int, dtype: str) -> tuple[Step, Wait, str]:
    """The jitted step of an experiment, as the trainer calls it."""
    import jax

    from core.optimizers import adamw, constant
    from launch.experiment import Experiment
    from models.decoder.transformer import Transformer
    from parallel import strategies
    from tasks import synthetic

    sizes = {"num_layers": LAYERS, "embed_dim": EMBED, "mlp_dim": MLP, "num_heads": HEADS, "num_kv_heads": KV_HEADS}
    task = synthetic.random_tokens(vocab_size=VOCAB, length=LENGTH, num_streams=ROWS)
    program = Experiment(
        slice=f"cpu:{devices}x1",
        strategy=strategies.fsdp(),
        model=Transformer(vocab_size=VOCAB, head_dim=HEAD_DIM, dtype=dtype, **sizes),
        task=task,
        optimizer=adamw(learning_rate=constant(RATE), weight_decay=DECAY, clip_norm=CLIP),
        batch_size=ROWS,
        total_steps=1000,
    ).bind(jax.devices())
    state, batch = program.init(), program.put(next(task.train(program.partitioner.data_layout(ROWS), seed=0)))

    def step() -> Any:
        nonlocal state
        state, metrics = program.train_step(state, batch)
        return metrics["loss"]

    return step, jax.block_until_ready, f"JAX {jax.__version__}"


def bare(devices: int, dtype: str, *, unrolls: bool) -> tuple[Step, Wait, str]:
    """A step written by hand in JAX; on several devices parameters, their state and rows are sharded (FSDP)."""
    import jax
    import jax.numpy as jnp
    import optax
    from jax.sharding import NamedSharding, PartitionSpec

    shapes = {
        "attention_norm": (EMBED,),
        "query": (EMBED, HEADS * HEAD_DIM),
        "key": (EMBED, KV_HEADS * HEAD_DIM),
        "value": (EMBED, KV_HEADS * HEAD_DIM),
        "output": (HEADS * HEAD_DIM, EMBED),
        "mlp_norm": (EMBED,),
        "gate": (EMBED, MLP),
        "up": (EMBED, MLP),
        "down": (MLP, EMBED),
    }
    automatic = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((devices,), ("fsdp",), automatic, devices=jax.devices())
    place = functools.partial(NamedSharding, mesh)
    rows = place(PartitionSpec("fsdp"))

    def split(x: jax.Array) -> jax.Array:
        return jax.lax.with_sharding_constraint(x, rows)  # otherwise XLA splits the width, and sums in every product

    def stored(*spec: str | None) -> NamedSharding:
        return place(PartitionSpec(*spec))

    at = {
        "layers": {name: stored(None, "fsdp") if len(shape) > 1 else stored() for name, shape in shapes.items()},
        "embedding": stored(None, "fsdp"),
        "final_norm": stored(),
        "unembedding": stored("fsdp"),
    }

    def init(key: jax.Array) -> Any:
        keys = iter(jax.random.split(key, len(shapes) + 2))

        def matrix(*shape: int) -> jax.Array:
            return jax.random.normal(next(keys), shape) * shape[-2] ** -0.5

        layers = {n: matrix(LAYERS, *s) if len(s) > 1 else jnp.ones((LAYERS, *s)) for n, s in shapes.items()}
        outer = {"embedding": matrix(VOCAB, EMBED), "unembedding": matrix(EMBED, VOCAB)}
        return {"layers": layers, "final_norm": jnp.ones(EMBED), **outer}

    def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        return (wide * jax.lax.rsqrt(jnp.mean(wide**2, -1, keepdims=True) + NORM_EPS) * scale).astype(x.dtype)

    def rotated(x: jax.Array, turns: tuple[jax.Array, jax.Array]) -> jax.Array:
        (cos, sin), (a, b) = turns, jnp.split(x.astype(jnp.float32), 2, -1)
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)

    def attention(x: jax.Array, w: Any, turns: tuple[jax.Array, jax.Array], visible: jax.Array) -> jax.Array:
        q = rotated((x @ w["query"]).reshape(*x.shape[:2], HEADS, HEAD_DIM), turns)
        k = rotated((x @ w["key"]).reshape(*x.shape[:2], KV_HEADS, HEAD_DIM), turns)
        v = (x @ w["value"]).reshape(*x.shape[:2], KV_HEADS, HEAD_DIM)
        q = q.reshape(*x.shape[:2], KV_HEADS, HEADS // KV_HEADS, HEAD_DIM)
        scores = jnp.einsum("btngk,bsnk->bngts", q, k, preferred_element_type=jnp.float32) * HEAD_DIM**-0.5
        weights = jax.nn.softmax(jnp.where(visible, scores, -1e30), axis=-1).astype(x.dtype)
        return jnp.einsum("bngts,bsnk->btngk", weights, v).reshape(*x.shape[:2], -1) @ w["output"]

    def loss(params: Any, ids: jax.Array, targets: jax.Array) -> jax.Array:
        narrow = jax.tree.map(lambda a: a.astype(dtype) if a.ndim > 1 else a, params)
        x = split(narrow["embedding"][ids])
        angles = jnp.arange(LENGTH)[:, None] * THETA ** (-jnp.arange(0, HEAD_DIM, 2) / HEAD_DIM)
        turns = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
        visible = jnp.tril(jnp.ones((LENGTH, LENGTH), bool))

        def layer(x: jax.Array, w: Any) -> tuple[jax.Array, None]:
            x += attention(norm(x, w["attention_norm"]), w, turns, visible)
            y = norm(x, w["mlp_norm"])
            return split(x + (jax.nn.silu(y @ w["gate"]) * (y @ w["up"])) @ w["down"]), None

        if unrolls:
            for i in range(LAYERS):
                x, _ = layer(x, jax.tree.map(lambda a, i=i: a[i], narrow["layers"]))
        else:
            x, _ = jax.lax.scan(layer, x, narrow["layers"])
        logits = jnp.matmul(norm(x, params["final_norm"]), narrow["unembedding"], preferred_element_type=jnp.float32)
        return jnp.mean(optax.losses.softmax_cross_entropy_with_integer_labels(logits, targets))

    optimizer = optax.chain(optax.clip_by_global_norm(CLIP), optax.adamw(RATE, B1, B2, EPS, weight_decay=DECAY))

    def start(key: jax.Array) -> tuple[Any, Any]:
        params = jax.lax.with_sharding_constraint(init(key), at)
        return params, optimizer.init(params)

    @functools.partial(jax.jit, donate_argnums=0)
    def train(state: tuple[Any, Any], ids: jax.Array, targets: jax.Array) -> tuple[tuple[Any, Any], jax.Array]:
        params, moments = state
        found, grads = jax.value_and_grad(loss)(params, ids, targets)
        updates, moments = optimizer.update(jax.lax.with_sharding_constraint(grads, at), moments, params)
        return (jax.lax.with_sharding_constraint(optax.apply_updates(params, updates), at), moments), found

    state = jax.jit(start)(jax.random.key(0))
    ids, targets = jax.device_put(tuple(_tokens()), rows)

    def step() -> Any:
        nonlocal state
        state, found = train(state, ids, targets)
        return found

    return step, jax.block_until_ready, f"JAX {jax.__version__}"


def transformers(devices: int, dtype: str) -> tuple[Step, Wait, str]:
    """The Llama of transformers with PyTorch's fused AdamW and its fused attention, eager."""
    import torch
    import transformers

    assert devices == 1
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=EMBED,
        intermediate_size=MLP,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        rms_norm_eps=NORM_EPS,
        rope_theta=THETA,
    )
    model = transformers.LlamaForCausalLM(config).train()
    about = {"lr": RATE, "betas": (B1, B2), "eps": EPS, "weight_decay": DECAY, "fused": True}
    optimizer = torch.optim.AdamW(model.parameters(), **about)
    ids, targets = map(torch.tensor, _tokens())

    def step() -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == "bfloat16"):
            logits = model(input_ids=ids, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten().long())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    threads = f"{torch.get_num_threads()} threads"
    return (
        step,
        lambda loss: loss.item(),
        f"transformers {transformers.__version__}, torch {torch.__version__}, {threads}",
    )


def maxtext(devices: int, dtype: str) -> tuple[Step, Wait, str]:
    """MaxText's Llama and train step; on several devices with its FSDP.

    It keeps all activations and has no loop over layers, like ours on CPUs. Its defaults are to keep none, and a loop.
    """
    import jax
    import numpy as np
    from flax import linen, nnx
    from maxtext.trainers.pre_train import train
    from maxtext.utils import sharding, train_utils

    settings = {
        "decoder_block": "llama2",
        "vocab_size": VOCAB,
        "base_num_decoder_layers": LAYERS,
        "base_emb_dim": EMBED,
        "base_mlp_dim": MLP,
        "base_num_query_heads": HEADS,
        "base_num_kv_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "rope_max_timescale": int(THETA),
        "normalization_layer_epsilon": NORM_EPS,
        "enable_dropout": False,
        "dtype": dtype,
        "float32_logits": True,  # the softmax of attention
        "attention": "dot_product",
        "scan_layers": False,
        "remat_policy": "none",
        "learning_rate": RATE,
        "learning_rate_final_fraction": 1.0,
        "warmup_steps_fraction": 0.0,
        "adam_b1": B1,
        "adam_b2": B2,
        "adam_eps": EPS,
        "adam_weight_decay": DECAY,
        "gradient_clipping_threshold": CLIP,
        "max_target_length": LENGTH,
        "per_device_batch_size": ROWS // devices,
        "steps": 1000,
        "packing": False,
        "dataset_type": "synthetic",
        "hardware": "cpu",
        "skip_jax_distributed_system": True,
        "jax_cache_dir": "",
        "enable_checkpointing": False,
        "log_config": False,
        "run_name": "peer",
        "base_output_directory": "unused",
    }
    config, recorder = train.initialize(["", *(f"{key}={value}" for key, value in settings.items())])
    _, _, places, _, mesh, *_, state = train_utils.setup_train_loop(config, recorder)
    graph, state = nnx.split(state)
    at, places = sharding.maybe_update_params_sharding_with_opt(config, places)
    functions = train.train_step, train.eval_step, None
    trains, _ = train_utils.jit_train_and_eval_step(config, graph, mesh, state, places, *functions, at)

    ids, targets = _tokens()
    positions, ones = np.broadcast_to(np.arange(LENGTH, dtype=np.int32), ids.shape), np.ones_like(ids)
    batch = {"inputs": ids, "targets": targets}
    batch |= {f"{name}_position": positions for name in ("inputs", "targets")}
    batch |= {f"{name}_segmentation": ones for name in ("inputs", "targets")}
    batch = jax.device_put(batch, sharding.get_input_data_sharding(config, mesh))

    def step() -> Any:
        nonlocal state
        with jax.set_mesh(mesh), linen.logical_axis_rules(config.logical_axis_rules):
            state, metrics = trains(state, batch)
        return metrics["scalar"]["learning/loss"]

    return step, jax.block_until_ready, f"MaxText {metadata.version('maxtext')}, JAX {jax.__version__}"


def levanter(devices: int, dtype: str) -> tuple[Step, Wait, str]:
    """Levanter's Llama and the step of its trainer, which waits for the loss; on several devices with its FSDP.

    It keeps all activations and has no loop over layers, like ours on CPUs, and attention without blocks. Its defaults
    are to keep none, a loop, and blocks. It shifts the ids to get targets, so that the last position has none.
    """
    import haliax
    import jax
    import jmp
    from levanter.layers.attention import AttentionBackend
    from levanter.layers.rotary import DefaultRotaryEmbeddingsConfig
    from levanter.models.llama import LlamaConfig
    from levanter.models.lm_model import LmExample
    from levanter.optim.config import AdamConfig
    from levanter.tracker import NoopConfig
    from levanter.trainer import Trainer, TrainerConfig, initialize

    model = LlamaConfig(
        max_seq_len=LENGTH,
        hidden_dim=EMBED,
        intermediate_dim=MLP,
        num_layers=LAYERS,
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        layer_norm_epsilon=NORM_EPS,
        rope=DefaultRotaryEmbeddingsConfig(theta=THETA),
        upcast_attn=True,  # its softmax
        attn_backend=AttentionBackend.VANILLA,
        gradient_checkpointing=False,
        scan_layers=False,
    )
    optimizer = AdamConfig(
        learning_rate=RATE,
        lr_schedule="constant",
        warmup=0,
        beta1=B1,
        beta2=B2,
        epsilon=EPS,
        weight_decay=DECAY,
        default_weight_decay_mask=False,
        max_grad_norm=CLIP,
    )
    with tempfile.TemporaryDirectory() as logs:
        config = TrainerConfig(
            mp=jmp.get_policy(f"params=float32,compute={dtype},output={dtype}"),
            train_batch_size=ROWS,
            num_train_steps=1000,
            tracker=NoopConfig(),
            log_dir=Path(logs),
            log_jaxprs=False,
            log_xla_hlo=False,
            load_checkpoint=False,
            require_accelerator=False,
        )
        initialize(config)

    def loss(model: Any, example: Any, *, key: Any = None) -> Any:
        return model.compute_next_token_loss(example, key=key)

    trainer = Trainer(config, optimizer.build(config.num_train_steps), loss, add_default_hooks=False)
    trainer.__enter__()  # until the process ends
    vocab = haliax.Axis("vocab", VOCAB)
    state = trainer.initial_state(jax.random.key(0), model_init=lambda: model.build(vocab, key=jax.random.key(1)))
    ids = haliax.named(_tokens()[0], (trainer.TrainBatch, model.max_Pos))
    example = haliax.vmap(LmExample.causal, trainer.TrainBatch)(ids)
    example = haliax.shard(example, trainer.compute_axis_mapping)

    def step() -> Any:
        nonlocal state
        info = trainer.train_step(state, example)
        state = info.state
        return info.loss

    return step, lambda loss: loss, f"Levanter {metadata.version('marin-levanter')}, JAX {jax.__version__}"


PROGRAMS = {
    "ours": ours,
    "scanned": functools.partial(bare, unrolls=False),
    "unrolled": functools.partial(bare, unrolls=True),
    "transformers": transformers,
    "maxtext": maxtext,
    "levanter": levanter,
}


def _tokens() -> Any:
    """Returns ids and targets, [B, T] each."""
    import numpy as np

    ids = np.random.default_rng(0).integers(0, VOCAB, (ROWS, LENGTH + 1), np.int32)
    return ids[:, :-1], ids[:, 1:]


def _peak_bytes() -> int:
    with open("/proc/self/status") as file:  # noqa: PTH123
        return next(1024 * int(line.split()[1]) for line in file if line.startswith("VmHWM"))


def main(program: str, devices: str, dtype: str) -> None:
    """Serves one program until its input ends."""
    os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": devices}
    answers, sys.stdout = sys.stdout, sys.stderr  # libraries print
    step, wait, versions = PROGRAMS[program](int(devices), dtype)
    loss = float(wait(step()))
    print(json.dumps({"versions": versions, "loss": loss}), file=answers, flush=True)
    for line in sys.stdin:
        wait(step())
        before = _now()
        wait([step() for _ in range(int(line))][-1])
        seconds, processor, faults = ((now - then) / int(line) for now, then in zip(_now(), before, strict=True))
        found = {"seconds": seconds, "processor": processor, "faults": faults, "peak": _peak_bytes()}
        print(json.dumps(found), file=answers, flush=True)


def _now() -> tuple[float, float, int]:
    """Returns seconds, seconds of processors, and page faults so far."""
    return time.perf_counter(), time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_minflt


if __name__ == "__main__":
    main(*sys.argv[1:])
