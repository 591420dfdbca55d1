"""Split a model into pipeline stages: which stage has which layers, and what stages send.

A Sequential is split between its layers; an output that a layer other than the next one needs is
sent straight to the stage of that layer. Any other model is split along one list of layers, and
every stage runs the model's own forward around its slice of the list (`stage_modules.py`), so that
masks and positions are exactly the model's. Nothing is copied: a partition refers to the model's
own modules under their names, and modules of other stages can be freed.

A stage of torch.distributed.pipelining brings its own module; if it was traced, the graph of the
model says which outputs of which stages it takes.
"""

import difflib
import logging
import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from hashlib import blake2b
from itertools import accumulate, pairwise
from typing import Any, NoReturn
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DataParallel, DistributedDataParallel

from polyrhythm.describe.measure import check_usable
from polyrhythm.errors import PlanError, ScheduleError
from polyrhythm.plan.plan import PipelinePlan, Plan, even_plan
from polyrhythm.run.pipeline.find_split import (
    Example,
    enclosing,
    find_split,
    is_layer_list,
)
from polyrhythm.run.pipeline.options import TiedNames
from polyrhythm.run.pipeline.stage_modules import (
    ExitLayer,
    SequentialStage,
    StageSpec,
    extract_stage,
    return_whole_output,
    starts_in_place,
)
from polyrhythm.run.random_streams import StreamedLayer

_logger = logging.getLogger(__name__)

_WHOLE_STEP = "average the gradients after step(), or use fully_shard, which reduces them once"
# By name: importing them takes as long as the rest of the package.
_TORCH_STAGES = "torch.distributed.pipelining.stage"
_TORCH_REPLICATE = "torch.distributed._composable.replicate"


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedInputs:
    """The inputs of a traced stage, by name."""

    received: tuple[str, ...]  # from other stages, in the order in which they are received
    of_model: tuple[str, ...]  # the inputs of the whole model
    taken: tuple[str, ...]  # the inputs of this stage's module

    def bind(
        self, inputs: Sequence[Any], keywords: Mapping[str, Any], stage: int
    ) -> dict[str, Any]:
        """Return the keyword arguments of the module; `inputs` are the model's on stage 0."""
        names = self.received or self.of_model
        unknown = [name for name in keywords if name not in self.of_model]
        if unknown or len(inputs) > len(names):
            what = f"the keyword {unknown[0]}" if unknown else f"{len(inputs)} arguments"
            raise ScheduleError(
                f"stage {stage} was called with {what}",
                expected=f"inputs of the traced model: {', '.join(self.of_model)}",
                fix="pass the arguments with which the model was traced",
            )
        bound = {**dict(zip(names, inputs, strict=False)), **keywords}
        missing = [name for name in self.taken if name not in bound]
        if missing:
            raise ScheduleError(
                f"stage {stage} needs the model's input {missing[0]}",
                expected="an input of the model on every stage that uses it",
                fix=f"call step({missing[0]}=...) on this stage",
            )
        return {name: bound[name] for name in self.taken}


@dataclass(frozen=True, slots=True, kw_only=True)
class Wiring:
    """Which stages send to a stage and receive from it; without skips only its neighbours."""

    sources: tuple[int, ...]  # their messages, in this order, are the positional inputs
    targets: Mapping[int, tuple[int, ...] | None]  # stage -> positions of outputs; None: all
    named_inputs: NamedInputs | None = None  # None: the module takes its inputs by position


@dataclass(frozen=True, slots=True, kw_only=True)
class TiedParameter:
    """A parameter that several stages hold: equal copies, whose gradients must be summed."""

    key: str  # its first name in the whole model, the same on every stage
    stages: tuple[int, ...]  # all that hold it, sorted, including this one
    name: str  # in the module of this stage


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPartition:
    """One stage's part of a model; its parameters have the names of the whole model.

    The module is called with the tensors of all sources (on stage 0 the user's arguments) and the
    user's keyword arguments, and returns a tensor or a tuple of tensors.
    """

    module: nn.Module
    wiring: Wiring
    tied: tuple[TiedParameter, ...] = ()  # in the same order on every stage
    layers: tuple[StreamedLayer, ...] = ()  # the list that stages divide, if known
    # Called after each backward, returns a function that adds the gradients of weights (torch's).
    dw_builder: Callable[[], Callable[..., None]] | None = None


def linear_wiring(stage: int, num_stages: int) -> Wiring:
    """Return the wiring that sends all outputs to the next stage."""
    return Wiring(
        sources=(stage - 1,) if stage > 0 else (),
        targets={stage + 1: None} if stage < num_stages - 1 else {},
    )


