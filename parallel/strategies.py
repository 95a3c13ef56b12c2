"""The built-in strategies. Each function returns a `Strategy`; a gin file selects one by its name.

Arguments named after mesh axes are their degrees; -1 takes the remaining chips.

Notation: X[B_f, D] is an array whose batch dimension is sharded over the mesh axis fsdp (f) and whose embed dimension
is not sharded. Other axes are d data, e expert, s sequence, t tensor, p stage. gather_f, scatter_f and exchange_f are
an all-gather, a reduce-scatter and an all-to-all over fsdp. B batch, L length, D embed, F mlp, H heads, N key/value
heads, K head_dim, V vocab, E experts, C tokens per expert, m microbatch.
"""

from core.logical import Rules
from parallel.pipeline import schedules
from parallel.pipeline.schedules import Schedule
from parallel.strategy import REPLICATED, Strategy, override

__all__ = [
    "REPLICATED",
    "Strategy",
    "context",
    "data_parallel",
    "experts",
    "fsdp",
    "fsdp_tensor",
    "hsdp",
    "mesh3d",
    "multislice",
    "override",
    "pipeline",
    "pipeline_data",
    "pipeline_experts",
    "pipeline_fsdp",
    "pipeline_fsdp_tensor",
    "sequence_tensor",
    "tensor",
    "zero1",
]

_BY_TENSOR: Rules = {"mlp": "tensor", "heads": "tensor", "kv_heads": "tensor", "vocab": "tensor"}
_BY_STAGE: Rules = {"layers": "stage", "vocab": "stage"}  # all stages share the embedding and the head
_BY_STAGE_AND_TENSOR: Rules = {**_BY_TENSOR, "layers": "stage", "vocab": ("stage", "tensor")}
# Matrices of experts are stored by expert; those of attention by head_dim, and gathered.
_BY_EXPERT: Rules = {"expert": "expert", "head_dim": "expert"}
_SCHEDULE = schedules.gpipe(num_microbatches=8)


def data_parallel(*, data: int = -1) -> Strategy:
    """Replicates the model on every chip; gradients are summed over `data`.

    In[B_d, D] · Win[D, F] → H[B_d, F];   H · Wout[F, D] → Out[B_d, D]
    """
    return Strategy(
        name="data_parallel",
        mesh_shape={"data": data},
        param_rules=REPLICATED,
        activation_rules={**REPLICATED, "batch": "data"},
    )


def zero1(*, data: int = -1) -> Strategy:
    """Like data_parallel, with optimizer state sharded over `data` (ZeRO stage 1, Rajbhandari et al. 2020).

    dWin[D, F] → scatter_d → dWin[D_d, F];   Adam's m, v [D_d, F];   Win ← gather_d(updated Win[D_d, F])
    """
    return Strategy(
        name="zero1",
        mesh_shape={"data": data},
        param_rules=REPLICATED,
        activation_rules={**REPLICATED, "batch": "data"},
        optimizer_rules={**REPLICATED, "embed": "data"},
    )


def fsdp(*, fsdp: int = -1, overlap_reduction: bool = False) -> Strategy:
    """Shards rows, parameters and optimizer state over `fsdp`; weights are gathered when a layer runs.

    With `overlap_reduction` the gradients of a layer are reduced around rings while the layer before it computes. Use
    it on v4, whose chips compute nothing during other reductions.

    In[B_f, D] · gather_f(Win[D_f, F]) → H[B_f, F];   H · gather_f(Wout[F, D_f]) → Out[B_f, D]
    """
    return Strategy(
        name="fsdp_overlapped" if overlap_reduction else "fsdp",
        overlap_reduction=overlap_reduction,
        mesh_shape={"fsdp": fsdp},
        param_rules={**REPLICATED, "embed": "fsdp"},
        activation_rules={**REPLICATED, "batch": "fsdp"},
    )


def hsdp(*, data: int, fsdp: int = -1) -> Strategy:
    """Copies the model to `data` groups of chips; each shards weights over `fsdp`.

    In[B_df, D] · gather_f(Win[D_f, F]) → H[B_df, F];   H · gather_f(Wout[F, D_f]) → Out[B_df, D]
    """
    return Strategy(
        name="hsdp",
        mesh_shape={"data": data, "fsdp": fsdp},
        param_rules={**REPLICATED, "embed": "fsdp"},
        activation_rules={**REPLICATED, "batch": ("data", "fsdp")},
    )


