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
        "import pickle as p\nstate = p.loads(data)",
        "from pickle import loads",
        "from pickle import loads as read\nstate = read(data)",
        "def f(data):\n    import pickle\n    return pickle.loads(data)",
        "pickle = importlib.import_module('pickle')",
        "pickle = __import__('pickle')",
        "import cloudpickle as packer",
        "import dill",
        "from joblib import load",
        "import joblib.numpy_pickle",
        "import shelve",
        "import pandas as pd\ntable = pd.read_pickle(file)",
        "state = torch.load(file)",
        "state = torch.load(file, weights_only=False)",
        "state = torch.load(file, weights_only=is_safe)",
        "state = torch.load(file, **options)",
        "import torch as t\nstate = t.load(file)",
        "from torch import load\nstate = load(file)",
        "from torch import load as read\nstate = read(file)",
        "import torch\nread = torch.load",
        "import torch\nread = partial(torch.load, weights_only=True)",
        "import torch\nstate = torch.serialization.load(file)",
        "from torch.serialization import load\nstate = load(file)",
        "import torch\nmodel = torch.hub.load(name)",
        "values = np.load(file, allow_pickle=True)",
        "import numpy as np\nvalues = np.load(file, None, True)",
        "import numpy as np\nvalues = np.load(file, **options)",
        "from numpy import load as read\nvalues = read(file, allow_pickle=True)",
        "import numpy as np\nread = partial(np.load, allow_pickle=True)",
        "from torch.distributed.checkpoint.filesystem import FileSystemReader",
        "from torch.distributed.checkpoint import FileSystemWriter as Writer",
        "import torch.distributed.checkpoint as dcp\ndcp.load(state, storage_reader=reader)",
        "from torch.distributed import checkpoint as dcp\ndcp.load(state)",
        "import torch.distributed as dist\ndist.checkpoint.load(state)",
        "import torch\ntorch.distributed.checkpoint.load(state)",
        "import torch\ntorch.distributed.broadcast_object_list(found)",
        "from torch import distributed as d\nd.all_gather_object(found, value)",
        "from torch.distributed import all_gather_object as gather\ngather(found, value)",
        *(
            f"import torch.distributed as dist\ndist.{name}(found)"
            for name in (
                "all_gather_object",
                "broadcast_object_list",
                "gather_object",
                "recv_object_list",
                "scatter_object_list",
                "send_object_list",
            )
        ),
        "from torch.distributed import rpc",
        "value = connection.recv()",
        "value = socket.recv_pyobj()",
        "import multiprocessing\nresults = multiprocessing.Queue()",
        "import multiprocessing as mp\nresults = mp.get_context('fork').SimpleQueue()",
        "_fork = get_context('fork')\nwith _fork.Pool() as pool: pass",
        "from multiprocessing import Manager as M",
        "from concurrent.futures import ProcessPoolExecutor",
        "import torch.multiprocessing as mp",
        "import numba\n@numba.njit(cache=True)\ndef f(): pass",
        "from numba import njit as compiled\n@compiled(cache=True)\ndef f(): pass",
    ],
)
def test_unpickling_is_found(structure: ModuleType, text: str) -> None:
    assert structure._unpickling(ast.parse(text))


@pytest.mark.parametrize(
    "text",
    [
        "state = torch.load(file, weights_only=True)",
        "from torch import load as read\nstate = read(file, weights_only=True)",
        "values = np.load(file)",
        "import numpy as np\nvalues = np.load(file, allow_pickle=False)",
        "found = store.all_gather_object(name, value, members)",
        "from json import loads\nstate = loads(text)",
        "import safetensors.torch\nstate = safetensors.torch.load(data)",
        "import torch.distributed as dist\ndist.broadcast(tensor, 0)",
        "data = socket.recv(4096)",
        "data = connection.recv_bytes()",
        "import queue\nresults = queue.SimpleQueue()",
        "from queue import Queue\nresults = Queue()",
        "import multiprocessing\nreceiving, sending = multiprocessing.Pipe()",
        "import numba\n@numba.njit\ndef f(): pass",
    ],
)
def test_other_reads_are_not(structure: ModuleType, text: str) -> None:
    assert structure._unpickling(ast.parse(text)) == []


@pytest.mark.long  # `make check` does the same
def test_package_unpickles_nowhere(structure: ModuleType) -> None:
    _, number, _, is_met, found = structure._unpickling_row()
    assert (number, is_met, found) == ("0", True, [])


@pytest.mark.parametrize("path", ["polyrhythm/run/checkpoint/legacy.py", "polyrhythm/jit.py"])
def test_exceptions_are_needed(structure: ModuleType, path: str) -> None:
    assert structure._unpickling(structure._parsed(path))