def as_partition(
    module: Any,
    stage: int,
    num_stages: int,
    tied: TiedNames | None = None,
    *,
    recompute: bool = False,
) -> ModelPartition:
    """Return a partition itself; make one of a module or a torch stage.

    `tied` names the parameters that stages share, which modules split by hand do not tell.
    To `recompute`, a module must tell its layers: a Sequential does.
    """
    if recompute:
        if not isinstance(module, nn.Sequential):
            raise _no_layers_to_recompute(module)
        module = SequentialStage(
            dict(module._modules.items()),
            first=0,
            is_last=True,
            received=(),
            extra={},
            sent=(),
            recompute=True,
        )
    if isinstance(module, ModelPartition):
        if tied is not None:
            raise ScheduleError(
                "tied= with a model that is split here",
                expected="tied= for modules split by hand and torch stages only",
                fix="omit it: tied parameters of the model are found",
            )
        return module
    partition = ModelPartition(module=module, wiring=linear_wiring(stage, num_stages))
    submodules: Mapping[str, int] = {}
    if (torch_stage := torch_stage_of(module)) is not None:
        partition = _torch_partition(torch_stage, stage, num_stages)
        if partition.wiring.named_inputs is not None:
            submodules = torch_stage.submod_to_stage_index
            if tied is None:
                _check_no_copies(torch_stage)
    elif not isinstance(module, nn.Module):
        raise ScheduleError(
            f"a {type(module).__name__} as a stage",
            expected="an nn.Module, or a torch PipelineStage",
            fix="wrap it in one",
        )
    if isinstance(partition.module, nn.Sequential | SequentialStage) and num_stages == 1:
        whole = partition.module
        layers = _streamed(whole, whole, range(len(whole._modules)))
        partition = replace(partition, layers=layers)
    by_stage = [{submodules.get(str(k), k): name for k, name in tie.items()} for tie in tied or ()]
    return replace(partition, tied=_named_ties(partition.module, by_stage, stage, num_stages))


def _no_layers_to_recompute(module: Any) -> ScheduleError:
    return ScheduleError(
        f"recompute=True with a {type(module).__name__}",
        expected="a Sequential, or a model that is split here, whose layers recompute",
        fix="use Pipeline.from_layers(model, recompute=True); or in the module's forward "
        "torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)",
    )


def torch_stage_of(stage: Any) -> Any | None:
    """Return a torch.distributed.pipelining stage, also the only one of a list; None for others."""
    if isinstance(stage, list | tuple) and len(stage) == 1:
        (stage,) = stage
    if isinstance(stage, list | tuple):
        raise ScheduleError(
            f"{len(stage)} stages in one process",
            expected="one stage per process: interleaved and V schedules are not implemented, and "
            "send more messages over each link",
            fix="create one PipelineStage per process, as for torch's Schedule1F1B",
        )
    return stage if _is_from(stage, _TORCH_STAGES) else None


def _is_from(value: object, module: str) -> bool:
    return any(kind.__module__ == module for kind in type(value).__mro__)


def _torch_partition(torch_stage: Any, stage: int, num_stages: int) -> ModelPartition:
    if (stage, num_stages) != (torch_stage.stage_index, torch_stage.num_stages):
        raise ScheduleError(
            f"a torch stage {torch_stage.stage_index} of {torch_stage.num_stages} "
            f"on process {stage} of {num_stages}",
            expected="one stage per process, in the order of the process group",
            fix="create one PipelineStage per process, with its group rank as stage_index",
        )
    kinds = type(torch_stage).__mro__
    first = next(k for k in kinds if k.__module__ == _TORCH_STAGES)
    overridden = sorted(
        name
        for kind in kinds[: kinds.index(first)]
        for name, value in vars(kind).items()
        if callable(value) and hasattr(first, name) and not name.startswith("__")
    )
    if overridden:
        raise ScheduleError(
            f"{kinds[0].__name__}.{overridden[0]}, which replaces torch's",
            expected="a stage with torch's own methods: a pipeline uses its module only",
            fix="do this in the module of the stage",
        )
    is_traced = hasattr(torch_stage, "pipe_info")
    return ModelPartition(
        module=torch_stage.submod,
        wiring=_traced_wiring(torch_stage) if is_traced else linear_wiring(stage, num_stages),
        dw_builder=torch_stage.dw_builder,
    )


