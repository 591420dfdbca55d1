"""Figures 6 and 9: layers that travel on their own, and what buffers gain."""

from collections.abc import Callable, Iterable, Mapping
from statistics import geometric_mean

from polyrhythm.sync.fusion.timeline import StepEstimate
from reproduction.claim import Plot, Row, ordered
from reproduction.dear import methods
from reproduction.dear.setting import (
    ETHERNET,
    INFINIBAND,
    MODELS,
    NETWORKS,
    Model,
    Network,
    Work,
    work,
)
from reproduction.stated import always, explained, stated

_Method = Callable[[Work, Network], StepEstimate]
_UNFUSED: Mapping[str, _Method] = {
    "DeAR": methods.dear_unfused,
    "WFBP": methods.wait_free,
    "ByteScheduler": methods.byte_scheduler,
}
_FUSED: Mapping[str, _Method] = {
    "DeAR-BO": methods.dear_tuned,
    "DeAR-NL": methods.dear_nearby,
    "DeAR-FB": lambda one, network: methods.dear_fixed(one, network, methods.SMALL_BUFFER),
    "Horovod-BO": methods.horovod_tuned,
    "Horovod-FB": lambda one, network: methods.horovod(one, network, methods.HOROVOD_BUFFER),
}
_GAIN = 1.01
STUDIED = tuple(m for m in MODELS if m.name in ("ResNet-50", "DenseNet-201", "BERT-Base"))
_SMALL_MESSAGES = (
    "the latency comes from all-reduces of 0.5 and 1 MB, the only ones that the paper states; most "
    "layers of DenseNet have some kB, for which NCCL has a faster protocol"
)
_LAUNCHES = (
    "on a fast network what a layer costs is mostly the launch of two collectives and the wait of "
    "the host for them, which take no time here"
)


def rows() -> list[Row]:
    return [*_unfused_rows(), *_fused_rows()]


def plots() -> list[Plot]:
    return [
        *(_bars("6", network, MODELS, _UNFUSED, "WFBP") for network in NETWORKS),
        *(_bars("9", network, STUDIED, _FUSED, "Horovod-FB") for network in NETWORKS),
    ]


def _over(model: Model, network: Network, one: _Method, other: _Method) -> float:
    """How much faster one is."""
    return other(work(model), network).seconds / one(work(model), network).seconds


def _unfused_rows() -> list[Row]:
    """The paper names no network for Figure 6: both."""
    cases = [(model, network) for model in MODELS for network in NETWORKS]
    gains = [_over(*case, methods.dear_unfused, methods.wait_free) for case in cases]
    images = [case for case in cases if case[0].is_image]
    speeds = {
        name: geometric_mean(_over(*case, method, methods.wait_free) for case in images)
        for name, method in _UNFUSED.items()
    }
    place = "section VI.C, Fig. 6"
    return [
        stated(
            place,
            "DeAR over WFBP, without tensor fusion: least",
            1.06,
            min(gains),
            why="on 100GbIB the network takes so little time that there is nothing to gain for "
            f"{_names(case[0] for case, gain in zip(cases, gains, strict=True) if gain < _GAIN)}; "
            "the paper does not say of which network Fig. 6 is",
        ),
        stated(
            place,
            "DeAR over WFBP, without tensor fusion: most",
            1.19,
            max(gains),
            why=methods.OVERHEADS,
        ),
        explained(
            Row(
                place=place,
                what="ByteScheduler over WFBP, mean of models of images (printed: mostly below "
                "0.9)",
                printed=0.9,
                ours=speeds["ByteScheduler"],
                printed_order=tuple(_UNFUSED),
                our_order=ordered(speeds),
            ),
            methods.OVERHEADS,
        ),
    ]


def _fused_rows() -> list[Row]:
    found: list[Row] = []
    place = "section VI.G, Fig. 9"
    for network, without, fixed in (
        (ETHERNET, (1.35, 4.54), (1.22, 1.56)),
        (INFINIBAND, (1.29, 1.78), (1.07, 1.14)),
    ):
        tuned, name = methods.dear_tuned, network.name
        gains = [_over(each, network, tuned, methods.dear_unfused) for each in STUDIED]
        what, why = "DeAR-BO over DeAR without tensor fusion", _LAUNCHES
        if network is ETHERNET:
            why = _SMALL_MESSAGES
        found.append(stated(place, f"{what}, {name}: least", without[0], min(gains), why=why))
        found.append(stated(place, f"{what}, {name}: most", without[1], max(gains), why=why))
        gains = [_over(each, network, tuned, _FUSED["Horovod-FB"]) for each in STUDIED]
        what = "DeAR-BO over Horovod-FB"
        why = methods.OVERHEADS
        found.append(stated(place, f"{what}, {name}: least", fixed[0], min(gains), why=why))
        found.append(stated(place, f"{what}, {name}: most", fixed[1], max(gains), why=why))
    cases = [(model, network) for model in STUDIED for network in NETWORKS]
    bert = STUDIED[-1]
    return [
        *found,
        always(
            place,
            "DeAR-BO is the fastest of five",
            [_fastest(*case) == "DeAR-BO" for case in cases],
            why="for models of images on 100GbIB DeAR-NL is ahead by hundredths of a per cent: "
            "latency hardly counts, and no buffer below 1 MB is tried",
        ),
        *(
            stated(
                place,
                f"{bert.name}, {network.name}: Horovod-BO over Horovod-FB",
                1.0,
                _over(bert, network, _FUSED["Horovod-BO"], _FUSED["Horovod-FB"]),
                why=methods.OVERHEADS,
            )
            for network in NETWORKS
        ),
        always(
            place,
            f"{bert.name}: DeAR-NL is faster than DeAR-FB and Horovod-FB, of both networks",
            [_is_ahead(bert, network) for network in NETWORKS],
            why="on 100GbIB DeAR-FB is ahead by half a per cent, since latency hardly counts",
        ),
    ]


def _names(models: Iterable[Model]) -> str:
    return ", ".join(dict.fromkeys(model.name for model in models))


def _fastest(model: Model, network: Network) -> str:
    times = {name: method(work(model), network).seconds for name, method in _FUSED.items()}
    return min(times, key=times.__getitem__)


def _is_ahead(model: Model, network: Network) -> bool:
    nearby = _FUSED["DeAR-NL"]
    return all(
        _over(model, network, nearby, _FUSED[other]) > 1 for other in ("DeAR-FB", "Horovod-FB")
    )


def _bars(
    figure: str,
    network: Network,
    models: tuple[Model, ...],
    systems: Mapping[str, _Method],
    base: str,
) -> Plot:
    """ByteScheduler had not enough memory for BERT-Large."""
    series = {
        name: [
            (model.name, _over(model, network, method, systems[base]))
            for model in models
            if not (name == "ByteScheduler" and model.name == "BERT-Large")
        ]
        for name, method in systems.items()
    }
    said = "without tensor fusion" if figure == "6" else "with ways to fuse tensors"
    return Plot(
        name=f"fig{figure}_{network.name}",
        title=f"Fig. {figure}: speed {said}, {network.name}",
        x="model",
        y=f"speed over {base}'s",
        series=series,
        printed={},
    )
