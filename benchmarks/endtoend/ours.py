"""Our side: the same model, samples and pace under the Trainer, whose ways are all `auto`."""

import time
from multiprocessing.connection import Connection

import torch._dynamo  # noqa: F401  # before the fork: it takes a second

from benchmarks.endtoend.side import Assignment, Line, Seat, enter
from benchmarks.endtoend.task import SEED, model, optimizer, rates, texts
from polyrhythm.run.demo.gpt import next_byte_loss
from polyrhythm.run.trainer.step_loop import StepEnd
from polyrhythm.run.trainer.trainer import Trainer


def work(told: Assignment, seat: Seat, boss: Connection) -> None:
    """One worker of the plan; its place follows from its device."""
    enter(seat, told.plan.num_workers)
    line = Line(boss, told.timeout, told.turn)
    text, held_out = texts(told.num_held_out)

    def heard(end: StepEnd) -> None:
        line.ended(trainer.worker, end.step, end.num_samples, end.loss)

    with Trainer(
        lambda: model(told.num_layers),
        next_byte_loss,
        optimizer,
        text,
        plan=told.plan,
        sync=told.sync,
        lr_scheduler_fn=rates(told.num_steps),
        seed=SEED,
        callbacks=[heard],
        timeout=told.timeout,
    ) as trainer:
        pace = told.pace(trainer.worker, seat.device)
        pace.keep(trainer.model)
        pace.begin(line.ready())
        trainer.fit(steps=told.num_steps)
        over = time.monotonic()
        pace.end()
        loss = trainer.evaluate(held_out) if told.num_held_out else None
        line.done(trainer.worker, over, pace, loss)
