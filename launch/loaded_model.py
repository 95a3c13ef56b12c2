"""Loads a trained or published model, and continues text with it.

    from launch import loaded_model
    model = loaded_model.load("runs/quickstart-v4-16")        # or RUN@STEP, or the folder of a published model
    print(model.continued(["import "], max_tokens=50)[0].text)

It runs in one process, on this machine's devices.
"""

import dataclasses
import functools
import importlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax

from core import optimizers, slices
from core.checkpoints import published_files, reading, steps
from core.checkpoints.store import Checkpoints
from core.checkpoints.warm_start import Origin, SavedParameters
from core.errors import UserError
from core.files import paths
from core.types import FramesTexts, Generates, Model, can, missing
from launch import environment, terminal
from launch.config import loader
from launch.experiment import Experiment
from launch.experiments import saved_run
from launch.hosts import machine, tpu_host
from launch.runs import warm_start
from models.decoder.published import families
from parallel import strategies
from parallel.generation import decoding, generating
from parallel.generation.generating import Generator, Vectors
from parallel.generation.sampling import GREEDY, Sampling
from parallel.partitioner import Partitioner, Program
from parallel.strategy import Strategy, multiple_of, resolve, row_pieces, schedule_of
from tasks import streams
from tasks.text import vocabularies
from tasks.text.ids import decode_continuation, stop_ids, with_bos
from tasks.text.tokenizer_folders import FolderTokenizer

_SIMULATED_CHIP = "v5e-1"  # what a CPU device stands for without a slice
_GIN = "gin/generation/folder.gin"


class Text(NamedTuple):
    """The continuation of a prompt.

    Attributes:
      text: the continuation; without a vocabulary, its ids as decimal numbers.
      ids: its ids, without the one that ended it.
      log_probabilities: log-probability of each id, at temperature 1 and over all tokens.
      ended: whether a stop id ended it.
    """

    text: str
    ids: list[int]
    log_probabilities: list[float]
    ended: bool


Images = Sequence[str]  # image files of a prompt, in the order of its image tokens


class Sight(Protocol):
    """Interface of what turns the images of prompts into vectors for a decoder."""

    @property
    def params(self) -> Any:
        """The parameters that turn images into vectors; None before they are read."""

    def expanded(self, text: str, images: Images) -> str:
        """Repeats each image token of a prompt once for each vector of its image.

        Raises:
          UserError: image tokens and images differ in number, or an image cannot be read.
        """

    def check(self, ids: Sequence[int], images: Images) -> None:
        """Raises UserError unless the ids have one image token for each vector of the images."""

    def vectors(self, ids: Sequence[int], images: Images) -> Vectors | None:
        """Returns the vectors of the images of a prompt; None without images."""


