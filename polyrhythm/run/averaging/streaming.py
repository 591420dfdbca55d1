"""Write an average into the model while it arrives: each module waits for its tensors in forward.

Everything else that reads or writes the model waits for the whole average: state_dict,
load_state_dict, the optimizer's step, a forward in evaluation. `start` waits for all tensors that
no hook has seen yet.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from polyrhythm.run.averaging.buffers import ReplicaState
from polyrhythm.run.averaging.split_all_reduce import StreamingBuffer
from polyrhythm.run.comm.forward_hooks import ForwardOrder, state_hooks
from polyrhythm.types import Seconds


class ForwardWaitHooks:
    """The hooks of one model, run in the training thread.

    A tensor's number is its index in `ReplicaState.averaged_tensors`; optimizer state follows.
    """

    def __init__(self, model: ReplicaState, *, timeout: Seconds) -> None:
        self._model, self._timeout = model, timeout
        self._streaming_buffer: StreamingBuffer | None = None
        self._missing: dict[int, tuple[Tensor, Tensor, int]] = {}  # tensor, mean, end in buffer
        self._forwards = ForwardOrder(model.module, model.averaged_tensors(), self._copy_received)
        self._seen, optimizer = self._forwards.order, model.optimizer

        def finish(*_: Any) -> None:
            self.finish()

        self._handles = state_hooks(model.module, before=finish)
        self._handles.append(optimizer.register_step_pre_hook(finish))
        self._handles.append(optimizer.register_state_dict_pre_hook(finish))
        self._handles.append(optimizer.register_load_state_dict_pre_hook(finish))

    def order(self) -> list[int]:
        """Return tensor numbers in forward order, preceded by those that no hook has seen."""
        num = len(self._model.averaged_tensors())
        return [*(i for i in range(num) if i not in self._seen), *self._seen]

    def start(self, streaming_buffer: StreamingBuffer) -> None:
        """Start to write the mean of the current model; return when the forward may start."""
        assert not self._missing, "the previous average is complete"
        self._streaming_buffer, flat = streaming_buffer, self._model.flat()
        numbers, stop = [*self._model.order], 0
        for index, (tensor, mean) in enumerate(flat.views(streaming_buffer.value)):
            stop += mean.numel()
            number = numbers[index] if index < len(numbers) else index
            self._missing[number] = tensor, mean, stop
        self._copy_received([i for i in numbers if i not in self._seen])

    def finish(self, timeout: Seconds | None = None) -> None:
        """Wait for the whole average and write it."""
        self._copy_received(list(self._missing), timeout)

    def remove(self) -> None:
        self._forwards.remove()
        for handle in self._handles:
            handle.remove()

    @torch.no_grad()
    def _copy_received(self, numbers: Iterable[int], timeout: Seconds | None = None) -> None:
        if not self._missing:
            return
        streaming_buffer = self._streaming_buffer
        for number in numbers:
            if number in self._missing:
                assert streaming_buffer is not None, "an average is arriving"
                tensor, mean, stop = self._missing[number]
                streaming_buffer.wait(stop, self._timeout if timeout is None else timeout)
                tensor.copy_(mean)
                del self._missing[number]
        if not self._missing:
            self._streaming_buffer = None
