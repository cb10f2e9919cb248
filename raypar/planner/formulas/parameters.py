"""How many parameters a GPT has, without its biases and norms."""

from __future__ import annotations


def layer_parameters(hidden: int) -> int:
    """Return the weights of a layer, 12 h^2: 4 h^2 of attention and 8 h^2 of an MLP that is 4 h wide.

    Args:
        hidden: Width h.
    """
    return 12 * hidden**2


def embedding_parameters(hidden: int, seq: int, vocab: int, *, tied: bool = True) -> int:
    """Return the weights of the embeddings of tokens and positions, (s + V) h, and V h more of a head of its own.

    Args:
        hidden: Width h.
        seq: Number of learned positions s.
        vocab: Number of tokens V.
        tied: Whether the head has the weights of the embedding.
    """
    return (seq + vocab) * hidden + (0 if tied else vocab * hidden)


def parameters(layers: int, hidden: int, seq: int, vocab: int, *, tied: bool = True) -> int:
    """Return all weights, 12 l h^2 + (s + V) h.

    Args:
        layers: Number of layers l.
        hidden: Width h.
        seq: Number of learned positions s.
        vocab: Number of tokens V.
        tied: Whether the head has the weights of the embedding.

    Source: Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM",
    equation 2.

    Examples:
        >>> round(parameters(96, 12288, 2048, 51200) / 1e9)
        175
        >>> round(12 * layer_parameters(768) / 2**20, 1)
        81.0
        >>> round(2 * embedding_parameters(768, 4096, 116444) / 2**20, 1)
        176.6
    """
    return layers * layer_parameters(hidden) + embedding_parameters(hidden, seq, vocab, tied=tied)
