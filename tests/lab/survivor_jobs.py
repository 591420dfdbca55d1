"""Jobs in the lab whose workers wait after a step, until a fault has been made."""

import os
import sys
import time
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any, Self

import psutil
import torch
from torch import Tensor

import polyrhythm.run.trainer.trainer  # noqa: F401  # loaded once, before the forks
from polyrhythm.cli.train import LabCoordination
from polyrhythm.describe.scenario import Scenario
from polyrhythm.lab import attach, control
from polyrhythm.lab.host_state import namespace_pids
from polyrhythm.lab.rehearsal import Rehearsal
from polyrhythm.processes import Child
from polyrhythm.run.coordinator.epoch_server import LossTimeouts
from tests.gloo.trainer_jobs import fit
from tests.lab.hosts import cluster, namespaces

NUM_STEPS, FAULT_STEP, TIMEOUT = 12, 4, 60.0
MARK = "TEST_FOLDER"  # in the environment of all processes of a job
QUICK = LossTimeouts(min_heartbeat=1.0, max_heartbeat=2.0)
SCRIPT = f"""
import os, sys, time
from pathlib import Path
import torch
from tests.gloo.trainer_jobs import plan_of, trainer

torch.set_num_threads(1)
rank, sync, stages, pipelines = os.environ["RANK"], *sys.argv[1:]

def wait(info):
    if info.step == {FAULT_STEP}:
        Path(f"trains{{rank}}").touch()
        deadline = time.monotonic() + {TIMEOUT}
        while not Path("fault").exists() and time.monotonic() < deadline:
            time.sleep(0.02)
    elif info.step > {FAULT_STEP}:
        time.sleep(0.15)  # a worker that leaves goes half a second later

with trainer(plan_of(int(stages), int(pipelines)), sync=sync) as made:
    fitted = made.fit(max_steps={NUM_STEPS}, callbacks=[wait], progress=False)
    weights = {{name: value.clone() for name, value in made.model.state_dict().items()}}
torch.save(([info.step for info in fitted.steps], weights), f"found{{rank}}.pt")
"""
_number = count()


class Job:
    """A rehearsal whose workers wait after a step until `fault` is there."""

    def __init__(
        self,
        folder: Path,
        sync: str,
        shape: tuple[int, int],
        scenario: Scenario | None = None,
        environment: dict[str, str] | None = None,
        *,
        timeout: float = TIMEOUT,
    ) -> None:
        num = shape[0] * shape[1]
        self.hosts = "abcdefgh"[:num]
        self.name = f"survivors-{os.getpid()}-{next(_number)}"
        self._folder, self._timeout = folder, timeout
        (folder / "script.py").write_text(SCRIPT)
        rehearsal = Rehearsal(
            cluster=cluster(num, latency=0.001, bandwidth=1e7),
            scenario=scenario or Scenario(name="nothing happens"),
            program=[sys.executable, str(folder / "script.py"), sync, *map(str, shape)],
            environment=environment or {},
            output=folder / "logs",
            log=lambda line: print(line, flush=True),
            is_one_job=True,
            coordination=LabCoordination(self.hosts, folder / "logs", QUICK),
        )
        self.child = Child(lambda: sys.exit(self._run(rehearsal)), output=folder / "shown.txt")
        self._closing = ExitStack()
        self._closing.callback(self.child.end)

    def __enter__(self) -> Self:
        with ExitStack() as failing:
            failing.push(self._closing)
            names = [self._folder / f"trains{rank}" for rank in range(len(self.hosts))]
            self.wait_for(lambda: all(path.exists() for path in names), "training")
            self.control = control.attach(self.name)
            failing.pop_all()
        self._closing.callback(self.control.close)
        own = Path("/proc/self/ns/net").stat().st_ino
        family = psutil.Process(self.child.pid).children(recursive=True)
        self._namespaces = self._closing.enter_context(namespaces(family)) - {own}
        assert len(self._namespaces) >= len(self.hosts)
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.close()

    def _run(self, rehearsal: Rehearsal) -> int:
        os.chdir(self._folder)
        os.environ[MARK] = str(self._folder)
        return rehearsal.run(name=self.name, timeout=self._timeout)

    def wait_for(self, condition: Any, what: str) -> None:
        deadline = time.monotonic() + TIMEOUT
        while not condition():
            assert self.child.status is None, f"it has ended before {what}: {self.text}"
            assert time.monotonic() < deadline, f"no {what}: {self.text}"
            time.sleep(0.02)

    def go_on(self) -> None:
        (self._folder / "fault").touch()

    def cut_off(self, host: str, *, up: bool) -> None:
        for other in self.hosts.replace(host, ""):
            attach.change_link(
                self.control, host, other, latency=None, bandwidth=None, up=up, one_way=False
            )

    def wait_for_loss(self) -> None:
        log = self._folder / "logs/membership.jsonl"
        self.wait_for(lambda: '"Lost"' in log.read_text(), "loss")

    def end(self) -> int | None:
        """Return the status after all have ended; check that nothing is left of the job."""
        assert self.child.wait(self._timeout) is not None, self.text
        assert [process for process in psutil.process_iter() if self._is_of_job(process)] == []
        assert not any(namespace_pids(number) for number in self._namespaces)
        assert not control.socket_path(self.name).exists()
        return self.child.status

    def _is_of_job(self, process: psutil.Process) -> bool:
        try:
            marked = process.environ().get(MARK) == str(self._folder)
            return marked and process.status() != psutil.STATUS_ZOMBIE
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            return False

    @property
    def text(self) -> str:
        logs = [self._folder / "shown.txt", *sorted(self._folder.glob("logs/*"))]
        return "\n".join(f"== {path.name}\n{path.read_text()}" for path in logs)

    def check(self, survivors: set[int]) -> None:
        """Check that they made all steps, once each, and have the weights of one process."""
        _, expected = fit(self._folder / "alone", 1, 1, steps=NUM_STEPS)
        steps, weights = self._found(survivors)
        assert steps == [list(range(NUM_STEPS))] * len(survivors)
        assert weights.keys() == expected.keys(), "some stage has no survivor"
        for name, value in expected.items():
            torch.testing.assert_close(weights[name], value, rtol=1e-4, atol=1e-5)

    def check_groups(self, survivors: set[int]) -> None:
        """Check that they made all global steps, and have equal weights after the last average."""
        steps, weights = self._found(survivors)
        assert {step for of_one in steps for step in of_one} <= {*range(NUM_STEPS)}
        assert max(max(of_one) for of_one in steps) == NUM_STEPS - 1
        assert all(value.isfinite().all() for value in weights.values())

    def _found(self, survivors: set[int]) -> tuple[list[list[int]], dict[str, Tensor]]:
        """Return the steps of each survivor, and the weights, which replicas have equally."""
        found = {int(path.stem[5:]): path for path in self._folder.glob("found*.pt")}
        assert found.keys() == survivors, self.text
        weights, made = dict[str, Tensor](), list[list[int]]()
        for path in found.values():
            steps, state = torch.load(path)
            made.append(steps)
            for name, value in state.items():
                torch.testing.assert_close(value, weights.setdefault(name, value), rtol=0, atol=0)
        return made, weights
