"""One call of `fit`: pieces of training one after the other, each with a way to keep together.

A job that was told its way has one piece. Under `sync="auto"` a piece ends when another way pays:
all replicas become equal, the first worker says which samples are left, and the next piece begins
there. It also ends when the job is told to end (`notice.py`).
"""

from dataclasses import dataclass, replace

from polyrhythm.plan.plan import AUTO
from polyrhythm.run.data.prefetch import Prefetch
from polyrhythm.run.trainer.assignment import Assignment, Progress
from polyrhythm.run.trainer.dealing import Dealer, dealer_of
from polyrhythm.run.trainer.loop import Loop, StepEnd
from polyrhythm.run.trainer.moves import Moves
from polyrhythm.run.trainer.sharing import share_state
from polyrhythm.run.trainer.telling import FIRST
from polyrhythm.run.trainer.together import LOCKSTEP, Alone, Decoupled, keep_together
from polyrhythm.run.trainer.turns import Turn, Turns
from polyrhythm.sync.dispenser import Supply
from polyrhythm.sync.foreseen import DECOUPLED, GROUPS, Shape, Took


@dataclass(frozen=True, slots=True)
class _Piece:
    """Under way."""

    way: str
    together: Alone
    dealer: Dealer
    loop: Loop
    in_lockstep: bool


