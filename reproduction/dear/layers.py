"""The learnable layers of DeAR's five models, one by one, and how long each takes on a GPU.

A matrix product or a convolution takes the longer of two times: its operations at the GPU's compute
rate, or its inputs and outputs at the GPU's memory bandwidth. All other operators (norms,
activations, sums, copies) are memory-bound: they take the time to read and write their elements.
Operators are counted as PyTorch 1.8 runs them, one kernel each. Kernel launches and the optimizer
are left out.

Elements read and written per output element, forward and backward: batch norm 3 and 5 (it reads its
input twice, first for the statistics), layer norm 3 and 7 (with the gradients of its parameters),
ReLU 2 and 3, GELU 2 and 3, softmax 2 and 3, dropout 2 and 3, bias 2 and 1, sum 3 and 3, scale 2 and
2, mask 2 and 0, concatenation 2 and 2, copy into another order 2 and 2; a pooling reads its input
and writes its output, in both passes.

Source of the shapes: DenseNet-201 and Inception-v4 from `polyrhythm.describe`, ResNet-50 as in
`describe/resnet_work.py`, BERT from Devlin et al., arXiv:1810.04805, section 3, as Hugging Face
trains it.
"""

from dataclasses import dataclass, replace

from polyrhythm.describe import densenet_work, inception_work
from polyrhythm.describe.convolution import Convolution, square
from polyrhythm.describe.densenet_work import DenseLayer
from polyrhythm.describe.inception_work import InceptionBlock, Pooling
from polyrhythm.describe.transformer_work import TransformerShape
from polyrhythm.sync.fusion.layers import LayerTimes
from polyrhythm.types import Bytes, BytesPerSecond, Seconds

ELEMENT_BYTES: Bytes = 4  # single precision
_NUM_CLASSES = 1000
_NUM_POSITIONS = 512
_NUM_SEGMENTS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """Rates that training reaches, not those of the data sheet."""

    operations: float  # per second
    memory: BytesPerSecond


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnableLayer:
    """Counts for one sample. Operators without parameters are counted with a neighbour."""

    tensors: tuple[int, ...]  # parameters of each
    operations: int = 0  # of the forward product
    product_elements: int = 0  # that the product reads and writes
    num_backward_products: int = 2  # of the same size: for the weights and for the input
    forward_elements: int = 0  # that memory-bound operators read and write
    backward_elements: int = 0

    @property
    def parameters(self) -> int:
        return sum(self.tensors)

    def plus(self, forward: int, backward: int) -> "LearnableLayer":
        """Return the layer with more elements of memory-bound operators."""
        return replace(
            self,
            forward_elements=self.forward_elements + forward,
            backward_elements=self.backward_elements + backward,
        )

    def times(self, batch: int, gpu: Gpu) -> LayerTimes:
        def memory_time(num_elements: int) -> Seconds:
            return batch * ELEMENT_BYTES * num_elements / gpu.memory

        product = max(batch * self.operations / gpu.operations, memory_time(self.product_elements))
        return LayerTimes(
            size=ELEMENT_BYTES * self.parameters,
            forward=product + memory_time(self.forward_elements),
            backward=self.num_backward_products * product + memory_time(self.backward_elements),
        )


