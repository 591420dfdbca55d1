"""How arguments are split into micro-batches, and outputs merged: torch's chunk specs."""

from collections import UserDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.pipelining.microbatch import (
    TensorChunkSpec,
    _CustomReducer,
    _Replicate,
    _split_block_mask,
)
from torch.nn.attention.flex_attention import (
    BlockMask,
    create_block_mask,
    create_mask,
    flex_attention,
)
from torch.nn.functional import mse_loss, scaled_dot_product_attention

from polyrhythm.errors import ScheduleError
from polyrhythm.run.comm.launch import DistContext
from polyrhythm.run.pipeline.batch import Batch, BatchSplitter, StepInputs
from polyrhythm.run.pipeline.microbatch import ChunkSpecs, merge_outputs, split_targets
from polyrhythm.run.pipeline.options import PipelineOptions
from polyrhythm.run.pipeline.pipeline import Pipeline
from tests.gloo.pipelines import (
    assert_close,
    gradients,
    merged,
    random_batch,
    run_single_process,
    run_stages,
)

BATCH, LENGTH, WIDTH = 5, 128, 8
PER_SAMPLE, WHOLE = TensorChunkSpec(0), _Replicate()


def options_of(**options: Any) -> PipelineOptions:
    usual: dict[str, Any] = {
        "n_microbatches": 2,
        "microbatch_sizes": None,
        "schedule": "1f1b",
        "flush": True,
        "scale_grads": True,
        "tune_every": 5,
        "window": None,
        "timeout": 10.0,
        "memory_limit": None,
        "optimizer_floats": 2.0,
    }
    return PipelineOptions(**{**usual, **options})


def split(*args: Any, is_later: bool = False, options: Any = None, **kwargs: Any) -> Batch:
    """Split a batch on a pipeline's only stage, or, with the keywords alone, on a later one."""
    given = dict(options or {})
    chosen = {k: given.pop(k) for k in ("args_chunk_spec", "kwargs_chunk_spec") if k in given}
    cpu, specs = torch.device("cpu"), ChunkSpecs(**chosen)

    def splitter(*, is_first: bool) -> BatchSplitter:
        return BatchSplitter(
            options=options_of(**given), device=cpu, is_first=is_first, is_last=True, specs=specs
        )

    def inputs(args: tuple[Any, ...], kwargs: dict[str, Any]) -> StepInputs:
        return StepInputs(args, kwargs, None, {}, True, (), training=True)

    given_first = inputs(args, {} if is_later else kwargs)
    header = splitter(is_first=True).make_header(given_first)
    own = inputs((), kwargs) if is_later else given_first
    return splitter(is_first=not is_later).batch(own, header, step=0)


def shapes(values: Any) -> list[tuple[int, ...]]:
    return [tuple(value.shape) for value in values]


def document_mask(ends: Tensor) -> BlockMask:
    """Let each position see its own document; every sample has other documents."""
    documents = torch.cumsum(ends, 1) - ends

    def visible(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (documents[b, q] == documents[b, k]) & (q >= k)

    return create_block_mask(visible, BATCH, 1, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=32)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor, mask: BlockMask) -> Tensor:
        q, k, v = self.qkv(x).unsqueeze(1).chunk(3, -1)
        if not torch.is_grad_enabled():
            return x + flex_attention(q, k, v, block_mask=mask).squeeze(1)
        # flex_attention has no backward on the CPU.
        dense = create_mask(mask.mask_mod, len(x), 1, LENGTH, LENGTH, device="cpu")
        return x + scaled_dot_product_attention(q, k, v, dense).squeeze(1)


def attention_stages() -> nn.ModuleList:
    torch.manual_seed(1)
    return nn.ModuleList([Attention().double() for _ in range(2)])


def attention_batch() -> tuple[Tensor, Tensor, BlockMask]:
    ends = torch.rand(BATCH, LENGTH, generator=torch.Generator().manual_seed(5)) < 0.05
    inputs, target = random_batch(BATCH, LENGTH, WIDTH)
    return inputs.double(), target.double(), document_mask(ends.long())


