"""The norm of many gradients as one, for clipping."""

from collections.abc import Sequence

import torch
from torch import Tensor


def norm_of(
    tensors: Sequence[Tensor], norm_type: float, device: torch.device | str = "cpu"
) -> Tensor:
    """Return the norm of all tensors as one, in single precision or better; 0 for no tensors."""
    half = (torch.float16, torch.bfloat16)
    wide = [t.float() if t.dtype in half else t for t in tensors]
    norms = [torch.linalg.vector_norm(t, norm_type) for t in wide]
    return torch.linalg.vector_norm(
        torch.stack([torch.zeros((), device=device), *norms]), norm_type
    )
