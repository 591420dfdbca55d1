"""Figs. 7 to 9: U-Net and GPT on 2, 4 and 8 workers, and replicas instead of a pipeline."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from polyrhythm.types import Seconds
from reproduction.ada_grouper.compared import is_faster
from reproduction.ada_grouper.cut import GPT, UNET, Model
from reproduction.ada_grouper.platforms import M8S, PLATFORMS, Platform
from reproduction.ada_grouper.steps import Job
from reproduction.claim import Plot, Row, ordered

_KS = (1, 2, 3, 4)
_WORKERS = (2, 4, 8)
_GPT_BATCH, _UNET_BATCH = 64, 128  # the latter per worker
_GPT_SIZE, _UNET_SIZE, _REPLICA_SIZE = 1, 16, 8  # of micro-batches
_OUT_OF_MEMORY = {("UNet-Medium", 8)}  # section 6.2.2; k = 4 of it, too
_GPT_BY_WORKERS = dict(zip((1, 2, 4, 8), GPT, strict=True))

Steps = Mapping[int, Seconds]  # by k


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaling:
    unet: Mapping[tuple[str, int], Steps]  # by model and workers
    weak: Mapping[tuple[str, int], Steps]  # by platform and workers
    strong: Mapping[tuple[str, int], Steps]
    replicas: Mapping[tuple[str, int], Seconds]
    reduced_gb: Mapping[int, float]  # that a worker sends for an all-reduce, by workers

    def teraflops(self, platform: str, num_workers: int, k: int | None = None) -> float:
        """Of all workers together; of the best k, unless it is given."""
        steps = self.weak[platform, num_workers]
        takes = min(steps.values()) if k is None else steps[k]
        operations = _GPT_BATCH * GPT[_GPT_BY_WORKERS[num_workers]].operations
        return operations / takes / 1e12

    @property
    def best_gains(self) -> list[float]:
        """Of kFkB over 1F1B, the greatest of each figure and model."""
        unets = [
            [steps for (model, _), steps in self.unet.items() if model == name] for name in UNET
        ]
        figures = [*unets, self.weak.values(), self.strong.values()]
        return [max(gain for steps in tests for gain in _gains(steps)) for tests in figures]


def measure() -> Scaling:
    medium = GPT["GPT-Medium"]
    grid = [(platform, num) for platform in PLATFORMS for num in _WORKERS]
    strong = {(p.name, num): _job(medium, p, num, _GPT_BATCH) for p, num in grid}
    return Scaling(
        unet={
            (name, num): {
                k: _job(model, M8S, num, num * _UNET_BATCH).pipelined(k, _UNET_SIZE)
                for k in (_KS if name == "UNet-Base" else _KS[:-1])
            }
            for name, model in UNET.items()
            for num in _WORKERS
            if (name, num) not in _OUT_OF_MEMORY
        },
        weak={
            (p.name, num): _steps(_job(GPT[name], p, num, _GPT_BATCH))
            for p in PLATFORMS
            for num, name in _GPT_BY_WORKERS.items()
        },
        strong={place: _steps(job) for place, job in strong.items()},
        replicas={place: job.replicated(_REPLICA_SIZE) for place, job in strong.items()},
        reduced_gb={num: strong["S1", num].reduced_bytes / 1e9 for num in _WORKERS},
    )


def _job(model: Model, platform: Platform, num_workers: int, batch: int) -> Job:
    return Job(
        model=model,
        platform=platform,
        num_workers=num_workers,
        batch=batch,
        other_flows=platform.other_flows,
        seed=f"scaling on {platform.name}",
    )


def _steps(job: Job) -> dict[int, Seconds]:
    ks = _KS if job.num_workers > 1 else _KS[:1]
    return {k: job.pipelined(k, _GPT_SIZE) for k in ks}


def _gains(steps: Steps) -> list[float]:
    return [steps[1] / takes for k, takes in steps.items() if k > 1]


def unet_rows(found: Scaling) -> Iterator[Row]:
    for name, least, greatest in (("UNet-Base", 1.02, 1.14), ("UNet-Medium", 1.04, 1.05)):
        gains = [
            gain
            for (model, _), steps in found.unet.items()
            if model == name
            for gain in _gains(steps)
        ]
        for printed, which, pick in ((least, "least", min), (greatest, "greatest", max)):
            gain = pick(gains)
            yield Row(
                place="Fig. 7",
                what=f"{name} on M8s: kFkB over 1F1B, {which} of k and workers",
                printed=printed,
                ours=gain,
            )


def gpt_rows(found: Scaling) -> Iterator[Row]:
    tests = [steps for steps in found.weak.values() if len(steps) > 1]
    alike = [
        f"{platform} with {num}"
        for (platform, num), steps in found.weak.items()
        if num > 1 and not is_faster(max(_gains(steps)))
    ]
    most = max(_WORKERS)
    yield Row(
        place="Fig. 8",
        what='GPT, weak scaling: tests, of 9, in which kFkB is faster than 1F1B ("always"); '
        "platforms by TFLOPS on 8 workers",
        printed=len(tests),
        ours=sum(is_faster(max(_gains(steps))) for steps in tests),
        is_exact=True,
        printed_order=("S1", "M8s", "C1x"),
        our_order=ordered({p.name: found.teraflops(p.name, most) for p in PLATFORMS}),
        why=f"not on {', '.join(alike)} workers (by 0.1 % or more): the second stage, which has "
        "the head, is the slower one, and 1F1B keeps it busy",
    )
    yield Row(
        place="Fig. 8",
        what='TFLOPS on C1x, 8 workers over 4 ("did not scale")',
        printed=1.0,
        ours=found.teraflops("C1x", 8) / found.teraflops("C1x", 4),
        why="at 25 Gbit/s shared with one other flow a transfer takes less than a fifth of a "
        "forward; it stops to scale where one takes several, at a load that the paper does not say",
    )
    gains = [max(_gains(steps)) for steps in found.strong.values()]
    yield Row(
        place="Fig. 9",
        what='GPT-Medium, strong scaling: kFkB over 1F1B, greatest ("up to 20%"); '
        "order of methods on 8 workers, platforms together",
        printed=1.20,
        ours=max(gains),
        printed_order=("kFkB", "1F1B", "SPMD"),
        our_order=ordered(_methods(found, most), highest_first=False),
    )
    for printed, num_workers in ((0.7, 2), (1.4, 8)):
        yield Row(
            place="section 6.2.3",
            what=f"GB that a replica sends for one micro-batch, {num_workers} workers",
            printed=printed,
            ours=found.reduced_gb[num_workers],
            is_given=True,  # the size of the model goes in
        )


def _methods(found: Scaling, num_workers: int) -> dict[str, Seconds]:
    """A step of each, summed over the platforms."""
    places = [(platform.name, num_workers) for platform in PLATFORMS]
    return {
        "kFkB": sum(min(found.strong[place].values()) for place in places),
        "1F1B": sum(found.strong[place][1] for place in places),
        "SPMD": sum(found.replicas[place] for place in places),
    }


def plots(found: Scaling) -> Iterator[Plot]:
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
        printed={},
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
        printed={},
    )
    yield Plot(
        name="gpt-strong",
        title="Fig. 9: GPT-Medium on more workers, batch 64",
        x="platform and number of workers",
        y="samples per second",
        series={
            name: [
                (f"{platform}, {num}", _GPT_BATCH / takes)
                for (platform, num), takes in steps.items()
            ]
            for name, steps in (
                ("SPMD", found.replicas),
                ("1F1B", {place: steps[1] for place, steps in found.strong.items()}),
                ("kFkB", {place: min(steps.values()) for place, steps in found.strong.items()}),
            )
        },
        printed={},
    )