def _traced_wiring(torch_stage: Any) -> Wiring:
    """Read from the graph of a traced model what its stages send to each other."""
    nodes, stages = list(torch_stage.pipe_info.graph.nodes), torch_stage.submod_to_stage_index

    def producer(node: Any) -> tuple[int, int]:
        """Return stage and position of an output; stage -1 for an input of the model."""
        position = node.args[1] if node.target is operator.getitem else 0
        node = node.args[0] if node.target is operator.getitem else node
        return stages.get(node.name, -1), position

    called = [node.target for node in nodes if node.op == "call_module"]
    if called != sorted(called, key=lambda name: int(name.rpartition("_")[2])):
        raise ScheduleError(
            f"a traced model that calls its stages in the order {', '.join(called)}",
            expected="every stage to need the one before it: torch numbers others by mistake",
            fix="split the model elsewhere, or by hand",
        )
    own = torch_stage.stage_index
    sent: dict[int, set[int]] = {}  # own outputs by target
    for node in nodes:
        if node.op == "call_module":
            for source, position in map(producer, node.args):
                if source == own:
                    sent.setdefault(stages[node.name], set()).add(position)
    returned = [producer(x)[0] for x in nodes[-1].all_input_nodes]
    if any(source != torch_stage.num_stages - 1 for source in returned):
        raise ScheduleError(
            f"a traced model that returns an output of stage {min(returned)}",
            expected="outputs of the last stage only, which computes the loss",
            fix="pass it through the following stages: add it to a tensor, or multiply it by one",
        )
    inputs = [node for node in torch_stage.submod.graph.nodes if node.op == "placeholder"]
    received = sorted(
        (*producer(argument), str(node.target))
        for node, argument in zip(inputs, torch_stage.node.args, strict=True)
        if producer(argument)[0] >= 0
    )
    return Wiring(
        sources=tuple(sorted({source for source, _, _ in received})),
        targets={target: tuple(sorted(positions)) for target, positions in sorted(sent.items())},
        named_inputs=NamedInputs(
            received=tuple(name for _, _, name in received),
            of_model=tuple(str(node.target) for node in nodes if node.op == "placeholder"),
            taken=tuple(str(node.target) for node in inputs),
        ),
    )


def _check_no_copies(torch_stage: Any) -> None:
    """Refuse a traced model whose stages seem to share a parameter: torch has made copies of it.

    Every process has the modules of all stages, so all of them refuse it.
    """
    seen: dict[bytes, tuple[str, str]] = {}
    for submodule, module in torch_stage.pipe_info.graph.owning_module.named_children():
        for name, parameter in module.named_parameters():
            problem = ""
            if "@" in name:  # torch's name for a module that another stage has, too
                problem = f"{name} of {submodule} is a copy"
            elif (values := fingerprint(parameter)) is not None:
                where, other = seen.setdefault(values, (submodule, name))
                if where != submodule:
                    problem = f"{name} of {submodule} seems to be a copy of {other} of {where}"
            if problem:
                raise ScheduleError(
                    problem,
                    expected="the names of shared parameters, whose gradients are summed",
                    fix="pass tied=pipe.replicated_params, which is empty if there are none",
                )


def fingerprint(parameter: Tensor) -> bytes | None:
    """Hash the first values of a parameter; None if they say nothing: unknown, or all the same."""
    if parameter.is_meta or isinstance(parameter, DTensor):
        return None
    values = parameter.detach().flatten()[:64].tolist()
    text = f"{parameter.dtype} {tuple(parameter.shape)} {values}"
    return blake2b(text.encode(), digest_size=16).digest() if len(set(values)) > 1 else None


def _named_ties(
    module: nn.Module, tied: Sequence[Mapping[Any, str]], stage: int, num_stages: int
) -> tuple[TiedParameter, ...]:
    """Return the parameters of `module` that `tied` names, after a check of all names."""
    known = dict(module.named_parameters(remove_duplicate=False))
    found = []
    for names in tied:
        if len(names) < 2 or not all(holder in range(num_stages) for holder in names):
            raise ScheduleError(
                f"tied={list(tied)}: {dict(names)}",
                expected=f"the names of a parameter on two or more of {num_stages} stages",
                fix="write tied=[{0: 'embed.weight', 1: 'head.weight'}], the same on every stage",
            )
        if stage in names and names[stage] not in known:
            raise ScheduleError(
                f"tied: stage {stage} has no parameter {names[stage]!r}",
                expected="the name of a parameter in the module of this stage",
                fix=f"nearest names: {', '.join(_nearest(names[stage], known)[:4])}",
            )
        stages = tuple(sorted(names))
        if stage in names:
            found.append(TiedParameter(key=names[stages[0]], stages=stages, name=names[stage]))
    return tuple(found)