@dataclasses.dataclass(frozen=True)
class LoadedModel:
    """A model with its parameters.

    `load` splits a model of images and text into its decoder and its `sight`.
    """

    program: Program  # the model and its layout
    params: Any  # `Params`, laid out as `program.abstract_state.params`; None before they are read
    vocabulary: Any  # vocabulary of the run or folder; None for data that is not text
    where: str  # one line that says what was loaded
    begins_with_bos: bool = True  # whether the model's texts begin with the begin-of-text id
    sight: Sight | None = None  # None: a model of text

    @property
    def model(self) -> Model:
        """The model; of a model of images and text that was split, the decoder alone."""
        return self.program.model

    @functools.cached_property
    def generator(self) -> Generator:
        """The generator, created at first use."""
        return Generator(self.program, self.params)

    def encoded(self, text: str, *, is_chat: bool = False, images: Images = ()) -> list[int]:
        """Converts a prompt to ids, with the begin-of-text id if the model's texts begin with one or it is empty.

        Args:
          text: the prompt.
          is_chat: whether to format it by the chat template, as a user's message.
          images: image files, in the order of the image tokens; ignored by a model of text.

        Raises:
          UserError: there is no vocabulary or chat template, or images do not fit.
        """
        if is_chat:
            return self.chat_ids([{"role": "user", "content": text}], images=images)
        if self.vocabulary is None:
            raise UserError(f"{self.where} has no {self._lacks}: give ids (--prompt-ids)")
        if self.sight is not None:
            text = self.sight.expanded(text, images)
        ids = self.vocabulary.encode(text)
        return with_bos(ids, self.vocabulary) if self.begins_with_bos or not ids else ids

    def chat_ids(self, messages: Sequence[Mapping[str, str]], *, images: Images = ()) -> list[int]:
        """Formats a conversation by the chat template, up to the beginning of the answer, and converts it to ids.

        Args:
          messages: at least one message, with the keys `role` and `content`.
          images: image files, placed before the text of the first message.

        Raises:
          UserError: there is no message, vocabulary or chat template, or images do not fit.
        """
        if not messages:
            raise UserError("a conversation has no messages: expected at least one")
        if self.vocabulary is None:
            raise UserError(f"{self.where} has no {self._lacks}: a conversation needs one")
        if not isinstance(self.vocabulary, FolderTokenizer):
            raise UserError(f"{self.where} has no chat template: only folders of published models have one")
        if self.sight is None:
            return self.vocabulary.encode(self.vocabulary.chat(messages))
        parts = [[{"type": "text", "text": message["content"]}] for message in messages]
        parts[0] = [{"type": "image"}] * len(images) + parts[0]
        written = [{**message, "content": content} for message, content in zip(messages, parts, strict=True)]
        ids = self.vocabulary.encode(self.sight.expanded(self.vocabulary.chat(written), images))
        return with_bos(ids, self.vocabulary) if self.begins_with_bos else ids  # as processors do

    @property
    def _lacks(self) -> str:
        return published_files.TOKENIZER if published_files.is_published(self.where) else "vocabulary"

    def checked(
        self,
        prompts: Sequence[str | Sequence[int]],
        *,
        max_tokens: int,
        is_chat: bool,
        images: Sequence[Images] = (),
    ) -> list[list[int]]:
        """Converts prompts to ids and checks them; needs no parameters.

        Args:
          prompts, max_tokens, is_chat, images: see `batches`.

        Raises:
          UserError: the model cannot generate, or cannot take these prompts or images.
        """
        if not can(self.model, Generates):
            lacks = ", ".join(missing(self.model, Generates))
            raise UserError(f"{self.where}: {type(self.model).__name__} lacks the ability Generates: add {lacks}")
        if any(images) and self.sight is None:
            is_run = not published_files.is_published(self.where)
            why = "only runs of gin/finetune_images.gin without a selector read images in generate"
            raise UserError(
                f"{self.where} reads no images: {why if is_run else 'it is a model of text'}; leave --image out, or "
                "give the folder of a published vision-language model"
            )
        if isinstance(prompts, str) or any(isinstance(prompt, int) for prompt in prompts):
            raise UserError(f"prompts is {prompts!r}: expected a list of prompts, each a text or a list of ids")
        if any(isinstance(own, str) for own in images):
            raise UserError(f"images is {[*images]!r}: expected a list of images for each prompt")
        of_each = [*images] or [()] * len(prompts)
        if len(of_each) != len(prompts):
            raise UserError(
                f"images has {len(of_each)} entries for {len(prompts)} prompts: expected one for each prompt; () for a "
                "prompt without images"
            )
        ids = [
            self.encoded(p, is_chat=is_chat, images=own) if isinstance(p, str) else list(p)
            for p, own in zip(prompts, of_each, strict=True)
        ]
        generating.check_prompts(self.program, ids, max_tokens=max_tokens)
        if self.sight is not None:
            for each, own in zip(ids, of_each, strict=True):
                self.sight.check(each, own)
        return ids

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """The ids that end a continuation; () without a vocabulary."""
        return () if self.vocabulary is None else stop_ids(self.vocabulary)

    def continued(self, prompts: Sequence[str | Sequence[int]], **options: Any) -> list[Text]:
        """Continues prompts, given as text or as ids, in one batch.

        `options`: those of `batches`, except `rows`.
        """
        return [one for batch in self.batches(prompts, rows=max(1, len(prompts)), **options) for one in batch]

    def batches(
        self,
        prompts: Sequence[str | Sequence[int]],
        *,
        rows: int,
        skip: int = 0,
        max_tokens: int = 100,
        sampling: Sampling = GREEDY,
        seed: int = 0,
        is_chat: bool = False,
        slots: int | None = None,
        images: Sequence[Images] = (),
        on_tokens: Callable[[list[int | None]], bool | None] = lambda ids: None,
        stop_ids: Sequence[int] = (),
    ) -> Iterator[list[Text]]:
        """Continues prompts, and yields the continuations of each batch.

        Args:
          prompts: text or ids.
          rows: number of prompts per batch.
          skip: number of prompts to skip at the beginning.
          max_tokens: most new ids per prompt.
          sampling: how ids are drawn; by default, the most likely one is taken.
          seed: seed of the draws.
          is_chat: see `encoded`.
          slots: least number of slots of the KV cache; None: as many as needed.
          images: the image files of each prompt; empty: no prompt has images.
          on_tokens: called with the new id of each prompt of the batch, None after its end or before it begins; True
            ends the batch early.
          stop_ids: further ids that end a continuation.

        Raises:
          UserError: the model cannot continue a prompt.
        """
        ids = self.checked(prompts, max_tokens=max_tokens, is_chat=is_chat, images=images)
        generator, sight = self.generator, self.sight
        num_ids = self.vocabulary.size if self.vocabulary is not None else None
        for first in range(skip, len(ids), rows):
            of_prompts = zip(ids[first : first + rows], [*images[first : first + rows]] or [()] * rows, strict=False)
            found = generator.generate(
                ids[first : first + rows],
                max_tokens=max_tokens,
                sampling=sampling,
                seed=seed,
                slots=slots,
                first_row=first,
                stop_ids=(*self.stop_ids, *stop_ids),
                num_ids=num_ids,
                vectors=() if sight is None else [sight.vectors(*each) for each in of_prompts],
                on_tokens=on_tokens,
            )
            batch = zip(ids[first : first + rows], found, strict=True)
            yield [Text(self.decoded(one.ids, after=prompt), *one) for prompt, one in batch]

    def decoded(self, ids: Sequence[int], *, after: Sequence[int] = ()) -> str:
        """Converts ids to text, as a continuation of the ids `after`.

        Without a vocabulary, the text is their decimal numbers.
        """
        if self.vocabulary is None:
            return " ".join(map(str, ids))
        return decode_continuation(self.vocabulary, after, ids)


