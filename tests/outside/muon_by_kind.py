"""Muon of optax for the matrices of each layer, chosen by kind; Adam for other parameters."""

import jax
import optax
import optax.contrib

from core import optimizers, parameters


def muon_by_kind(*, learning_rate: optax.ScalarOrSchedule, weight_decay: float = 0.1) -> optimizers.Optimizer:
    """A rule gets the `ParamSpec`s of the parameters, which say what each one is, and returns a transformation."""

    def rule(specs):
        def label(spec):
            return "muon" if spec.kind == "matrix" and spec.trainable else "adam" if spec.trainable else "frozen"

        of_layer = optax.chain(
            optax.contrib.scale_by_muon(weight_dimension_numbers=parameters.dimension_numbers(specs)),
            optax.add_decayed_weights(weight_decay),
            optax.scale_by_learning_rate(learning_rate),
        )
        rules = {
            "muon": parameters.by_layer(of_layer, specs, in_turn=True),  # the matrix of one layer after the other
            "adam": optax.adam(learning_rate),
            "frozen": optax.set_to_zero(),
        }
        return optax.partition(rules, parameters.labeled(jax.tree.map(label, specs)))

    schedule = learning_rate if callable(learning_rate) else optimizers.constant(learning_rate)
    return optimizers.Optimizer(rule, schedule)