def tensor(*, tensor: int = -1) -> Strategy:
    """Shards heads, hidden units and vocabulary over `tensor` (Shoeybi et al. 2019).

    In[B, D] · Win[D, F_t] → H[B, F_t];   H · Wout[F_t, D] → Out[B, D]  (summed over t)
    """
    return Strategy(
        name="tensor",
        mesh_shape={"tensor": tensor},
        param_rules={**REPLICATED, **_BY_TENSOR},
        activation_rules={**REPLICATED, **_BY_TENSOR},
    )


def fsdp_tensor(*, tensor: int, fsdp: int = -1) -> Strategy:
    """Shards weights over `fsdp` and `tensor`, and the batch over `fsdp`.

    In[B_f, D] · gather_f(Win[D_f, F_t]) → H[B_f, F_t];   H · gather_f(Wout[F_t, D_f]) → Out[B_f, D]  (summed over t)
    """
    return Strategy(
        name="fsdp_tensor",
        mesh_shape={"fsdp": fsdp, "tensor": tensor},
        param_rules={**REPLICATED, **_BY_TENSOR, "embed": "fsdp"},
        activation_rules={**REPLICATED, **_BY_TENSOR, "batch": "fsdp"},
    )


def sequence_tensor(*, tensor: int, fsdp: int = -1) -> Strategy:
    """Like fsdp_tensor, with the residual stream sharded along length between blocks (Korthikanti et al. 2022).

    gather_t(In[B_f, L_t, D]) · gather_f(Win[D_f, F_t]) → H[B_f, L, F_t];   H · Wout → scatter_t → Out[B_f, L_t, D]
    """
    return Strategy(
        name="sequence_tensor",
        mesh_shape={"fsdp": fsdp, "tensor": tensor},
        param_rules={**REPLICATED, **_BY_TENSOR, "embed": "fsdp"},
        activation_rules={**REPLICATED, **_BY_TENSOR, "batch": "fsdp", "residual_length": "tensor"},
    )


def context(*, sequence: int, fsdp: int = -1, ring: bool = False) -> Strategy:
    """Shards positions over `sequence`; each chip attends from its own queries.

    Q[B_f, L_s, H, K] · gather_s(K[B_f, L_s, N, K]) → scores[B_f, H, L_s, L];   weights sharded over fsdp and sequence

    With `ring`, keys and values are not gathered, but travel around the chips of `sequence`:

    Q[B_f, L_s, H, K] · K[B_f, L_s, N, K] → scores[B_f, H, L_s, L_s]
    """
    return Strategy(
        name="context",
        mesh_shape={"fsdp": fsdp, "sequence": sequence},
        param_rules={**REPLICATED, "embed": ("fsdp", "sequence")},
        activation_rules={
            **REPLICATED,
            "batch": "fsdp",
            "length": "sequence",
            "residual_length": "sequence",
            "kv_length": "sequence" if ring else None,
        },
    )


def experts(*, expert: int, fsdp: int = -1, tensor: int = 1) -> Strategy:
    """Like fsdp_tensor, but `expert` shards experts and rows; chips exchange tokens over it.

    exchange_e(In[E, B_ef, C, D]) · gather_f(Win[E_e, D_f, F_t]) → H[E_e, B_f, C, F_t];   exchange_e(H · gather_f(Wout))
    """
    return Strategy(
        name="experts",
        mesh_shape={"fsdp": fsdp, "expert": expert, "tensor": tensor},
        param_rules={**REPLICATED, **_BY_TENSOR, **_BY_EXPERT, "embed": "fsdp"},
        activation_rules={
            **REPLICATED,
            **_BY_TENSOR,
            "expert": "expert",
            "batch": ("fsdp", "expert"),
        },
    )


def mesh3d(*, data: int = 1, fsdp: int = -1, tensor: int = 1) -> Strategy:
    """Copies the model to `data` groups of chips; each shards weights over `fsdp` and `tensor`.

    In[B_df, D] · gather_f(Win[D_f, F_t]) → H[B_df, F_t];   H · gather_f(Wout[F_t, D_f]) → Out[B_df, D]  (summed over t)
    """
    return Strategy(
        name="mesh3d",
        mesh_shape={"data": data, "fsdp": fsdp, "tensor": tensor},
        param_rules={**REPLICATED, **_BY_TENSOR, "embed": "fsdp"},
        activation_rules={**REPLICATED, **_BY_TENSOR, "batch": ("data", "fsdp")},
    )


def multislice(*, slices: int, fsdp: int = -1, tensor: int = 1) -> Strategy:
    """Copies the model to each slice; gradients cross the data-center network (DCN).

    In[B_df, D] · gather_f(Win[D_f, F_t]) → H[B_df, F_t], with data across slices, fsdp and tensor inside one
    """
    return Strategy(
        name="multislice",
        mesh_shape={"fsdp": fsdp, "tensor": tensor},
        dcn_shape={"data": slices},
        param_rules={**REPLICATED, **_BY_TENSOR, "embed": "fsdp"},
        activation_rules={**REPLICATED, **_BY_TENSOR, "batch": ("data", "fsdp")},
    )


