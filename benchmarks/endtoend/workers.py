"""What all sides train, and the workers that do: torch's pipeline, the Trainer, a single process.

A small GPT of equal layers learns the source of Python's standard library. It represents a large
one: of GPT3-XL, the gradients of a layer have 24 times the bytes that a sequence sends from stage
to stage; with a width of 48 and a context of 22 bytes a layer has 24.1 times those of a message and
its envelope. The embedding is part of the first layer and the head part of the last, which have
half as much again to average.
"""

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import accumulate, pairwise

import torch
import torch._dynamo  # before the fork: it takes a second
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn import functional
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from torch.utils.data import Subset

from benchmarks.endtoend.job import EmulatedSpeed, JobReporter, JobSetting
from benchmarks.harness.pipeline_job import FLOAT
from benchmarks.harness.pool import PoolWorker
from benchmarks.plan.lab import XL_GRADIENT, XL_LAYERS
from polyrhythm.plan.plan import Plan
from polyrhythm.run.data.loader import SampleLoader
from polyrhythm.run.data.reader import make_order
from polyrhythm.run.demo.job import GPTShape
from polyrhythm.run.demo.train import ByteText, Embedding, Head, next_byte_loss, standard_library
from polyrhythm.run.trainer.config import DataConfig
from polyrhythm.run.trainer.sampler import GlobalBatch, microbatch_ranges
from polyrhythm.run.trainer.trainer import Trainer
from polyrhythm.sinks.metrics import StepInfo
from polyrhythm.types import Bytes, Worker

SEED = 1  # of weights and of the order of samples
WIDTH, NUM_HEADS, CONTEXT = 48, 4, 22
ACTIVATIONS: Bytes = WIDTH * CONTEXT * FLOAT  # of one sample, between stages
_PEAK = 3e-3  # the learning rate
_WARM_UP = 0.1  # of all steps
_TEXT: Bytes = 4_000_000
_HELD_OUT = 10  # one window in ten
_NICE = 10  # of the single process: the others are timed

Windows = Subset[tuple[Tensor, Tensor]]  # some of the consecutive windows of a text


class CompactBlock(nn.Module):
    """A transformer block in as few calls as possible: 16 processes share two cores."""

    def __init__(self) -> None:
        super().__init__()
        self.first_norm = nn.Parameter(torch.ones(2, WIDTH))  # weight and bias
        self.second_norm = nn.Parameter(torch.ones(2, WIDTH))
        self.attention_in = nn.Parameter(torch.empty(3 * WIDTH, WIDTH))
        self.attention_out = nn.Parameter(torch.empty(WIDTH, WIDTH))
        self.up = nn.Parameter(torch.empty(4 * WIDTH, WIDTH))
        self.down = nn.Parameter(torch.empty(WIDTH, 4 * WIDTH))
        for matrix in (self.attention_in, self.attention_out, self.up, self.down):
            nn.init.normal_(matrix, std=0.5 * matrix.shape[1] ** -0.5)
        with torch.no_grad():
            self.first_norm[1], self.second_norm[1] = 0.0, 0.0

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        normed = functional.layer_norm(x, (width,), *self.first_norm)
        heads = functional.linear(normed, self.attention_in).view(batch, length, 3, NUM_HEADS, -1)
        query, key, value = heads.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        mixed = mixed.transpose(1, 2).reshape(batch, length, width)
        x = x + functional.linear(mixed, self.attention_out)
        normed = functional.layer_norm(x, (width,), *self.second_norm)
        hidden = functional.gelu(functional.linear(normed, self.up))
        return x + functional.linear(hidden, self.down)


def model(num_layers: int) -> nn.Sequential:
    """Return one module per layer; all processes build the same weights."""
    shape = GPTShape(num_blocks=num_layers, width=WIDTH, context=CONTEXT)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        embedding, head = Embedding(shape), Head(shape)
        blocks = [CompactBlock() for _ in range(num_layers)]
    first, last = nn.Sequential(embedding, blocks[0]), nn.Sequential(blocks[-1], head)
    return nn.Sequential(first, *blocks[1:-1], last)


def layer_bytes(num_layers: int) -> list[Bytes]:
    """Return the size of each layer's parameters; compute nothing: the process may fork later."""
    with torch.device("meta"):
        made = model(num_layers)
    return [FLOAT * sum(p.numel() for p in layer.parameters()) for layer in made]


def byte_scale() -> float:
    """Return bytes of a layer here per byte of GPT3-XL's, of any layer but the first and last."""
    return layer_bytes(XL_LAYERS)[1] / XL_GRADIENT


