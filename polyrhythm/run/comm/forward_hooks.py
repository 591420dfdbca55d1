"""Hooks on the forwards, gradients and state of a model whose tensors arrive while it trains."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle


class ForwardOrder:
    """Calls `before` with the indices of a module's own tensors; records their first use.

    A pre-hook runs before every forward of every module that has parameters or buffers of
    `tensors`, also when activations are recomputed. A tensor that is used without a call of its
    module (such as the weights of `out_proj` in nn.MultiheadAttention) has no such hook: its owner
    waits for it elsewhere. In evaluation a forward may use other modules, so its first hook waits
    for all tensors.
    """

    def __init__(
        self,
        model: nn.Module,
        tensors: Sequence[Tensor],
        before: Callable[[Iterable[int]], None],
    ) -> None:
        self.order: dict[int, None] = {}  # an ordered set
        self._before, self._all, self._model = before, range(len(tensors)), model
        indices = {tensor: index for index, tensor in enumerate(tensors)}
        self._handles: list[RemovableHandle] = []
        for module in model.modules():
            if any(t in indices for t in (*module.parameters(), *module.buffers())):
                held = (*module.parameters(recurse=False), *module.buffers(recurse=False))
                own = [indices[tensor] for tensor in held if tensor in indices]
                # Kept out of compiled graphs: it must run at every forward, not once at tracing.
                hook = torch._dynamo.disable(self._hook(own))
                self._handles.append(module.register_forward_pre_hook(hook, prepend=True))

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    # A closure, not a bound method: a deep copy of the model shares it.
    def _hook(self, own: list[int]) -> Callable[[nn.Module, Any], None]:
        def before_forward(module: nn.Module, args: Any) -> None:
            self.order.update(dict.fromkeys(own))
            self._before(own if self._model.training else self._all)

        return before_forward


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
    model: nn.Module, *, before: Callable[[], None], after_load: Callable[[], None] = lambda: None
) -> list[RemovableHandle]:
    """Call `before` each save or load of any module's state, `after_load` after the model's."""
    handles = [model.register_load_state_dict_post_hook(lambda *_: after_load())]
    for module in model.modules():
        handles.append(module.register_state_dict_pre_hook(lambda *_: before()))
        handles.append(module.register_load_state_dict_pre_hook(lambda *_: before()))
    return handles
