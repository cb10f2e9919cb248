"""What a worker builds from: plain descriptions of model, data and optimizer. Nothing here imports torch.

They are frozen dataclasses so that a run can be written down, compared, shipped to actors and read from TOML.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class GPT:
    """A pre-LN GPT with learned positions (Radford et al. 2019), over bytes unless a tokenizer says otherwise.

    layers   number of transformer blocks
    hidden   width of the residual stream
    heads    attention heads, a divisor of hidden
    seq      tokens a sequence
    vocab    token ids run from 0 to vocab - 1
    mlp      width of a block's MLP in multiples of hidden
    dropout  probability, after embeddings, in attention and on both residual branches
    tied     one logical weight for the embedding and the head (Press & Wolf 2017)
    """

    layers: int = 8
    hidden: int = 256
    heads: int = 8
    seq: int = 256
    vocab: int = 256
    mlp: int = 4
    dropout: float = 0.0
    tied: bool = False


@dataclass(frozen=True)
class Layers:
    """The user's own modules: ``fn()`` returns a list of nn.Modules that are applied one after the other.

    fn    builds the list; each layer takes what the layer before it returned (a tensor or a tuple of tensors)
    loss  ``loss(output, target) -> scalar tensor``, the mean over the microbatch
    seq   tokens a sequence, for a model over text; with other data leave it out
    vocab token ids run from 0 to vocab - 1, for a model over text
    """

    fn: Callable[[], Sequence[Any]]
    loss: Callable[[Any, Any], Any]
    seq: int | None = None
    vocab: int = 256


@dataclass(frozen=True)
class Text:
    """Tokens of text files.

    path          a file, a folder (all files below it), or a glob; "stdlib" is the .py files of the running Python's
                  standard library; a ``.bin`` file is uint16 tokens (nanoGPT's format)
    tokenizer     a Hugging Face ``tokenizers`` JSON file; None reads bytes (256 ids)
    val_path      validation text, same kinds as path; None keeps the last ``val_fraction`` of path for validation
    val_fraction  share of the tokens that is kept for validation, 0 < val_fraction < 1
    cache         folder for the converted tokens; None is ~/.cache/raypar
    """

    path: str = "stdlib"
    tokenizer: str | None = None
    val_path: str | None = None
    val_fraction: float = 0.1
    cache: str | None = None


@dataclass(frozen=True)
class Batches:
    """The user's own data: ``fn(step, microbatch, dp)`` returns ``(inputs, targets)``; a pure function.

    fn        training batches; inputs and targets are tensors (or tuples of them) of one fixed shape
    validate  the same for evaluation; None means that the run has no validation data
    """

    fn: Callable[[int, int, int], tuple[Any, Any]]
    validate: Callable[[int, int, int], tuple[Any, Any]] | None = None


@dataclass(frozen=True)
class AdamW:
    """torch's AdamW (Loshchilov & Hutter 2019). Weight decay is for tensors of two or more dims only.

    lr         peak learning rate
    warmup     steps of linear warm-up from lr / warmup
    decay      "constant", or "cosine" / "linear" down to ``lr * final`` at the last step of the run
    """

    kind: Literal["adamw"] = field(default="adamw", kw_only=True)
    lr: float = 3e-4
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    warmup: int = 0
    decay: Literal["constant", "cosine", "linear"] = "constant"
    final: float = 0.1


@dataclass(frozen=True)
class SGD:
    """torch's SGD with momentum. ``warmup``, ``decay`` and ``final`` as for AdamW."""

    kind: Literal["sgd"] = field(default="sgd", kw_only=True)
    lr: float = 1e-2
    momentum: float = 0.9
    weight_decay: float = 0.0
    warmup: int = 0
    decay: Literal["constant", "cosine", "linear"] = "constant"
    final: float = 0.1