def module_device(module: nn.Module, device: torch.device | str | None) -> torch.device:
    """Return the device on which a stage runs: where its module is, unless given."""
    if device is not None:
        device = torch.device(device)
        check_usable(device)
        is_any = device.type == "cuda" and device.index is None
        return torch.device("cuda", torch.cuda.current_device()) if is_any else device
    parameter = next(module.parameters(), None)
    if parameter is not None and parameter.is_meta:
        raise ScheduleError(
            "a module on the meta device, without memory",
            expected="weights on a device, or device= of where they will be",
            fix="pass device='cpu' or device='cuda:0', and call module.to_empty(device=...)",
        )
    return torch.device("cpu") if parameter is None else parameter.device


def check_device(module: nn.Module, device: torch.device, stage: int) -> None:
    """Refuse, before the first batch, a module that is not on the device of its stage.

    FSDP2 may keep shards in main memory, and a module may have tensors on other devices, too.
    """
    found = {p.device for p in module.parameters() if not isinstance(p, DTensor)}
    if not found or any(
        each.type == device.type and (device.type == "cpu" or device.index in (each.index, None))
        for each in found
    ):
        return
    where = " and ".join(sorted(map(str, found)))
    raise ScheduleError(
        f"device={str(device)!r}, and the module of stage {stage} is on {where}",
        expected="weights on the device on which the stage runs",
        fix=f"call pipeline.module.{'to_empty(device=' if where == 'meta' else 'to('}"
        f"{str(device)!r}) before the first step, or omit device=",
    )


def check_module(
    module: nn.Module, *, stage: int, is_tuned: bool, flush: bool, has_dw_builder: bool = False
) -> None:
    """Refuse modules that a pipeline would run wrongly.

    FSDP2 (`fully_shard`) and tensor parallelism run collectives with the other processes of the
    stage inside a forward and a backward, so all of them must run the same actions in the same
    order: they are the same stage of parallel pipelines with one fixed schedule.
    """
    for name, inner in module.named_modules():
        where = f"stage {stage}" + (f": {name}" if name else "")
        is_replicated = _is_from(inner, _TORCH_REPLICATE)  # the older one, which is DDP inside
        if isinstance(inner, DistributedDataParallel) or is_replicated:
            wrapped = "the older replicate()" if is_replicated else "DistributedDataParallel"
            raise ScheduleError(
                f"{where} is wrapped in {wrapped}",
                expected="gradients that are averaged once per step: DDP would all-reduce them "
                "after every micro-batch, and wait there for the other pipelines",
                fix=f"pass the module inside it, and {_WHOLE_STEP}",
            )
        if isinstance(inner, FullyShardedDataParallel | DataParallel):
            raise ScheduleError(
                f"{where} is wrapped in {type(inner).__name__}",
                expected="a module that can run several forwards before the first backward",
                fix="shard the module with torch.distributed.fsdp.fully_shard instead",
            )
        inside = (m for m in inner.modules() if m is not inner)
        if isinstance(inner, FSDPModule) and any(isinstance(m, ExitLayer) for m in inside):
            raise ScheduleError(
                f"{where} is sharded around layers that are partly on the next stages",
                expected="no fully_shard on a module whose forward ends at the next stage: "
                "its post-forward hooks would not run",
                fix="call fully_shard on each layer, embedding and norm, not on their parents",
            )
    if has_dw_builder and (not flush or _is_shared(module)):
        what = "a module that several processes share" if flush else "flush=False"
        raise ScheduleError(
            f"dw_builder of stage {stage} with {what}",
            expected="weights and gradients that stay in place until dw_builder has run",
            fix="omit dw_builder: autograd computes all gradients",
        )
    if (is_tuned or not flush) and _is_shared(module):
        what = "schedule='auto'" if is_tuned else "flush=False"
        why = "each would choose its own" if is_tuned else "sharded weights cannot be stashed"
        raise ScheduleError(
            f"{what} with a module of stage {stage} that several processes share",
            expected=f"one schedule for all these processes, and a flush: {why}",
            fix="name the schedule, such as schedule='1f1b', and leave flush=True",
        )


def _is_shared(module: nn.Module) -> bool:
    """Whether the forward of a module needs other processes: FSDP2 or tensor parallelism."""
    tensors = (*module.parameters(), *module.buffers())
    return any(isinstance(t, DTensor) and t.device_mesh.size() > 1 for t in tensors)