def pipeline(*, stage: int = 4, data: int = -1, schedule: Schedule = _SCHEDULE) -> Strategy:
    """Splits layers into stages and rows into microbatches (Huang et al. 2019).

    stage s: In[B_dm, D] · Win[D, F] → Out[B_dm, D] → stage s + 1, for microbatch m;   logits[B_d, V_p]
    """
    return Strategy(
        name="pipeline",
        mesh_shape={"stage": stage, "data": data},
        param_rules={**REPLICATED, **_BY_STAGE},
        activation_rules={**REPLICATED, **_BY_STAGE, "batch": "data"},
        pipeline=schedule,
    )


def pipeline_data(*, slices: int, stage: int = 1, data: int = -1, schedule: Schedule = _SCHEDULE) -> Strategy:
    """Distributes the stages of a pipeline over slices, `stage` of them in each.

    stage s: In[B_dm, D] · Win[D, F] → Out[B_dm, D] → stage s + 1, over the data-center network

    Args:
      stage: stages in each slice.
    """
    return Strategy(
        name="pipeline_data",
        mesh_shape={"stage": stage, "data": data},
        dcn_shape={"stage": slices},
        param_rules={**REPLICATED, **_BY_STAGE},
        activation_rules={**REPLICATED, **_BY_STAGE, "batch": "data"},
        pipeline=schedule,
    )


def pipeline_fsdp(*, stage: int, fsdp: int = -1, slices: int = 1, schedule: Schedule = _SCHEDULE) -> Strategy:
    """Like pipeline, with weights sharded over `fsdp` and gathered once for all microbatches.

    stage s: In[B_fm, D] · gather_f(Win[D_f, F]) → Out[B_fm, D] → stage s + 1;   dWin → scatter_f, once for all m

    Args:
      stage: stages in each slice.
      slices: number of slices over which stages extend.
    """
    return Strategy(
        name="pipeline_fsdp",
        mesh_shape={"stage": stage, "fsdp": fsdp},
        dcn_shape={"stage": slices},
        param_rules={**REPLICATED, **_BY_STAGE, "embed": "fsdp"},
        activation_rules={**REPLICATED, **_BY_STAGE, "batch": "fsdp"},
        pipeline=schedule,
    )


def pipeline_fsdp_tensor(
    *, stage: int, tensor: int, fsdp: int = -1, slices: int = 1, schedule: Schedule = _SCHEDULE
) -> Strategy:
    """Like pipeline_fsdp, with weights also sharded over `tensor`.

    stage s: In[B_fm, D] · gather_f(Win[D_f, F_t]) → H[B_fm, F_t] → Out[B_fm, D] → stage s + 1;   logits[B_f, V_pt]

    Args:
      stage: stages in each slice.
      slices: number of slices over which stages extend.
    """
    return Strategy(
        name="pipeline_fsdp_tensor",
        mesh_shape={"stage": stage, "fsdp": fsdp, "tensor": tensor},
        dcn_shape={"stage": slices},
        param_rules={**REPLICATED, **_BY_STAGE_AND_TENSOR, "embed": "fsdp"},
        activation_rules={**REPLICATED, **_BY_STAGE_AND_TENSOR, "batch": "fsdp"},
        pipeline=schedule,
    )


def pipeline_experts(
    *, stage: int, expert: int, fsdp: int = -1, tensor: int = 1, slices: int = 1, schedule: Schedule = _SCHEDULE
) -> Strategy:
    """Runs `experts` inside each stage of a pipeline.

    stage s: exchange_e(In[E, B_efm, C, D]) · gather_f(Win[E_e, D_f, F_t]) → Out → exchange_e → stage s + 1

    Args:
      stage: stages in each slice.
      slices: number of slices over which stages extend.
    """
    return Strategy(
        name="pipeline_experts",
        mesh_shape={"stage": stage, "fsdp": fsdp, "expert": expert, "tensor": tensor},
        dcn_shape={"stage": slices},
        param_rules={**REPLICATED, **_BY_STAGE_AND_TENSOR, **_BY_EXPERT, "embed": "fsdp"},
        activation_rules={
            **REPLICATED,
            **_BY_STAGE_AND_TENSOR,
            "expert": "expert",
            "batch": ("fsdp", "expert"),
        },
        pipeline=schedule,
    )
