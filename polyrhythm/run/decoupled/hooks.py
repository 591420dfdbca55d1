"""Where a model tells a distributed optimizer that something happens to it."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle


def gradient_hooks(
    on_gradient: Mapping[nn.Parameter, Callable[[Tensor], None]],
) -> list[RemovableHandle]:
    """Called when backward has a parameter's gradient; also of those that are frozen for now."""
    handles = []
    for parameter, hook in on_gradient.items():
        is_trained = parameter.requires_grad
        parameter.requires_grad_(True)
        handles.append(parameter.register_post_accumulate_grad_hook(hook))
        parameter.requires_grad_(is_trained)
    return handles


def state_hooks(
    model: nn.Module, *, before: Callable[[], None], after_load: Callable[[], None]
) -> list[RemovableHandle]:
    """Called `before` the state of any part of the model is read or loaded, and after the whole."""

    def begin(*_: Any) -> None:
        before()

    def end(*_: Any) -> None:
        after_load()

    handles: list[RemovableHandle] = []
    for part in model.modules():
        handles.append(part.register_state_dict_pre_hook(begin))
        handles.append(part.register_load_state_dict_pre_hook(begin))
    handles.append(model.register_load_state_dict_post_hook(end))
    return handles