def split_sequential(
    model: nn.Sequential,
    *,
    stage: int,
    num_stages: int,
    layers_per_stage: Sequence[int] | None = None,
    skips: Mapping[int | str, int | str | Sequence[int | str]] | None = None,
    recompute: bool = False,
) -> ModelPartition:
    """Split a Sequential; `skips={5: 1}` (index or name) calls layer 5 with outputs of 4 and 1.

    `recompute`: layers keep only their inputs, and run again in the backward.
    """
    names = list(model._modules)  # named_children() leaves out a layer's second appearance
    ranges = _ranges(len(names), num_stages, layers_per_stage)
    owner = [holder for holder, held in enumerate(ranges) for _ in held]
    extra = _extra_inputs(names, skips or {})
    _check_not_overwritten(model, extra)
    own_range, is_last = ranges[stage], stage == num_stages - 1
    needed = [_needed(held, extra) for held in ranges]
    sent = sorted({v for values in needed[stage + 1 :] for v in values if owner[v] == stage})
    wiring = Wiring(
        sources=tuple(sorted({owner[v] for v in needed[stage]})),
        targets={
            target: positions
            for target in range(stage + 1, num_stages)
            if (positions := tuple(i for i, v in enumerate(sent) if v in needed[target]))
        },
    )
    module = SequentialStage(
        {names[i]: model[i] for i in own_range},
        first=own_range.start,
        is_last=is_last,
        received=needed[stage] if extra else (),
        extra=extra,
        sent=sent if extra else (),
        recompute=recompute,
    )
    index = {name: i for i, name in enumerate(names)}
    holders = {
        name: {owner[index[name.partition(".")[0]]]}
        for name, _ in model.named_parameters(remove_duplicate=False)
    }
    return ModelPartition(
        module=module,
        wiring=wiring if extra else linear_wiring(stage, num_stages),
        tied=_tied(model, module, holders),
        layers=_streamed(model, module, own_range),
    )


def split_layers(
    model: nn.Module,
    *,
    stage: int,
    num_stages: int,
    layers: str,
    prologue: Sequence[str] = (),
    every: Sequence[str] = (),
    epilogue: Sequence[str] = (),
    layers_per_stage: Sequence[int] | None = None,
    recompute: bool = False,
) -> ModelPartition:
    """Split a model: each stage runs the model's own forward around its slice of `layers`.

    All names are dotted. `prologue` goes to the first stage, `epilogue` to the last, `every` and
    modules without parameters to all. Stages after the first take the hidden state as their only
    positional argument; the last returns the logits (or the first tensor that the model returns).
    `recompute`: layers keep only their inputs, and run again in the backward, unless the model
    does that itself.
    """
    if recompute and recomputes_itself(model):
        _logger.warning(
            "%s recomputes its layers itself (gradient_checkpointing_enable): the stage does not "
            "do it a second time",
            type(model).__name__,
        )
        recompute = False
    listed = _check_lists(model, layers=layers, prologue=prologue, every=every, epilogue=epilogue)
    layer_list = model.get_submodule(layers)
    ranges = _ranges(len(layer_list._modules), num_stages, layers_per_stage)
    _check_all_assigned(model, {layers, *listed})
    everywhere = set(range(num_stages))
    stages_of_list = {"prologue": {0}, "every": everywhere, "epilogue": {num_stages - 1}}
    stages_by_name = {
        layers: everywhere,
        **{name: stages_of_list[option] for name, option in listed.items()},
    }
    for holder, held in enumerate(ranges):
        for name in list(layer_list._modules)[held.start : held.stop]:
            stages_by_name[f"{layers}.{name}"] = {holder}
    module = extract_stage(
        model,
        StageSpec(
            layers=layers,
            own_layers=ranges[stage],
            absent={name for name, stages in stages_by_name.items() if stage not in stages},
            inner={outer for name in (layers, *listed) for outer in enclosing(name)},
            recompute=recompute,
        ),
        is_last=stage == num_stages - 1,
    )
    holders = {
        name: next(
            stages_by_name[inside]
            for inside in (name, *enclosing(name))
            if inside in stages_by_name
        )
        for name, _ in model.named_parameters(remove_duplicate=False)
    }
    return ModelPartition(
        module=module,
        wiring=linear_wiring(stage, num_stages),
        tied=_tied(model, module, holders),
        layers=_streamed(layer_list, module.get_submodule(layers), ranges[stage]),
    )


def recomputes_itself(model: nn.Module) -> bool:
    """Return whether a model of transformers checkpoints its layers' activations."""
    return any(
        getattr(module, "gradient_checkpointing", False) is True for module in model.modules()
    )


