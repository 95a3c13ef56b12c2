"""Takes the part of a model that continues text, such as the decoder of a model of images and text."""

from core import optimizers
from core.types import HasTextPart, Params, can
from parallel.generation.decoding import TEXT_FIELDS
from parallel.partitioner import Program


def program_of(program: Program) -> Program:
    """Returns the program of the model's `text_part`; `program` itself if the whole model reads text."""
    if not can(program.model, HasTextPart):
        return program
    spec = {name: field for name, field in program.spec.items() if name in TEXT_FIELDS}
    unused = optimizers.adamw(learning_rate=optimizers.constant(0.0))  # the model's may name parameters of other parts
    return program.partitioner.program(program.model.text_part, unused, spec, seed=program.seed)


def of(program: Program, params: Params) -> tuple[Program, Params]:
    """Returns the program and the parameters of the model's `text_part`, or those given, as `program_of` does."""
    text = program_of(program)
    if text is program:
        return program, params
    shapes = text.abstract_state.params
    return text, {module: {name: params[module][name] for name in leaves} for module, leaves in shapes.items()}
