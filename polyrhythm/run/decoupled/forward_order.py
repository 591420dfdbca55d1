"""In which order a forward uses parameters, and where it has to wait for them.

A hook runs before the forward of every module that has parameters of its own, as often as the
module is called, also when activations are computed anew. What is used without its module being
called (a weight that another module reads) has no such place, and is waited for in the step itself.
In evaluation modules may take other ways, so there the first of them waits for everything.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle


class ForwardOrder:
    """Calls `before` with the indices of a module's own parameters; notes who came first."""

    def __init__(
        self,
        model: nn.Module,
        indices: Mapping[nn.Parameter, int],
        before: Callable[[Iterable[int]], None],
    ) -> None:
        self.order: dict[int, None] = {}  # a set in order
        self._before, self._all, self._model = before, list(indices.values()), model
        self._handles: list[RemovableHandle] = []
        for module in model.modules():
            if any(p in indices for p in module.parameters()):
                own = [indices[p] for p in module.parameters(recurse=False) if p in indices]
                hook = _without_dynamo(self._hook(own))
                self._handles.append(module.register_forward_pre_hook(hook, prepend=True))

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _hook(self, own: list[int]) -> Callable[[nn.Module, Any], None]:
        def before_forward(module: nn.Module, args: Any) -> None:
            self.order.update(dict.fromkeys(own))
            self._before(own if self._model.training else self._all)

        return before_forward


def _without_dynamo(hook: Callable[[nn.Module, Any], None]) -> Callable[[nn.Module, Any], None]:
    """A compiled graph may not keep what was waited for when it was traced."""
    found: Callable[[nn.Module, Any], None] = torch._dynamo.disable(hook)
    return found