def _ranges(
    num_layers: int, num_stages: int, layers_per_stage: Sequence[int] | None
) -> list[range]:
    if layers_per_stage is None:
        plan = even_plan(num_layers=num_layers, num_stages=num_stages, num_pipelines=1)
    else:
        plan = Plan(layers_per_stage=tuple(layers_per_stage), pipelines=(PipelinePlan(),))
        if plan.num_stages != num_stages or sum(layers_per_stage) != num_layers:
            raise PlanError(
                f"layers_per_stage={list(layers_per_stage)}: {sum(layers_per_stage)} layers in "
                f"{plan.num_stages} stages",
                expected=f"{num_layers} layers in {num_stages} stages",
                fix="pass one number per stage with this sum, or omit layers_per_stage",
            )
    return [plan.layers(stage) for stage in range(num_stages)]


def _streamed(whole: nn.Module, of_stage: nn.Module, own: range) -> tuple[StreamedLayer, ...]:
    """Describe a list of layers, and those of them that a stage has."""
    streams = dict[nn.Module | None, int]()
    for index, layer in enumerate(whole._modules.values()):
        streams.setdefault(layer, index)  # a layer that is used twice has one stream
    return tuple(
        StreamedLayer(streams[layer], of_stage._modules[name] if index in own else None)
        for index, (name, layer) in enumerate(whole._modules.items())
    )


