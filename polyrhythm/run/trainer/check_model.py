"""Before training: the model takes its inputs, computes a loss, and its stages are the whole model.

A model that is split into stages is compared with itself, whole, on the first samples of the
dataset: outputs, own loss and gradients. Rank 0 does so, and the others wait.
"""

import importlib
import inspect
import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree

from polyrhythm.errors import LaunchError, PlanError
from polyrhythm.run.data.loader import CollatedSamples, SampleLoader, as_arguments
from polyrhythm.run.data.order import DataError
from polyrhythm.run.data.reader import make_order
from polyrhythm.run.machine import usable_memory
from polyrhythm.run.pipeline.loss import labels_of
from polyrhythm.run.pipeline.stage_modules import forward_parameters
from polyrhythm.run.pipeline.verify_split import verify_split
from polyrhythm.run.random_streams import may_draw
from polyrhythm.run.trainer.config import TrainerConfig
from polyrhythm.types import AUTO

_logger = logging.getLogger(__name__)

_NUM_SAMPLES = 2  # of an example
_MAX_TOKENS = 64  # of each: a long text shows nothing more, and a large model runs on a CPU here
_LABELS = ("labels", "start_positions")  # arguments of models that compute their loss
_WRAPPERS = (DataParallel, DistributedDataParallel, FullyShardedDataParallel)
_COPIES = 4  # weights, and gradients of both sides


def check_placement(model: nn.Module) -> None:
    """Refuse wrappers, and weights that are sharded, spread over devices, or without values."""
    wrapped = [each for each in model.modules() if isinstance(each, _WRAPPERS)]
    if wrapped:
        raise LaunchError(
            f"a model wrapped in {type(wrapped[0]).__name__}",
            expected="the model itself, which the Trainer divides into stages and replicas",
            fix="pass the module inside, such as model.module: sync= averages the replicas",
        )
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    sharded = [name for name, tensor in tensors.items() if isinstance(tensor, DTensor)]
    if sharded or any(isinstance(each, FSDPModule) for each in model.modules()):
        what = "fully_shard" if not sharded else f"{sharded[0]}, which is a DTensor"
        raise LaunchError(
            f"a model that is sharded already: {what}",
            expected="whole weights, which the Trainer divides into stages and replicas by itself",
            fix="pass the model before fully_shard or parallelize_module; for these inside a stage "
            "use Pipeline in a loop of your own",
        )
    lazy = [name for name, tensor in tensors.items() if is_lazy(tensor)]
    if lazy:
        raise LaunchError(
            f"weights without a shape yet, such as {lazy[0]}",
            expected="a model whose lazy layers have run once",
            fix="call it on one sample before the Trainer, or pass a function that does so and "
            "returns it",
        )
    meta = [name for name, tensor in tensors.items() if tensor.is_meta]
    if meta:
        raise LaunchError(
            f"{len(meta)} of {len(tensors)} weights without values, on the meta device, such as "
            f"{meta[0]}",
            expected="a model with its weights: the Trainer does not initialise or load them",
            fix="build it without torch.device('meta') and without a device_map that offloads; "
            "or pass a function that builds it",
        )
    of_device = {str(parameter.device): name for name, parameter in model.named_parameters()}
    if len(of_device) > 1:
        shown = ", ".join(f"{name} on {device}" for device, name in of_device.items())
        raise LaunchError(
            f"a model that is spread over {len(of_device)} devices: {shown}",
            expected="a model on one device, from which each process moves its stage to its own",
            fix="load it without device_map=, or with device_map='cpu'",
        )


def check_loss(config: TrainerConfig, model: nn.Module) -> None:
    """Refuse a model that cannot compute its loss, if there is no loss_fn."""
    if config.loss_fn is not None:
        return
    parameters = inspect.signature(model.forward).parameters.values()
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    if takes_any or any(parameter.name in _LABELS for parameter in parameters):
        return
    raise LaunchError(
        f"no loss_fn, and {type(model).__name__}.forward takes no `labels`",
        expected="a loss_fn, or a model that computes its loss from labels, as those of "
        "transformers with a head do",
        fix="pass loss_fn=torch.nn.functional.cross_entropy, for example, or use "
        "AutoModelForCausalLM, AutoModelForSequenceClassification, ...",
    )


def check_inputs(module: nn.Module, keywords: Mapping[str, Any]) -> None:
    """Refuse inputs of the first stage that it does not take, or tokens that it does not have."""
    _check_names(module, keywords)
    tokens, size = keywords.get("input_ids"), _vocabulary_size(module)
    if not isinstance(tokens, Tensor) or not tokens.numel() or size is None:
        return
    if (largest := int(tokens.max())) >= size:
        raise DataError(
            f"token {largest} in input_ids, and {size} tokens in the model's vocabulary",
            expected="tokens from 0 on, below the size of the vocabulary",
            fix="use the tokenizer of this model, or call "
            "model.resize_token_embeddings(len(tokenizer)) before the Trainer",
        )


def _vocabulary_size(module: nn.Module) -> int | None:
    """Return the size of the largest vocabulary of the models of transformers in a module.

    None if there is none, or if an embedding of another kind may take more tokens.
    """
    found = list[int]()
    for each in module.modules():
        with suppress(AttributeError, NotImplementedError):
            embedding = each.get_input_embeddings()  # type: ignore[operator]
            if type(embedding).forward is not nn.Embedding.forward:
                return None
            found.append(embedding.num_embeddings)
    return max(found, default=None)


