"""`tools/structure.py` finds the places that unpickle."""

import ast
from pathlib import Path
from types import ModuleType

import pytest

TOOLS = Path(__file__).parents[2] / "tools"


@pytest.fixture
def structure(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(TOOLS))
    import structure

    return structure


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "from pickle import loads",
        "import cloudpickle as packer",
        "state = torch.load(file)",
        "state = torch.load(file, weights_only=False)",
        "values = np.load(file, allow_pickle=True)",
        "from torch.distributed.checkpoint.filesystem import FileSystemReader",
        "import torch.distributed as dist\ndist.all_gather_object(found, value)",
        "import torch\ntorch.distributed.broadcast_object_list(found)",
        "value = connection.recv()",
        "value = socket.recv_pyobj()",
    ],
)
def test_unpickling_is_found(structure: ModuleType, text: str) -> None:
    assert list(structure._unpickling(ast.parse(text)))


@pytest.mark.parametrize(
    "text",
    [
        "state = torch.load(file, weights_only=True)",
        "values = np.load(file)",
        "found = store.all_gather_object(name, value, members)",
        "data = socket.recv(4096)",
        "data = connection.recv_bytes()",
    ],
)
def test_other_reads_are_not(structure: ModuleType, text: str) -> None:
    assert list(structure._unpickling(ast.parse(text))) == []