def _tied(
    model: nn.Module, module: nn.Module, holders: Mapping[str, Collection[int]]
) -> tuple[TiedParameter, ...]:
    """Find the tied parameters of `module`; `holders` gives the stages of every name."""
    stages: dict[nn.Parameter, set[int]] = {}
    keys: dict[nn.Parameter, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        stages.setdefault(parameter, set()).update(holders[name])
        keys.setdefault(parameter, name)
    own_names = {parameter: name for name, parameter in module.named_parameters()}
    return tuple(
        TiedParameter(key=keys[parameter], stages=tuple(sorted(holding)), name=own_names[parameter])
        for parameter, holding in stages.items()
        if parameter in own_names and len(holding) > 1
    )


def _needed(held: range, extra: Mapping[int, Sequence[int]]) -> list[int]:
    """Return the outputs, by layer, that a stage with the layers `held` receives."""
    if held.start == 0:
        return []
    skipped = {value for layer in held for value in extra.get(layer, ()) if value < held.start}
    return sorted({held.start - 1, *skipped})


def _extra_inputs(
    names: list[str], skips: Mapping[int | str, int | str | Sequence[int | str]]
) -> dict[int, tuple[int, ...]]:
    """Map a layer to the layers whose outputs it takes in addition to the previous one's."""
    extra: dict[int, tuple[int, ...]] = {}
    for target, listed in skips.items():
        sources = [listed] if isinstance(listed, int | str) else listed
        layer = _index(target, names)
        if layer in extra:
            raise PlanError(
                f"skips name layer {layer} twice, by index and by name",
                expected="each layer once, with all its sources",
                fix=f"write skips={{{layer}: [all its sources]}}",
            )
        extra[layer] = tuple(_index(source, names) for source in sources)
        too_late = [source for source in extra[layer] if source >= layer]
        if too_late:
            raise PlanError(
                f"skips={{{target!r}: {listed!r}}}: {too_late[0]} is not before layer {layer}",
                expected="sources that run before the layer that takes them",
                fix=f"take the output of a layer below {layer}, or swap the two: "
                f"skips={{{too_late[0]}: {layer}}}",
            )
    return extra


def _index(layer: int | str, names: list[str]) -> int:
    if isinstance(layer, str) and layer in names:
        return names.index(layer)
    if isinstance(layer, int) and 0 <= layer < len(names):
        return layer
    nearest = f"did you mean {_nearest(str(layer), names)[0]!r}? or use" if names else "use"
    raise PlanError(
        f"skips name layer {layer!r}",
        expected=f"an index from 0 to {len(names) - 1}, or the name of a layer",
        fix=f"{nearest} one of {', '.join(map(repr, names[:12]))}{', ...' * (len(names) > 12)}",
    )


def _check_not_overwritten(model: nn.Sequential, extra: Mapping[int, Sequence[int]]) -> None:
    """Refuse layers that overwrite the output of a skip: results would depend on the split."""
    for target, sources in extra.items():
        for source in sources:
            if source + 1 < target and starts_in_place(model[source + 1]):
                raise PlanError(
                    f"layer {source + 1} works in place on the output of layer {source}, which "
                    f"layer {target} takes as well",
                    expected="outputs that no layer overwrites before all have used them",
                    fix=f"use inplace=False there, or take the output of layer {source + 1}",
                )


def _check_lists(model: nn.Module, *, layers: str, **lists: Sequence[str]) -> dict[str, str]:
    """Map every listed name to the option that lists it."""
    modules = {name: module for name, module in model.named_modules(remove_duplicate=False) if name}
    if layers not in modules or not is_layer_list(modules[layers]):
        _raise_layers_error(layers, modules)
    known = [*modules, *(name for name, _ in model.named_parameters(remove_duplicate=False))]
    listed: dict[str, str] = {}
    for option, names in lists.items():
        if isinstance(names, str):
            raise PlanError(
                f"{option}={names!r}", expected="a list of names", fix=f"write {option}=[{names!r}]"
            )
        for name in names:
            if name not in known:
                raise PlanError(
                    f"{option}: the model has no {name!r}",
                    expected="the dotted name of a module of the model",
                    fix=f"nearest names: {', '.join(_nearest(name, known)[:4])}",
                )
            for other in (layers, *listed):
                if name == other or name in enclosing(other) or other in enclosing(name):
                    raise PlanError(
                        f"{option}: {name!r} overlaps with {other!r} in "
                        f"{listed.get(other, 'layers')}",
                        expected="every module in one list, and none inside another",
                        fix="list it once",
                    )
            listed[name] = option
    return listed


def _raise_layers_error(layers: str, modules: Mapping[str, nn.Module]) -> NoReturn:
    lists = {
        name: len(module._modules) for name, module in modules.items() if is_layer_list(module)
    }
    shown = [f"{name} ({lists[name]})" for name in _nearest(layers, lists)]
    more = f" and {len(shown) - 8} more" if len(shown) > 8 else ""
    kind = f"is a {type(modules[layers]).__name__}" if layers in modules else "does not exist"
    raise PlanError(
        f"layers={layers!r} {kind}",
        expected="the dotted name of the list of modules to split: a ModuleList or a Sequential",
        fix=f"use one of (with its length): {', '.join(shown[:8])}{more}"
        if shown
        else "this model has none: write it as a Sequential, which needs no layers=",
    )


def _check_all_assigned(model: nn.Module, listed: set[str]) -> None:
    """Refuse parameters that are inside no listed module."""
    inner = {outer for name in listed for outer in enclosing(name)}
    unassigned: dict[str, None] = {}  # in the model's order
    for name, _ in model.named_parameters():
        path = [*reversed(enclosing(name)), name]
        if not listed & set(path):
            unassigned[next(outer for outer in path if outer not in inner)] = None
    if unassigned:
        names = ", ".join(repr(name) for name in unassigned)
        raise PlanError(
            f"no list assigns {names} to a stage",
            expected="every module that has parameters in layers, prologue, every or epilogue",
            fix="list modules that run before the layers under `prologue`, after them under "
            "`epilogue`, and modules that several stages need under `every`",
        )


def _nearest(name: str, known: Iterable[str]) -> list[str]:
    return sorted(known, key=lambda other: -difflib.SequenceMatcher(None, name, other).ratio())


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSplit:
    """Arguments of `Pipeline.from_layers`; what is not named is found.

    Without `layers`, a Sequential is split by layer, and any other model as `find_split` finds.
    """

    layers: str | None = None
    prologue: Sequence[str] = ()
    every: Sequence[str] = ()
    epilogue: Sequence[str] = ()
    # Found, seldom named: (0, 3) if layer 3 takes more from layer 0 than the hidden state.
    together: Sequence[tuple[int, int]] = ()

    def found(self, model: nn.Module, example: Example | None = None) -> "LayerSplit":
        """Return this split with all parts named; a PlanError says why a model has none.

        Runs the model once, on the example if one is given, and remembers the result with the
        model. Stages of a Sequential have no names.
        """
        if self.layers is not None or isinstance(model, nn.Sequential):
            return self
        known = _found_splits.get(model)
        if isinstance(known, LayerSplit):
            return known
        if known is None or example is not None:
            if self.prologue or self.every or self.epilogue:
                raise PlanError(
                    "a split with `prologue`, `every` or `epilogue`, and no `layers`",
                    expected="all parts named, or none",
                    fix='add the list, as in layers="model.layers", or use LayerSplit()',
                )
            try:
                known = LayerSplit(**asdict(find_split(model, example)))
            except PlanError as error:  # its traceback would keep the model alive
                known = PlanError(error.wrong, expected=error.expected, fix=error.fix)
                _found_splits[model] = known
                raise
            _found_splits[model] = known
        if isinstance(known, PlanError):
            raise PlanError(known.wrong, expected=known.expected, fix=known.fix)
        return known

    def num_layers(self, model: nn.Module) -> int:
        """Return the number of layers to split between; 1 for a model that cannot be split."""
        try:
            layers = self.found(model).layers
        except PlanError:  # `check` raises it for a plan of several stages
            return 1
        # The model itself is a Sequential if no list is named.
        layer_list = dict(model.named_modules(remove_duplicate=False)).get(layers or "")
        # `extract_stage` raises if there is no such list.
        return len(layer_list._modules) if layer_list is not None else 1

    def check(self, model: nn.Module, layers_per_stage: Sequence[int]) -> None:
        """Reject a model that cannot be split, or a stage without parameters, in all processes."""
        if len(layers_per_stage) > 1:
            self.found(model)._check_together(layers_per_stage)
        if self.layers is not None or not isinstance(model, nn.Sequential):
            return
        layers, bounds = list(model._modules.values()), [0, *accumulate(layers_per_stage)]
        for stage, (first, end) in enumerate(pairwise(bounds)):
            held = [layer for layer in layers[first:end] if layer is not None]
            if not any(True for layer in held for _ in layer.parameters()):
                kinds = ", ".join(type(layer).__name__ for layer in held)
                raise PlanError(
                    f"stage {stage} has no parameters: {kinds}",
                    expected="at least one parameter in every stage",
                    fix="use fewer stages, or another layers_per_stage in the plan",
                )

    def _check_together(self, layers_per_stage: Sequence[int]) -> None:
        for bound in list(accumulate(layers_per_stage))[:-1]:
            for first, last in self.together:
                if first < bound <= last:
                    raise PlanError(
                        f"layers_per_stage={list(layers_per_stage)}: the layers after layer "
                        f"{bound - 1} take more from layer {first} than the hidden state, such as "
                        "keys and values",
                        expected=f"no boundary of stages from layer {first} to layer {last}",
                        fix="use other layers_per_stage in the plan, or one stage and several "
                        "pipelines",
                    )

    def extract_stage(
        self,
        model: nn.Module,
        stage: int,
        layers_per_stage: Sequence[int],
        *,
        recompute: bool = False,
    ) -> ModelPartition:
        """Return one stage of the model; parameters keep their names.

        `recompute`: its layers keep only their inputs, and run again in the backward.
        """
        num_stages = len(layers_per_stage)
        is_whole = self.layers is None and num_stages == 1
        if is_whole and not recompute:
            return self._whole(model)
        split = self.found(model)
        split._check_together(layers_per_stage)
        if split.layers is not None:  # also for one stage, for the same arguments of the loss
            partition = split_layers(
                model,
                stage=stage,
                num_stages=num_stages,
                layers=split.layers,
                prologue=split.prologue,
                every=split.every,
                epilogue=split.epilogue,
                layers_per_stage=layers_per_stage,
                recompute=recompute,
            )
            if is_whole:
                return_whole_output(partition.module)
            return partition
        assert isinstance(model, nn.Sequential), "others have a list of layers"
        return split_sequential(
            model,
            stage=stage,
            num_stages=num_stages,
            layers_per_stage=layers_per_stage,
            recompute=recompute,
        )

    def _whole(self, model: nn.Module) -> ModelPartition:
        """Return the model as one stage, with the random streams of the layers that it has."""
        partition = as_partition(model, 0, 1)
        try:
            layers = self.found(model).layers
        except PlanError:  # it needs no split
            return partition
        if layers is None:
            return partition
        layer_list = model.get_submodule(layers)
        own = range(len(layer_list._modules))
        return replace(partition, layers=_streamed(layer_list, layer_list, own))


# Or why there is none.
_found_splits: "WeakKeyDictionary[nn.Module, LayerSplit | PlanError]" = WeakKeyDictionary()


def build_model(model: nn.Module | Callable[[], nn.Module], seed: int) -> nn.Module:
    """Return the whole model; a function is called with the same seed in every process."""
    if isinstance(model, nn.Module):
        return model
    if not callable(model):
        raise PlanError(
            f"model={model!r}",
            expected="an nn.Module, or a function that returns it",
            fix="pass AutoModelForCausalLM.from_pretrained(name), for example",
        )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        made = model()
    if not isinstance(made, nn.Module):
        raise PlanError(
            f"the model function returned a {type(made).__name__}",
            expected="an nn.Module",
            fix="return the model from the function",
        )
    return made