@pytest.mark.long
@pytest.mark.timeout(80)
@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_block_mask_per_sample_is_split_on_every_stage(tmp_path: Path) -> None:
    def stage(ctx: DistContext) -> tuple[dict[str, Tensor], list[Tensor]]:
        stages = attention_stages()
        inputs, target, mask = attention_batch()
        with Pipeline(stages[ctx.rank], loss_fn=mse_loss, n_microbatches=3) as pipeline:
            args = (inputs,) if pipeline.is_first else ()
            dense = pipeline.step(*args, target=target, mask=mask)
            blocks = pipeline.eval(*args, mask=mask)
        return gradients(stages), [dense, blocks]

    def whole() -> tuple[dict[str, Tensor], Tensor]:
        stages = attention_stages()
        inputs, target, mask = attention_batch()
        output = inputs
        for module in stages:
            output = module(output, mask)
        mse_loss(output, target).backward()
        return gradients(stages), output.detach()

    expected, output = run_single_process(whole, tmp_path)
    results = run_stages(2, stage, tmp_path)
    assert_close(merged(found for found, _ in results), expected, 1e-12)
    for found in results[1][1]:
        torch.testing.assert_close(found, output, rtol=0, atol=1e-12)


def test_block_masks_are_those_of_torch() -> None:
    _, _, mask = attention_batch()
    batch = split(torch.ones(BATCH, 3), options={"n_microbatches": 3}, mask=mask)
    ours, theirs = [kw["mask"] for kw in batch.keywords], _split_block_mask(mask, 3)
    index = torch.arange(LENGTH)
    for a, b in zip(ours, theirs, strict=True):
        assert a.shape == b.shape
        assert torch.equal(a.to_dense(), b.to_dense())
        for sample in range(a.shape[0]):
            of_sample = torch.full_like(index, sample)
            grid = of_sample[:, None], of_sample[:, None], index[:, None], index[None]
            assert torch.equal(a.mask_mod(*grid), b.mask_mod(*grid))
    causal = create_block_mask(lambda b, h, q, k: q >= k, None, None, 64, 64, device="cpu")
    assert all(kw["mask"] is causal for kw in split(torch.ones(BATCH, 3), mask=causal).keywords)


