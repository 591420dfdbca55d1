"""Split a model into pipeline stages: who holds which layer, what crosses from stage to stage.

A Sequential is cut between its layers; an output that a later layer needs besides the one after it
travels straight to the stage that needs it. Any other model is cut along one list of layers, and
every stage runs the model's own forward around its slice of it (`parts.py`), so that masks and
positions are exactly the model's. Nothing is copied: parts hold the model's own modules and their
names, and what no part of this process holds is free to go.
"""

import difflib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

from torch import nn

from polyrhythm.errors import PlanError
from polyrhythm.plan.plan import PipelinePlan, Plan, even_plan
from polyrhythm.run.pipeline.stage_modules import (
    SequentialStage,
    StageSpec,
    extract_stage,
    starts_in_place,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wiring:
    """What a stage receives from whom and sends to whom; most often all from and to neighbours."""

    sources: tuple[int, ...]  # their messages, one after the other, make the positional inputs
    targets: Mapping[int, tuple[int, ...] | None]  # stage -> positions of outputs; None: all


@dataclass(frozen=True, slots=True, kw_only=True)
class TiedParameter:
    """A parameter that several stages hold: equal copies, whose gradients must be summed."""

    key: str  # its first name in the whole model, the same on every stage
    stages: tuple[int, ...]  # that hold it, sorted; this one among them
    name: str  # in this part's module


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPartition:
    """One stage's share of a model; its parameters are called as in the whole model.

    The module is called with the tensors of all sources (on stage 0 the user's arguments) and the
    user's keyword arguments, and returns a tensor or a tuple of tensors.
    """

    module: nn.Module
    wiring: Wiring
    tied: tuple[TiedParameter, ...] = ()  # in the same order on every stage


def linear_wiring(stage: int, num_stages: int) -> Wiring:
    """All outputs to the next stage."""
    return Wiring(
        sources=(stage - 1,) if stage > 0 else (),
        targets={stage + 1: None} if stage < num_stages - 1 else {},
    )


def split_sequential(
    model: nn.Sequential,
    *,
    stage: int,
    num_stages: int,
    layers_per_stage: Sequence[int] | None = None,
    skips: Mapping[int | str, int | str | Sequence[int | str]] | None = None,
) -> ModelPartition:
    """`skips={5: 1}` calls layer 5 with the outputs of layers 4 and 1; layers by index or name."""
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
) -> ModelPartition:
    """A stage runs the model's own forward around its slice of the list of modules `layers`.

    All names are dotted. `prologue` goes to the first stage, `epilogue` to the last, `every` and
    what has no parameters to all. Stages after the first take the hidden state as their only
    positional argument, the last returns the logits (or the first tensor that the model returns).
    """
    listed = _check_lists(model, layers=layers, prologue=prologue, every=every, epilogue=epilogue)
    layer_list = model.get_submodule(layers)
    ranges = _ranges(len(layer_list._modules), num_stages, layers_per_stage)
    _check_all_assigned(model, {layers, *listed})
    everywhere = set(range(num_stages))
    stages_of_list = {"prologue": {0}, "every": everywhere, "epilogue": {num_stages - 1}}
    stages_by_name = {
        layers: everywhere,
        **{name: stages_of_list[what] for name, what in listed.items()},
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
            inner={outer for name in (layers, *listed) for outer in _outer(name)},
        ),
        is_last=stage == num_stages - 1,
    )
    holders = {
        name: next(
            stages_by_name[inside] for inside in (name, *_outer(name)) if inside in stages_by_name
        )
        for name, _ in model.named_parameters(remove_duplicate=False)
    }
    wiring = linear_wiring(stage, num_stages)
    return ModelPartition(module=module, wiring=wiring, tied=_tied(model, module, holders))


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
                fix="give one number per stage, which add up, or leave layers_per_stage out",
            )
    return [plan.layers(stage) for stage in range(num_stages)]


