"""A pipeline: this process runs one stage of a model, action by action, in schedule order.

`step` and `eval` are called like those of torch.distributed.pipelining's schedules. Sends never
block and receives are posted ahead, so a stage waits only if the input of its next action has not
arrived. Micro-batches run in the same order under every schedule: gradients are bit-identical.
"""

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
from msgspec import structs
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from polyrhythm.describe import units
from polyrhythm.errors import ScheduleError, SingleWorkerError, is_out_of_memory, peer_errors
from polyrhythm.events import worker_log
from polyrhythm.renamed import renamed_arguments
from polyrhythm.run.comm.process_groups import DEFAULT_TIMEOUT, all_reduce
from polyrhythm.run.comm.reduce_scatter import site_of
from polyrhythm.run.emulated_compute import EmulatedCompute
from polyrhythm.run.pipeline.autotune import (
    ScheduleAutotuner,
    fixed_memory,
    measure_offsets,
)
from polyrhythm.run.pipeline.batch import (
    END_OF_DATA,
    Batch,
    BatchHeader,
    BatchSplitter,
    EndOfDataError,
    HostCopy,
    Metadata,
    Microbatches,
    MicrobatchKind,
    StepInputs,
    mean_loss,
)
from polyrhythm.run.pipeline.executor import Executor, StageCompute, local
from polyrhythm.run.pipeline.loss import Count, LossFunction, scale_by, squared_norm
from polyrhythm.run.pipeline.microbatch import ChunkSpecs, merge_outputs
from polyrhythm.run.pipeline.options import PipelineOptions, TiedNames
from polyrhythm.run.pipeline.partition import (
    LayerSplit,
    ModelPartition,
    TiedParameter,
    Wiring,
    as_partition,
    check_device,
    check_module,
    module_device,
    split_layers,
    split_sequential,
    torch_stage_of,
)
from polyrhythm.run.pipeline.runners import (
    FlushRunner,
    GradientDivision,
    PipeDreamRunner,
    TiedGradients,
    check_untied,
    warn_of_copies,
)
from polyrhythm.run.pipeline.stage_modules import (
    call_after_earlier_layers,
    check_keywords,
    keywords_for_all,
    return_whole_output,
    without_cache,
)
from polyrhythm.run.pipeline.transport import Connections, stage_ranks
from polyrhythm.run.random_streams import RandomStreams, may_draw
from polyrhythm.schedule.builders import Schedule
from polyrhythm.schedule.spec import ExplicitSchedule, ScheduleSpec
from polyrhythm.sinks.jsonl import EventLog
from polyrhythm.types import AUTO, Action, Bytes, Op, Seconds, Worker

_RENAMED = renamed_arguments(
    module="stage=", num_microbatches="n_microbatches=", group="process_group=", deadline="timeout="
)