def _check_names(module: nn.Module, keywords: Mapping[str, Any]) -> None:
    """Refuse inputs by name that the model's forward does not take, or would ignore."""
    parameters = forward_parameters(module)
    known = {name for name, p in parameters.items() if p.kind is not p.VAR_KEYWORD}
    for parameter in parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            kinds = get_args(parameter.annotation) or _options_of(module)
            if not kinds:
                return  # it may take anything
            known |= {name for kind in kinds for name in kind.__annotations__}
    if unknown := [name for name in keywords if name not in known]:
        names = ", ".join(unknown)
        raise DataError(
            f"inputs that {type(module).__name__}.forward does not take: {names}",
            expected=f"names among its arguments: {', '.join(parameters)}",
            fix=f"remove them: dataset.remove_columns({unknown}), or in a collate_fn",
        )


def _options_of(module: nn.Module) -> tuple[Any, ...]:
    """Return what models of transformers take by **kwargs; nothing of others."""
    if not any(kind.__module__.startswith("transformers.") for kind in type(module).__mro__):
        return ()
    return (importlib.import_module("transformers.utils.generic").TransformersKwargs,)


def find_split(config: TrainerConfig, model: nn.Module, dataset: Any, num_processes: int) -> None:
    """Find the split of a model that may need one; `config.split.found` remembers it, or why not.

    One process needs it for the seeds of dropout, which layers have of their own.
    """
    is_single = num_processes == 1 and config.plan == AUTO
    if isinstance(model, nn.Sequential) or (is_single and not may_draw(model)):
        return
    try:
        config.split.found(model)  # on an example of its config
    except PlanError:
        args, kwargs, _ = _example(first_samples(config, dataset, _NUM_SAMPLES), model)
        try:
            config.split.found(model, (args, kwargs))
        except PlanError as error:
            _logger.debug("no split of the model: %s", error)


def check_stages(
    config: TrainerConfig, model: nn.Module, dataset: Any, layers_per_stage: Sequence[int]
) -> None:
    """Compare all stages with the whole model; a PlanError says what differs."""
    if len(layers_per_stage) == 1 or isinstance(model, nn.Sequential):
        return
    needed = _COPIES * sum(parameter.nbytes for parameter in model.parameters())
    if needed > usable_memory() // 2:
        _logger.warning(
            "the stages are not compared with the whole model, which is too large for this machine"
        )
        return
    args, kwargs, target = _example(first_samples(config, dataset, _NUM_SAMPLES), model)
    labels = {} if config.loss_fn is not None or target is None else labels_of(target)
    check_inputs(model, kwargs)
    verify_split(model, config.split, layers_per_stage, (args, kwargs), labels)


def first_samples(config: TrainerConfig, dataset: Any, num_samples: int) -> CollatedSamples:
    """Return the first samples, collated; an iterable dataset is rewound."""
    order = make_order(dataset, seed=config.data.seed, shuffle=config.data.shuffle)
    samples = SampleLoader(dataset, order, config.collate_fn, seed=config.data.seed)
    try:
        return samples.load(((0, num_samples),))
    finally:
        if (start := samples.state_at(0)) is not None:
            dataset.load_state_dict(start.shards[0].state)


def _example(
    samples: CollatedSamples, model: nn.Module
) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
    """Return arguments, keywords and target on the model's device; of texts, the first tokens."""
    args, kwargs = as_arguments(samples.inputs)
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    found: tuple[tuple[Any, ...], dict[str, Any], Any] = pytree.tree_map_only(
        Tensor, lambda x: x.to(device), (args, kwargs, samples.target)
    )
    tensors = [x for x in pytree.tree_leaves(found) if isinstance(x, Tensor)]
    ids = next((x for x in tensors if x.dim() == 2 and x.dtype == torch.int64), None)
    if ids is None or ids.shape[1] <= _MAX_TOKENS:
        return found
    if any(x.dim() > 1 and x.shape[:2] != ids.shape for x in tensors):
        return found
    cut = pytree.tree_map_only(Tensor, lambda x: x[:, :_MAX_TOKENS] if x.dim() > 1 else x, found)
    assert isinstance(cut, tuple), "of the same structure"
    return cut


def use_float8(module: nn.Module, device: torch.device) -> None:
    """Let linear layers multiply in float8, if their sizes are multiples of 16, as GPUs need it.

    Parameters and their names stay as they are. Numbers of tokens that are no multiples are padded
    for the products. On a CPU these are emulated.
    """
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError:
        raise LaunchError(
            "DeviceConfig(float8=True) without torchao",
            expected="torchao, which has the layers",
            fix="pip install torchao, in all environments of the job",
        ) from None

    def fits(layer: nn.Module, name: str) -> bool:
        if not isinstance(layer, nn.Linear):
            return False
        return layer.in_features % 16 == layer.out_features % 16 == 0

    config = Float8LinearConfig(emulate=device.type == "cpu", pad_inner_dim=True)
    convert_to_float8_training(module, config=config, module_filter_fn=fits)
