"""Takes the part of a model that continues text, such as the decoder of a model of images and text."""

from core.types import HasTextPart, Params, can
from parallel.generation.decoding import TEXT_FIELDS
from parallel.partitioner import Program


def of(program: Program, params: Params | None) -> tuple[Program, Params | None]:
    """Returns the program and the parameters of the model's `text_part`; those given if the whole model reads text."""
    if not can(program.model, HasTextPart):
        return program, params
    spec = {name: field for name, field in program.spec.items() if name in TEXT_FIELDS}
    text = program.partitioner.program(program.model.text_part, program.optimizer, spec, seed=program.seed)
    if params is None:
        return text, None
    shapes = text.abstract_state.params
    return text, {module: {name: params[module][name] for name in leaves} for module, leaves in shapes.items()}
