"""Models as people write them, each with `loss(data)` and `data(step, size)`; the loss is a mean over samples."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


def random(step, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(step))


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        y = self.norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.mlp(self.norm(x))


class SmallGPT(nn.Module):
    """Embedding tied to the head by using its weight from outside, blocks, a scale kept in a plain list."""

    def __init__(self, width=32, layers=4, vocabulary=50, checkpointing=None):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(layers)])
        self.lstm = nn.LSTM(width, width, batch_first=True)
        self.norm = nn.LayerNorm(width)
        self.holder = nn.Linear(width, 1)
        self.listed = [self.holder.weight]
        self.checkpointing = checkpointing  # None, "reentrant", "non-reentrant"

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            if self.checkpointing is None:
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.checkpointing == "reentrant")
        x = self.lstm(x)[0] * self.listed[0]
        return self.norm(x) @ self.embedding.weight.t()

    def loss(self, tokens):
        return F.cross_entropy(self(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())

    @staticmethod
    def data(step, size=4, length=12, vocabulary=50):
        return torch.randint(0, vocabulary, (size, length), generator=torch.Generator().manual_seed(step))


class ReentrantGPT(SmallGPT):
    def __init__(self):
        super().__init__(layers=2, checkpointing="reentrant")


class RecomputingGPT(SmallGPT):
    def __init__(self):
        super().__init__(layers=2, checkpointing="non-reentrant")


class Regression(nn.Module):
    """Base: the loss is the mean square of the output."""

    width = 12

    def loss(self, x):
        return self(x).square().mean()

    @classmethod
    def data(cls, step, size=4):
        return random(step, size, cls.width)


class Perceptron(Regression):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(12, 12) for _ in range(4)])

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class Convolutional(nn.Module):
    """Convolutions, batch norm with buffers, in-place activations, a transposed convolution."""

    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3, padding=1, groups=2), nn.GroupNorm(4, 16), nn.ReLU(inplace=True),
            nn.ConvTranspose2d(16, 8, 2, stride=2), nn.InstanceNorm2d(8, affine=True), nn.PReLU(8),
        )  # fmt: skip
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        return self.head(self.features(x).mean((2, 3)))

    def loss(self, x):
        return F.cross_entropy(self(x), torch.arange(len(x)) % 5)

    @staticmethod
    def data(step, size=4):
        return random(step, size, 3, 8, 8)


class Recurrent(nn.Module):
    """LSTM with projection and two layers, a bidirectional GRU, an RNN cell in a loop."""

    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(6, 8, num_layers=2, proj_size=4, batch_first=True)
        self.gru = nn.GRU(4, 5, bidirectional=True, batch_first=True)
        self.cell = nn.GRUCell(10, 3)

    def forward(self, x):
        x = self.gru(self.lstm(x)[0])[0]
        state = torch.zeros(len(x), 3)
        for moment in x.unbind(1):
            state = self.cell(moment, state)
        return state

    def loss(self, x):
        return (self(x) - 0.5).square().mean()

    @staticmethod
    def data(step, size=4):
        return random(step, size, 5, 6)


class TiedAutoencoder(Regression):
    """The decoder uses the encoder's weights transposed, in reverse."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.ModuleList([nn.Linear(12, 8), nn.Linear(8, 4)])
        self.biases = nn.ParameterList([nn.Parameter(torch.zeros(12)), nn.Parameter(torch.zeros(8))])

    def forward(self, x):
        code = x
        for layer in self.encoder:
            code = torch.tanh(layer(code))
        for layer, bias in zip(reversed(self.encoder), reversed(self.biases), strict=True):
            code = F.linear(code, layer.weight.t(), bias)
        return code - x


class GraphNetwork(nn.Module):
    """Two rounds of message passing over a fixed graph; parameters in a ParameterDict and of 0 and 1 dims."""

    def __init__(self):
        super().__init__()
        self.messages = nn.ParameterDict({"weight": random(1, 2, 6, 6) / 3, "scale": torch.tensor(0.7)})
        self.update = nn.GRUCell(6, 6)
        self.gate = nn.Parameter(torch.ones(6))
        self.register_buffer("edges", torch.tensor([[0, 1, 2, 3, 4, 0, 2], [1, 2, 3, 4, 0, 2, 4]]))

    def forward(self, x):
        source, target = self.edges
        for weight in self.messages["weight"]:
            sent = torch.einsum("bnd,de->bne", x[:, source], weight) * self.messages["scale"]
            received = torch.zeros_like(x).index_add(1, target, sent)
            x = self.update(received.flatten(0, 1), (x * self.gate).flatten(0, 1)).view(x.shape)
        return x

    def loss(self, x):
        return self(x).square().mean()

    @staticmethod
    def data(step, size=4):
        return random(step, size, 5, 6)