class Fitting:
    def __init__(self, name: str, own: Assignment, progress: Progress, num_steps: int) -> None:
        """Until `num_steps` are made, those before included; `name` is this fit's alone."""
        self._own, self._progress, self._num_steps = own, progress, num_steps
        self._turns = Turns(name, own.worker, own.settings.deadline)
        self._prefetch = Prefetch(own.samples.load)
        self._moves: Moves | None = None
        if own.settings.sync == AUTO and own.num_pipelines > 1:
            num_stages = own.pipeline.num_stages
            shape = Shape(shares=own.shares, num_stages=num_stages, overlap=True)
            deadline = own.settings.deadline
            self._moves = Moves(f"{name}/auto", own.worker, shape, own.log, deadline)
        self._next: str | None = None  # the way that was decided upon, on the first worker
        self._has_ended_supply = False
        self.ends: list[StepEnd] = []
        self.is_stopped = False  # before its time

    def run(self) -> None:
        sync = self._own.settings.sync
        way: str | None = DECOUPLED if sync == AUTO else sync
        try:
            while way is not None:
                way = self._train(way)
        finally:
            self._prefetch.close()

    def _train(self, way: str) -> str | None:
        """A piece; the way of the next one."""
        if self._moves is not None:
            self._moves.begin(way, self._progress.step)
        together = self._keep_together(way)
        try:
            piece = self._piece(way, together)
            turn = self._in_lockstep(piece) if piece.in_lockstep else self._in_groups(piece)
            progress = self._progress
            progress.supply = turn.supply
            progress.step = turn.supply.num_used // self._own.batches.size
            piece.loop.set_rates(progress.step)  # on all workers alike
            progress.rates = piece.loop.rates()
            self.is_stopped = turn.stops
            if turn.way is None:
                self._save_last(together)
            self._end(together)
        except BaseException:
            together.break_off()
            raise
        if way in GROUPS and turn.way is not None:
            share_state(progress.optimizer, self._own)
        return turn.way

    def _in_lockstep(self, piece: _Piece) -> Turn:
        """In windows of steps, after each of which it may be another way's turn."""
        moves, loop = self._moves, piece.loop
        window = None if moves is None else moves.num_steps
        while True:
            self.ends += loop.run(window)
            if loop.is_over:
                piece.together.consolidate()
                return self._turns.next(lambda: self._over(piece.dealer.supply()))
            assert moves is not None, "it would be over"
            if self._own.pipeline.is_first:
                moves.tell()
            turn = self._turns.next(lambda: self._after_window(piece))
            if turn.way != piece.way:
                piece.together.consolidate()
                return turn

    def _after_window(self, piece: _Piece) -> Turn:
        assert self._moves is not None, "windows are its"
        supply, decision = piece.dealer.supply(), self._moves.after_window(self._progress.step)
        is_over = supply.num_used >= self._end_of_samples
        return Turn(way=piece.way if is_over else decision.way, supply=supply)

    def _in_groups(self, piece: _Piece) -> Turn:
        """Until there are no samples any more, of which the first worker may end the supply."""
        self._next, self._has_ended_supply = None, False
        self.ends += piece.loop.run()
        piece.together.consolidate()
        return self._turns.next(lambda: self._after_groups(piece))

    def _after_groups(self, piece: _Piece) -> Turn:
        supply = replace(piece.dealer.supply(), limit=None)
        if self._next is not None and supply.num_used < self._end_of_samples:
            return Turn(way=self._next, supply=supply)
        return self._over(supply)

    def _over(self, supply: Supply) -> Turn:
        return Turn(way=None, supply=supply, stops=self._own.notice.is_given)

    @property
    def _end_of_samples(self) -> int:
        return self._num_steps * self._own.batches.size

    def _piece(self, way: str, together: Alone) -> _Piece:
        own, settings = self._own, self._own.settings
        dealer = dealer_of(
            way,
            own.batches,
            own.shares,
            own.worker.pipeline,
            self._progress.supply,
            self._num_steps,
            together.sync if own.pipeline.is_first else None,
        )
        rates = self._progress.new_rates(own, together.optimizer)
        in_lockstep = way in LOCKSTEP or together.sync is None

        def may_begin() -> bool:
            return not in_lockstep or own.notice.may_begin(self._progress.step)

        def took(took: Took) -> None:
            if self._moves is not None:
                self._moves.took(took)
            if not in_lockstep:
                self._look(together)

        def keep(step: int) -> None:
            progress, every = self._progress, settings.checkpoint_every
            before, progress.step = progress.step, max(progress.step, step)
            is_due = every and step // every > before // every and step < self._num_steps
            if own.keeping is not None and is_due:
                progress.rates = None if rates is None else rates.state_dict()
                own.keeping.save(step, together, progress.extra(own, dealer.supply()))

        loop = Loop(
            pipeline=own.pipeline,
            together=together,
            dealer=dealer,
            load=self._prefetch.load,
            loss=own.loss,
            lr_scheduler=rates,
            precision=settings.precision,
            log=own.log,
            callbacks=tuple(settings.callbacks),
            keep=keep,
            may_begin=may_begin,
            took=took,
        )
        return _Piece(way, together, dealer, loop, in_lockstep)

    def _look(self, together: Alone) -> None:
        """In groups, after a step of a first stage: whether the first worker ends the piece."""
        if self._moves is not None and not self._has_ended_supply:
            decision = self._moves.after_step(self._progress.step)
            if decision is not None and decision.moves:
                self._next = decision.way
        is_to_end = self._next is not None or self._own.notice.is_given
        if self._own.worker == FIRST and is_to_end and not self._has_ended_supply:
            assert together.sync is not None, "in groups"
            together.sync.supply(last_batch=self._own.batches.size)
            self._has_ended_supply = True

    def _keep_together(self, way: str) -> Alone:
        own, settings = self._own, self._own.settings
        return keep_together(
            own.pipeline,
            self._progress.optimizer,
            settings.clip_grad_norm,
            way=way,
            overlap=way in GROUPS if settings.sync == AUTO else settings.overlap,
            options=settings.sync_options,
            worker=own.worker,
            num_pipelines=own.num_pipelines,
            seed=settings.seed,
            timeout=settings.deadline,
            supply=replace(self._progress.supply, limit=self._end_of_samples),
        )

    def _save_last(self, together: Alone) -> None:
        own, progress = self._own, self._progress
        is_wanted = own.settings.checkpoint_every or self.is_stopped
        if own.keeping is not None and is_wanted:
            extra = progress.extra(own, progress.supply)
            own.keeping.save(progress.step, together, extra, patient=True)

    def _end(self, together: Alone) -> None:
        state = together.optimizer.state_dict() if isinstance(together, Decoupled) else None
        together.close()
        if state is not None:  # each worker had a part of it
            self._progress.optimizer = self._own.new_optimizer()
            self._progress.optimizer.load_state_dict(state)
