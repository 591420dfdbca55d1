"""`kill_windows`: a kill at every file operation of a save; counts the checkpoints that are lost.

The operations of one save are recorded. For each of them, new processes repeat the save in a copy
of the folder, and one dies by SIGKILL right before that operation (a write also dies halfway); then
a new start opens the folder and restores. A checkpoint is lost if it was complete, was neither
replaced nor rotated away by a complete one, and is not found and verified. The newest one must be
restored with its values; `latest` must find it also before the new start has cleaned up. Of two
stages, the surviving one is still running while the new start cleans up. The new start itself is
killed at each of its operations, too.

A loss of power also loses what was not synced: the recorded operations must sync each file and the
folder before the rename that makes a checkpoint, and that rename before anything older is removed.
"""

import io
import json
import os
import shutil
import signal
import tempfile
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch.distributed as dist
from torch import nn

from benchmarks.parity.facts import Fact
from polyrhythm.run.checkpoint.checkpointer import Checkpointer
from polyrhythm.run.checkpoint.folder import candidates, latest
from polyrhythm.run.checkpoint.manifest import find_damage, read_manifest
from polyrhythm.types import Seconds

_TIMEOUT: Seconds = 20.0
_MAX_STAGES = 2


@dataclass(frozen=True, slots=True)
class Save:
    """A save of `step` in a folder with checkpoints of `steps`, saved one after the other.

    A checkpoint is known by its value: the n-th that was saved has weights of n.
    """

    steps: tuple[int, ...]
    step: int
    keep_last: int
    num_stages: int = 1
    killed_stage: int = 0

    def __str__(self) -> str:
        kind = "saved again" if self.step in self.steps else "saved"
        killed = f", stage {self.killed_stage} of 2 killed" if self.num_stages > 1 else ""
        others = ", ".join(map(str, self.steps))
        return f"step {self.step} {kind} beside {others}, keep_last={self.keep_last}{killed}"

    @property
    def value(self) -> int:
        return len(self.steps) + 1

    def kept(self, found: set[int]) -> set[int]:
        """Return the values that must be there, given whether the save was completed."""
        before = dict(enumerate(self.steps, 1))
        if self.value not in found:
            return set(before)
        others = [value for value, step in before.items() if step != self.step]
        return set(sorted([*others, self.value])[-self.keep_last :])


_SAVES: Final = (
    Save((1,), 1, keep_last=1),
    Save((1, 2), 3, keep_last=3),
    Save((1, 2), 3, keep_last=1),
    Save((1, 2), 2, keep_last=3),
    Save((2, 3, 1), 2, keep_last=2),
)
_KILLED: Final = ((1, 0), (2, 0), (2, 1))  # number of stages, and the one that is killed


class Operation(NamedTuple):
    name: str
    path: str

    def __str__(self) -> str:
        return f"{self.name} {Path(self.path).name}"


