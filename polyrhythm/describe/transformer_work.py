"""GPT and BERT by their shapes: an embedding, equal blocks, a head.

Counted as torch computes them: attention is fused (scaled_dot_product_attention), so that the
scores are never kept; products of matrices are counted in full, also where a mask makes half of
them 0. There is no dropout.

Source of the shapes: Radford et al., "Language Models are Unsupervised Multitask Learners", 2019;
Devlin et al., arXiv:1810.04805, section 3. Departure: where input and output embedding are one
matrix, both layers count it, as two stages that hold them have one copy each.
"""

from dataclasses import dataclass

from polyrhythm.describe.layer_work import LayerWork
from polyrhythm.errors import DescriptionError

_INDEX = 8  # bytes
_HEAD = 64  # width of a head, if the number of heads is not given
_MAX_BLOCKS = 10_000  # more is a typing error


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformerShape:
    num_blocks: int
    hidden: int
    sequence: int  # tokens in a sample
    num_heads: int
    vocabulary: int

    def __post_init__(self) -> None:
        numbers = (self.num_blocks, self.hidden, self.sequence, self.num_heads, self.vocabulary)
        if min(numbers) < 1:
            raise DescriptionError(
                f"a transformer of shape {'x'.join(map(str, numbers))}",
                expected="blocks, hidden, sequence, heads and vocabulary of at least 1",
                fix="correct the number that is 0 or less",
            )
        if self.num_blocks > _MAX_BLOCKS:
            raise DescriptionError(
                f"{self.num_blocks} blocks",
                expected=f"at most {_MAX_BLOCKS}",
                fix="write the number of blocks first, then hidden, then the sequence",
            )
        if self.hidden % self.num_heads:
            raise DescriptionError(
                f"hidden {self.hidden} for {self.num_heads} heads",
                expected=f"a multiple of {self.num_heads}",
                fix="change hidden or the number of heads",
            )


def gpt(
    *,
    num_blocks: int,
    hidden: int,
    sequence: int,
    num_heads: int | None = None,
    vocabulary: int = 50257,
) -> list[LayerWork]:
    """Return the layers of a GPT-2 or GPT-3; heads are 64 wide unless their number is given."""
    if num_heads is None and hidden % _HEAD:
        raise DescriptionError(
            f"hidden {hidden} without a number of heads",
            expected=f"a multiple of {_HEAD}, or the number of heads behind the sequence",
            fix=f"add it: gpt-{num_blocks}x{hidden}x{sequence}x1, or use a multiple of {_HEAD}",
        )
    heads = hidden // _HEAD if num_heads is None else num_heads
    shape = TransformerShape(
        num_blocks=num_blocks,
        hidden=hidden,
        sequence=sequence,
        num_heads=heads,
        vocabulary=vocabulary,
    )
    tokens = sequence * hidden  # the numbers of one sample between two blocks
    embedding = LayerWork(
        name="embedding",
        parameters=(vocabulary + sequence) * hidden,
        operations=0,
        outputs=tokens,
        stored=0,
        other_bytes=_INDEX * sequence,
    )
    head = LayerWork(
        name="head",  # a norm, and a product with the vocabulary without bias
        parameters=2 * hidden + vocabulary * hidden,
        operations=2 * tokens * vocabulary,
        outputs=sequence * vocabulary,
        stored=2 * tokens + 2 * sequence,
    )
    return [embedding, *_blocks(shape), head]


def bert(size: str, *, sequence: int = 512) -> list[LayerWork]:
    """Return the layers of BERT `base` or `large`, with the masked-language-model head."""
    if size not in ("base", "large"):
        raise DescriptionError(
            f"BERT {size!r}", expected="base or large", fix="use bert-base or bert-large"
        )
    num_blocks, hidden, heads = (12, 768, 12) if size == "base" else (24, 1024, 16)
    return bert_of(
        TransformerShape(
            num_blocks=num_blocks,
            hidden=hidden,
            sequence=sequence,
            num_heads=heads,
            vocabulary=30522,
        )
    )


def bert_of(shape: TransformerShape, *, num_positions: int = 512) -> list[LayerWork]:
    """Return the layers of a BERT of another shape."""
    hidden, sequence, vocabulary = shape.hidden, shape.sequence, shape.vocabulary
    if sequence > num_positions:
        raise DescriptionError(
            f"a sequence of {sequence} for BERT",
            expected=f"at most {num_positions}, for which it has positions",
            fix=f"use a sequence of {num_positions} or less",
        )
    tokens = sequence * hidden
    embedding = LayerWork(
        name="embedding",  # words, positions, two kinds of sentence, and a norm
        parameters=(vocabulary + num_positions + 2) * hidden + 2 * hidden,
        operations=0,
        outputs=tokens,
        stored=tokens + 2 * sequence,
        other_bytes=2 * _INDEX * sequence,
    )
    head = LayerWork(
        name="head",  # a linear layer, GELU, a norm, and a product with the vocabulary with bias
        parameters=hidden * hidden + 3 * hidden + (hidden + 1) * vocabulary,
        operations=2 * tokens * (hidden + vocabulary),
        outputs=sequence * vocabulary,
        stored=4 * tokens + 2 * sequence,
    )
    return [embedding, *_blocks(shape), head]


def _blocks(shape: TransformerShape) -> list[LayerWork]:
    """Return the blocks; norms before (GPT) or after (BERT) have the same counts.

    Weights: 4 h^2 of attention and 8 h^2 of the inner layer, which is 4 h wide, and their biases
    and norms. Kept, in h numbers per token: the input, two inputs or outputs of norms and one more
    between them, query, key and value, what attention gives, and the inner layer before and after
    its GELU: 1 + 3 + 3 + 1 + 4 + 4. Besides, the sums of attention and the statistics of norms.
    A backward is two products for each of the forward's, and in attention five for two: it computes
    the scores again, as it did not keep them.
    """
    hidden, sequence = shape.hidden, shape.sequence
    tokens = sequence * hidden
    return [
        LayerWork(
            name=f"block.{number}",
            parameters=12 * hidden**2 + 13 * hidden,
            operations=24 * tokens * hidden + 4 * sequence * tokens,
            backward_ratio=(48 * hidden + 10 * sequence) / (24 * hidden + 4 * sequence),
            outputs=tokens,
            stored=16 * tokens + sequence * shape.num_heads + 4 * sequence,
        )
        for number in range(shape.num_blocks)
    ]
