"""`polyrhythm train`: a script in several processes, and arguments that are rejected."""

import os
import re
import sys
import warnings
from pathlib import Path
from typing import NamedTuple

import pytest

from polyrhythm.cli import main
from polyrhythm.lab.program import run_program
from polyrhythm.processes import Child
from polyrhythm.run.trainer.trainer import Trainer

SCRIPT = """
import sys, torch, polyrhythm as pr
from torch.utils.data import TensorDataset

inputs = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
def model():
    return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 4))

trainer = pr.Trainer(
    model, torch.nn.functional.mse_loss, lambda p: torch.optim.SGD(p, lr=0.1),
    TensorDataset(inputs, inputs[:, :4]), batch_size=16, run_dir=sys.argv[1],
    checkpoint=pr.CheckpointConfig(every=4), timeout=30,
)
start = trainer.restore()
trainer.fit(progress=False, max_steps=int(sys.argv[2]))
loss = trainer.evaluate(TensorDataset(inputs, inputs[:, :4]))
print(f"{trainer.worker} from {start} to {trainer.global_step}: {loss:.6f}")
"""
PLAN = '{"schema": 2, "layers_per_stage": [1, 2], "pipelines": [{"schedule": "1f1b"}]}'


class CommandResult(NamedTuple):
    status: int | None
    output: str


def run(*arguments: object, folder: Path, as_script: bool = False) -> CommandResult:
    """Run the command, or with `as_script` a script, in a fork: interpreters start slowly."""

    def work() -> None:
        os.chdir(folder)
        warnings.simplefilter("ignore")  # pytest turns warnings into errors
        if as_script:
            run_program([sys.executable, *map(str, arguments)], {})
        else:
            main(["train", *map(str, arguments)])

    output = folder / "output.txt"
    child = Child(work, output=output)
    try:
        assert child.wait(80) is not None, "it hangs"
    finally:
        child.end()
    return CommandResult(child.status, output.read_text())


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "plan.json").write_text(PLAN)
    return tmp_path / "script.py"


def test_script_ends_though_it_leaves_threads(tmp_path: Path) -> None:
    """Those of an executor wait for work until an interpreter ends; torch.compile has some."""
    (tmp_path / "script.py").write_text(
        "import atexit, threading, time\n"
        "from concurrent.futures import ThreadPoolExecutor\n"
        "pool = ThreadPoolExecutor(2)\n"
        "pool.submit(print, 'in the executor', flush=True).result()\n"
        "def work():\n"
        "    time.sleep(0.5)\n"
        "    print('in the thread', flush=True)\n"
        "threading.Thread(target=work).start()\n"
        "atexit.register(print, 'at exit', flush=True)\n"
    )
    found = run("script.py", folder=tmp_path, as_script=True)
    assert found == (0, "in the executor\nin the thread\nat exit\n")


def test_script_trains_in_one_process_several_and_with_a_plan(script: Path) -> None:
    """Each run resumes the previous one, and the losses are those of a single process."""
    folder = script.parent
    single = run(script, "alone", 12, folder=folder, as_script=True)
    assert single.output.startswith("s0p0 from 0 to 12: ")
    several = run(script, "--local", 2, "--output", "out", "--", "run", 6, folder=folder)
    assert several.output.startswith("s0p0 from 0 to 6: ")
    assert (folder / "out" / "rank1.log").read_text().startswith("s0p1 from 0 to 6: ")
    planned = run(script, "--plan", "plan.json", "--output", "out", "--", "run", 12, folder=folder)
    assert planned.output.startswith("s0p0 from 6 to 12: ")
    assert planned.output.split()[-1] == single.output.split()[-1]
    assert not list(folder.glob("*/checkpoints/.*"))


LAUNCHED = (
    "import os\nnames = ('RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'LOCAL_WORLD_SIZE')\n"
    "launched = [os.environ[name] for name in names]\n"
)


def test_a_process_that_is_lost_comes_back(script: Path) -> None:
    """It runs the script from the start, and is in the evaluation after the fit."""
    killed = """
import os, pathlib, signal, time
def slowly(info):
    time.sleep(0.1)
    if trainer.worker.pipeline == 1 and info.step == 3 and not pathlib.Path("killed").exists():
        pathlib.Path("killed").touch()
        os.kill(os.getpid(), signal.SIGKILL)
"""
    text = SCRIPT.replace("progress=False", "progress=False, callbacks=[slowly]")
    evaluate = 'print("before:", trainer.evaluate(TensorDataset(inputs, inputs[:, :4])))'
    script.write_text(text.replace("start =", f"{killed}\n{evaluate}\nstart ="))
    command = [script, "--local", "2", "--elastic", "--", "run", "60"]
    found = run(*command, folder=script.parent)
    assert found.status == 0, found.output
    assert "rank 1 was ended by SIGKILL: the others go on; it is started again" in found.output
    log = (script.parent / "runs/output/rank1.1.log").read_text()
    assert "before: nan" in log
    assert re.search(r"s0p1 from 0 to 60: ", log), log
    loss = re.search(r"to 60: (\S+)", found.output)
    assert loss is not None
    assert loss[1] in log, "both evaluate the same weights"