def _tied(
    model: nn.Module, module: nn.Module, holders: Mapping[str, Collection[int]]
) -> tuple[TiedParameter, ...]:
    """`holders`: stages by name of parameter, for every name that a shared one has."""
    stages: dict[nn.Parameter, set[int]] = {}
    keys: dict[nn.Parameter, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        stages.setdefault(parameter, set()).update(holders[name])
        keys.setdefault(parameter, name)
    own_range = {parameter: name for name, parameter in module.named_parameters()}
    return tuple(
        TiedParameter(key=keys[parameter], stages=tuple(sorted(held)), name=own_range[parameter])
        for parameter, held in stages.items()
        if parameter in own_range and len(held) > 1
    )


def _needed(held: range, extra: Mapping[int, Sequence[int]]) -> list[int]:
    """The values, by the layer that makes them, that a stage with these layers receives."""
    if held.start == 0:
        return []
    skipped = {value for layer in held for value in extra.get(layer, ()) if value < held.start}
    return sorted({held.start - 1, *skipped})


def _extra_inputs(
    names: list[str], skips: Mapping[int | str, int | str | Sequence[int | str]]
) -> dict[int, tuple[int, ...]]:
    """Layer -> layers whose outputs it takes after that of the one before it."""
    extra: dict[int, tuple[int, ...]] = {}
    for target, given in skips.items():
        sources = [given] if isinstance(given, int | str) else given
        into = _index(target, names)
        if into in extra:
            raise PlanError(
                f"skips name layer {into} twice, by index and by name",
                expected="every layer once, with all its sources",
                fix=f"write skips={{{into}: [all its sources]}}",
            )
        extra[into] = tuple(_index(source, names) for source in sources)
        late = [source for source in extra[into] if source >= into]
        if late:
            raise PlanError(
                f"skips={{{target!r}: {given!r}}}: {late[0]} has no output when layer {into} runs",
                expected="sources that come before the layer that takes them",
                fix=f"take the output of a layer below {into}, or swap the two: "
                f"skips={{{late[0]}: {into}}}",
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
        expected=f"an index from 0 to {len(names) - 1}, or a name of a layer",
        fix=f"{nearest} one of {', '.join(map(repr, names[:12]))}{', ...' * (len(names) > 12)}",
    )


def _check_not_overwritten(model: nn.Sequential, extra: Mapping[int, Sequence[int]]) -> None:
    """A layer that overwrites what a skip carries would do so for some ways to split only."""
    for target, sources in extra.items():
        for source in sources:
            if source + 1 < target and starts_in_place(model[source + 1]):
                raise PlanError(
                    f"layer {source + 1} works in place on the output of layer {source}, which "
                    f"layer {target} takes as well",
                    expected="outputs that stay as they are until all have used them",
                    fix=f"use inplace=False there, or take the output of layer {source + 1}",
                )


def _check_lists(model: nn.Module, *, layers: str, **lists: Sequence[str]) -> dict[str, str]:
    """Name -> which list it is in."""
    modules = {name: module for name, module in model.named_modules(remove_duplicate=False) if name}
    if layers not in modules or not _is_list(modules[layers]):
        _raise_layers_error(layers, modules)
    known = [*modules, *(name for name, _ in model.named_parameters(remove_duplicate=False))]
    listed: dict[str, str] = {}
    for what, names in lists.items():
        if isinstance(names, str):
            raise PlanError(
                f"{what}={names!r}", expected="a list of names", fix=f"write {what}=[{names!r}]"
            )
        for name in names:
            if name not in known:
                raise PlanError(
                    f"{what}: the model has no {name!r}",
                    expected="the dotted name of a module of the model",
                    fix=f"nearest names: {', '.join(_nearest(name, known)[:4])}",
                )
            for other in (layers, *listed):
                if name == other or name in _outer(other) or other in _outer(name):
                    raise PlanError(
                        f"{what}: {name!r} overlaps with {other!r} in "
                        f"{listed.get(other, 'layers')}",
                        expected="every module in one list, and none inside of another",
                        fix="list it once",
                    )
            listed[name] = what
    return listed


def _raise_layers_error(layers: str, modules: Mapping[str, nn.Module]) -> NoReturn:
    lists = {name: len(module._modules) for name, module in modules.items() if _is_list(module)}
    shown = [f"{name} ({lists[name]})" for name in _nearest(layers, lists)]
    more = f" and {len(shown) - 8} more" if len(shown) > 8 else ""
    kind = f"is a {type(modules[layers]).__name__}" if layers in modules else "does not exist"
    raise PlanError(
        f"layers={layers!r} {kind}",
        expected="the dotted name of the list of modules to cut: a ModuleList or a Sequential",
        fix=f"use one of (with its length): {', '.join(shown[:8])}{more}"
        if shown
        else "this model has none: write it as a Sequential and use split_sequential",
    )


def _check_all_assigned(model: nn.Module, listed: set[str]) -> None:
    """Every parameter must be inside of something that was listed."""
    inner = {outer for name in listed for outer in _outer(name)}
    unassigned: dict[str, None] = {}  # in the model's order
    for name, _ in model.named_parameters():
        path = [*reversed(_outer(name)), name]
        if not listed & set(path):
            unassigned[next(outer for outer in path if outer not in inner)] = None
    if unassigned:
        names = ", ".join(repr(name) for name in unassigned)
        raise PlanError(
            f"no list says which stage holds {names}",
            expected="every module that has parameters in layers, prologue, every or epilogue",
            fix="list under `prologue` what runs before the layers, under `epilogue` what runs "
            "after them, under `every` what runs beside them",
        )


def _is_list(module: nn.Module) -> bool:
    if isinstance(module, nn.ModuleDict):  # some number the layers by key, to keep names in parts
        return len(module) > 0 and all(key.isdecimal() for key in module)
    return isinstance(module, nn.ModuleList | nn.Sequential)


def _outer(name: str) -> list[str]:
    """The modules around it, innermost first: of "a.b.c", "a.b" and "a"."""
    outer = []
    while "." in name:
        name = name.rpartition(".")[0]
        outer.append(name)
    return outer


def _nearest(name: str, known: Iterable[str]) -> list[str]:
    return sorted(known, key=lambda other: -difflib.SequenceMatcher(None, name, other).ratio())
