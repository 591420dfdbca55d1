"""A user's training script, to run on hosts of the lab, and its losses."""

import json
from itertools import zip_longest
from pathlib import Path

import polyrhythm.run.trainer.trainer  # noqa: F401

NUM_STEPS, NUM_LAYERS = 4, 6
SCRIPT = f"""
import json, os, sys, torch, polyrhythm as pr
from pathlib import Path
from torch.utils.data import TensorDataset

torch.set_num_threads(1)
inputs = torch.randn(40, 8, generator=torch.Generator().manual_seed(0))

def model():
    layers = [f(8, 8) for _ in range(2) for f in (torch.nn.Linear, lambda *_: torch.nn.Tanh())]
    return torch.nn.Sequential(*layers, torch.nn.Linear(8, 8), torch.nn.Linear(8, 4))

def fail(end):
    if os.environ.get("POLYRHYTHM_DEVICE") in sys.argv[3:]:
        raise ValueError("on purpose")

trainer = pr.Trainer(
    model, torch.nn.functional.mse_loss, lambda p: torch.optim.AdamW(p, lr=0.01),
    TensorDataset(inputs, inputs[:, :4]), batch_size=16, microbatch_size=2, timeout=30,
    run_dir=sys.argv[2] if len(sys.argv) > 2 else None,
)
ends = trainer.fit(max_steps={NUM_STEPS}, callbacks=[fail]).steps
found = [[end.own.loss, end.own.num_samples] for end in ends if end.own.loss is not None]
Path(sys.argv[1], f"{{trainer.worker}}.json").write_text(json.dumps(found))
print(trainer.worker, "on", os.environ.get("POLYRHYTHM_DEVICE"))
"""


def losses(folder: Path) -> list[float]:
    """Return the loss of each global batch, over the samples of all pipelines."""
    found = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    steps = zip_longest(*filter(None, found))  # first stages have none
    return [sum(loss * n for loss, n in step) / sum(n for _, n in step) for step in steps]
