"""Execute the actions of one stage: receive the inputs, compute, send the results."""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from polyrhythm.errors import ScheduleError
from polyrhythm.run.pipeline.batch import Batch
from polyrhythm.run.pipeline.connections import BatchHeader, Connections
from polyrhythm.run.pipeline.message import MessageLayout
from polyrhythm.run.pipeline.microbatches import tensors_of
from polyrhythm.run.pipeline.partition import Wiring
from polyrhythm.run.pipeline.stage import MAX_TIMINGS, StageCompute
from polyrhythm.run.pipeline.transport import Inbox, MicrobatchKind, Transfer
from polyrhythm.sinks.jsonl import EventLog
from polyrhythm.types import Action, Op, Seconds


@dataclass(slots=True, kw_only=True)
class Executor:
    """Runs the actions of one stage; `connections` is None in a pipeline of one stage."""

    stage: StageCompute
    wiring: Wiring
    connections: Connections | None
    log: EventLog | None
    clock_offsets: dict[str, Seconds] = field(default_factory=dict)  # by neighbour
    _transfers: deque[tuple[str, Transfer]] = field(init=False)
    _num_outputs: dict[MicrobatchKind, int] = field(default_factory=dict, init=False)
    _waited: Seconds = field(default=0.0, init=False)
    _longest_wait: Seconds = field(default=0.0, init=False)
    _waited_for: str = field(default="", init=False)

    def __post_init__(self) -> None:
        self._transfers = deque(maxlen=MAX_TIMINGS)

    def post_receives(self, header: BatchHeader, first: int = 0) -> None:
        """Post receives for a whole batch, whose micro-batches are numbered from `first`."""
        if self.connections is None:
            return
        kinds = list(enumerate(header.kinds, start=first))
        for inbox in self.connections.activations_in.values():
            inbox.post_receives([(Action(Op.F, m), kind) for m, kind in kinds])
        if header.training:
            for inbox in self.connections.gradients_in.values():
                inbox.post_receives([(Action(Op.B, m), kind) for m, kind in kinds])

    def run(self, actions: Sequence[Action], batch: Batch) -> None:
        for action in actions:
            self.execute(action, batch)

    def pop_transfers(self) -> list[tuple[str, Transfer]]:
        """Return sender and times of the messages received since the last call."""
        transfers = list(self._transfers)
        self._transfers.clear()
        return transfers

    def execute(self, action: Action, batch: Batch) -> None:
        start = time.perf_counter()
        self._waited, self._longest_wait, self._waited_for = 0.0, 0.0, ""
        if action.op is Op.F:
            self._forward(action, batch)
        else:
            self._backward(action, batch)
        if self.log is not None:
            waited_for = {"waited_for": self._waited_for} if self._waited_for else {}
            self.log.write(
                "action",
                start=self.log.at(start),
                step=batch.step,
                name=str(action),
                values={"wait": self._waited, **waited_for},
            )

    def _forward(self, action: Action, batch: Batch) -> None:
        m, kind = action.microbatch, batch.kind(action.microbatch)
        inputs = self._inputs(action, batch)
        keywords = self._to_device(batch.keywords[m - batch.first], batch)
        if self.stage.is_last:
            outputs = self.stage.forward(
                kind, inputs, keywords, partial(self._compute_loss, m, batch)
            )
        else:
            returned = self.stage.forward(kind, inputs, keywords)
            outputs = tensors_of(returned, stage=self.stage.stage)
            self._send_outputs(action, kind, outputs, training=batch.header.training)
        if batch.header.training:
            self.stage.save_for_backward(m, inputs, outputs)

    def _backward(self, action: Action, batch: Batch) -> None:
        m, kind = action.microbatch, batch.kind(action.microbatch)
        gradients = [None] if self.stage.is_last else self._gradients(action, batch)
        input_gradients = self.stage.backward(m, kind, gradients)
        for source in self.wiring.sources:
            layout = self._links.activations_in[source].layout(kind).gradient
            tensors, input_gradients = (
                input_gradients[: len(layout.specs)],
                input_gradients[len(layout.specs) :],
            )
            self._links.gradients_out[source].send(action, kind, tensors, layout)

    @property
    def _links(self) -> Connections:
        assert self.connections is not None, "a stage with sources or targets has connections"
        return self.connections

    def _inputs(self, action: Action, batch: Batch) -> list[Any]:
        if not self.wiring.sources:
            return list(self._to_device(batch.arguments[action.microbatch - batch.first], batch))
        inboxes = (self._links.activations_in[source] for source in self.wiring.sources)
        return [tensor for inbox in inboxes for tensor in self._receive(inbox, action, batch)]

    def _gradients(self, action: Action, batch: Batch) -> list[Tensor | None]:
        """Receive the gradients of this stage's outputs, summed over the stages that use them."""
        total: dict[int, Tensor] = {}
        kind = batch.kind(action.microbatch)
        for target in self.wiring.targets:
            positions = self._positions(target, self._num_outputs[kind])
            layout = self._links.activations_out[target].layout(kind)
            assert layout is not None, "announced by the forward"
            sent = zip(positions, layout.specs, strict=True)
            needing_grad = [position for position, spec in sent if spec.needs_grad]
            received = self._receive(self._links.gradients_in[target], action, batch)
            for position, gradient in zip(needing_grad, received, strict=True):
                total[position] = total[position] + gradient if position in total else gradient
        return [total.get(position) for position in range(self._num_outputs[kind])]

    def _send_outputs(
        self, action: Action, kind: MicrobatchKind, outputs: Sequence[Tensor], *, training: bool
    ) -> None:
        self._num_outputs[kind] = len(outputs)
        for target in self.wiring.targets:
            sent = [outputs[position] for position in self._positions(target, len(outputs))]
            outbox = self._links.activations_out[target]
            layout, previous = MessageLayout.of(sent), outbox.layout(kind)
            if (
                previous is not None
                and previous.description == layout.description
                and previous != layout
            ):
                raise ScheduleError(
                    f"layers of stage {self.stage.stage} or an earlier one changed requires_grad",
                    expected="the same trained parameters in every step of a pipeline",
                    fix="create a new Pipeline after changing requires_grad",
                )
            if previous is not None and previous != layout:
                raise ScheduleError(
                    f"stage {self.stage.stage} returned {layout.description}, and earlier, "
                    f"for inputs of the same shape, {previous.description}",
                    expected="outputs whose shape and dtype depend only on those of the inputs",
                    fix="pad to a fixed shape, or choose the shape outside the pipeline",
                )
            outbox.send(action, kind, [tensor.detach() for tensor in sent], layout)
            if training:
                self._links.gradients_in[target].set_layout(kind, layout.gradient)

    def _positions(self, target: int, num_outputs: int) -> Sequence[int]:
        """Return which of this stage's outputs go to `target`."""
        positions = self.wiring.targets[target]
        return range(num_outputs) if positions is None else positions

    def _receive(self, inbox: Inbox, action: Action, batch: Batch) -> list[Tensor]:
        start = time.perf_counter()
        tensors, transfer = inbox.get(action)
        waited = time.perf_counter() - start
        if waited > self._longest_wait:
            self._longest_wait, self._waited_for = waited, inbox.route.peer
        self._waited += waited
        self._transfers.append((inbox.route.peer, transfer))
        if self.log is not None:
            self.log.write(
                "transfer",
                start=self.log.at(self._transfer_start(inbox.route.peer, transfer)),
                end=self.log.at(transfer.arrived),
                step=batch.step,
                name=str(action),
                values={"peer": inbox.route.peer, "bytes": transfer.nbytes},
            )
        return tensors

    def _transfer_start(self, peer: str, transfer: Transfer) -> Seconds:
        """Return the start of a transfer on the local clock; without an offset, a lower bound."""
        sent = transfer.sent - self.clock_offsets[peer] if peer in self.clock_offsets else 0.0
        return min(transfer.arrived, max(sent, transfer.posted))

    def _compute_loss(self, microbatch: int, batch: Batch, returned: Any) -> tuple[Tensor, ...]:
        """Compute the loss of a micro-batch, weighted as it counts in the gradient."""
        if batch.keeps_outputs:
            batch.outputs.append(pytree.tree_map_only(Tensor, Tensor.detach, returned))
        number = microbatch - batch.first
        if self.stage.loss_fn is None or batch.targets[number] is None:
            return ()
        target = self._to_device(batch.targets[number], batch)
        loss = self.stage.loss(returned, target, batch.loss_kwargs)
        if batch.header.training and not loss.requires_grad:
            raise ScheduleError(
                "a loss that depends on no trained parameter of any stage",
                expected="a trained parameter on at least one stage",
                fix="unfreeze one, or call eval() to run forward only",
            )
        batch.losses.append(loss.detach())
        return (loss * batch.loss_weights[number],)

    def _to_device(self, arguments: Any, batch: Batch) -> Any:
        """Move tensors to this stage's device."""
        if not batch.needs_device_copy:
            return arguments
        device = self.stage.device
        to_gpu = device.type == "cuda"  # a non-blocking copy to the host could be read too early
        return pytree.tree_map_only(Tensor, lambda t: t.to(device, non_blocking=to_gpu), arguments)