def texts(num_held_out: int) -> tuple[Windows, Windows]:
    """Return the windows to learn from, and some of every tenth window, which nobody learns."""
    text = ByteText(standard_library(_TEXT), context=CONTEXT)
    starts = range(0, len(text), CONTEXT)
    held_out = starts[::_HELD_OUT]
    some = held_out[:: max(1, len(held_out) // max(1, num_held_out))][:num_held_out]
    learned = [start for number, start in enumerate(starts) if number % _HELD_OUT]
    return Subset(text, learned), Subset(text, some)


def optimizer(named: Iterable[tuple[str, nn.Parameter]]) -> Optimizer:
    return AdamW(named, lr=_PEAK, betas=(0.9, 0.95))


def rates(num_steps: int) -> Callable[[Optimizer], LRScheduler]:
    """Return a schedule that rises during the first steps, and then falls to 0."""

    def rate(step: int) -> float:
        part = (step + 1) / (num_steps + 1)
        return min(part / _WARM_UP, (1 - part) / (1 - _WARM_UP))

    return lambda optimizer: LambdaLR(optimizer, rate)


def trainer_worker(pool_worker: PoolWorker, setting: JobSetting) -> None:
    """Train one worker's stage with the Trainer; every option is `auto`."""
    text, held_out = texts(setting.num_held_out)
    make = partial(
        Trainer,
        lambda: model(setting.num_layers),
        next_byte_loss,
        optimizer,
        text,
        sync="auto",
        lr_schedule=rates(setting.num_steps),
        data=DataConfig(seed=SEED),
    )
    fit(pool_worker, setting, make, held_out if setting.num_held_out else None)


def fit(
    pool_worker: PoolWorker,
    setting: JobSetting,
    make: Callable[..., Trainer],
    held_out: Windows | None = None,
) -> None:
    """Run a job with the Trainer that `make` returns; the worker's stage follows from its host."""
    pool_worker.keep_time()
    pool_worker.set_environment()
    reporter = JobReporter(pool_worker, setting)

    def on_step(end: StepInfo) -> None:
        own = end.own  # its metrics come one step later: its moment is not now
        reporter.step_ended(trainer.worker, end.step, own.num_samples, own.loss, own.end)

    with make(plan=setting.plan, timeout=setting.timeout) as trainer:
        speed = setting.speed(trainer.worker, pool_worker.host)
        speed.attach(trainer.model)
        speed.start = reporter.wait_for_start()
        trainer.fit(max_steps=setting.num_steps, callbacks=[on_step], progress=False)
        end = time.monotonic()
        speed.start = None
        loss = None if held_out is None else trainer.evaluate(held_out)
        reporter.job_ended(end, speed, loss)


def torch_baseline(pool_worker: PoolWorker, setting: JobSetting) -> None:
    """Train one stage with torch's Schedule1F1B over gloo, averaging gradients in buckets as DDP.

    torch's pipeline accepts a stage that is wrapped in DistributedDataParallel, too. But then the
    last micro-batch's gradient is sent to the previous stage only after the average: stages average
    one after the other, and a step takes three times as long where averages do. So here each stage
    averages when its part of the schedule has ended, bucket by bucket, several at a time.
    """
    pool_worker.keep_time()
    plan, worker = setting.plan, setting.plan.worker(pool_worker.rank)
    speed, reporter = setting.speed(worker, pool_worker.host), JobReporter(pool_worker, setting)
    with pool_worker.process_group():
        own_pipeline, own_stage = _groups(plan, worker)
        module, schedule = _stage(setting, worker, speed, own_pipeline)
        chosen = optimizer(module.named_parameters())
        rate = rates(setting.num_steps)(chosen)
        samples, share = _samples(setting, worker)
        batches = GlobalBatch(size=setting.batch, microbatch_size=setting.microbatch_size)
        is_first, is_last = worker.stage == 0, worker.stage == setting.plan.num_stages - 1

        def compute(step: int) -> list[Tensor]:
            given, target, losses = tuple[Tensor, ...](), None, list[Tensor]()
            if is_first or is_last:
                batch = samples.load((batches.range_of(step, share),))
                given = (batch.inputs,) if is_first else ()
                target = batch.target if is_last else None
            schedule.step(*given, target=target, losses=losses, return_outputs=False)
            average(list(module.parameters()), own_stage, setting.bucket)
            return losses

        compute(0)  # makes all connections, and exchanges shapes between stages
        chosen.zero_grad()
        speed.start = reporter.wait_for_start()
        for step in range(setting.num_steps):
            losses = compute(step)
            chosen.step()
            chosen.zero_grad()
            rate.step()
            loss = torch.stack(losses).detach().mean().item() if losses else None
            num_samples = len(share) * setting.microbatch_size
            reporter.step_ended(worker, step, num_samples, loss, time.monotonic())
        reporter.job_ended(time.monotonic(), speed, None)


def average(parameters: Sequence[nn.Parameter], group: dist.ProcessGroup, bucket: Bytes) -> None:
    """Average the gradients of a stage's replicas in buckets of `bucket` bytes, all at once."""
    sent = []
    for some in buckets(parameters, bucket):
        gradients = [p.grad for p in some if p.grad is not None]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        sent.append((gradients, flat, dist.all_reduce(flat, group=group, async_op=True)))
    for gradients, flat, pending in sent:
        assert pending is not None, "it is asynchronous"
        pending.wait()
        flat /= group.size()
        parts = torch.split(flat, [gradient.numel() for gradient in gradients])
        for gradient, part in zip(gradients, parts, strict=True):
            gradient.copy_(part.view_as(gradient))


def buckets(parameters: Sequence[nn.Parameter], limit: Bytes) -> Iterator[list[nn.Parameter]]:
    """Yield buckets from the last parameter to the first, each of `limit` bytes or more."""
    some, size = list[nn.Parameter](), 0.0
    for parameter in reversed(parameters):
        some.append(parameter)
        size += parameter.nbytes
        if size >= limit:
            yield some
            some, size = [], 0.0
    if some:
        yield some


def _stage(
    setting: JobSetting, worker: Worker, speed: EmulatedSpeed, group: dist.ProcessGroup
) -> tuple[nn.Module, Schedule1F1B]:
    plan = setting.plan
    first, end = list(pairwise(accumulate(plan.layers_per_stage, initial=0)))[worker.stage]
    module = nn.Sequential(*list(model(setting.num_layers))[first:end])
    speed.attach(module)
    stage = PipelineStage(module, worker.stage, plan.num_stages, torch.device("cpu"), group=group)
    number = plan.pipelines[worker.pipeline].num_microbatches
    assert number is not None, "the plan is complete"
    return module, Schedule1F1B(stage, number, loss_fn=next_byte_loss)


def _groups(plan: Plan, worker: Worker) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Return the groups of this pipeline and of this stage; all processes make all groups."""
    stages, pipelines = range(plan.num_stages), range(plan.num_pipelines)
    of_pipelines = [dist.new_group([plan.rank(Worker(s, p)) for s in stages]) for p in pipelines]
    of_stages = [dist.new_group([plan.rank(Worker(s, p)) for p in pipelines]) for s in stages]
    return of_pipelines[worker.pipeline], of_stages[worker.stage]


def _samples(setting: JobSetting, worker: Worker) -> tuple[SampleLoader, range]:
    """Return the Trainer's samples in its order, and the micro-batches of this pipeline."""
    text, _ = texts(setting.num_held_out)
    order = make_order(text, seed=SEED, shuffle=True)
    samples = SampleLoader(text, order)
    numbers = [pipeline.num_microbatches or 0 for pipeline in setting.plan.pipelines]
    return samples, microbatch_ranges(numbers)[worker.pipeline]


def single_process(pool_worker: PoolWorker, setting: JobSetting) -> None:
    """Train on the same batches with nothing emulated; send the loss of each, and held out."""
    os.nice(_NICE)
    torch.set_num_threads(1)
    text, held_out = texts(setting.num_held_out)
    module = model(setting.num_layers)
    chosen = optimizer(module.named_parameters())
    rate, losses = rates(setting.num_steps)(chosen), list[float]()
    samples = SampleLoader(text, make_order(text, seed=SEED, shuffle=True))
    for step in range(setting.num_steps):
        batch = samples.load(((step * setting.batch, (step + 1) * setting.batch),))
        loss = next_byte_loss(module(batch.inputs), batch.target)
        loss.backward()  # type: ignore[no-untyped-call]
        chosen.step()
        chosen.zero_grad()
        rate.step()
        losses.append(loss.item())
    tests = SampleLoader(held_out, make_order(held_out, shuffle=False)).load(((0, len(held_out)),))
    with torch.no_grad():
        expected = next_byte_loss(module(tests.inputs), tests.target).item()
    pool_worker.send((losses, expected))
