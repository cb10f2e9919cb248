"""Pre-norm decoder, a GPT or a Llama: embedding, blocks and head, each a layer.

Shapes: B microbatch, S sequence, D hidden, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path

import torch
from torch import Tensor, nn

from raypar.actors.expert_parallel.joint_loss import JointLoss
from raypar.actors.hugging_face.folder import model_type_of
from raypar.actors.hugging_face.weights import FolderWeights
from raypar.actors.layers.attention.attention import Attention
from raypar.actors.layers.attention.attention_scratch import ScratchAllocator
from raypar.actors.layers.attention.kv_cache import Incremental
from raypar.actors.layers.attention.token_slices import TokenSlices
from raypar.actors.layers.documents import Documents
from raypar.actors.layers.linear import Postponable, anywhere, is_watched, linear_of, products_of, undisturbed
from raypar.actors.layers.linear_cross_entropy import Labels, LossSpec, Vocabulary, linear_cross_entropy
from raypar.actors.layers.positions import Alibi, Learned, Rope, Sinusoidal, added_positions, between
from raypar.actors.models.base import IGNORED, InitialValues, Kind, Model, Parallelize, TensorPlan
from raypar.actors.models.init.cast import UsesOnce
from raypar.actors.models.init.deferred_init import Unfilled, on_meta
from raypar.actors.models.mlp import MLP
from raypar.actors.models.moe import MixtureOfExperts
from raypar.actors.models.partition import transformer_costs
from raypar.actors.rng import derive
from raypar.actors.sharding import Shard
from raypar.actors.specs.lora import LORA, is_adapter
from raypar.actors.specs.model import GPT, Llama, Transformer, vocabulary_slice
from raypar.actors.tensors import Values, bent, host_like


class Embedding(nn.Module, Incremental):
    """Token embedding plus the position table, if the model has one: ids (B, S) int64 -> (B, S, D)."""

    def __init__(self, spec: Transformer, documents: Documents, slices: TokenSlices) -> None:
        super().__init__()
        self._seq = spec.seq
        self._hidden = spec.hidden
        self._documents = documents
        self._slices = slices
        self.tokens = nn.Embedding(spec.vocab, spec.hidden, spec.pad_id)
        self.positions = added_positions(spec)
        self._scaled = spec.scaled_embedding or isinstance(self.positions, Sinusoidal)
        self.drop = nn.Dropout(spec.dropout)

    def forward(self, ids_BS: Tensor) -> Tensor:
        """Embed token ids. Raises ValueError if a sequence has more than the model's ``seq`` tokens."""
        length = ids_BS.shape[1] * (1 if self._slices.now is None else self._slices.now.count)
        if length > self._seq:
            raise ValueError(f"a sequence has {length} tokens, but the model's seq is {self._seq}: set it to {length}")
        x_BSD = self.tokens(ids_BS)
        if self._scaled:  # to the size of a table of sines, say (Vaswani et al. 2017, section 3.4)
            x_BSD = x_BSD * math.sqrt(self._hidden)
        if self.positions is not None:
            x_BSD = x_BSD + self._vectors(self.positions, ids_BS.shape[1], x_BSD)
        out: Tensor = self.drop(x_BSD)
        return out

    def _vectors(self, table: Learned | Sinusoidal, length: int, like: Tensor) -> Tensor:
        """Return the vectors of the tokens' positions, (length, D), or of those that come next, (B, 1, D)."""
        after, now = self.sequences, self._slices.now
        if after is None or after.at is None:
            first = 0 if now is None else now.start(length)
            rows_SD: Tensor = table(length, like, first) if isinstance(table, Sinusoidal) else table(length, first)
            return self._in_documents(rows_SD)
        # no call: sequence parallelism's hook would keep some rows, but all repeated tokens have one position
        rows_TD = table.forward(after.reach, like) if isinstance(table, Sinusoidal) else table.forward(after.reach)
        return rows_TD[after.at][:, None]

    def _in_documents(self, table_SD: Tensor) -> Tensor:
        """Return the rows of a table for tokens that are counted from the beginning of their document."""
        starts_BS = self._documents.starts
        return table_SD if starts_BS is None else table_SD[torch.arange(len(table_SD)).to(starts_BS) - starts_BS]


