"""What the paper prints in its text and tables."""

from collections.abc import Mapping

from reproduction.prague.testbed import (
    AD_PSGD,
    ALL_REDUCE,
    RANDOM,
    SMART,
    STATIC,
)
from reproduction.prague.training import FIVE_TIMES, HOMOGENEOUS, TWICE

Column = Mapping[str, float]  # by method

OVERALL: Mapping[int, Column] = {  # speed to the loss over the parameter server without sleep
    HOMOGENEOUS: {SMART: 5.26, STATIC: 5.01, ALL_REDUCE: 4.27, RANDOM: 3.03, AD_PSGD: 1.42},
    TWICE: {SMART: 4.23, STATIC: 2.47, RANDOM: 2.13, ALL_REDUCE: 1.66, AD_PSGD: 1.37},
}
SPEED_OF_STEP: Column = {SMART: 5.10, AD_PSGD: 1.18}  # over the parameter server
STEPS_TO_LOSS: Column = {SMART: 0.96, AD_PSGD: 0.78}  # over the parameter server
IMAGES: Mapping[str, Mapping[int, Column]] = {  # per second, of a GPU
    "ResNet-18": {
        HOMOGENEOUS: {ALL_REDUCE: 376.47, AD_PSGD: 234.9, STATIC: 415.8, SMART: 412.3},
        FIVE_TIMES: {ALL_REDUCE: 89.8, AD_PSGD: 104.1, SMART: 169.5},
    },
    "ResNet-200": {
        HOMOGENEOUS: {ALL_REDUCE: 54.78, AD_PSGD: 28.57, STATIC: 52.34, SMART: 53.43},
        FIVE_TIMES: {ALL_REDUCE: 13.01, AD_PSGD: 12.45, SMART: 24.62},
    },
}
ITERATIONS: Column = {ALL_REDUCE: 55_800.0, AD_PSGD: 32_100.0, STATIC: 58_200.0, SMART: 56_800.0}