@dataclass(slots=True)
class FileOperations:
    """Records the file operations of this process, or kills it right before one of them."""

    kill_at: int | None = None  # index of the operation
    is_torn: bool = False  # half of that write reaches the file
    done: list[Operation] = field(default_factory=list)

    def record(self, name: str, path: str | Path | int) -> bool:
        """Record an operation; return whether this process is to die halfway."""
        path = _opened(path) if isinstance(path, int) else Path(path)
        is_last = len(self.done) == self.kill_at
        if is_last and not self.is_torn:
            os.kill(os.getpid(), signal.SIGKILL)
        self.done.append(Operation(name, str(path.absolute())))
        return is_last

    def start(self) -> None:
        """Replace the functions of this process that change files."""
        for name in ("rename", "unlink", "rmdir", "mkdir", "fsync"):
            setattr(os, name, partial(self._call, getattr(os, name), name))
        plain_open, record = io.open, self.record

        class RecordedFile(io.FileIO):
            def write(self, data: Any) -> int:
                if record("write", self.fileno()):
                    super().write(bytes(data)[: len(data) // 2])
                    os.kill(os.getpid(), signal.SIGKILL)
                return super().write(data)

        def open_recorded(path: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
            if "r" in mode:
                return plain_open(path, mode, *args, **options)
            record("open", path)
            file = io.BufferedWriter(RecordedFile(path, mode.replace("b", "")))
            return file if "b" in mode else io.TextIOWrapper(file, encoding="utf-8")

        io.open = open_recorded  # type: ignore[assignment]

    def _call(
        self, function: Callable[..., Any], name: str, path: Any, *args: Any, **options: Any
    ) -> Any:
        within = options.get("dir_fd")
        self.record(name, path if within is None else _opened(within) / path)
        return function(path, *args, **options)


def _opened(descriptor: int) -> Path:
    return Path(f"/proc/self/fd/{descriptor}").readlink()


def measure(*, quick: bool) -> list[Fact]:
    """Return the number of lost checkpoints of each save, over all of its operations."""
    saves = [
        replace(save, num_stages=num_stages, killed_stage=killed)
        for num_stages, killed in _KILLED
        for save in _SAVES
    ]
    facts = []
    with tempfile.TemporaryDirectory() as folder:
        for number, save in enumerate(saves[:1] if quick else saves):
            facts += measure_save(save, Path(folder) / str(number))
        if not quick:
            facts.append(measure_restarts(saves[0], Path(folder) / "restarts"))
    return facts


def measure_save(save: Save, folder: Path) -> list[Fact]:
    """Kill a save at each of its operations, and check the order of its syncs."""
    before, recorded, kills = _record(save, folder)
    problems = []
    for index, is_torn in kills:
        copied = Path(shutil.copytree(before, folder / f"{index}-{is_torn}"))
        where = str(recorded[index]) if index < len(recorded) else "the end"
        found = run_save(save, copied, FileOperations(index, is_torn), then=partial(check, save))
        problems += [f"{problem} ({where})" for problem in found]
    detail = f"{len(kills)} kills at {len(recorded)} operations"
    facts = [Fact(str(save), len(problems), "; ".join([detail, *problems[:3]]))]
    if save.killed_stage == 0:  # it renames and removes
        unsynced = find_unsynced(recorded)
        facts.append(Fact(f"not synced: {save}", len(unsynced), "; ".join(unsynced[:3])))
    return facts


def measure_restarts(save: Save, folder: Path) -> Fact:
    """Kill the new start after each kill of a save, at each operation of the new start."""
    before, _, kills = _record(save, folder)
    problems, num_kills = [], 0
    for index, is_torn in kills:
        left = Path(shutil.copytree(before, folder / f"{index}-{is_torn}"))
        run_save(save, left, FileOperations(index, is_torn))
        copied = Path(shutil.copytree(left, folder / "recorded-start"))
        operations = _run(partial(_restart, copied, FileOperations()))["operations"]
        shutil.rmtree(copied)
        num_kills += len(operations)
        for kill_at, operation in enumerate(operations):
            copied = Path(shutil.copytree(left, folder / f"{index}-{is_torn}-{kill_at}"))
            _run(partial(_restart, copied, FileOperations(kill_at)))
            where = f"kill {index}, then {Operation(*operation)}"
            problems += [f"{problem} ({where})" for problem in check(save, copied)]
    detail = f"{num_kills} kills of a new start"
    return Fact(f"new start after: {save}", len(problems), "; ".join([detail, *problems[:3]]))


def run_save(
    save: Save,
    folder: Path,
    operations: FileOperations,
    *,
    then: Callable[[Path], Any] | None = None,
) -> Any:
    """Save with all stages; return the operations of the stage to be killed.

    With `then`, call that once this stage has ended, kill the others, and return its result.
    """
    others = [stage for stage in range(save.num_stages) if stage != save.killed_stage]
    stages = [partial(_save, save, stage, folder, operations) for stage in others]
    killed = partial(_save, save, save.killed_stage, folder, operations)
    return _run(killed, *stages, then=None if then is None else partial(then, folder))


def check(save: Save, folder: Path) -> list[str]:
    """Restart in the folder after a kill; return what is lost, left behind or wrong."""
    found = _run(partial(_restart, folder, FileOperations()))
    if found is None:
        return ["the new start failed"]
    whole = set(found["whole"])
    kept = save.kept(whole)
    problems = [f"the checkpoint with value {value} is lost" for value in sorted(kept - whole)]
    for name in ("latest", "restored"):
        if found[name] != max(kept):
            problems.append(f"{name} is {found[name]}, not {max(kept)}")
    if save.num_stages == 1:  # else the other stage may still write
        problems += [f"{name} is left" for name in found["left"]]
    return problems


def find_unsynced(recorded: Sequence[Operation]) -> list[str]:
    """Return what a loss of power could lose: a rename or a removal before a sync."""
    problems = []
    unsynced: set[str] = set()  # files with data, and folders with entries, that are not on disk
    for name, path in recorded:
        parent = str(Path(path).parent)
        if name == "fsync":
            unsynced.discard(path)
        elif name in ("open", "write"):
            unsynced |= {path, parent} if name == "open" else {path}
        elif name == "rename" and path.endswith(".partial"):
            problems += [f"{each} at the rename" for each in unsynced if each.startswith(path)]
            unsynced = {parent}
        elif name in ("unlink", "rmdir") or (name == "rename" and path.endswith(".replaced")):
            problems += [f"{each} at {name} {path}" for each in unsynced]
    return problems


def _record(save: Save, folder: Path) -> tuple[Path, list[Operation], list[tuple[int, bool]]]:
    """Return the folder before the save, the operations of a save, and the kills to try."""
    before = folder / "before"
    folder.mkdir()
    for number, step in enumerate(save.steps):
        earlier = Save(save.steps[:number], step, len(save.steps), save.num_stages)
        run_save(earlier, before, FileOperations())
    copied = Path(shutil.copytree(before, folder / "recorded"))
    operations = FileOperations()
    recorded = [Operation(*each) for each in run_save(save, copied, operations)]
    # Once the other stage has written, stage 0 completes the save: no kill is left to try.
    num_kills = len(recorded) + (save.killed_stage == 0)
    kills = [(index, False) for index in range(num_kills)]
    kills += [(index, True) for index, each in enumerate(recorded) if each.name == "write"]
    return before, recorded, kills


def _save(save: Save, stage: int, folder: Path, operations: FileOperations) -> list[Operation]:
    """Save in a process of its own; return the operations of the stage to be killed."""
    if save.num_stages > 1:
        path = folder.with_name(f"{folder.name}-store-{save.value}")
        store = dist.FileStore(str(path), save.num_stages)  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=stage, world_size=save.num_stages)
    checkpoints = Checkpointer(folder, keep_last=save.keep_last, timeout=_TIMEOUT)
    if stage == save.killed_stage:
        operations.start()
    layers = range(_MAX_STAGES)[stage : stage + 1] if save.num_stages > 1 else range(_MAX_STAGES)
    checkpoints.save(save.step, _model(layers, save.value), extra={"value": save.value})
    outcome = checkpoints.wait()
    assert outcome is not None, "it was saved"
    assert outcome.is_saved, outcome.why
    return operations.done


def _restart(folder: Path, operations: FileOperations) -> dict[str, Any]:
    """Open the folder in a new process, restore the newest checkpoint; return what was found."""
    newest = None if (path := latest(folder)) is None else read_manifest(path).extra["value"]
    operations.start()
    with Checkpointer(folder) as checkpoints:
        model, path = _model(range(_MAX_STAGES), 0), checkpoints.latest()
        if path is not None:
            checkpoints.restore(path, model)
    weights = {
        value for tensor in model.state_dict().values() for value in tensor.flatten().tolist()
    }
    return {
        "latest": newest,
        "restored": weights.pop() if len(weights) == 1 else None,
        "whole": [
            manifest.extra["value"]
            for path, manifest in candidates(folder)
            if find_damage(path, manifest.files) is None
        ],
        "left": [entry.name for entry in folder.iterdir() if entry.name.startswith(".")],
        "operations": operations.done,
    }


def _model(layers: Sequence[int], value: float) -> nn.Module:
    model = nn.ModuleDict({f"layer{layer}": nn.Linear(3, 5) for layer in layers})
    for parameter in model.parameters():
        nn.init.constant_(parameter, value)
    return model


def _run(*functions: Callable[[], Any], then: Callable[[], Any] | None = None) -> Any:
    """Call each function in a process of its own; return the first one's result, None if killed.

    With `then`, call that once the first one has ended, kill the others, and return its result.
    """
    read, write = os.pipe()
    processes = [_start(function, write) for function in functions]
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        first = processes.pop(0)
        os.waitpid(first, 0)
        result = None if then is None else then()
        for process in processes:
            if then is not None:
                os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
        results = dict(json.loads(line) for line in pipe)
    return results.get(first) if then is None else result


def _start(function: Callable[[], Any], pipe: int) -> int:
    process = os.fork()
    if process == 0:
        status = 1
        try:
            line = json.dumps([os.getpid(), function()]) + "\n"
            os.write(pipe, line.encode())  # short enough to be written at once
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    return process