def test_stages_and_pipelines_need_no_plan_file(script: Path) -> None:
    """The script knows its rank before it makes the Trainer, which has the same rank."""
    folder = script.parent
    script.write_text(f"{LAUNCHED}{SCRIPT}\nprint(launched, trainer.plan.layers_per_stage)")
    single = folder / "single.py"
    single.write_text(SCRIPT)
    expected = run(single, "alone", 6, folder=folder, as_script=True).output.split()[-1]
    found = run(script, "--stages", 2, "--pipelines", 2, "--", "run", 6, folder=folder)
    outputs = [found.output]
    outputs += [(folder / f"runs/output/rank{rank}.log").read_text() for rank in (1, 2, 3)]
    for rank, worker in enumerate(("s0p0", "s1p0", "s0p1", "s1p1")):
        first, second = outputs[rank].splitlines()
        assert first == f"{worker} from 0 to 6: {expected}"
        assert second == f"{[str(rank), str(rank), '4', '4']} (2, 1)"


@pytest.mark.long
def test_smallest_plan_of_the_manual_trains(script: Path) -> None:
    manual = (Path(__file__).parents[2] / "docs" / "plan.md").read_text(encoding="utf-8")
    (text,) = re.findall(r"```json smallest plan\n(.*?)```", manual, re.DOTALL)
    (script.parent / "plan.json").write_text(text)
    layers = "*[torch.nn.Linear(8, 8) for _ in range(11)], torch.nn.Linear(8, 4)"
    model = "torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 4)"
    script.write_text(SCRIPT.replace(model, layers))
    found = run(script, "--plan", "plan.json", "--", "run", 2, folder=script.parent)
    assert found.output.startswith("s0p0 from 0 to 2: "), found.output
    assert (script.parent / "runs/output/rank3.log").read_text().startswith("s1p1 from 0 to 2: ")


@pytest.mark.parametrize(
    ("text", "arguments", "message"),
    [
        ("print('hello')", ["--local", "2"], "has ended without training"),
        pytest.param("raise SystemExit(3)", ["--local", "2"], "failed", marks=pytest.mark.long),
        pytest.param("import nonsense", ["--local", "1"], "nonsense", marks=pytest.mark.long),
    ],
)
def test_script_that_does_not_train_is_an_error(
    tmp_path: Path, text: str, arguments: list[str], message: str
) -> None:
    script = tmp_path / "script.py"
    script.write_text(text)
    found = run(script, *arguments, "--output", "out", folder=tmp_path)
    assert found.status in (1, 2)
    assert message in found.output


FAILING = """
import os, sys, torch, polyrhythm as pr
where, ranks = sys.argv[1], sys.argv[2]

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, index):
        if where == "data" and index == 37 and os.environ["RANK"] in ranks:
            raise KeyError("broken sample")
        return torch.ones(8), torch.ones(4)

class Broken(torch.nn.Linear):
    def forward(self, inputs):
        if where == "model" and os.environ["RANK"] in ranks:
            raise ZeroDivisionError("broken model")
        return super().forward(inputs)

trainer = pr.Trainer(
    lambda: torch.nn.Sequential(torch.nn.Linear(8, 8), Broken(8, 4)),
    torch.nn.functional.mse_loss, lambda p: torch.optim.SGD(p, lr=0.1), Data(), batch_size=16,
    timeout=20,
)
trainer.fit(progress=False, max_steps=20)
"""


@pytest.mark.parametrize(
    ("where", "ranks", "line", "message"),
    [
        ("data", "1", 10, "rank 1 refused: sample 37"),
        pytest.param("data", "01", 10, "refused: sample 37", marks=pytest.mark.long),
        pytest.param("model", "1", 16, "rank 1 failed: ZeroDiv", marks=pytest.mark.long),
        ("model", "01", 16, "\nZeroDivisionError: broken model\n"),
    ],
)
def test_traceback_of_the_users_code_is_shown_once(
    tmp_path: Path, where: str, ranks: str, line: int, message: str
) -> None:
    script = tmp_path / "script.py"
    script.write_text(FAILING)
    found = run(script, "--local", 2, "--output", "out", "--", where, ranks, folder=tmp_path)
    assert found.status in (1, 2), found.output
    assert found.output.count("Traceback") == 1, found.output
    assert found.output.count(f'script.py", line {line}, in ') == 1
    assert message in found.output


def test_fit_of_the_launching_process_does_not_count_as_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers are forked and inherit the count of fits."""
    monkeypatch.setattr(Trainer, "num_fits", 1)
    (tmp_path / "script.py").write_text("print('hello')")
    found = run("script.py", "--local", "2", "--output", "out", folder=tmp_path)
    assert found.status == 2, found.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere.py"], "nowhere.py: no such file"),
        (["script.py", "--local", "0"], "--local 0"),
        (["script.py", "--local", "2", "--lab", "case1_datacenter"], "one of the two"),
        (["script.py", "--elastic", "--lab", "case1_datacenter"], "--elastic with --lab"),
        (["script.py", "--scenario", "sdpipe_b"], "without a lab"),
        (["script.py", "--plan", "missing.json"], "missing.json"),
        (["script.py", "--plan", "plan.json", "--stages", "2"], "stages=2 with --plan"),
        (["script.py", "--stages", "0"], "stages=0"),
        (["script.py", "--local", "3", "--stages", "2"], "start 2 or 4"),
        (["script.py", "--local", "3", "--stages", "2", "--pipelines", "2"], "4 processes"),
    ],
)
def test_invalid_arguments_are_rejected(script: Path, arguments: list[str], message: str) -> None:
    found = run(*arguments, folder=script.parent)
    assert found.status == 2
    assert message in found.output
    assert "Traceback" not in found.output
