"""Hooks on gradients and on the state of a model, for a DistributedOptimizer."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle


def gradient_hooks(
    on_gradient: Mapping[nn.Parameter, Callable[[Tensor], None]],
) -> list[RemovableHandle]:
    """Register hooks that run when a gradient is complete; also on frozen parameters."""
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
    """Call `before` each save or load of any module's state, `after_load` after the model's."""

    def pre_hook(*_: Any) -> None:
        before()

    def post_hook(*_: Any) -> None:
        after_load()

    handles: list[RemovableHandle] = []
    for module in model.modules():
        handles.append(module.register_state_dict_pre_hook(pre_hook))
        handles.append(module.register_load_state_dict_pre_hook(pre_hook))
    handles.append(model.register_load_state_dict_post_hook(post_hook))
    return handles