class SequenceFirst(nn.Module):
    """Mixes positions by a matrix for all samples: (T, B, D), (T, T), (D,) -> (T, B, D)."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH).double()

    def forward(self, x: Tensor, mixing: Tensor, scale: Tensor) -> Tensor:
        return torch.einsum("ts,sbd->tbd", mixing, self.linear(x)) * scale


@pytest.mark.timeout(80)
def test_sequence_first_and_broadcast_inputs_equal_one_process(tmp_path: Path) -> None:
    length = 4  # equals the batch size: a mask of T x T could be cut by accident
    inputs, target = (t.double() for t in random_batch(length, 4, WIDTH))
    mixing, scale = (t.double() for t in random_batch(length, length)[:1] + random_batch(WIDTH)[:1])

    def loss_fn(output: Tensor, by_sample: Tensor) -> Tensor:
        return mse_loss(output.transpose(0, 1), by_sample)

    def model() -> nn.ModuleList:
        torch.manual_seed(1)
        return nn.ModuleList([SequenceFirst(), SequenceFirst()])

    def stage(ctx: DistContext) -> tuple[dict[str, Tensor], Tensor | None]:
        stages = model()
        with Pipeline(
            stages[ctx.rank],
            loss_fn=loss_fn,
            n_microbatches=3,
            args_chunk_spec=(TensorChunkSpec(1),),
            kwargs_chunk_spec={"mixing": WHOLE, "scale": _Replicate},
            output_merge_spec=TensorChunkSpec(1),
        ) as pipeline:
            args = (inputs,) if pipeline.is_first else ()
            output = pipeline.step(*args, target=target.transpose(0, 1), mixing=mixing, scale=scale)
        return gradients(stages), output

    def whole() -> tuple[dict[str, Tensor], Tensor]:
        stages, output = model(), inputs
        for module in stages:
            output = module(output, mixing, scale)
        loss_fn(output, target.transpose(0, 1)).backward()
        return gradients(stages), output.detach()

    expected, output = run_single_process(whole, tmp_path)
    results = run_stages(2, stage, tmp_path)
    assert_close(merged(found for found, _ in results), expected, 1e-12)
    torch.testing.assert_close(results[1][1], output, rtol=0, atol=1e-12)


@dataclass
class Packed:
    ids: Tensor


X = torch.zeros(8, 3)
SQUARE = torch.zeros(8, 8)  # a mask of T x T positions, or of B samples with T positions
# Arguments, keywords, options -> parts of the error.
REFUSED: dict[str, tuple[tuple[Any, ...], dict[str, Any], dict[str, Any], str]] = {
    "square mask": ((X,), {"mask": SQUARE}, {}, "'mask' has shape.*8, 8.*_Replicate"),
    "square argument": ((X, SQUARE), {}, {}, "argument 1 has shape.*args_chunk_spec=.None, Tens"),
    "positions": ((SQUARE,), {"position_ids": torch.zeros(8)}, {}, "may be the samples, or"),
    "table of positions": ((SQUARE,), {"table": torch.zeros(8, 4)}, {}, "may be the samples, or"),
    "a dict that torch cannot split": (
        (X,),
        {"batch": UserDict(ids=torch.zeros(8, 4))},
        {},
        "'batch' is a UserDict that holds a tensor of 8 rows.*_Replicate",
    ),
    "an object with samples": ((X, Packed(torch.zeros(8))), {}, {}, "argument 1 is a Packed"),
    "other length": ((X,), {"mask": torch.zeros(16, 16)}, {}, "shapes .8, 3. and .16, 16."),
    "own spec, other length": (
        (X,),
        {"y": torch.zeros(3, 12)},
        {"kwargs_chunk_spec": {"y": TensorChunkSpec(1)}},
        "8 samples or a multiple along dimension 1",
    ),
    "no such dimension": (
        (X,),
        {},
        {"args_chunk_spec": (TensorChunkSpec(2),)},
        "a tensor with 2 dimensions",
    ),
    "not a tensor": ((X, "text"), {}, {"args_chunk_spec": (None, PER_SAMPLE)}, "'text'"),
    "misspelt": (
        (X,),
        {"mask": SQUARE},
        {"kwargs_chunk_spec": {"msk": WHOLE}},
        "'msk'.*not called",
    ),
    "too many": ((X,), {}, {"args_chunk_spec": (None, WHOLE)}, "argument 1.*not called with"),
    "other structure": (((X, X),), {}, {"args_chunk_spec": ((PER_SAMPLE,),)}, "1 specs.*has 2"),
    "a number": ((X,), {}, {"args_chunk_spec": (0,)}, "args_chunk_spec contains 0"),
    "a list of keywords": ((X,), {}, {"kwargs_chunk_spec": (WHOLE,)}, "a dict by name"),
    "a reducer": (
        (X,),
        {},
        {"args_chunk_spec": (_CustomReducer(0, max),)},
        "expected: TensorChunkSpec.dim., _Replicate.. or None",
    ),
    "block mask along heads": (
        (X,),
        {"mask": create_block_mask(lambda b, h, q, k: q >= k, 8, 1, 8, 8, device="cpu")},
        {"kwargs_chunk_spec": {"mask": TensorChunkSpec(1)}},
        "BlockMask, whose samples are along dimension 0",
    ),
    "block mask of another batch": (
        (X,),
        {"mask": create_block_mask(lambda b, h, q, k: q >= k, 4, 1, 8, 8, device="cpu")},
        {},
        "shapes .8, 3. and .4, 1, 8, 8.",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_ambiguous_or_does_not_fit_is_refused(name: str) -> None:
    args, kwargs, options, message = REFUSED[name]
    with pytest.raises(ScheduleError, match=f"(?s){message}"):
        split(*args, options=options, **kwargs)


@pytest.mark.parametrize("first", [X, SQUARE], ids=["other lengths", "length of the batch"])
def test_a_later_stage_refuses_what_the_first_would(first: Tensor) -> None:
    rows = torch.zeros(8, 4)
    with pytest.raises(ScheduleError, match="'mask' has shape"):
        split(first, is_later=True, mask=SQUARE)
    if first is SQUARE:  # the header says so: a later stage does not see the inputs
        with pytest.raises(ScheduleError, match="'rows' has shape"):
            split(first, is_later=True, rows=rows)
    else:
        assert (
            shapes(kw["rows"] for kw in split(first, is_later=True, rows=rows).keywords)
            == [(4, 4)] * 2
        )


def test_targets_that_cannot_be_split_are_refused() -> None:
    assert split_targets({"ids": X, "n": 3}, [5, 3])[1]["ids"].shape == (3, 3)
    with pytest.raises(ScheduleError, match="the target is a Packed"):
        split_targets([Packed(X)], [5, 3])


def test_one_microbatch_is_never_ambiguous() -> None:
    (keywords,) = split(X, options={"n_microbatches": 1}, mask=SQUARE).keywords
    assert keywords["mask"].shape == (8, 8)


def test_specs_decide_what_is_split() -> None:
    def parts(spec: Any, value: Any) -> list[Any]:
        batch = split(X, options={"kwargs_chunk_spec": spec}, value=value)
        return [keywords["value"] for keywords in batch.keywords]

    assert shapes(parts({"value": PER_SAMPLE}, SQUARE)) == [(4, 8)] * 2
    assert shapes(parts({"value": TensorChunkSpec(-1)}, SQUARE)) == [(8, 4)] * 2
    assert shapes(parts({"value": WHOLE}, SQUARE)) == [(8, 8)] * 2
    assert shapes(parts(PER_SAMPLE, SQUARE)) == [(4, 8)] * 2  # one for all keywords
    assert shapes(parts({"value": PER_SAMPLE}, torch.zeros(24, 2))) == [(12, 2)] * 2  # 3 a sample
    assert shapes(parts(None, torch.zeros(1, 5))) == [(1, 5)] * 2  # broadcasts, as torch cannot
    table = Packed(torch.zeros(5, 4))  # has no samples
    assert parts(None, table) == [table] * 2
    assert parts({"value": WHOLE}, samples := Packed(SQUARE)) == [samples] * 2
    assert parts(None, "text") == parts(PER_SAMPLE, "text") == ["text"] * 2
    nested = parts({"value": [PER_SAMPLE, WHOLE]}, [SQUARE, SQUARE])
    assert [shapes(part) for part in nested] == [[(4, 8), (8, 8)]] * 2


@given(
    st.lists(st.integers(1, 3), min_size=1, max_size=3),
    st.integers(0, 3),
    st.integers(1, 3),
    st.integers(2, 7),
    st.integers(1, 4),
)
def test_merged_parts_are_the_whole(
    lengths: list[int], dim: int, rows: int, batch_size: int, num_microbatches: int
) -> None:
    dim, count = min(dim, len(lengths)), min(num_microbatches, batch_size)
    shape = [*lengths[:dim], rows * batch_size, *lengths[dim:]]
    value = torch.randn(shape)
    spec = {"value": TensorChunkSpec(dim)}
    options = {"n_microbatches": count, "kwargs_chunk_spec": spec}
    batch = split(torch.zeros(batch_size, 9), options=options, value=value)
    assert torch.equal(merge_outputs(batch.keywords, spec)["value"], value)
    sizes, kinds = batch.header.sizes, batch.header.kinds
    assert shapes(kw["value"] for kw in batch.keywords) == [
        (*shape[:dim], rows * size, *shape[dim + 1 :]) for size in sizes
    ]
    assert len(set(kinds)) == len(set(sizes))


def test_outputs_are_merged_by_spec() -> None:
    outputs = [{"y": torch.ones(2, 3), "loss": torch.tensor(i), "n": 4} for i in (1, 2)]
    spec = {
        "y": TensorChunkSpec(1),
        "loss": _CustomReducer(torch.tensor(0), torch.add),
        "n": WHOLE,
    }
    whole = merge_outputs(outputs, spec)
    assert (whole["y"].shape, whole["loss"].item(), whole["n"]) == ((2, 6), 3, 4)
    assert merge_outputs(outputs) == outputs  # numbers cannot be concatenated
    assert merge_outputs([torch.ones(2)] * 2, (PER_SAMPLE,))[0].shape == (4,)  # a tuple, as torch
    for wrong, message in [
        ({**spec, "loss": PER_SAMPLE}, "of 0 dimensions"),
        ({**spec, "loss": WHOLE}, "differs between micro-batches"),
        ((PER_SAMPLE, WHOLE), "2 specs, the model 3 outputs"),
    ]:
        with pytest.raises(ScheduleError, match=message):
            merge_outputs(outputs, wrong)
