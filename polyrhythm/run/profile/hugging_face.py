"""Build a Hugging Face model with random weights from its config; nothing is downloaded.

A config is a model type, as of `AutoConfig.for_model`, or a folder with a config.json; values of it
may be changed: `gpt2,n_layer=4,n_embd=256`. `sequence=128` is the length of the example's texts.
"""

import contextlib
import json
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from polyrhythm.describe.factory import error_summary
from polyrhythm.describe.profiles import NAMES, SPELLINGS
from polyrhythm.describe.read import unknown
from polyrhythm.errors import DescriptionError

_NUM_SAMPLES = 8  # of an example, from which other sizes are made
_SEQUENCE = 512  # by default, if the model has as many positions
# The head that a config is trained with: of the first of these that knows the type.
_AUTO_CLASSES = (
    "AutoModelForMaskedLM",
    "AutoModelForCausalLM",
    "AutoModelForImageClassification",
    "AutoModel",
)


@dataclass(frozen=True)
class HuggingFaceModel:
    """A config by name or folder, with some of its values changed."""

    source: str

    def build(self, dtype: torch.dtype | None = None) -> tuple[nn.Module, dict[str, Tensor]]:
        """Return the model and an example, on torch's current device; raise DescriptionError."""
        config = self.config
        try:
            model = self._model_class(config).from_config(config, dtype=dtype or config.dtype)
        except Exception as error:  # values that do not fit together, such as heads and width
            raise DescriptionError(
                f"{self.source}: {error_summary(error)}",
                expected="a config of which transformers can build a model",
                fix="correct the values after the name",
            ) from None
        return model, self._example(model)

    @cached_property
    def config(self) -> Any:
        name, *changes = self.source.split(",")
        values = dict(self._parse(change) for change in changes)
        values.pop("sequence", None)
        config = self._load(name)
        names = {*config.to_dict(), *config.attribute_map}
        known = {name for name in names if not name.startswith("_")}
        for key in values:
            if key not in known:
                raise unknown("value", key, [*sorted(known), "sequence"]).at(name)
        if values:  # built again, since a config computes some of its values from others
            config = self._changed(name, values)
        if config.is_encoder_decoder:
            raise DescriptionError(
                f"{name} has an encoder and a decoder",
                expected="a model with one list of layers",
                fix="profile a factory of its layers: polyrhythm profile my_model.py:build",
            )
        return config

    def _load(self, name: str) -> Any:
        if find_spec("transformers") is None:
            raise DescriptionError(
                f"model {name!r} without transformers",
                expected=f"transformers for models of Hugging Face, or one of {', '.join(NAMES)}",
                fix="pip install transformers",
            )
        from transformers import CONFIG_MAPPING, AutoConfig

        folder = Path(name)
        if folder.is_dir() or "/" in name:
            if not (folder / "config.json").is_file():
                raise DescriptionError(
                    f"{name}: no config.json",
                    expected="a folder as save_pretrained writes it",
                    fix="check its path; a name that is to be downloaded: download it first",
                )
            try:
                return AutoConfig.from_pretrained(folder, local_files_only=True)
            except Exception as error:  # transformers has no error of its own for a wrong file
                raise DescriptionError(
                    f"{name}/config.json: {error_summary(error)}",
                    expected="a config that transformers can read",
                    fix="correct it, or write it again with config.save_pretrained",
                ) from None
        if name not in CONFIG_MAPPING:
            known = unknown("model", name, NAMES, near=(*SPELLINGS, *sorted(CONFIG_MAPPING)))
            more = "a model type of transformers, such as gpt2, or a folder with a config.json"
            raise DescriptionError(
                known.wrong, expected=f"{known.expected}; or {more}", fix=known.fix
            )
        return AutoConfig.for_model(name)

    def _changed(self, name: str, values: dict[str, Any]) -> Any:
        from transformers import AutoConfig

        file = Path(name) / "config.json"
        table = json.loads(file.read_text()) if file.is_file() else {"model_type": name}
        try:
            return AutoConfig.for_model(**{**table, **values})
        except Exception as error:  # values that the config refuses
            raise DescriptionError(
                f"{self.source}: {error_summary(error)}",
                expected="values that the config accepts",
                fix="correct the values after the name",
            ) from None

    def _parse(self, change: str) -> tuple[str, Any]:
        key, equals, text = change.partition("=")
        if not equals or not key.isidentifier():
            raise DescriptionError(
                f"{self.source}: {change!r}",
                expected="values of the config after the name: gpt2,n_layer=4,sequence=128",
                fix="write key=value, separated by commas, without spaces",
            )
        with contextlib.suppress(json.JSONDecodeError):
            return key, json.loads(text)
        return key, text

    def _model_class(self, config: Any) -> Any:
        import transformers

        named = [getattr(transformers, name, None) for name in config.architectures or ()]
        if named and named[0] is not None and hasattr(named[0], "_from_config"):
            return _ByArchitecture(named[0])
        autos = [getattr(transformers, name) for name in _AUTO_CLASSES]
        return next((auto for auto in autos if type(config) in auto._model_mapping), autos[-1])

    def _example(self, model: nn.Module) -> dict[str, Tensor]:
        config: Any = model.config
        name = str(getattr(model, "main_input_name", ""))
        if name == "input_ids":
            text = config.get_text_config()
            shape = (_NUM_SAMPLES, self._sequence(getattr(text, "max_position_embeddings", None)))
            return {name: torch.randint(0, int(text.vocab_size), shape)}
        if name == "pixel_values" and hasattr(config, "image_size"):
            size = config.image_size
            height, width = size if isinstance(size, list | tuple) else (size, size)
            channels = getattr(config, "num_channels", 3)
            return {name: torch.randn(_NUM_SAMPLES, channels, height, width)}
        raise DescriptionError(
            f"{self.source} takes {name or 'unknown inputs'}",
            expected="a model of texts (input_ids) or images (pixel_values)",
            fix="use a factory that returns the model and an example: my_model.py:build",
        )

    def _sequence(self, most: int | None) -> int:
        given = dict(map(self._parse, self.source.split(",")[1:])).get("sequence")
        length = min(_SEQUENCE, most or _SEQUENCE) if given is None else given
        if not isinstance(length, int) or not 1 <= length <= (most or length):
            raise DescriptionError(
                f"{self.source}: sequence={given}",
                expected=f"a number of tokens from 1 to {most}",
                fix="use another length, or change max_position_embeddings",
            )
        return length


@dataclass(frozen=True)
class _ByArchitecture:
    """The class that a config names, with the method of an Auto class."""

    kind: Any

    def from_config(self, config: Any, dtype: torch.dtype | None) -> nn.Module:
        model: nn.Module = self.kind._from_config(config, dtype=dtype)
        return model
