"""What a model draws is seeded between its layers, by hooks only where something may draw."""

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, mse_loss

from polyrhythm.run.pipeline.pipeline import Pipeline
from polyrhythm.run.random_streams import RandomStreams, may_draw


class Rate(nn.Module):
    """Has an attribute of its own, or a configuration with it."""

    def __init__(self, in_config: bool = False, **values: Any) -> None:
        super().__init__()
        if in_config:
            self.config = type("Config", (), {})()
        vars(self.config if in_config else self).update(values)

    def forward(self, x: Tensor) -> Tensor:
        return x


class Functional(Rate):
    def forward(self, x: Tensor) -> Tensor:
        return dropout(x, 0.5, self.training)


class Hidden(Rate):
    def forward(self, x: Tensor) -> Tensor:
        return draw(x)


def draw(x: Tensor) -> Tensor:
    return dropout(x, 0.5)


MODULES: list[tuple[nn.Module, bool]] = [
    (nn.Linear(2, 2), False),
    (nn.Dropout(0.0), False),
    (nn.Dropout2d(0.1), True),
    (nn.RReLU(), True),
    (nn.LSTM(2, 2, num_layers=2, dropout=0.1), True),
    (nn.TransformerEncoderLayer(2, 1, 2, dropout=0.0), False),
    (nn.TransformerEncoderLayer(2, 1, 2), True),
    (Rate(attention_dropout=0.0, classifier_dropout=None), False),
    (Rate(attention_dropout=0.1), True),
    (Rate(drop_path_rate=0.1), True),
    (Rate(router_jitter_noise=0.1), True),
    (Rate(in_config=True, layerdrop=0.1), True),
    (Rate(in_config=True, layerdrop=0.0, summary_first_dropout=0.1), False),
    (Functional(), True),
    (Functional(dropout=0.0), False),
]


@pytest.mark.parametrize("number", range(len(MODULES)))
def test_modules_that_may_draw_are_found(number: int) -> None:
    module, expected = MODULES[number]
    assert may_draw(nn.Sequential(nn.Linear(2, 2), module)) == expected


def num_hooks(model: nn.Module) -> int:
    return sum(len(layer._forward_hooks) for layer in model.modules())


def pipeline_of(model: nn.Module, **options: Any) -> Pipeline:
    return Pipeline.from_sequential(
        model, n_microbatches=1, loss_fn=mse_loss, **{"seed": 0, **options}
    )


def test_hooks_are_added_only_if_needed_and_removed_on_close() -> None:
    for layer, expected in ((nn.Dropout(0.5), 2), (nn.Dropout(0.0), 0)):
        model = nn.Sequential(nn.Linear(2, 2), layer)
        for _ in range(2):
            with pipeline_of(model) as pipeline:
                assert num_hooks(model) == expected
                pipeline.step(torch.ones(2, 2), target=torch.ones(2, 2))
            assert num_hooks(model) == 0


def test_draw_of_a_model_without_rates_is_noticed(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Linear(2, 2), Hidden())
    with pipeline_of(model) as pipeline, caplog.at_level(logging.WARNING):
        assert num_hooks(model) == 0
        for _ in range(2):
            pipeline.step(torch.ones(2, 2), target=torch.ones(2, 2))
        assert caplog.text.count("the model has drawn random numbers") == 1
        assert num_hooks(model) == 2


def test_draws_that_begin_late_are_noticed(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Linear(2, 2), Hidden())
    draws, model[1] = model[1], nn.Identity()
    with pipeline_of(model) as pipeline, caplog.at_level(logging.WARNING):
        for step in range(100):
            if step == 40:
                model[1].register_forward_hook(
                    lambda layer, args, output: draws(output) if layer.training else None
                )
            pipeline.step(torch.ones(2, 2), target=torch.ones(2, 2))
            if step % 15 == 14:  # every 16th block
                model.eval()
                pipeline.eval(torch.ones(2, 2))
                model.train()
        assert caplog.text.count("the model has drawn random numbers") == 1


def test_model_without_dropout_compiles_as_one_graph() -> None:
    model, graphs = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.0), nn.Linear(2, 2)), []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    with pipeline_of(model) as pipeline:
        pipeline.module.compile(backend=backend, fullgraph=True)
        pipeline.step(torch.ones(2, 2), target=torch.ones(2, 2))
    assert len(graphs) == 1


class Recorded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.drop = nn.Parameter(torch.ones(1)), nn.Dropout(0.5)
        self.masks = list[list[float]]()

    def forward(self, x: Tensor) -> Tensor:
        mask = self.drop(torch.ones(64))
        self.masks.append(mask.tolist())
        return x * self.scale * mask.mean()


def test_masks_differ_between_pipelines_and_steps_and_follow_the_number_of_steps() -> None:
    def masks(pipeline: int, num_steps: int = 0) -> list[list[float]]:
        module = Recorded()
        with Pipeline(
            module, n_microbatches=2, loss_fn=mse_loss, seed=0, pipeline=pipeline
        ) as made:
            made.num_steps = num_steps
            for size in (2, 6):
                made.step(torch.ones(size, 1), target=torch.ones(size, 1))
        return module.masks

    first, second = masks(0), masks(1)
    assert len({tuple(mask) for mask in first + second}) == 8
    assert masks(0) == first
    assert masks(0, num_steps=1)[0] == first[2], "not as before a restart"


def test_closed_streams_leave_the_layers_alone() -> None:
    layers = nn.ModuleList([nn.Dropout(0.5)])
    streams = RandomStreams(0, layers)
    assert num_hooks(layers) == 1
    streams.close()
    assert num_hooks(layers) == 0
