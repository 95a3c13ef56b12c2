"""The strategies that come with Renga. Each is a table; swap one for another with one gin line.

Notation: X[B_f, D] is an array whose batch dimension is split over the mesh axis fsdp (f) and whose embed dimension is
whole; d is data, t is tensor.
"""

from __future__ import annotations

from parallel.strategy import REPLICATED, Strategy, override

__all__ = ["REPLICATED", "Strategy", "data_parallel", "fsdp", "fsdp_tensor", "override"]


def data_parallel(*, data: int = -1) -> Strategy:
    """Every chip holds the whole model and its own rows; gradients are summed over data.

    In[B_d, D] · Win[D, F] → H[B_d, F];   H · Wout[F, D] → Out[B_d, D]
    """
    return Strategy(
        name="data_parallel",
        mesh_shape={"data": data},
        param_rules=REPLICATED,
        activation_rules={**REPLICATED, "batch": "data"},
    )


def fsdp(*, fsdp: int = -1, data: int = 1) -> Strategy:
    """Parameters, gradients and optimizer state split over fsdp; a layer's weights are gathered when it runs.

    In[B_df, D] · gather_f(Win[D_f, F]) → H[B_df, F];   H · gather_f(Wout[F, D_f]) → Out[B_df, D]
    """
    return Strategy(
        name="fsdp",
        mesh_shape={"data": data, "fsdp": fsdp},
        param_rules={**REPLICATED, "embed": "fsdp"},
        activation_rules={**REPLICATED, "batch": ("data", "fsdp")},
    )


def fsdp_tensor(*, tensor: int, fsdp: int = -1, data: int = 1) -> Strategy:
    """Weights split over fsdp and tensor; batch over data and fsdp.

    In[B_df, D] · gather_f(Win[D_f, F_t]) → H[B_df, F_t];   H · gather_f(Wout[F_t, D_f]) → Out[B_df, D]  (summed over t)
    """
    by_tensor = {"mlp": "tensor", "heads": "tensor", "kv_heads": "tensor", "vocab": "tensor"}
    return Strategy(
        name="fsdp_tensor",
        mesh_shape={"data": data, "fsdp": fsdp, "tensor": tensor},
        param_rules={**REPLICATED, **by_tensor, "embed": "fsdp"},
        activation_rules={**REPLICATED, **by_tensor, "batch": ("data", "fsdp")},
    )