def image_content(file: str) -> bytes:
    """Returns the content of an image file, local or in a bucket. Raises UserError if it cannot be read."""
    try:
        return paths.resolve(file).read_bytes()
    except OSError as error:
        raise UserError(f"the image {file} cannot be read: {error}") from error


def choose_devices(slice_name: str | None, *, is_simulated: bool) -> None:
    """Selects JAX's platform. Must be called before the process uses a device.

    Without a slice, it is the CPU on a machine without TPU chips, also if it has GPUs, unless JAX_PLATFORMS is set.

    Args:
      slice_name: name of the slice; None: one chip.
      is_simulated: whether CPU devices simulate the chips of the slice.
    """
    if not is_simulated and slice_name and not slices.get(slice_name).is_tpu:
        jax.config.update("jax_platforms", slices.get(slice_name).chip.platform)
        return
    if is_simulated or not (jax.config.values["jax_platforms"] or tpu_host.chips()):
        jax.config.update("jax_platforms", "cpu")  # on a machine without chips, libtpu would print errors
    if is_simulated:
        jax.config.update("jax_num_cpu_devices", slices.get(slice_name or _SIMULATED_CHIP).devices)


def load(
    text: str,
    *,
    slice_name: str | None = None,
    bindings: Sequence[str] = (),
    dtype: str | None = None,
    strategy: Strategy | None = None,
    check: Callable[[], object] = lambda: None,
    check_model: Callable[[LoadedModel], object] = lambda model: None,
    averaged: bool = True,
) -> LoadedModel:
    """Loads the model of a run, of a step, or of a published model's folder.

    Args:
      text: RUN, RUN@STEP or the folder.
      slice_name: the slice on which to lay out the model; None: one chip.
      bindings: gin bindings that override the configuration of the run or of generation.
      dtype: compute dtype of a published model; None: float32 on CPUs, otherwise bfloat16.
      strategy: overrides the strategy of the configuration and of `bindings`.
      check: called before parameters are read.
      check_model: called with the model before its parameters are read.
      averaged: whether parameters that the run's optimizer averages are the averages; INIT_FROM starts from the others.

    Raises:
      UserError: there is no such model, it is not supported, or it does not fit the devices.
    """
    machine.prepare_platform()
    published_files.use_copies(None)
    if published_files.is_published(text):
        kind = families.read_config(published_files.small_files(text)).get("model_type")
        for module, kinds in environment.declared("FOLDERS").items():
            if kind in kinds:
                return importlib.import_module(module).load(
                    text, slice_name, bindings, dtype, strategy, check, check_model
                )
        return _published(text, slice_name, bindings, dtype, strategy, check, check_model)
    if not steps.has_folder(text):
        raise UserError(published_files.unknown(text))
    folder = steps.find(text)
    run_dir = str(folder.parent.parent)
    found = saved_run.read(run_dir, step=folder, bindings=bindings, slice_name=slice_name)
    check()
    experiment = found.experiment()

    def check_split(whole: LoadedModel) -> None:
        check_model(split(whole, experiment.task))

    whole = load_step(
        experiment, folder, slice_name=slice_name, strategy=strategy, check_model=check_split, averaged=averaged
    )
    return split(whole, experiment.task)


