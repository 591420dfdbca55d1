"""One stage of a pipeline: execute its list of actions over real tensors and a real network.

Sends never block: they are started and waited for at the end of the step. A receive is waited for
when its action needs it. Gloo cannot carry CUDA tensors point to point (it aborts the process), so
tensors on a GPU cross the network through host memory.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

from polyrhythm.events import EventLog
from polyrhythm.plan.plan import Plan
from polyrhythm.run.compute import Compute
from polyrhythm.run.peers import waiting_for
from polyrhythm.types import Action, Op, Worker


@dataclass
class PipelineStage:
    """Gradients accumulate in the module: the mean over all micro-batches of all pipelines."""

    module: nn.Module
    loss_fn: Callable[[Tensor, Tensor], Tensor]
    plan: Plan
    worker: Worker
    boundary: torch.Size  # what crosses from stage to stage for one micro-batch
    log: EventLog
    device: torch.device = torch.device("cpu")  # noqa: RUF009 - immutable
    compute: Compute = field(default_factory=Compute)
    _inputs: Sequence[Tensor] = field(default=(), init=False)
    _targets: Sequence[Tensor] = field(default=(), init=False)
    _kept: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict, init=False)
    _sent: list[tuple[dist.Work, Tensor, Worker, str]] = field(default_factory=list, init=False)
    _losses: list[Tensor] = field(default_factory=list, init=False)
    _waited: float = field(default=0.0, init=False)

    @property
    def is_first(self) -> bool:
        return self.worker.stage == 0

    @property
    def is_last(self) -> bool:
        return self.worker.stage == self.plan.num_stages - 1

    def run_step(
        self,
        actions: list[Action],
        inputs: Sequence[Tensor],
        targets: Sequence[Tensor],
        *,
        step: int,
    ) -> float | None:
        """Run one mini-batch; the mean loss of this pipeline on the last stage, None elsewhere.

        `inputs` and `targets` hold one tensor per micro-batch; only the first stage reads the
        former, only the last the latter.
        """
        self._inputs, self._targets = inputs, targets
        self._kept.clear()
        self._losses.clear()
        execute = {Op.F: self._forward, Op.B: self._backward}
        for action in actions:
            start, self._waited = self.log.now(), 0.0
            execute[action.op](action)
            self.log.write(
                "action", start=start, step=step, name=str(action), values={"wait": self._waited}
            )
        self._finish_sends()
        return torch.stack(self._losses).mean().item() if self.is_last else None

    def _forward(self, action: Action) -> None:
        if self.is_first:
            x = self._inputs[action.microbatch].to(self.device)
        else:
            x = self._receive(action, self._neighbour(-1)).requires_grad_()
        start = self.log.now()
        y = self.module(x)
        if self.is_last:
            y = self.loss_fn(y, self._targets[action.microbatch].to(self.device))
            self._losses.append(y.detach())
        self.compute.hold_back(Op.F, self.log.now() - start)
        if not self.is_last:
            self._send(action, y.detach(), self._neighbour(+1))
        self._kept[action.microbatch] = (x, y)

    def _backward(self, action: Action) -> None:
        x, y = self._kept.pop(action.microbatch)
        gradient = None if self.is_last else self._receive(action, self._neighbour(+1))
        start = self.log.now()
        if self.is_last:
            y = y / (len(self._targets) * self.plan.num_pipelines)
        y.backward(gradient)
        self.compute.hold_back(Op.B, self.log.now() - start)
        if not self.is_first:
            assert x.grad is not None, "a received activation takes part in the graph"
            self._send(action, x.grad, self._neighbour(-1))

    def _neighbour(self, offset: int) -> Worker:
        return self.worker._replace(stage=self.worker.stage + offset)

    def _send(self, action: Action, tensor: Tensor, to: Worker) -> None:
        tensor = tensor.cpu().contiguous()
        with waiting_for(to, f"sending {action}"):
            work = dist.isend(tensor, self.plan.rank(to), tag=_tag(action))
        assert work is not None, "every worker belongs to the default group"
        self._sent.append((work, tensor, to, str(action)))  # the tensor must live until it is sent

    def _receive(self, action: Action, sender: Worker) -> Tensor:
        tensor = torch.empty(self.boundary)
        start = self.log.now()
        with waiting_for(sender, f"receiving {action}"):
            dist.recv(tensor, self.plan.rank(sender), tag=_tag(action))
        self._waited += self.log.now() - start
        return tensor.to(self.device)

    def _finish_sends(self) -> None:
        for work, _, to, action in self._sent:
            with waiting_for(to, f"sending {action}"):
                work.wait()
        self._sent.clear()


def _tag(action: Action) -> int:
    return 2 * action.microbatch + (action.op is Op.B)
