"""The scripts in examples/ run, and compute what a plain loop computes."""

import ast
import re
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy

from tests.gloo.pipelines import run_single_process
from tests.gloo.scripts import import_before_fork, printed_losses, run_script, run_train

EXAMPLES = Path(__file__).parents[2] / "examples"
LOOPS = ("accelerate_loop.py", "fabric_loop.py")


@pytest.fixture(autouse=True, scope="module")
def _imports() -> None:
    models = "transformers.models"
    import_before_fork(f"{models}.llama.modeling_llama", f"{models}.byt5.tokenization_byt5")


def edited(name: str, folder: Path, replacements: dict[str, str]) -> Path:
    """Copy an example with other code, such as fewer steps."""
    code = (EXAMPLES / name).read_text()
    for old, new in replacements.items():
        assert code.count(old) == 1, old
        code = code.replace(old, new)
    (folder / name).write_text(code)
    return folder / name


def test_hugging_face_example_has_ten_lines_which_the_readme_shows() -> None:
    code = (EXAMPLES / "hugging_face.py").read_text()
    statements = ast.parse(code).body[1:]
    num_lines = sum((each.end_lineno or 0) - each.lineno + 1 for each in statements)
    assert num_lines <= 10
    shown = "".join(code.splitlines(keepends=True)[statements[0].lineno - 1 :])
    assert f"```python\n{shown}```" in (EXAMPLES.parent / "README.md").read_text()


def test_hugging_face_example_has_equal_losses_on_1_2_and_4_processes(tmp_path: Path) -> None:
    edited("text.py", tmp_path, {"max_length=128": "max_length=16"})
    script = edited("hugging_face.py", tmp_path, {"max_steps=100": "max_steps=2"})
    outputs = [
        *run_script(script, folder=tmp_path),
        run_train(script, "--local", "2", folder=tmp_path),
        run_train(script, "--stages", "2", "--pipelines", "2", folder=tmp_path),
    ]
    lines = [
        re.findall(r"step 2/2 .*?(loss \S+).*(lr \S+  grad norm \S+)", output) for output in outputs
    ]
    assert lines[0] == lines[1] == lines[2] != []


def test_data_parallel_example_computes_what_the_plain_script_does(tmp_path: Path) -> None:
    less = {"windows[:-2000, :-1], windows[:-2000, -1]": "windows[:2560, :-1], windows[:2560, -1]"}
    in_order = {"shuffle=True": "shuffle=False"}
    plain = edited("plain.py", tmp_path, less | in_order)
    in_order = {"Sampler(data)": "Sampler(data, shuffle=False)"}
    parallel = edited("data_parallel.py", tmp_path, less | in_order)
    (expected,) = run_script(plain, folder=tmp_path)
    outputs = run_script(parallel, num_processes=2, folder=tmp_path)
    assert outputs == [expected, ""]


@pytest.mark.long
def test_slow_process_gets_fewer_samples_with_balanced(tmp_path: Path) -> None:
    less = {"windows[-2000:, :-1], windows[-2000:, -1]": "windows[-64:, :-1], windows[-64:, -1]"}
    script = edited("unequal_gpus.py", tmp_path, less | {"max_steps=50": "max_steps=10"})
    (alone,) = run_script(script, folder=tmp_path)
    output = run_train(script, "--local", "2", "--", "--slow", "1", folder=tmp_path)
    shares, loss = output.splitlines()[-1].split("; ")
    samples = [int(number) for number in re.findall(r"p\d (\d+)", shares)]
    assert samples[0] > samples[1] > 0
    assert loss == alone.splitlines()[-1].split("; ")[1]


def plain_losses() -> list[float]:
    """Return the loss of each half batch of the loop examples, without any library."""
    code = (EXAMPLES / LOOPS[0]).read_text()
    names: dict[str, object] = {}
    exec(code[: code.index("def distributed_optimizer")], names)
    model, windows = names["model"], names["windows"]
    assert isinstance(model, torch.nn.Module)
    assert isinstance(windows, torch.Tensor)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    losses = []
    for number, half in enumerate(windows.split(32)):
        loss = cross_entropy(model(half[:, :-1]), half[:, -1])
        (loss / 2).backward()
        losses.append(loss.item())
        if number % 2:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return losses


@pytest.mark.long
def test_loops_of_accelerate_and_fabric_train_as_a_plain_loop(tmp_path: Path) -> None:
    expected = torch.tensor(run_single_process(plain_losses, tmp_path))
    by_step = expected.view(-1, 2).mean(1)

    def losses(script: str, *part: str, rank: int = 0) -> torch.Tensor:
        outputs = run_script(EXAMPLES / script, *part, num_processes=2, folder=tmp_path)
        return torch.tensor(printed_losses(outputs[rank]))

    close = {"rtol": 0, "atol": 2e-4}
    for script in LOOPS:
        torch.testing.assert_close(losses(script, "distributed_optimizer"), expected, **close)
        torch.testing.assert_close(losses(script, "group_sync", "all_reduce"), expected, **close)
        torch.testing.assert_close(losses(script, "pipeline", rank=1), by_step, **close)
    groups = losses(LOOPS[0], "group_sync")  # of models, not of gradients
    assert len(groups) == len(expected)
    assert groups[-1] < groups[0] - 1