class WeightNormed(Regression):
    """The new and the old weight norm, and a spectral one with its buffers."""

    def __init__(self):
        super().__init__()
        self.new = nn.utils.parametrizations.weight_norm(nn.Linear(12, 12))
        self.spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(12, 12))
        self.plain = nn.Linear(12, 12)

    def forward(self, x):
        return self.plain(torch.tanh(self.spectral(torch.tanh(self.new(x)))))


class SharedBlock(Regression):
    """One block applied four times, then a head."""

    def __init__(self):
        super().__init__()
        self.block = nn.Sequential(nn.Linear(12, 24), nn.GELU(), nn.Linear(24, 12))
        self.head = nn.Linear(12, 3)

    def forward(self, x):
        for _ in range(4):
            x = x + self.block(x)
        return self.head(x)


class Recursive(Regression):
    """A module that calls itself."""

    def __init__(self):
        super().__init__()
        self.node = nn.Linear(12, 12)
        self.leaf = nn.Linear(12, 12)

    def forward(self, x, depth=3):
        if depth == 0:
            return self.leaf(x)
        return torch.tanh(self.node(self(x, depth - 1))) + self.leaf(x)


class Encoder(nn.Module):
    """torch's own transformer layers, which read their weights without calling the submodules."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), 2, enable_nested_tensor=False
        )
        self.decoder = nn.TransformerDecoderLayer(8, 2, 16, dropout=0.0, batch_first=True)

    def forward(self, x):
        return self.decoder(x, self.encoder(x))

    def loss(self, x):
        return (self(x) - x).square().mean()

    @staticmethod
    def data(step, size=4):
        return random(step, size, 5, 8)


class OddSizes(Regression):
    """Parameters of 0 elements, 0 dims, fewer elements than ranks, and an integer one."""

    width = 3

    def __init__(self):
        super().__init__()
        self.scalar = nn.Parameter(torch.tensor(1.5))
        self.sizes = nn.ParameterList([nn.Parameter(random(n, n)) for n in (1, 2, 3, 5)])
        self.matrix = nn.Parameter(random(7, 7, 3))
        self.empty = nn.Parameter(torch.zeros(0, 4))
        self.table = nn.Parameter(torch.tensor([2, 0, 1]), requires_grad=False)

    def forward(self, x):
        for size in self.sizes:
            x = x * size.mean() + size.sum() * self.scalar
        return F.linear(x[:, self.table], self.matrix) + self.empty.sum()


class FunctionWithWeight(torch.autograd.Function):
    """Saves a weight the documented way, and keeps the same Parameter in ctx as many do."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        ctx.weight = weight
        return x @ weight

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad @ (0.5 * weight + 0.5 * ctx.weight).t(), x.t() @ grad


class CustomFunction(Regression):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(12, 12)
        self.weight = nn.Parameter(random(0, 12, 12) / 4)
        self.last = nn.Linear(12, 12)

    def forward(self, x):
        return self.last(torch.tanh(FunctionWithWeight.apply(torch.tanh(self.first(x)), self.weight)))


class SeveralDtypes(nn.Module):
    """float64 in the middle, a frozen float32 layer, and a complex parameter used outside autograd's real path."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.middle = nn.Linear(6, 6, dtype=torch.float64)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.phase = nn.Parameter(torch.polar(torch.ones(6), torch.arange(6.0)))

    def forward(self, x):
        x = self.middle(self.first(x).double()).float()
        return (self.frozen(x) * self.phase).abs()

    def loss(self, x):
        return self(x).square().mean()

    @staticmethod
    def data(step, size=4):
        return random(step, size, 6)


MODELS = {
    cls.__name__: cls
    for cls in (
        SmallGPT, ReentrantGPT, RecomputingGPT, Perceptron, Convolutional, Recurrent, TiedAutoencoder, GraphNetwork,
        WeightNormed, SharedBlock, Recursive, Encoder, OddSizes, CustomFunction, SeveralDtypes,
    )
}  # fmt: skip