class Pipeline:
    """One stage of a pipeline; the processes of `process_group`, in order, are the stages."""

    @_RENAMED
    def __init__(
        self,
        stage: Any,
        n_microbatches: int | None = None,
        loss_fn: Callable[..., Any] | None = None,
        args_chunk_spec: Any = None,
        kwargs_chunk_spec: Any = None,
        output_merge_spec: Any = None,
        scale_grads: bool = True,
        *,
        microbatch_sizes: Sequence[int] | None = None,
        schedule: str | ScheduleSpec | Schedule = "auto",
        memory_limit: str | Bytes | None = None,
        optimizer_floats: float = 2.0,
        tune_every: int = 5,
        flush: bool = True,
        process_group: dist.ProcessGroup | None = None,
        tied: TiedNames | None = None,
        window: int | None = None,
        timeout: Seconds = DEFAULT_TIMEOUT,
        device: torch.device | str | None = None,
        log: EventLog | Path | str | None = None,
        compute: EmulatedCompute | None = None,
        pipeline: int = 0,
        seed: int | None = None,
        recompute: bool = False,
        site: str | None = AUTO,
    ) -> None:
        """`stage` is the module of this stage, or a torch.distributed.pipelining stage.

        `loss_fn(output, target)` returns the mean loss of a micro-batch, on the last stage, or
        (sum, count), the sum of losses and the number of labels: gradients are then those of the
        mean over all labels of the batch, however many each micro-batch has. Without it, `step`
        runs forward only, like `eval`, as torch's schedules do. A torch stage brings its process
        group and device. A batch is split into `n_microbatches` or, with schedule="auto",
        into micro-batches of the best of `microbatch_sizes`. Auto starts with 1f1b; every
        `tune_every` steps it selects the schedule with the shortest step, predicted from the
        measured times, within the `memory_limit` of this stage ("20GiB"), where the optimizer has
        `optimizer_floats` floats per weight. Other schedules are written `1f1b`, `gpipe`, `kfkb:2`,
        `bounded:7,5,3,1`, or are lists of actions.

        `flush=False`: a step runs the forward of its batch, unsplit, and the backward of an earlier
        batch, so that stages never wait for the pipeline to empty; see `drain`.

        `args_chunk_spec`, `kwargs_chunk_spec` and `output_merge_spec` are those of torch's
        schedules, or one spec for all: which dimension of an argument counts samples
        (`TensorChunkSpec(dim)`), what goes whole to every micro-batch (`_Replicate()`), and how
        outputs are merged. By default samples are along the first dimension.

        `scale_grads`: gradients are those of the mean loss over the batch, otherwise of the sum
        over micro-batches, or of all sums that `loss_fn` returns.
        `tied=[{0: "embed.weight", 3: "head.weight"}]`: parameters that modules split by hand share,
        by stage; their gradients are summed. `timeout`: the longest wait for another stage before
        it counts as lost, or half an hour in the first two batches of each kind, which stages may
        compile. `window`: number of receives posted ahead per direction, instead of the
        schedule's number. `pipeline` numbers the replicas of a job in messages and logs; `log` is
        an event log, or the folder of a run in which to write one. With a `seed`, dropout masks do
        not depend on the number of stages (`random_streams.py`), but on `pipeline` and `num_steps`,
        which a script that resumes sets; by default they are drawn as always in torch.
        `recompute`: the layers of this stage keep only their inputs from forward to backward, and
        run again in the backward (activation checkpointing); other stages need not do the same.
        `site`: stages with the same one pass tensors over NCCL, others over gloo; None for gloo. By
        default all have the same, whose process group has NCCL for their device.
        """
        options = PipelineOptions(
            n_microbatches=n_microbatches,
            microbatch_sizes=microbatch_sizes,
            schedule=schedule,
            flush=flush,
            scale_grads=scale_grads,
            tune_every=tune_every,
            window=window,
            timeout=timeout,
            memory_limit=memory_limit,
            optimizer_floats=optimizer_floats,
            tied=tied,
            has_loss=loss_fn is not None,
        )
        if (torch_stage := torch_stage_of(stage)) is not None:
            process_group = _same_group(process_group, torch_stage)
            device = torch_stage.device if device is None else device
        self.ranks, self.stage = stage_ranks(process_group)  # ranks of all stages, in the job
        self.num_stages = len(self.ranks)
        partition = as_partition(stage, self.stage, self.num_stages, tied, recompute=recompute)
        self.module = partition.module
        self.device = module_device(self.module, device)
        self._check_partition(partition, options)  # raises before any communication
        self._splitter = BatchSplitter(
            options=options,
            device=self.device,
            is_first=self.is_first,
            is_last=self.is_last,
            specs=ChunkSpecs(args_chunk_spec, kwargs_chunk_spec, output_merge_spec),
        )
        if loss_fn is not None and not isinstance(loss_fn, LossFunction):
            loss_fn = LossFunction(loss_fn)
        if isinstance(loss_fn, LossFunction) and loss_fn.function is None:
            return_whole_output(self.module)
        self._loss_fn, self._is_closed, self.num_steps = loss_fn, False, 0
        self.loss_counts: list[Count] = []  # labels or samples of each loss of the latest batch
        self._failure: str | None = None  # why a step or eval has failed
        # Of the optimizer, if it is known, for what an error says of memory.
        self.optimizer_state: Callable[[], Mapping[Any, Any]] | None = None
        self._last_header: BatchHeader | None = None  # of the latest batch
        self._num_batches = Counter[MicrobatchKind]()  # that have micro-batches of each kind
        self._number = pipeline
        group = process_group or (dist.group.WORLD if dist.is_initialized() else None)
        site = site_of(site, self.device, group)
        self._connections = self._connect(partition.wiring, options, pipeline, seed, site)
        self.log = log if isinstance(log, EventLog) else None
        self._own_log: EventLog | None = None
        self._unlogged: tuple[int, Seconds, Seconds, HostCopy] | None = None  # the last step
        if isinstance(log, str | Path):
            worker = Worker(self.stage, pipeline)
            self.log = self._own_log = EventLog(worker_log(Path(log), worker), worker)
        self._executor = self._make_executor(partition, compute, seed)
        self._tied = self._tie(partition.tied, tied, is_split_here=stage is partition)
        self._runner = self._make_runner(options)
        if self._connections is not None:
            self._connections.set_step_timeout(num_done=0)

    def _check_partition(self, partition: ModelPartition, options: PipelineOptions) -> None:
        check_module(
            partition.module,
            stage=self.stage,
            is_tuned=options.is_tuned,
            flush=options.flush,
            has_dw_builder=partition.dw_builder is not None,
        )
        if not options.flush:
            check_untied(partition.tied)
            options.pipedream_limits(self.num_stages)

    def _connect(
        self,
        wiring: Wiring,
        options: PipelineOptions,
        pipeline: int,
        seed: int | None,
        site: str | None,
    ) -> Connections | None:
        """Connect all stages, which must have the same options; None for a single stage."""
        if self.num_stages == 1:
            return None
        connections = Connections(
            self.ranks,
            self.stage,
            wiring,
            device=self.device,
            pipeline=pipeline,
            timeout=options.timeout,
            window=options.window,
            site=site,
        )
        connections.check_consistent(f"{options.text}, seed {seed}")
        return connections

    def _make_executor(
        self, partition: ModelPartition, compute: EmulatedCompute | None, seed: int | None
    ) -> Executor:
        executor = Executor(
            stage=StageCompute(
                call=self.module,
                stage=self.stage,
                is_last=self.is_last,
                device=self.device,
                loss_fn=self._loss_fn if self.is_last else None,
                compute=compute,
                dw_builder=partition.dw_builder,
                is_timed=self.log is not None or compute is not None,
            ),
            wiring=partition.wiring,
            connections=self._connections,
            log=self.log,
            defaults=without_cache(self.module, {}),
        )
        if self.log is not None and self._connections is not None:
            executor.clock_offsets = measure_offsets(self._connections)
        if seed is not None:
            executor.streams = RandomStreams(
                seed, partition.layers, self.device, has_hooks=may_draw(self.module)
            )
            call_after_earlier_layers(self.module, executor.streams.after_layer)
        return executor

    def _tie(
        self, found: Sequence[TiedParameter], tied: TiedNames | None, *, is_split_here: bool
    ) -> TiedGradients | None:
        if self._connections is None:
            return None
        if tied is None and not is_split_here:
            warn_of_copies(self.module, self._connections)
        if not found and not tied:
            return None
        gradients = TiedGradients(self.module, found, self._connections)
        if tied:
            gradients.check_shapes(nbytes=64 + sum(128 + 4 * len(repr(tie)) for tie in tied))
        return gradients

    def _make_runner(self, options: PipelineOptions) -> FlushRunner | PipeDreamRunner:
        if not options.flush:
            limits = options.pipedream_limits(self.num_stages)
            return PipeDreamRunner(module=self.module, executor=self._executor, limits=limits)
        autotuner: ScheduleAutotuner | None = None
        if options.is_tuned:
            autotuner = ScheduleAutotuner(
                microbatch_sizes=options.sizes_to_try or None,
                every=options.tune_every,
                memory=fixed_memory(self.module, options.optimizer_floats),
                limit=options.limit_bytes,
                connections=self._connections,
                log=self.log,
            )
            self._executor.stage.is_timed |= autotuner.has_choice
        return FlushRunner(
            module=self.module,
            executor=self._executor,
            num_stages=self.num_stages,
            spec=options.spec,
            tied=self._tied,
            autotuner=autotuner,
            division=GradientDivision(options.scale_grads),
        )

    @classmethod
    @_RENAMED
    def from_sequential(
        cls,
        model: nn.Sequential,
        *,
        process_group: dist.ProcessGroup | None = None,
        layers_per_stage: Sequence[int] | None = None,
        skips: Mapping[int | str, Any] | None = None,
        recompute: bool = False,
        **options: Any,
    ) -> Self:
        """Run this process's layers of `model`; `skips={5: 1}`: layer 5 also takes 1's output."""
        ranks, stage = stage_ranks(process_group)
        partition = split_sequential(
            model,
            stage=stage,
            num_stages=len(ranks),
            layers_per_stage=layers_per_stage,
            skips=skips,
            recompute=recompute,
        )
        return cls(partition, process_group=process_group, **options)

    @classmethod
    @_RENAMED
    def from_layers(
        cls,
        model: nn.Module,
        *,
        layers: str | None = None,
        prologue: Sequence[str] = (),
        every: Sequence[str] = (),
        epilogue: Sequence[str] = (),
        process_group: dist.ProcessGroup | None = None,
        layers_per_stage: Sequence[int] | None = None,
        recompute: bool = False,
        **options: Any,
    ) -> Self:
        """Run this process's part of a model with a list of layers, as in Hugging Face models.

        `prologue` modules run on the first stage, `epilogue` on the last, `every` on all. Without
        `layers` all of them are found, if transformers knows an example of the model's inputs.
        """
        ranks, stage = stage_ranks(process_group)
        named = LayerSplit(layers=layers, prologue=prologue, every=every, epilogue=epilogue)
        split = named.found(model)
        if split.layers is None:
            assert isinstance(model, nn.Sequential), "others have a list of layers"
            return cls.from_sequential(
                model,
                process_group=process_group,
                layers_per_stage=layers_per_stage,
                recompute=recompute,
                **options,
            )
        partition = split_layers(
            model,
            stage=stage,
            num_stages=len(ranks),
            layers=split.layers,
            prologue=split.prologue,
            every=split.every,
            epilogue=split.epilogue,
            layers_per_stage=layers_per_stage,
            recompute=recompute,
        )
        return cls(partition, process_group=process_group, **options)

    @classmethod
    def from_torch_stage(cls, stage: Any, *args: Any, **options: Any) -> Self:
        """Run a torch.distributed.pipelining stage, like `Pipeline(stage, ...)`."""
        return cls(stage, *args, **options)

    @property
    def worker(self) -> Worker:
        """This stage of this pipeline (`pipeline=`), as errors name it."""
        return Worker(self.stage, self._number)

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        return self.stage == self.num_stages - 1

    @property
    def spec(self) -> ScheduleSpec | ExplicitSchedule:
        """The schedule of the next step; set it between steps, equally on all stages."""
        return self._flush_runner.spec

    @spec.setter
    def spec(self, spec: ScheduleSpec | ExplicitSchedule) -> None:
        self._flush_runner.spec = spec

    @property
    def last_spec(self) -> ScheduleSpec | ExplicitSchedule:
        """The schedule of the last step."""
        return self._flush_runner.last_spec

    @property
    def metadata(self) -> Metadata:
        """The first stage's metadata of the latest batch."""
        return () if self._last_header is None else self._last_header.metadata

    @property
    def sizes(self) -> list[int]:
        """The sizes of the micro-batches of the latest batch."""
        return [] if self._last_header is None else self._last_header.sizes

    @property
    def is_flushed(self) -> bool:
        """Whether each step runs all backwards of its batch, with one version of the weights."""
        return isinstance(self._runner, FlushRunner)

    @property
    def tied(self) -> set[nn.Parameter]:
        """The parameters that other stages hold, too: their gradients are complete after `step`."""
        return set() if self._tied is None else self._tied.parameters()

    @property
    def tied_not_owned(self) -> set[nn.Parameter]:
        """The tied parameters that an earlier stage owns."""
        return set() if self._tied is None else self._tied.not_owned()

    @property
    def peak_in_flight(self) -> int:
        """The largest number of micro-batches with activations in memory during the last step."""
        return self._executor.stage.peak_in_flight

    @property
    def activation_bytes(self) -> Mapping[int, Bytes]:
        """The activation memory of a micro-batch between forward and backward, by kind."""
        return self._executor.stage.activation_bytes

    @property
    def has_gradients(self) -> bool:
        """Whether the last step left gradients; without a flush the first few do not."""
        return self._runner.has_gradients

    @property
    def peak_weight_versions(self) -> int:
        """Without a flush: the largest number of stashed weight versions."""
        return self._runner.peak_weight_versions if isinstance(self._runner, PipeDreamRunner) else 0

    def step(
        self,
        *args: Any,
        target: Any = None,
        losses: list[Tensor] | None = None,
        return_outputs: bool = True,
        loss_kwargs: dict[str, Any] | None = None,
        metadata: Metadata = (),
        **kwargs: Any,
    ) -> Any:
        """Run forward and backward of one batch; gradients accumulate in the parameters.

        Without a `loss_fn` run forward only, like `eval`. The first stage passes the model's
        arguments, the last one `target`; keyword arguments go to the module of the stage that
        passes them. On the last stage `losses` receives the loss of every micro-batch, and the
        outputs of the batch are returned. The `metadata` of the first stage, a few numbers, is sent
        ahead of the batch; `target` may be a function of it.
        """
        inputs = args, kwargs, target, loss_kwargs or {}, return_outputs, metadata
        if self._loss_fn is None and target is None and losses is None:
            return self._forward(StepInputs(*inputs, training=False), None)
        return self._step(StepInputs(*inputs, training=True), losses)

    def _step(self, step_inputs: StepInputs, losses: list[Tensor] | None) -> Any:
        with self._record_failure("step"), self._isolated_streams():
            batch = self._begin(step_inputs)
            start = time.perf_counter()
            self._runner.run(batch)
        if self._own_log is not None:
            self._log_step()
            numbers = HostCopy((*batch.losses, *batch.loss_counts))
            self._unlogged = batch.step, start, time.perf_counter(), numbers
            if self.device.type == "cpu":
                self._log_step()
        self._executor.log_actions()
        self.num_steps += 1
        return self._results(batch, losses)

    def eval(
        self,
        *args: Any,
        target: Any = None,
        losses: list[Tensor] | None = None,
        return_outputs: bool = True,
        loss_kwargs: dict[str, Any] | None = None,
        metadata: Metadata = (),
        **kwargs: Any,
    ) -> Any:
        """Run forward only, without gradients; otherwise like `step`."""
        inputs = args, kwargs, target, loss_kwargs or {}, return_outputs, metadata
        return self._forward(StepInputs(*inputs, training=False), losses)

    def _forward(self, inputs: StepInputs, losses: list[Tensor] | None) -> Any:
        with self._record_failure("eval"), torch.no_grad(), self._isolated_streams():
            batch = self._begin(inputs)
            forwards = [Action(Op.F, m) for m in range(batch.num_microbatches)]
            self._executor.run(forwards, batch)
            if self._connections is not None:
                self._connections.drain()
        self._executor.pop_transfers()  # the schedule is tuned by the times of training alone
        self._executor.log_actions()
        return self._results(batch, losses)

    def run_microbatches(
        self,
        microbatches: Microbatches,
        *,
        training: bool,
        losses: list[Tensor],
        metadata: Metadata = (),
        on_backward: Callable[[], None] | None = None,
    ) -> None:
        """Run `step` or `eval` on micro-batches that are separate already, on every stage.

        The first stage passes as many as `split_sizes` says; each may have its own shapes. Later
        stages pass a function of the header, which may have `kwargs` of the module and targets.
        `on_backward` is called when the first backward begins, or at the end if there is none.
        """
        step_inputs = StepInputs((), {}, None, {}, False, metadata, training, microbatches)
        self._executor.on_backward = on_backward
        (self._step if training else self._forward)(step_inputs, losses)
        self._executor.call_on_backward()

    def observe_outputs(self, observer: Callable[[Any, Any, int], None] | None) -> None:
        """Call `observer(output, target, num_samples)` for each micro-batch on the last stage."""
        if self._loss_fn is not None and self.is_last:
            self._loss_fn.observer = observer

    def split_sizes(self, batch_size: int) -> list[int]:
        """Return the sizes of the micro-batches into which the next batch is split."""
        self._splitter.microbatch_size = (
            self._runner.microbatch_size or self._splitter.microbatch_size
        )
        return self._splitter.sizes(batch_size)

    def send_data(self, payloads: Sequence[bytes]) -> None:
        """Send data of the next batch from the first stage to each later one, in their order."""
        self._check_open("send_data")
        if self._connections is not None:
            self._connections.send_data(payloads)

    def receive_data(self, nbytes: Bytes) -> bytes:
        """Receive on a later stage what `send_data` has sent; `nbytes` as the metadata says."""
        assert self._connections is not None, "a later stage"
        return self._connections.receive_data(nbytes)

    def _log_step(self) -> None:
        """Log the last step, if it is not: after the next one, a GPU has computed its loss."""
        if (log := self._own_log) is None or self._unlogged is None:
            return
        (step, start, end, numbers), self._unlogged = self._unlogged, None
        timeout = None if self._connections is None else self._connections.step_timeout
        loss = mean_loss(numbers.read(timeout))
        values = {} if loss is None else {"loss": loss}  # on the last stage
        log.write("step", start=log.at(start), end=log.at(end), step=step, values=values)

    def finish_log(self) -> None:
        """Write the actions to the log that a GPU has not run yet; wait for them."""
        self._log_step()
        self._executor.log_actions(is_last=True)

    def end_batches(self) -> None:
        """Announce from the first stage that no batch follows; the other stages wait for one."""
        self._check_open("end_batches")
        if self._connections is not None and self._connections.stage == 0:
            self._connections.relay_header(END_OF_DATA)

    def set_accumulation_context(
        self, context: Callable[[], AbstractContextManager[object]]
    ) -> None:
        """Set the context of all backwards of a step but the last, which completes gradients."""
        if self._executor.stage.dw_builder is not None:
            raise ScheduleError(
                f"dw_builder of stage {self.stage} with averages of gradients during backward",
                expected="gradients that are complete when autograd is done",
                fix="omit dw_builder: autograd computes all gradients",
            )
        self._flush_runner.accumulation_context = context

    def set_loss_scale(self, scale: Tensor | None) -> None:
        """Multiply the gradients of the next steps by a number on this stage's device.

        Every stage passes the same one, such as `scaler.scale(torch.ones((), device=...))` of a
        GradScaler. Losses, and auxiliary ones, are reported as they are.
        """
        if not self.is_flushed and self.num_stages > 1:
            raise ScheduleError(
                "a loss scale without a flush",
                expected="gradients of the same mini-batch, and scale, on all stages",
                fix="use flush=True, or bfloat16, which needs no scale",
            )
        self._executor.loss_scale = scale

    @property
    def is_loss_scaled(self) -> bool:
        return self._executor.loss_scale is not None

    @property
    def has_last_backward(self) -> bool:
        """Whether each step has a last backward, in which autograd completes all gradients."""
        return self.is_flushed and self._executor.stage.dw_builder is None

    def set_last_backward_context(
        self, context: Callable[[], AbstractContextManager[object]]
    ) -> None:
        """Set the context of the last backward of a step, if the pipeline has one."""
        self._flush_runner.last_backward_context = context

    def keep_parameters(self) -> None:
        """Declare that no parameter is replaced by another one: an optimizer would miss it."""
        if isinstance(self._runner, FlushRunner):
            self._runner.keeps_parameters = True

    def defer_division(self, is_deferred: bool) -> None:
        """Leave the division of gradients by counted labels to their average over pipelines."""
        if isinstance(self._runner, FlushRunner):
            self._runner.division.is_deferred = is_deferred

    def pop_divisor(self) -> Count | None:
        """Return the divisor of deferred gradients; None if labels are not counted."""
        return (
            self._runner.division.pop_divisor() if isinstance(self._runner, FlushRunner) else None
        )

    def drain(self) -> Iterator[None]:
        """Run the remaining backwards of a pipeline without a flush; update weights after each.

        for _ in pipeline.drain():
            optimizer.step()
            optimizer.zero_grad()
        """
        self._check_open("drain")
        if isinstance(self._runner, PipeDreamRunner):
            with self.describe_out_of_memory("drain"):
                for _ in self._runner.drain():
                    was_last = self._runner.is_drained
                    yield
                    if not was_last:
                        self._check_open("drain")

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip the gradients of all stages by their common norm, as torch does for one model."""
        self._check_open("clip_grad_norm_")
        if isinstance(self._runner, PipeDreamRunner) and self.num_stages > 1:
            raise ScheduleError(
                "clipping across stages without a flush",
                expected="gradients of the same mini-batch on all stages",
                fix="clip per stage with torch.nn.utils.clip_grad_norm_, or use flush=True",
            )
        gradients = self.gradients()
        owned = self.gradients(owned=True) if self.tied_not_owned else gradients
        # In double precision: the sum of squares of a whole model may overflow float32.
        total: Count = 0.0
        if norm_type == 2.0:
            total = squared_norm(owned)
        elif owned:
            norms = torch.stack([_norm(gradient, norm_type) for gradient in owned])
            total = norms.max() if norm_type == math.inf else (norms**norm_type).sum()
        if self._connections is not None:  # which reduces it on the host
            total = float(total)
        norm = self._reduce_norm(torch.as_tensor(total, dtype=torch.float64), norm_type)
        scale = max_norm / (norm + 1e-6)
        if not norm.is_cpu:  # without waiting for it
            scale_by(scale.clamp(max=1.0), map(local, gradients))
        elif not scale >= 1.0:  # or nan
            scale_by(scale.item(), map(local, gradients))
        return norm.float()

    def gradients(self, *, owned: bool = False) -> list[Tensor]:
        """Return the gradients of this stage; `owned`: tied ones are those of their first stage."""
        skipped = self.tied_not_owned if owned else ()
        # To collect the parameters of a module takes as long as their norm.
        listed = self._runner.division.parameters if isinstance(self._runner, FlushRunner) else ()
        return [
            p.grad
            for p in listed or self.module.parameters()
            if p.grad is not None and not (skipped and p in skipped)
        ]

    def check_received(self) -> None:
        """Raise PeerError if a stage was lost before all of its last tensors had come.

        Over NCCL a GPU computes on with what there is; this waits until it has run the batch.
        """
        if self._connections is not None:
            self._connections.check_received()

    def norm_over_stages(self, norm: Tensor, norm_type: float) -> Tensor:
        """Combine this stage's norm with those of all other stages, which call this, too."""
        total = norm.double() if norm_type == math.inf else norm.double() ** norm_type
        return self._reduce_norm(total, norm_type)

    def _reduce_norm(self, total: Tensor, norm_type: float) -> Tensor:
        """Combine each stage's sum of powers, or its largest number, into the norm of all."""
        is_largest = norm_type == math.inf
        if self._connections is not None:
            if is_largest:  # gloo's maximum of a number and nan is either
                total = total.nan_to_num(nan=math.inf, posinf=math.inf)
            operation = dist.ReduceOp.MAX if is_largest else dist.ReduceOp.SUM
            with peer_errors("another stage", "reducing the norm of the gradients"):
                all_reduce(self._connections.control, total, operation)
        return total if is_largest else total ** (1.0 / norm_type)

    def close(self) -> None:
        """Close the connections and free batches in flight; without a flush, `drain` first."""
        try:
            if self._connections is not None:
                if isinstance(self._runner, PipeDreamRunner) and not self._runner.is_drained:
                    self._connections.abort()
                self._connections.close()
            self.finish_log()
        finally:
            self._release()

    def abort(self, reason: str) -> None:
        """After an error between steps: refuse further ones, and wake the other stages at once."""
        if self._connections is not None:
            self._failure = self._failure or reason
            self._connections.abort()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.close()
            return
        if self._connections is not None:  # a peer may be lost: waiting would hide the error
            self._connections.abort()
        self._release()

    @property
    def _flush_runner(self) -> FlushRunner:
        if isinstance(self._runner, FlushRunner):
            return self._runner
        raise ScheduleError(
            "the schedule of a pipeline with flush=False",
            expected="a pipeline whose steps each run a schedule",
            fix="use flush=True",
        )

    def _check_open(self, called: str) -> None:
        if self._is_closed:
            raise ScheduleError(
                f"{called} of a closed pipeline",
                expected="an open pipeline: closing frees the batches in flight",
                fix="create a new Pipeline; without a flush, call drain() before close()",
            )

        if self._failure is not None:
            raise ScheduleError(
                f"{called} after {self._failure}",
                expected="a pipeline in which all stages have finished the last batch: otherwise "
                "a stage would use what is left of that batch in the next one",
                fix="create a new Pipeline on all stages, and set weights and optimizer there to "
                "the same step, such as from a checkpoint",
            )

    @contextmanager
    def _record_failure(self, called: str) -> Iterator[None]:
        """After an error, refuse all further batches, and wake the other stages.

        A single stage with a flush has no batch in flight, and may continue with the next one.
        """
        self._check_open(called)
        number = self.num_steps
        where = f"step {number}" if called == "step" else f"an evaluation after {number} steps"
        try:
            with self.describe_out_of_memory(where):
                yield
        except EndOfDataError:
            raise
        except BaseException as error:
            self._runner.release()
            self._executor.action = None
            if self._connections is not None or not self.is_flushed:
                text = str(error).splitlines()[:1]
                self._failure = f"a failed {called}: {': '.join([type(error).__name__, *text])}"
            if self._connections is not None:
                self._connections.abort()
            raise

    @contextmanager
    def describe_out_of_memory(self, where: str) -> Iterator[None]:
        """Turn a failed allocation into a SingleWorkerError that says what this stage holds.

        `where` names the step, or what else runs in the block.
        """
        try:
            yield
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            action = self._executor.action
            raise SingleWorkerError(
                f"{self.worker} ran out of memory in {f'{action} of ' if action else ''}{where}",
                expected=f"room for more than this stage holds: {self._held_memory(action)}",
                fix=self._use_less_memory(action),
            ) from error

    def _held_memory(self, action: Action | None) -> str:
        parameters = list(self.module.parameters())
        gradients = [p.grad for p in parameters if p.grad is not None]
        state = [] if self.optimizer_state is None else list(self.optimizer_state().values())
        in_optimizer = [x for x in pytree.tree_leaves(state) if isinstance(x, Tensor)]
        stage, is_backward = self._executor.stage, action is not None and action.op is Op.B
        num_in_flight = stage.num_in_flight + is_backward
        text = f"weights {_size(parameters)}, gradients {_size(gradients)}, "
        if self.optimizer_state is not None:
            text += f"optimizer state {_size(in_optimizer)}, "
        text += f"activations of {num_in_flight} micro-batch{'es' * (num_in_flight != 1)}"
        if num_in_flight and stage.activation_bytes:
            text += f", {units.show(max(stage.activation_bytes.values()), Bytes)} each"
        return text

    def _use_less_memory(self, action: Action | None) -> str:
        if action is None and not self._executor.stage.num_in_flight:  # in the update
            return "use more stages, or an optimizer with less state; foreach=False makes no copies"
        changes = [
            'recompute activations: DeviceConfig(recompute="always"), Pipeline(recompute=True)'
        ]
        if (largest := max(self.sizes, default=1)) > 1:
            changes.insert(0, f"use a microbatch_size below {largest}")
        if self.peak_in_flight > 1:
            changes.append("a schedule with fewer micro-batches in flight, such as 1f1b or bounded")
        changes.append(
            "more stages; or set memory_limit=, for plans and schedule='auto' to keep to"
        )
        return ", ".join(changes)

    def _release(self) -> None:
        self._is_closed = True
        self._runner.release()
        if self._executor.streams is not None:
            self._executor.streams.close()
        if self._own_log is not None:
            self._own_log.close()

    def _begin(self, step_inputs: StepInputs) -> Batch:
        """Split the batch as its header prescribes, and post its receives."""
        if not self._num_batches:  # users move a stage after they have created the pipeline
            check_device(self.module, self.device, self.stage)
        step_inputs.check(self._loss_fn, is_last=self.is_last)
        self._splitter.microbatch_size = (
            self._runner.microbatch_size or self._splitter.microbatch_size
        )
        header: BatchHeader | None = None
        if self.is_first:
            keywords = keywords_for_all(self.module, step_inputs.args, step_inputs.kwargs)
            header = structs.replace(self._splitter.make_header(step_inputs), keywords=keywords)
        if self._connections is not None:
            header = self._connections.relay_header(header)
        assert header is not None, "the first stage makes the header, the others receive it"
        self._last_header = header
        self._set_step_timeout(header)
        if not self.is_first and step_inputs.microbatches is None:
            check_keywords(self.module, header.keywords, step_inputs.kwargs, self.stage)
        first: int | None = None
        if callable(step_inputs.microbatches) and header != END_OF_DATA:
            # Before data of the batch is waited for: activations are on their way meanwhile.
            first = self._runner.post_receives(header)
        batch = self._splitter.batch(
            step_inputs.with_target(header), header, step=self.num_steps, pipeline=self._number
        )
        batch.first = self._runner.post_receives(header) if first is None else first
        return batch

    def _set_step_timeout(self, header: BatchHeader) -> None:
        """Wait longer for other stages in the first batches of each kind, which they compile."""
        kinds = set(header.kinds)
        if self._connections is not None and kinds:
            self._connections.set_step_timeout(min(self._num_batches[kind] for kind in kinds))
        self._num_batches.update(kinds)

    def _isolated_streams(self) -> AbstractContextManager[None]:
        streams = self._executor.streams
        return nullcontext() if streams is None else streams.isolated()

    def _results(self, batch: Batch, losses: list[Tensor] | None) -> Any:
        if losses is not None:
            losses.clear()
            losses.extend(batch.losses)
        self.loss_counts = batch.loss_counts
        return merge_outputs(batch.outputs, self._splitter.specs.output_merge_spec)


def _same_group(
    process_group: dist.ProcessGroup | None, torch_stage: Any
) -> dist.ProcessGroup | None:
    """Return the process group of a torch stage; another one is refused."""
    if process_group and stage_ranks(process_group) != stage_ranks(torch_stage.group):
        raise ScheduleError(
            "a process_group= other than that of the torch stage",
            expected="the group with which the stage was created",
            fix="omit process_group, or pass it to PipelineStage as group=",
        )
    group: dist.ProcessGroup | None = torch_stage.group
    return group


def _size(tensors: Iterable[Tensor]) -> str:
    return units.show(sum(local(tensor).nbytes for tensor in tensors), Bytes)


def _norm(gradient: Tensor, norm_type: float) -> Tensor:
    """Return the norm of a gradient; of a sharded one, the norm of the whole."""
    norm = torch.linalg.vector_norm(gradient, norm_type)
    return (norm.full_tensor() if isinstance(norm, DTensor) else norm).double()