def load_step(
    experiment: Experiment,
    folder: Any,
    *,
    slice_name: str | None = None,
    strategy: Strategy | None = None,
    check_model: Callable[[LoadedModel], object] = lambda model: None,
    averaged: bool = True,
) -> LoadedModel:
    """Loads the model of an experiment with the parameters of one of its checkpoints; `split` makes it generate.

    Args:
      experiment: the experiment of the run.
      folder: the checkpoint (`core.checkpoints.steps.find`).
      slice_name, strategy, check_model, averaged: as in `load`.
    """
    experiment, run_dir = experiment.spans()[-1].experiment, str(folder.parent.parent)
    vocabulary = experiment.task.vocabulary
    if vocabulary is not None:
        vocabulary.prepare(run_dir, is_host_zero=False, sample=lambda: ())
    chosen = strategy or (experiment.strategy if slice_name else None)
    spec = experiment.task.spec(experiment.batch_size)
    stored = {"frozen": experiment.frozen, "frozen_dtype": experiment.frozen_dtype}
    program = bound(experiment.model, chosen, slice_name, spec, optimizer=experiment.optimizer, **stored)
    where = f"step {folder.name} of {run_dir}"
    task = experiment.task
    begins_with_bos = task.begins_with_bos() if can(task, FramesTexts) else True
    check_model(LoadedModel(program, None, vocabulary, where, begins_with_bos))
    open_source = functools.partial(warm_start.source_again, experiment)
    source = SavedParameters(folder, open_source=open_source)
    is_averaging = averaged and program.optimizer.is_averaging(program.abstract_state.opt_state)
    if source.is_averaged or not is_averaging:
        params = source.load(program.abstract_state.params, program.param_specs, progress=lambda *_: None)
    else:
        origin = Origin(open_source, program.param_specs)
        checkpoints = Checkpoints(folder.parent, keep=1, read_only=True, origin=origin)
        with reading.refusing_damage(folder):
            state, _, _ = checkpoints.restore(int(folder.name), program.abstract_state)
        params = program.optimizer.evaluated(state.params, state.opt_state)
        where += " (averaged by its optimizer)"
    return LoadedModel(program, params, vocabulary, where, begins_with_bos)


def split(model: LoadedModel, task: Any) -> LoadedModel:
    """Returns the decoder and the `sight` of a model of images and text; a model of text as it is."""
    for module in environment.declared("FOLDERS") if "images" in model.program.spec else ():
        model = importlib.import_module(module).seeing(model, task)
    return model


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice:
    """A published model and its strategy, as gin files and `--gin` configure them."""

    model: Any  # the model of the folder: a `Transformer` or a `VisionLanguageModel`
    strategy: Strategy  # the strategy that lays it out


