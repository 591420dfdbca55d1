"""Takes an average into the model while it arrives: each module waits for its own, when it is used.

A hook runs before the forward of every module that has weights or running statistics of its own, in
training and evaluation, also when activations are computed anew: it waits until they are there, and
writes them. Whatever else reads or writes the model waits for all of it: its state, the optimizer's
step, a forward in evaluation.

Weights that are used without their module being called (those of `out_proj` in
nn.MultiheadAttention, say) have no such place. What no hook has seen yet is waited for at once.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from polyrhythm.run.averaging.buffers import ReplicaState
from polyrhythm.run.averaging.streaming import StreamingBuffer
from polyrhythm.types import Seconds


class ForwardWaitHooks:
    """In the thread of training. Tensors have numbers, as in `ReplicaState.averaged_tensors`; state follows."""

    def __init__(self, model: ReplicaState, *, timeout: Seconds) -> None:
        self._model, self._timeout = model, timeout
        self._seen: dict[int, None] = {}  # a set in order
        self._streaming_buffer: StreamingBuffer | None = None
        self._missing: dict[int, tuple[Tensor, Tensor, int]] = {}  # tensor, its mean, where it ends
        self._handles: list[RemovableHandle] = []
        numbers = {id(tensor): number for number, tensor in enumerate(model.averaged_tensors())}
        for module in model.module.modules():
            tensors = (*module.parameters(recurse=False), *module.buffers(recurse=False))
            own = [numbers[id(tensor)] for tensor in tensors if id(tensor) in numbers]
            if own:
                hook = torch._dynamo.disable(self._before_forward(own))
                self._handles.append(module.register_forward_pre_hook(hook, prepend=True))
        self._hook_reads()

    def order(self) -> list[int]:
        """As the forward uses them; before that, what it was not seen to use."""
        num = len(self._model.averaged_tensors())
        return [*(i for i in range(num) if i not in self._seen), *self._seen]

    def start(self, streaming_buffer: StreamingBuffer) -> None:
        """A mean of what the model is now; returns when the forward may begin."""
        assert not self._missing, "the average before is there"
        self._streaming_buffer, flat = streaming_buffer, self._model.flat()
        numbers, stop = [*self._model.order], 0
        for place, (tensor, mean) in enumerate(flat.views(streaming_buffer.value)):
            stop += mean.numel()
            number = numbers[place] if place < len(numbers) else place
            self._missing[number] = tensor, mean, stop
        self._copy_received([i for i in numbers if i not in self._seen])

    def finish(self, timeout: Seconds | None = None) -> None:
        """Wait for all of it."""
        if self._missing:
            self._copy_received(list(self._missing), timeout)

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    @torch.no_grad()
    def _copy_received(self, numbers: Iterable[int], timeout: Seconds | None = None) -> None:
        streaming_buffer = self._streaming_buffer
        for number in numbers:
            if number in self._missing:
                assert streaming_buffer is not None, "something is missing"
                tensor, mean, stop = self._missing[number]
                streaming_buffer.wait(stop, self._timeout if timeout is None else timeout)
                tensor.copy_(mean)
                del self._missing[number]
        if not self._missing:
            self._streaming_buffer = None

    # Functions that hold this object, not methods of it: a copy of the model shares them.

    def _before_forward(self, own: list[int]) -> Callable[[nn.Module, Any], None]:
        root = self._model.module

        def before_forward(module: nn.Module, args: Any) -> None:
            self._seen.update(dict.fromkeys(own))
            if self._missing:  # in evaluation, modules may call each other in other ways
                self._copy_received(own if root.training else list(self._missing))

        return before_forward

    def _hook_reads(self) -> None:
        def finish(*_: Any) -> None:
            self.finish()

        for module in self._model.module.modules():
            self._handles.append(module.register_state_dict_pre_hook(finish))
            self._handles.append(module.register_load_state_dict_pre_hook(finish))
        optimizer = self._model.optimizer
        self._handles.append(optimizer.register_step_pre_hook(finish))
        self._handles.append(optimizer.register_state_dict_pre_hook(finish))
        self._handles.append(optimizer.register_load_state_dict_pre_hook(finish))
