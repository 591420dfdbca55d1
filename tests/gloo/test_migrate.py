"""docs/migrate.md: the scripts before and after each migration run and print the same losses."""

import ast
import re
from pathlib import Path

import pytest
import torch

from tests.gloo.scripts import import_before_fork, run_script, run_train

PAGE = Path(__file__).parents[2] / "docs" / "migrate.md"


@pytest.fixture(autouse=True, scope="module")
def _imports() -> None:
    models = "transformers.models"
    import_before_fork(
        f"{models}.llama.modeling_llama", f"{models}.byt5.tokenization_byt5", "transformers.trainer"
    )


def scripts(title: str, folder: Path) -> tuple[Path, Path]:
    """Write the scripts of a section's diff, before and after."""
    (diff,) = re.findall(rf"^## {title}\n\n```diff\n(.*?)^```$", PAGE.read_text(), re.M | re.S)
    lines = [line or " " for line in diff.splitlines()]
    assert {line[0] for line in lines} == set(" +-")
    paths = folder / "before.py", folder / "after.py"
    for path, own in zip(paths, "-+", strict=True):
        path.write_text("".join(f"{line[1:]}\n" for line in lines if line[0] in f" {own}"))
    return paths


def losses(output: str) -> torch.Tensor:
    (line,) = re.findall(r"^losses (\[.*\])$", output, re.M)
    return torch.tensor(ast.literal_eval(line), dtype=torch.float64)


def assert_equal(before: str, *after: str) -> None:
    expected = losses(before)
    assert len(expected) >= 6
    assert expected[-1] < expected[0]
    for output in after:
        torch.testing.assert_close(losses(output), expected, rtol=1e-5, atol=1e-6)


def test_hugging_face_trainer(tmp_path: Path) -> None:
    before, after = scripts("Hugging Face Trainer", tmp_path)
    assert_equal(
        *run_script(before, folder=tmp_path),
        *run_script(after, folder=tmp_path),
        run_train(after, "--stages", "2", "--pipelines", "2", folder=tmp_path),
    )


def test_accelerate(tmp_path: Path) -> None:
    before, after = scripts("accelerate", tmp_path)
    assert_equal(
        *run_script(before, folder=tmp_path),
        *run_script(after, folder=tmp_path),
        run_train(after, "--local", "2", folder=tmp_path),
    )


@pytest.mark.parametrize(
    ("title", "rank"),
    [("Lightning Fabric", 0), (r"torch\.distributed\.pipelining", 1), ("DDP", 0)],
)
def test_torchrun(title: str, rank: int, tmp_path: Path) -> None:
    runs = (
        run_script(script, num_processes=2, folder=tmp_path) for script in scripts(title, tmp_path)
    )
    assert_equal(*(outputs[rank] for outputs in runs))