def _published(
    folder: str,
    slice_name: str | None,
    bindings: Sequence[str],
    dtype: str | None,
    strategy: Strategy | None,
    check: Callable[[], object],
    check_model: Callable[[LoadedModel], object],
) -> LoadedModel:
    choice = chosen(_GIN, folder, bindings, dtype, check)
    model, vocabulary = choice.model, vocabulary_of(folder, vocab_size=choice.model.vocab_size)
    layout = strategy or choice.strategy
    rows, length = sizes_for(layout, slice_of(slice_name), is_tiled=model.attention == "splash")
    program = bound(model, layout, slice_name, streams.batch_spec(rows, length=length))
    begins_with_bos = vocabulary is not None and vocabulary.begins_with_bos
    found = LoadedModel(program, None, vocabulary, folder, begins_with_bos)
    check_model(found)
    source = model.published(folder)
    abstract = in_compute_dtype(program)
    params = source.load(abstract, program.param_specs, progress=terminal.progress(f"parameters of {folder}"))
    return dataclasses.replace(found, params=params)


def sizes_for(layout: Strategy, slice_: slices.Slice, *, is_tiled: bool) -> tuple[int, int]:
    """Returns rows and positions that a layout divides. A program needs a batch; generation has rows of its own."""
    shape = resolve(layout, slice_)
    schedule = schedule_of(layout, shape)
    rows = multiple_of(layout, slice_, "batch") * (schedule.num_microbatches if schedule else 1)
    length = math.lcm(*(multiple_of(layout, slice_, name) for name in ("length", "residual_length")))
    return math.lcm(rows, slice_.devices), math.lcm(32, length, row_pieces(layout, shape) * (128 if is_tiled else 1))


def in_compute_dtype(program: Program) -> Any:
    """Returns abstract parameters in the dtypes of generation."""
    dtypes = decoding.dtypes(program)
    return jax.tree.map(lambda leaf, dtype: leaf.update(dtype=dtype), program.abstract_state.params, dtypes)


def chosen(gin: str, folder: str, bindings: Sequence[str], dtype: str | None, check: Callable[[], object]) -> Choice:
    """Returns a published model, without its parameters, and its strategy.

    Args:
      gin: the gin file with the default settings.
      folder, bindings, dtype, check: as in `load`.
    """
    on_cpu = jax.devices()[0].platform == "cpu"
    given = f"FOLDER = {folder!r}\nCOMPUTE_DTYPE = {dtype or ('float32' if on_cpu else 'bfloat16')!r}\n"
    root = f"{Choice.__module__}.{Choice.__name__}"
    config = loader.load(gin, bindings=bindings, root=root, defaults=gin, between={"the command": given})
    check()
    return config.build()


def vocabulary_of(folder: str, *, vocab_size: int) -> Any:
    """Returns the tokenizer of a published model's folder, or None; UserError if it has more than `vocab_size` ids."""
    if not (published_files.small_files(folder) / published_files.TOKENIZER).exists():
        return None
    vocabulary = vocabularies.tokenizer(folder)
    vocabularies.check_fits(vocabulary, vocab_size=vocab_size)
    return vocabulary


def slice_of(name: str | None) -> slices.Slice:
    """Returns a slice by its name; None: one chip of those that JAX sees; a CPU device stands for one of v5e."""
    first = None if name else jax.devices()[0]
    if first is None or first.platform == "cpu":
        return slices.get(name or _SIMULATED_CHIP)
    return slices.one_of_device_kind(first.device_kind)


def bound(
    model: Any, strategy: Strategy | None, slice_name: str | None, spec: Any, *, optimizer: Any = None, **stored: Any
) -> Program:
    """Returns a model laid out on the devices of this process.

    Args:
      model: the model.
      strategy: how to shard it; None: every chip has all parameters.
      slice_name: the slice; None: one chip.
      spec: the fields of the program's batches.
      optimizer: the optimizer; None for a model that is not trained.
      **stored: `frozen` and `frozen_dtype` of `Partitioner.program`.

    Raises:
      UserError: this process has too few devices, or the layout does not fit.
    """
    slice_ = slice_of(slice_name)
    devices = jax.devices()[: slice_.devices]
    if len(devices) < slice_.devices:
        raise UserError(
            f"{slice_.name} has {slice_.devices} devices, and this process {len(devices)}: leave out --slice, or give "
            "--simulate if this command takes it"
        )
    at = Partitioner(strategy or strategies.data_parallel(), slice=slice_, devices=devices)
    unused = optimizers.adamw(learning_rate=optimizers.constant(0.0))
    return at.program(model, optimizer or unused, spec, seed=0, **stored)