def resnet50(image: int) -> list[LearnableLayer]:
    """Bottlenecks of 1 x 1, 3 x 3 and 1 x 1 convolutions, each with a sum at its end."""
    first = square(3, 64, 7, image, (image + 1) // 2)
    side, channels = (first.side + 1) // 2, 64
    layers = _stem(first, pooled=64 * side**2)
    for stage, (width, num_blocks) in enumerate(((64, 3), (128, 4), (256, 6), (512, 3))):
        for number in range(num_blocks):
            after = (side + 1) // 2 if stage and not number else side
            convolutions = [
                square(channels, width, 1, side, side),
                square(width, width, 3, side, after),
                square(width, 4 * width, 1, after, after),
            ]
            if not number:
                convolutions.append(square(channels, 4 * width, 1, side, after))
            for each in convolutions:
                layers += _with_norm(each)
            num_inputs = channels * side**2
            layers[-1] = layers[-1].plus(3 * convolutions[2].num_outputs, 3 * num_inputs)
            channels, side = 4 * width, after
    return [*layers, _classifier(channels, side)]


def densenet201(image: int) -> list[LearnableLayer]:
    """Each layer concatenates its inputs again; their gradients are summed with those of others."""
    blocks = densenet_work.blocks_of(image)
    first, last = blocks[0], blocks[-1]
    assert isinstance(first, DenseLayer), "a dense layer follows the stem"
    assert isinstance(last, DenseLayer), "no transition follows the last block"
    layers = _stem(densenet_work.first_convolution(image), pooled=first.narrow.num_inputs)
    for block in blocks:
        if isinstance(block, DenseLayer):
            num_inputs = block.narrow.num_inputs
            norm = _batch_norm(block.narrow.inputs, num_inputs)
            layers += [norm.plus(2 * num_inputs, 3 * num_inputs), _convolution(block.narrow)]
            layers.append(_batch_norm(block.wide.inputs, block.wide.num_inputs))
            layers.append(_convolution(block.wide))
        else:
            half = block.half
            pooling = half.num_outputs + half.outputs * (half.side // 2) ** 2
            layers.append(_batch_norm(half.inputs, half.num_inputs))
            layers.append(_convolution(half).plus(pooling, pooling))
    channels, side = last.narrow.inputs + last.wide.outputs, last.narrow.side
    num_outputs = channels * side**2
    norm = _batch_norm(channels, num_outputs).plus(2 * num_outputs, 2 * num_outputs)
    return [*layers, norm, _classifier(channels, side)]


def inceptionv4(image: int) -> list[LearnableLayer]:
    """The branches of a block run one after another."""
    layers: list[LearnableLayer] = []
    blocks = inception_work.blocks_of(image)
    for block in blocks:
        for convolution in block.convolutions:
            layers += _with_norm(convolution)
        layers[-1] = layers[-1].plus(*_branch_elements(block))
    return [*layers, _classifier(blocks[-1].channels, blocks[-1].side)]


def bert(shape: TransformerShape) -> list[LearnableLayer]:
    """BERT for pre-training.

    The word embedding and the product with the vocabulary share a matrix, whose gradient is
    complete when the backward reaches the embedding; it is counted there.
    """
    hidden, tokens = shape.hidden, shape.sequence
    state, scores = tokens * hidden, tokens * shape.vocabulary
    vocabulary = LearnableLayer(
        tensors=(shape.vocabulary,),
        operations=2 * state * shape.vocabulary,
        product_elements=state + scores,
        forward_elements=(2 + 3) * scores,  # bias; softmax over more than one kernel holds
        backward_elements=(1 + 2 + 3) * scores,  # bias; a sparse gradient in zeros; softmax
    )
    return [
        *(_embedding(n * hidden, state) for n in (shape.vocabulary, _NUM_POSITIONS, _NUM_SEGMENTS)),
        _layer_norm(hidden, state).plus(2 * state, 3 * state),  # dropout
        *(layer for _ in range(shape.num_blocks) for layer in _bert_block(shape)),
        _linear(hidden, hidden, 1),  # pooler
        _linear(hidden, hidden, tokens).plus(2 * state, 3 * state),  # GELU
        _layer_norm(hidden, state),
        vocabulary,
        _linear(hidden, _NUM_SEGMENTS, 1),  # whether the second sentence follows the first
    ]


def _bert_block(shape: TransformerShape) -> list[LearnableLayer]:
    hidden, tokens, wide = shape.hidden, shape.sequence, 4 * shape.hidden
    state, scores = tokens * hidden, shape.num_heads * tokens**2
    # Query, key and value are copied by heads; their three gradients of the input are summed.
    projection = _linear(hidden, hidden, tokens).plus(2 * state, (2 + 2) * state)
    attention = LearnableLayer(
        tensors=(hidden * hidden, hidden),
        # The output projection, and the two products of attention.
        operations=2 * state * hidden + 4 * state * tokens,
        product_elements=2 * state + 4 * state + 2 * scores,
        # Scale, mask, softmax and dropout of the scores; a copy, bias and dropout of the output.
        forward_elements=(2 + 2 + 2 + 2) * scores + (2 + 2 + 2) * state,
        backward_elements=(2 + 3 + 3) * scores + (2 + 1 + 3) * state,
    )
    norm = _layer_norm(hidden, state).plus(3 * state, 3 * state)  # the sum before it
    return [
        *(projection, projection, projection),
        attention,
        norm,
        _linear(hidden, wide, tokens).plus(2 * tokens * wide, 3 * tokens * wide),  # GELU
        _linear(wide, hidden, tokens).plus(2 * state, 3 * state),  # dropout
        norm,
    ]


def _linear(inputs: int, outputs: int, tokens: int) -> LearnableLayer:
    return LearnableLayer(
        tensors=(inputs * outputs, outputs),
        operations=2 * tokens * inputs * outputs,
        product_elements=tokens * (inputs + outputs),
        forward_elements=2 * tokens * outputs,
        backward_elements=tokens * outputs,
    )


def _layer_norm(hidden: int, state: int) -> LearnableLayer:
    return LearnableLayer(tensors=(hidden, hidden)).plus(3 * state, 7 * state)


def _embedding(parameters: int, state: int) -> LearnableLayer:
    """A lookup and a sum. The gradient is dense, but only entries that were looked up are added."""
    return LearnableLayer(tensors=(parameters,)).plus((2 + 3) * state, 3 * state)


def _branch_elements(block: InceptionBlock) -> tuple[int, int]:
    """Elements of poolings, of the concatenation, and of the sum of the input's gradients."""
    num_branches = len(block.branches)
    if num_branches == 1:
        return 0, 0
    forward = backward = 2 * block.num_outputs
    backward += 3 * (num_branches - 1) * block.num_inputs
    for branch in block.branches:
        if branch.pooling is not Pooling.NONE:
            is_mean = branch.pooling is Pooling.MEAN
            pooling = block.num_inputs + (block.num_inputs if is_mean else branch.num_outputs)
            forward, backward = forward + pooling, backward + pooling
    return forward, backward


def _stem(first: Convolution, *, pooled: int) -> list[LearnableLayer]:
    """A convolution, a batch norm and a pooling that leaves `pooled` elements."""
    convolution, norm = _with_norm(first)
    pooling = first.num_outputs + pooled
    return [convolution, norm.plus(pooling, pooling)]


def _with_norm(convolution: Convolution) -> list[LearnableLayer]:
    norm = _batch_norm(convolution.outputs, convolution.num_outputs)
    return [_convolution(convolution), norm]


def _convolution(convolution: Convolution) -> LearnableLayer:
    is_first = convolution.inputs == 3  # images need no gradient
    return LearnableLayer(
        tensors=(convolution.weights,),
        operations=convolution.operations,
        product_elements=convolution.num_inputs + convolution.num_outputs,
        num_backward_products=1 if is_first else 2,
    )


def _batch_norm(channels: int, num_elements: int) -> LearnableLayer:
    """A batch norm and the ReLU that follows it."""
    layer = LearnableLayer(tensors=(channels, channels))
    return layer.plus((3 + 2) * num_elements, (5 + 3) * num_elements)


def _classifier(channels: int, side: int) -> LearnableLayer:
    """The mean over all points, and the product with the classes."""
    layer = LearnableLayer(
        tensors=(channels * _NUM_CLASSES, _NUM_CLASSES),
        operations=2 * channels * _NUM_CLASSES,
        product_elements=channels + _NUM_CLASSES,
    )
    pooling = channels * side**2 + channels
    return layer.plus(pooling, pooling)