class DecoderBlock(nn.Module, UsesOnce):
    """Decoder block, (B, S, D) -> (B, S, D): attention and MLP, each after a norm and added to the residual stream.

    Args:
        norms: The norms of the inputs of attention and MLP, and perhaps those of their outputs.
        attn: The attention.
        mlp: The MLP, or experts.
        dropout: Dropout probability of the outputs of attention and MLP.
    """

    def __init__(self, norms: Sequence[nn.Module], attn: nn.Module, mlp: nn.Module, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = norms[:2]
        self.attn, self.mlp, self.uses_once = attn, mlp, not isinstance(mlp, MixtureOfExperts)
        self.attn_norm: nn.Module | None = norms[2] if norms[2:] else None
        self.mlp_norm: nn.Module | None = norms[3] if norms[2:] else None
        self.drop = nn.Dropout(dropout)

    def forward(self, x_BSD: Tensor) -> Tensor:
        y_BSD: Tensor = self.attn(self.norm1(x_BSD))
        x_BSD = x_BSD + self.drop(y_BSD if self.attn_norm is None else self.attn_norm(y_BSD))
        y_BSD = self.mlp(self.norm2(x_BSD))
        out: Tensor = x_BSD + self.drop(y_BSD if self.mlp_norm is None else self.mlp_norm(y_BSD))
        return out


class Projection(nn.Module):
    """Project to the vocabulary by a linear layer: (B, S, D) -> logits (B, S, V), or losses of tokens (B, S) in fp32.

    It has no weights. It returns losses if labels are known and ``vocabulary_slice`` says that there are many logits.
    """

    def __init__(self, spec: Transformer, labels: Labels) -> None:
        super().__init__()
        self._vocab, self._cap, self._labels = spec.vocab, spec.logit_cap, labels

    def forward(self, x_BSD: Tensor, out: nn.Module, *, whole: bool) -> Tensor:
        """Apply the layer ``out``. ``whole``: return logits in any case."""
        labels, vocabulary = self._labels.now, self._labels.vocabulary
        width = vocabulary_slice(x_BSD.shape[:-1].numel(), self._vocab)
        is_plain = isinstance(out, nn.Linear) and not is_watched(out) and undisturbed(x_BSD)
        if whole or width is None or labels is None or vocabulary is None or not is_plain:
            return bent(out(x_BSD), self._cap)
        if not labels:  # the gradients are 0, as without tokens
            return bent(out(x_BSD[:, :0]), self._cap)
        assert isinstance(out, nn.Linear)
        (labels_BS,) = labels
        later = out.postponer if isinstance(out, Postponable) else None
        memory = later.take_memory if later is not None and later.wants(x_BSD, out) else anywhere
        spec = LossSpec(vocabulary, width, IGNORED, self._cap, products_of(out), memory)
        loss_T = linear_cross_entropy(x_BSD.flatten(0, -2), out.weight, labels_BS.flatten(), spec)
        return loss_T.view(labels_BS.shape)


class Head(nn.Module):
    """Final norm and projection to the vocabulary: (B, S, D) -> logits (B, S, V), or losses (B, S).

    It returns the losses of tokens where ``Projection`` does. A hook on the head gets logits.
    """

    def __init__(self, spec: Transformer, norm: nn.Module, labels: Labels) -> None:
        super().__init__()
        self.norm = norm
        self.project = Projection(spec, labels)
        self.out = linear_of(spec.linear)(spec.hidden, spec.vocab, bias=False)

    def forward(self, x_BSD: Tensor) -> Tensor:
        out: Tensor = self.project(self.norm(x_BSD), self.out, whole=is_watched(self))
        return out


def _with_experts(plan: TensorPlan, spec: Transformer) -> TensorPlan:
    """Return a plan with "moe" instead of the "enter" style of MLPs in blocks with experts."""
    kinds: list[Kind] = ["moe" if spec.num_experts(block) else "enter" for block in range(spec.layers)]
    entries: TensorPlan = tuple((f"blocks.{block}.mlp", kind) for block, kind in enumerate(kinds))
    return (*(entry for entry in plan if entry != ("blocks.*.mlp", "enter")), *entries)


class TransformerModel(Model):
    """A decoder with the layers ``embed``, ``blocks.0``, ..., ``head``.

    A GPT is one with pre-LayerNorm (Radford et al. 2019, GPT-2, section 2.3), a Llama as in Touvron et al. 2023,
    section 2.2. Weights are initialised as in GPT-2, or read from a folder of Hugging Face.
    """

    tensor_plan: TensorPlan = (
        ("embed.tokens", "vocab"),
        ("embed.positions", "table"),
        ("embed.drop", "drop"),
        ("blocks.*.norm1", "norm"),
        ("blocks.*.norm2", "norm"),
        ("blocks.*.attn_norm", "norm"),
        ("blocks.*.mlp_norm", "norm"),
        ("blocks.*.attn", "heads"),
        ("blocks.*.attn", "enter"),
        ("blocks.*.attn.out", "row"),
        ("blocks.*.attn.out_lora", "adapter_row"),
        ("blocks.*.mlp.experts", "expert"),
        ("blocks.*.mlp", "enter"),
        ("blocks.*.mlp.gate", "column"),
        ("blocks.*.mlp.up", "column"),
        ("blocks.*.mlp.down", "row"),
        ("blocks.*.mlp.gate_lora", "adapter_column"),
        ("blocks.*.mlp.up_lora", "adapter_column"),
        ("blocks.*.mlp.down_lora", "adapter_row"),
        ("blocks.*.drop", "drop"),
        ("head.norm", "norm"),
        ("head.out", "logits"),
        ("head.project", "enter"),
    )

    documents: Documents
    slices: TokenSlices
    labels: Labels

    def __init__(self, spec: GPT | Llama, linear: type[nn.Linear] | None = None) -> None:
        self.spec = spec
        self._linear = linear or linear_of(spec.linear)
        self.names = ("embed", *(f"blocks.{i}" for i in range(spec.layers)), "head")
        self.body = range(1, spec.layers + 1)
        self.costs = transformer_costs(spec)
        if spec.moe is not None:
            self.tensor_plan = _with_experts(self.tensor_plan, spec)
        self.ties = (("embed.tokens.weight", "head.out.weight"),) if spec.tied else ()
        self.documents, self.slices, self._joint = Documents(), TokenSlices(), JointLoss()
        self.labels = Labels(Vocabulary(spec.vocab))
        layer = partial(self._layer, between(spec), ScratchAllocator())
        with on_meta():
            super().__init__([*map(layer, range(len(self.names)))])

    def norm(self) -> nn.Module:
        """Return a norm over D whose weight is initialised to 1."""
        kind = nn.RMSNorm if self.spec.has_rms_norms else nn.LayerNorm
        return kind(self.spec.hidden, eps=self.spec.norm_eps)

    def draws(self, layers: Sequence[int]) -> list[dict[str, Tensor]]:
        """Return which tensors of some layers begin with random values; see ``Model.draws``."""
        found = dict[str, Tensor]()
        for index in layers:
            for inner, parameter in self.skeleton[index].named_parameters():
                name = f"{self.names[index]}.{inner}"
                key = self.originals.get(name, name)
                if self._start(key) is None:
                    found.setdefault(key, parameter)
        return [{name: parameter} for name, parameter in found.items()]

    def draw(self, tensors: Mapping[str, Tensor], seed: int) -> list[Tensor]:
        """Draw the initial values of whole tensors; see ``Model.draw``."""
        return [self._drawn(name, host_like(tensor), seed) for name, tensor in tensors.items()]

    def make(
        self, layers: Sequence[int], seed: int, parallelize: Parallelize, values: InitialValues | None = None
    ) -> list[nn.Module]:
        """Make some layers with their initial weights; see ``Model.make``.

        Each weight has its own generator, seeded by its logical name. A sharded weight is drawn whole and then sliced,
        one weight at a time, so that every layout gets the same bits. Of weights in a folder only the slices are read.

        Raises:
            CheckpointError: The folder's weights can't be read.
        """
        layer = partial(self._layer, *self._shared)
        with Unfilled():
            made = [*map(layer, layers)]
        for index, module in zip(layers, made, strict=True):
            shards = parallelize(self.names[index], module)
            self._freeze(module)
            for inner, parameter in module.named_parameters():
                name = f"{self.names[index]}.{inner}"
                shard = shards.get(inner, Shard(tuple(parameter.shape)))
                key = self.originals.get(name, name)
                if values is not None and key in values:
                    parameter.data = values.part(key, shard)
                else:
                    self._init(key, parameter, shard, seed)
        return made

    def loss(self, output: Values, target: Values) -> Tensor:
        """Return the mean cross-entropy in nats per token.

        Args:
            output: Logits (B, S, V), or the losses of tokens (B, S).
            target: Labels (B, S) int64. Labels of -100 are ignored; if all are -100, the loss is 0.
        """
        (out,), (labels_BS,) = output, target
        has_losses = out.dim() == labels_BS.dim()
        total = out.sum() if has_losses else self.cross_entropy(out.flatten(0, 1), labels_BS.flatten())
        mean: Tensor = total / (labels_BS != IGNORED).sum().clamp(min=1)  # counted on the labels' device: no sync
        return mean

    @cached_property
    def _shared(self) -> tuple[Rope | Alibi | None, ScratchAllocator]:
        """The tables of positions and the scratch memory of all attention layers of this process."""
        return between(self.spec), ScratchAllocator()

    @cached_property
    def _folder(self) -> FolderWeights | None:
        """The weights that the model begins with; None if they are random."""
        return None if self.spec.hf is None else FolderWeights(Path(self.spec.hf))

    @cached_property
    def _adapters(self) -> FolderWeights | None:
        """The weights that the adapters begin with; None if they are random."""
        lora, folder = self.spec.lora, self.spec.hf
        if lora is None or lora.hf is None or folder is None:
            return None
        return FolderWeights(Path(lora.hf), adapts=model_type_of(Path(folder)))

    def _layer(self, encoding: Rope | Alibi | None, scratch: ScratchAllocator, index: int) -> nn.Module:
        """Build a layer. Layers that get the same ``encoding`` and ``scratch`` share tables and memory."""
        return self._freeze(self._whole_layer(encoding, scratch, index))

    def _freeze(self, layer: nn.Module) -> nn.Module:
        """Let only the adapters of a layer learn, if the model has some."""
        if self.spec.lora is not None:
            for name, parameter in layer.named_parameters():
                parameter.requires_grad_(is_adapter(name))
        return layer

    def _whole_layer(self, encoding: Rope | Alibi | None, scratch: ScratchAllocator, index: int) -> nn.Module:
        spec = self.spec
        if index == 0:
            return Embedding(spec, self.documents, self.slices)
        if index not in self.body:
            return Head(spec, self.norm(), self.labels)
        block = index - self.body.start
        window = spec.window_of(block)
        attn = Attention(
            spec, encoding, scratch, self._linear, window=window, documents=self.documents, slices=self.slices
        )
        norms = [self.norm() for _ in range(spec.norms)]
        return DecoderBlock(norms, attn, self._mlp_or_experts(block), spec.dropout)

    def _mlp_or_experts(self, block: int) -> nn.Module:
        """Build what comes after the attention of a block: its MLP, or its experts."""
        num_experts, mlp = self.spec.num_experts(block), partial(MLP, self.spec, self._linear)
        if not num_experts:
            return mlp(self.spec.mlp_width)
        return MixtureOfExperts(self.spec, num_experts, mlp, self.documents, self._joint, block)

    @torch.no_grad()
    def _init(self, name: str, parameter: Tensor, shard: Shard, seed: int) -> None:
        """Set the initial values of this actor's part of a parameter, in place."""
        start = self._start(name)
        if isinstance(start, FolderWeights):
            start.fill(name, parameter, shard)
        elif start is not None:
            parameter.fill_(start)
        elif shard.is_whole:
            self._drawn(name, parameter, seed)
        else:
            parameter.copy_(shard.take(self._drawn(name, parameter.new_empty(shard.whole), seed)))

    def _start(self, name: str) -> FolderWeights | float | None:
        """Return the folder that has the initial values of a parameter, or its constant; None if they are random."""
        folder = self._adapters if is_adapter(name) else self._folder
        if folder is not None:
            return folder
        if name.endswith((".bias", f"{LORA}.b.weight")):
            return 0.0
        return 1.0 if "norm" in name else None

    @torch.no_grad()
    def _drawn(self, name: str, whole: Tensor, seed: int) -> Tensor:
        """Draw the initial values of a whole parameter, in place, and return it."""
        # the 2 x layers projections into the residual stream are scaled down by 1/sqrt of their number
        branches = 2 * self.spec.layers if name.endswith(("attn.out.weight", ".down.weight")) else 1
        spread = whole.shape[-1] ** -0.5 if is_adapter(name) else 0.02 / math.sqrt(branches)
        generator = torch.Generator().manual_seed(derive(seed, name))
        return whole.normal_(0.0, spread, generator=generator)
