"""The shape of the demo's model, without torch, so that the plan can be made before import."""

from dataclasses import dataclass

from polyrhythm.errors import LaunchError


@dataclass(frozen=True, slots=True, kw_only=True)
class GPTShape:
    num_blocks: int = 4
    width: int = 128
    num_heads: int = 4
    context: int = 128  # context length in bytes

    def __post_init__(self) -> None:
        if self.num_blocks < 0 or self.context < 1:
            raise LaunchError(
                f"{self.num_blocks} blocks over a context of {self.context}",
                expected="0 or more blocks, and a context of at least 1",
                fix="pass --blocks and --context in this range",
            )
        if self.width < 1 or self.width % self.num_heads:
            raise LaunchError(
                f"width {self.width} for {self.num_heads} heads",
                expected=f"a multiple of {self.num_heads}",
                fix=f"use --width {max(1, round(self.width / self.num_heads)) * self.num_heads}",
            )

    @property
    def num_layers(self) -> int:
        """An embedding, the blocks, and a head."""
        return self.num_blocks + 2
