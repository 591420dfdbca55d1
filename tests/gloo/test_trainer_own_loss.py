"""The loss that a model computes itself, from labels: the same for any number of stages."""

import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss, pad

from polyrhythm.errors import LaunchError, PlanError, ScheduleError, WorkerError
from polyrhythm.run.comm.launch import DistContext
from polyrhythm.run.data.order import DataError
from polyrhythm.run.pipeline.loss import LossFunction
from polyrhythm.run.pipeline.partition import LayerSplit
from polyrhythm.run.pipeline.verify_split import verify_split
from polyrhythm.run.trainer.optimizers import adamw, cosine
from polyrhythm.run.trainer.trainer import Trainer
from tests.gloo.trainer_jobs import run_job

WORDS, STEPS, BATCH = 50, 4, 8


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=2, n_embd=16, n_head=2, vocab_size=WORDS, n_positions=16, bos_token_id=0,
        eos_token_id=0, loss_type="ForCausalLM", resid_pdrop=0.1, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return GPT2LMHeadModel(config).double()


def bert(kind: str) -> nn.Module:
    import transformers

    config = transformers.BertConfig(
        num_hidden_layers=2, hidden_size=16, intermediate_size=16, num_attention_heads=2,
        vocab_size=WORDS, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return getattr(transformers, kind)(config).double()


def texts() -> list[dict[str, Any]]:
    draw = torch.Generator().manual_seed(0)
    lengths = torch.randint(2, 13, (32,), generator=draw).tolist()
    ids = [torch.randint(1, WORDS, (n,), generator=draw).tolist() for n in lengths]
    return [{"input_ids": row, "label": n % 2, "start_positions": 0, "end_positions": n - 1}
            for row, n in zip(ids, lengths, strict=True)]  # fmt: skip


def padded(
    items: list[dict[str, Any]], *, side: str = "right", names: tuple[str, ...] = ("labels",)
) -> dict[str, Tensor]:
    longest = max(len(item["input_ids"]) for item in items)

    def fill(values: list[int]) -> list[int]:
        gap = [0] * (longest - len(values))
        return gap + values if side == "left" else values + gap

    ids = torch.tensor([fill(item["input_ids"]) for item in items])
    mask = torch.tensor([fill([1] * len(item["input_ids"])) for item in items])
    known = {"labels": ids.masked_fill(mask == 0, -100)}
    for name in ("label", "start_positions", "end_positions"):
        known[name] = torch.tensor([item[name] for item in items])
    return {"input_ids": ids, "attention_mask": mask, **{name: known[name] for name in names}}


def packed(items: list[dict[str, Any]]) -> dict[str, Tensor]:
    """One row of all texts, whose positions start again with each."""
    rows = [torch.tensor(item["input_ids"])[:2] for item in items]
    positions = torch.cat([torch.arange(len(row)) for row in rows])
    ids = torch.cat(rows).expand(len(items), -1)
    return {"input_ids": ids, "position_ids": positions.expand_as(ids), "labels": ids}


def fit(folder: Path, num_stages: int, num_pipelines: int, **options: Any) -> list[float]:
    def work(ctx: DistContext | None) -> list[float]:
        with Trainer(
            dataset=texts(),
            optimizer_fn=adamw(lr=1e-2, weight_decay=0.1),
            lr_schedule=cosine(warmup=2),
            batch_size=BATCH,
            microbatch_size=2,
            stages=num_stages,
            pipelines=num_pipelines,
            timeout=60.0,
            **options,
        ) as trainer:
            return list(trainer.fit(max_steps=STEPS, progress=False).losses)

    found = run_job(num_stages * num_pipelines, work, folder)
    assert all(losses == found[0] for losses in found)
    return found[0]


CASES: dict[str, dict[str, Any]] = {
    "padded": {"model": gpt2, "collate_fn": padded},
    "padded left": {"model": gpt2, "collate_fn": partial(padded, side="left")},
    "packed": {"model": gpt2, "collate_fn": packed},
    "classification": {
        "model": partial(bert, "BertForSequenceClassification"),
        "collate_fn": partial(padded, names=("label",)),
    },
    "question answering": {
        "model": partial(bert, "BertForQuestionAnswering"),
        "collate_fn": partial(padded, names=("start_positions", "end_positions")),
    },
}


@pytest.mark.parametrize("case", CASES)
def test_own_loss_is_the_same_on_several_stages(tmp_path: Path, case: str) -> None:
    options = CASES[case]
    one = fit(tmp_path, 1, 1, **options)
    shape = (2, 2) if case == "padded" else (2, 1)
    assert fit(tmp_path, *shape, **options) == pytest.approx(one, rel=1e-9)


@pytest.mark.long
def test_compiled_layers_are_split(tmp_path: Path) -> None:
    graphs = list[Any]()

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    def compiled() -> nn.Module:
        made = gpt2()
        for layer in made.transformer.h:  # type: ignore[union-attr]
            layer.compile(backend=backend, dynamic=True)
        return made

    def compiled_in_worker() -> nn.Module:
        warnings.simplefilter("ignore")  # pytest turns those of torch's compiler into errors
        return compiled()

    batch = padded(texts()[:2])
    labels = {"labels": batch.pop("labels")}
    verify_split(compiled(), LayerSplit(), (1, 1), ((), batch), labels)
    assert not graphs, "neither the search for a split nor its comparison compiles layers"
    plain = fit(tmp_path, 1, 1, model=gpt2, collate_fn=padded)
    several = fit(tmp_path, 2, 1, model=compiled_in_worker, collate_fn=padded)
    assert several == pytest.approx(plain, rel=1e-9)


def test_own_loss_is_the_mean_over_all_tokens(tmp_path: Path) -> None:
    """As one forward of the whole batch; and the shift is the model's."""

    def shifted(logits: Tensor, labels: Tensor) -> Tensor:
        return cross_entropy(logits.flatten(0, 1), pad(labels, (0, 1), value=-100)[:, 1:].flatten())

    def model() -> nn.Module:
        made = gpt2()
        made.transformer.h[0].mlp.dropout.p = 0.0  # type: ignore[union-attr, assignment]
        return made.eval()

    options: Any = {"model": model, "collate_fn": padded}
    own = fit(tmp_path, 1, 1, **options)
    given = fit(tmp_path, 1, 1, loss_fn=shifted, **options)
    assert own == pytest.approx(given, rel=1e-6)  # the model's loss is in float32


def test_microbatch_without_a_label_counts_nothing(tmp_path: Path) -> None:
    def unlabelled(items: list[dict[str, Any]]) -> dict[str, Tensor]:
        batch = padded(items)
        batch["labels"] = batch["labels"].where(batch["input_ids"][:, :1] % 3 > 0, -100)
        return batch

    losses = fit(tmp_path, 1, 1, model=gpt2, collate_fn=unlabelled)
    assert all(loss == loss and loss > 0 for loss in losses)
    several = fit(tmp_path, 2, 1, model=gpt2, collate_fn=unlabelled)
    assert several == pytest.approx(losses, rel=1e-9)


def test_a_step_without_a_label_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    data = [{"input_ids": [1, 2, 3], "labels": [-100] * 3}] * 8
    with Trainer(gpt2, optimizer_fn=adamw(lr=0.1), dataset=data, batch_size=4) as trainer:
        losses = trainer.fit(max_steps=3, progress=False).losses
    assert all(loss != loss for loss in losses)
    warned = [r.getMessage() for r in caplog.records if "no label" in r.getMessage()]
    assert warned == ["step 0 has no label: all are ignored, as -100 is"]


def test_recorded_losses_are_those_of_the_forward() -> None:
    model, loss_fn = gpt2(), LossFunction(None, counts_labels=True)
    batch = padded(texts()[:4])
    before = nn.functional.cross_entropy
    with loss_fn.recorded():
        output = model(**batch)
    assert nn.functional.cross_entropy is before
    found = loss_fn(output, None, num_samples=4, host_target=batch["labels"])
    assert found.count == (batch["labels"][:, 1:] != -100).sum()


def test_router_loss_of_all_layers_is_refused() -> None:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        num_hidden_layers=2, hidden_size=16, intermediate_size=16, num_attention_heads=2,
        num_key_value_heads=2, vocab_size=WORDS, num_local_experts=4, output_router_logits=True,
    )  # fmt: skip
    ids = torch.arange(16).reshape(2, 8)
    with pytest.raises(PlanError, match=r"not the whole model: .*gate"):
        verify_split(
            MixtralForCausalLM(config), LayerSplit(), (1, 1), ((), {"input_ids": ids}),
            {"labels": ids},
        )  # fmt: skip


class NoLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        return {"logits": self.inner(x)}


class WithPair(NoLoss):
    def forward(self, x: Tensor, labels: Tensor) -> Any:
        output = self.inner(x)
        return output, mse_loss(output, labels)


class WithoutLabels(NoLoss):
    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        return {"logits": self.inner(x)}  # a loss_fn gets the logits, as on several stages


def small(model: Any, **options: Any) -> Trainer:
    data = [{"x": [1.0, 2.0], "labels": [0.0, 1.0]}] * 8
    return Trainer(model, optimizer_fn=adamw(lr=0.1), dataset=data, batch_size=4, **options)


def test_loss_in_a_tuple_is_found() -> None:
    with small(WithPair) as trainer:
        own = trainer.fit(max_steps=2, progress=False).losses

    with small(WithoutLabels, loss_fn=mse_loss) as trainer:
        assert trainer.fit(max_steps=2, progress=False).losses == own


def test_a_model_without_a_loss_is_refused() -> None:
    with pytest.raises(LaunchError, match=r"no loss_fn, and Linear.forward takes no `labels`"):
        small(lambda: nn.Linear(2, 2))
    with small(NoLoss) as trainer, pytest.raises(ScheduleError, match="without a loss"):
        trainer.fit(max_steps=1, progress=False)


@pytest.mark.parametrize("model", [gpt2, NoLoss])
def test_inputs_that_the_model_does_not_take_are_refused(model: Any) -> None:
    data = [{"input_ids": [1, 2, 3], "length": 3, "labels": [1, 2, 3]}] * 8
    with (
        Trainer(model, optimizer_fn=adamw(lr=0.1), dataset=data, batch_size=4) as trainer,
        pytest.raises(DataError, match=r"does not take: (input_ids, )?length") as error,
    ):
        trainer.fit(max_steps=1, progress=False)
    assert "remove_columns" in error.value.fix


@pytest.mark.parametrize("num_stages", [1, 2])
def test_tokens_beyond_the_vocabulary_are_refused(num_stages: int, tmp_path: Path) -> None:
    """The embedding would raise an IndexError, and on a GPU end the process."""
    size = gpt2().config.vocab_size
    data = [{"input_ids": [1, 2, size], "labels": [1, 2, 3]}] * 8

    def work(ctx: DistContext | None) -> None:
        with Trainer(
            gpt2, optimizer_fn=adamw(lr=0.1), dataset=data, batch_size=4, stages=num_stages
        ) as trainer:
            trainer.fit(max_steps=1, progress=False)

    with pytest.raises((DataError, WorkerError), match=f"token {size} in input_ids, and {size} t"):
        run_job(num_stages, work, tmp_path)
