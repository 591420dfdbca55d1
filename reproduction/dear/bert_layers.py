"""The learnable layers of BERT for pre-training, one by one, as Hugging Face has them.

Words and the product with the vocabulary share their matrix, whose gradient is there when the
backward has come to the words; so it counts there. The vocabulary is filled up to a multiple of 8.

Passes over the numbers that a kernel gives, forward and backward: a bias 2 and 1, dropout 2 and 3,
a norm 3 and 7 (gradients of its parameters among them), a sum 3 and 3, GELU 2 and 3, softmax 2 and
3, a scale 2 and 2, a mask 2 and none, a copy in another order 2 and 2.

Source of the shapes: Devlin et al., arXiv:1810.04805, section 3.
"""

from dataclasses import dataclass

from reproduction.dear.gpu_time import LearnableLayer

_VOCABULARY = 30528
_POSITIONS = 512
_KINDS = 2  # of sentences


@dataclass(frozen=True, slots=True, kw_only=True)
class BertShape:
    num_blocks: int
    hidden: int
    num_heads: int


BASE = BertShape(num_blocks=12, hidden=768, num_heads=12)
LARGE = BertShape(num_blocks=24, hidden=1024, num_heads=16)


def bert(shape: BertShape, tokens: int) -> list[LearnableLayer]:
    """For samples of that many tokens."""
    hidden, state = shape.hidden, tokens * shape.hidden
    found = [
        _table("words", _VOCABULARY, hidden, state),
        _table("positions", _POSITIONS, hidden, state),
        _table("kinds", _KINDS, hidden, state),
        _norm("embedding.norm", hidden, state, dropout=True),
    ]
    for number in range(shape.num_blocks):
        found += _block(f"block{number}", shape, tokens)
    scores = tokens * _VOCABULARY
    found.append(_linear("pooler", hidden, hidden, 1))
    found.append(_linear("head.transform", hidden, hidden, tokens, forward=2, backward=3))  # GELU
    found.append(_norm("head.norm", hidden, state))
    found.append(
        LearnableLayer(
            name="head.vocabulary",  # its matrix is that of the words
            tensors=(_VOCABULARY,),
            operations=2 * state * _VOCABULARY,
            product_moves=state + scores,
            forward_moves=(2 + 3) * scores,  # bias; softmax, over more than a kernel holds
            backward_moves=(1 + 2 + 3) * scores,  # bias; zeros and the ones among them; softmax
        )
    )
    return [*found, _linear("head.next", hidden, _KINDS, 1)]


def _block(name: str, shape: BertShape, tokens: int) -> list[LearnableLayer]:
    hidden, state = shape.hidden, tokens * shape.hidden
    scores = shape.num_heads * tokens**2
    # Query, key and value are copied in the order of heads; the input's three gradients are added.
    query, key, value = (
        _linear(f"{name}.{each}", hidden, hidden, tokens, forward=2, backward=2 + 2)
        for each in ("query", "key", "value")
    )
    attention = LearnableLayer(
        name=f"{name}.output",
        tensors=(hidden * hidden, hidden),
        # Its own product, and the two of attention, whose backwards are two each as well.
        operations=2 * state * hidden + 4 * state * tokens,
        product_moves=2 * state + 4 * state + 2 * scores,
        # Scale, mask, softmax and dropout of scores; a copy; bias, dropout.
        forward_moves=(2 + 2 + 2 + 2) * scores + (2 + 2 + 2) * state,
        backward_moves=(2 + 3 + 3) * scores + (2 + 1 + 3) * state,
    )
    wide = 4 * hidden
    return [
        query,
        key,
        value,
        attention,
        _norm(f"{name}.norm0", hidden, state, residual=True),
        _linear(f"{name}.inner", hidden, wide, tokens, forward=2, backward=3),  # GELU
        _linear(f"{name}.outer", wide, hidden, tokens, forward=2, backward=3),  # dropout
        _norm(f"{name}.norm1", hidden, state, residual=True),
    ]


def _linear(
    name: str, inputs: int, outputs: int, tokens: int, *, forward: int = 0, backward: int = 0
) -> LearnableLayer:
    """With its bias, and passes over its output."""
    return LearnableLayer(
        name=name,
        tensors=(inputs * outputs, outputs),
        operations=2 * tokens * inputs * outputs,
        product_moves=tokens * (inputs + outputs),
        forward_moves=(2 + forward) * tokens * outputs,
        backward_moves=(1 + backward) * tokens * outputs,
    )


def _norm(
    name: str, hidden: int, state: int, *, residual: bool = False, dropout: bool = False
) -> LearnableLayer:
    """With the sum before it, or the dropout behind it."""
    more = (3 if residual else 0) + (2 if dropout else 0)
    more_backward = (3 if residual else 0) + (3 if dropout else 0)
    return LearnableLayer(
        name=name,
        tensors=(hidden, hidden),
        forward_moves=(3 + more) * state,
        backward_moves=(7 + more_backward) * state,
    )


def _table(name: str, num_entries: int, hidden: int, state: int) -> LearnableLayer:
    """Looked up and added; its gradient is dense, but only what was looked up is added to it."""
    return LearnableLayer(
        name=name,
        tensors=(num_entries * hidden,),
        forward_moves=(2 + 3) * state,
        backward_moves=3 * state,
    )
