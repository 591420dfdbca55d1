"""Figs. 7 to 9: U-Net and GPT on 2, 4 and 8 workers, as pipelines and as data-parallel replicas."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from polyrhythm.types import Seconds
from reproduction.ada_grouper.models import GPT, UNET, AdaGrouperModel
from reproduction.ada_grouper.steps import AdaGrouperJob, is_faster
from reproduction.ada_grouper.testbed import M8S, PLATFORMS, Platform
from reproduction.paper_row import PaperRow, Plot, ordered

_KS = (1, 2, 3, 4)
_NUM_WORKERS = (2, 4, 8)
_GPT_BATCH, _UNET_BATCH = 64, 128  # the latter per worker
_GPT_SIZE, _UNET_SIZE, _REPLICA_SIZE = 1, 16, 8  # of micro-batches
_OUT_OF_MEMORY = {("UNet-Medium", 8)}  # section 6.2.2; also UNet-Medium with k = 4
_GPT_BY_WORKERS = dict(zip((1, 2, 4, 8), GPT, strict=True))

Steps = Mapping[int, Seconds]  # by k


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingResult:
    unet: Mapping[tuple[str, int], Steps]  # by model and number of workers
    weak: Mapping[tuple[str, int], Steps]  # by platform and number of workers
    strong: Mapping[tuple[str, int], Steps]
    replicas: Mapping[tuple[str, int], Seconds]
    all_reduce_gb: Mapping[int, float]  # that a worker sends, by number of workers

    def teraflops(self, platform: str, num_workers: int, k: int | None = None) -> float:
        """TFLOPS of all workers together, of the best k unless one is given."""
        steps = self.weak[platform, num_workers]
        step = min(steps.values()) if k is None else steps[k]
        operations = _GPT_BATCH * GPT[_GPT_BY_WORKERS[num_workers]].operations
        return operations / step / 1e12

    @property
    def best_gains(self) -> list[float]:
        """The greatest gain of kFkB over 1F1B, of each figure and model."""
        unets = [
            [steps for (model, _), steps in self.unet.items() if model == name] for name in UNET
        ]
        figures = [*unets, self.weak.values(), self.strong.values()]
        return [max(gain for steps in tests for gain in _gains(steps)) for tests in figures]


def measure() -> ScalingResult:
    medium = GPT["GPT-Medium"]
    grid = [(platform, num) for platform in PLATFORMS for num in _NUM_WORKERS]
    strong = {(p.name, num): _job(medium, p, num, _GPT_BATCH) for p, num in grid}
    return ScalingResult(
        unet={
            (name, num): {
                k: _job(model, M8S, num, num * _UNET_BATCH).pipeline_step(k, _UNET_SIZE)
                for k in (_KS if name == "UNet-Base" else _KS[:-1])
            }
            for name, model in UNET.items()
            for num in _NUM_WORKERS
            if (name, num) not in _OUT_OF_MEMORY
        },
        weak={
            (p.name, num): _steps(_job(GPT[name], p, num, _GPT_BATCH))
            for p in PLATFORMS
            for num, name in _GPT_BY_WORKERS.items()
        },
        strong={case: _steps(job) for case, job in strong.items()},
        replicas={case: job.replica_step(_REPLICA_SIZE) for case, job in strong.items()},
        all_reduce_gb={num: strong["S1", num].all_reduce_bytes / 1e9 for num in _NUM_WORKERS},
    )


def _job(model: AdaGrouperModel, platform: Platform, num_workers: int, batch: int) -> AdaGrouperJob:
    return AdaGrouperJob(model, platform, num_workers, batch, seed=f"scaling on {platform.name}")


def _steps(job: AdaGrouperJob) -> dict[int, Seconds]:
    ks = _KS if job.num_workers > 1 else _KS[:1]
    return {k: job.pipeline_step(k, _GPT_SIZE) for k in ks}


def _gains(steps: Steps) -> list[float]:
    return [steps[1] / step for k, step in steps.items() if k > 1]


def rows(found: ScalingResult) -> Iterator[PaperRow]:
    for name, least, greatest in (("UNet-Base", 1.02, 1.14), ("UNet-Medium", 1.04, 1.05)):
        tests = [steps for (model, _), steps in found.unet.items() if model == name]
        gains = [gain for steps in tests for gain in _gains(steps)]
        what = f"{name} on M8s: kFkB over 1F1B, {{}} of k and workers"
        yield PaperRow("Fig. 7", what.format("least"), least, min(gains))
        yield PaperRow("Fig. 7", what.format("greatest"), greatest, max(gains))
    tests = [steps for steps in found.weak.values() if len(steps) > 1]
    not_faster = [
        f"{platform} with {num}"
        for (platform, num), steps in found.weak.items()
        if num > 1 and not is_faster(max(_gains(steps)))
    ]
    most = max(_NUM_WORKERS)
    yield PaperRow(
        "Fig. 8",
        'GPT, weak scaling: tests, of 9, in which kFkB is faster than 1F1B ("always"); '
        "platforms by TFLOPS on 8 workers",
        len(tests),
        sum(is_faster(max(_gains(steps))) for steps in tests),
        is_exact=True,
        printed_order=("S1", "M8s", "C1x"),
        our_order=ordered({p.name: found.teraflops(p.name, most) for p in PLATFORMS}),
        why=f"not on {', '.join(not_faster)} workers (by 0.1 % or more): the second stage, which "
        "has the head, is the slower one, and 1F1B keeps it busy",
    )
    yield PaperRow(
        "Fig. 8",
        'TFLOPS on C1x, 8 workers over 4 ("did not scale")',
        1.0,
        found.teraflops("C1x", 8) / found.teraflops("C1x", 4),
        why="at 25 Gbit/s shared with one other flow a transfer takes less than a fifth of a "
        "forward; scaling stops where it takes several, at a load that the paper does not state",
    )
    yield PaperRow(
        "Fig. 9",
        'GPT-Medium, strong scaling: kFkB over 1F1B, greatest ("up to 20%"); '
        "order of methods on 8 workers, all platforms together",
        1.20,
        max(max(_gains(steps)) for steps in found.strong.values()),
        printed_order=("kFkB", "1F1B", "SPMD"),
        our_order=ordered(_total_steps(found, most), highest_first=False),
    )
    for printed, num_workers in ((0.7, 2), (1.4, 8)):
        what = f"GB that a replica sends for one micro-batch, {num_workers} workers"
        ours = found.all_reduce_gb[num_workers]
        yield PaperRow("section 6.2.3", what, printed, ours, is_given=True)  # by the model's size


def _total_steps(found: ScalingResult, num_workers: int) -> dict[str, Seconds]:
    """The step of each method, summed over the platforms."""
    cases = [(platform.name, num_workers) for platform in PLATFORMS]
    return {
        "kFkB": sum(min(found.strong[case].values()) for case in cases),
        "1F1B": sum(found.strong[case][1] for case in cases),
        "SPMD": sum(found.replicas[case] for case in cases),
    }


def plots(found: ScalingResult) -> Iterator[Plot]:
    yield Plot(
        name="unet",
        title="Fig. 7: U-Net on M8s, batch 128 per worker",
        x="model and number of workers",
        y="throughput over 1F1B",
        series={
            f"k = {k}": [
                (f"{name}, {num}", steps[1] / steps[k])
                for (name, num), steps in found.unet.items()
                if k in steps
            ]
            for k in _KS
        },
    )
    yield Plot(
        name="gpt-weak",
        title="Fig. 8: GPT, a larger model on more workers, batch 64",
        x="number of workers",
        y="TFLOPS of all workers",
        series={
            f"{platform.name}, {name}": [
                (num, found.teraflops(platform.name, num, k)) for num in _GPT_BY_WORKERS
            ]
            for platform in PLATFORMS
            for name, k in (("1F1B", 1), ("kFkB", None))
        },
    )
    yield Plot(
        name="gpt-strong",
        title="Fig. 9: GPT-Medium on more workers, batch 64",
        x="platform and number of workers",
        y="samples per second",
        series={
            name: [
                (f"{platform}, {num}", _GPT_BATCH / step) for (platform, num), step in steps.items()
            ]
            for name, steps in (
                ("SPMD", found.replicas),
                ("1F1B", {case: steps[1] for case, steps in found.strong.items()}),
                ("kFkB", {case: min(steps.values()) for case, steps in found.strong.items()}),
            )
        },
    )
