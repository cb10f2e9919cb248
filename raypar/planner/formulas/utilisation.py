"""How much of a device's peak a run reaches, and how long a training takes."""

from __future__ import annotations

from raypar.planner.formulas.flops import Recomputed, training_flops

_HOURS = 24.0


def mfu(
    tokens_per_second: float, peak: float, layers: int, hidden: int, seq: int, vocab: int, devices: int = 1
) -> float:
    """Return the model FLOPs utilisation: FLOPs of forwards and backwards, without what is computed again, of the peak.

    Args:
        tokens_per_second: Tokens that all devices train on in a second.
        peak: FLOP/s that a device could do.
        layers: Number of layers.
        hidden: Width.
        seq: Tokens of a sequence.
        vocab: Number of tokens of the vocabulary.
        devices: Number of devices.

    Source: Chowdhery et al. 2022, "PaLM", appendix B.

    Examples:
        >>> round(mfu(1e6, 312e12, 96, 12288, 2048, 51200, 8192), 3)
        0.421
    """
    return hfu(tokens_per_second, peak, layers, hidden, seq, vocab, devices, recomputed="none")


def hfu(
    tokens_per_second: float,
    peak: float,
    layers: int,
    hidden: int,
    seq: int,
    vocab: int,
    devices: int = 1,
    *,
    recomputed: Recomputed,
) -> float:
    """Return the hardware FLOPs utilisation: as ``mfu``, and what is computed again counts.

    Args:
        tokens_per_second: Tokens that all devices train on in a second.
        peak: FLOP/s that a device could do.
        layers: Number of layers.
        hidden: Width.
        seq: Tokens of a sequence.
        vocab: Number of tokens of the vocabulary.
        devices: Number of devices.
        recomputed: What backwards compute again.

    Source: Korthikanti et al. 2022, section 6.3 and appendix A.
    """
    each = training_flops(layers, hidden, seq, vocab, recomputed=recomputed)
    return tokens_per_second / seq * each / (peak * devices)


def days(parameters: float, tokens: float, devices: int, flops: float) -> float:
    """Return the days of a training, 8 T P / (n X) seconds with recomputation of all layers.

    Args:
        parameters: Number of parameters P.
        tokens: Tokens T that it takes.
        devices: Number of devices n.
        flops: FLOP/s X that a device reaches.

    Source: Narayanan et al. 2021, section 5.1.

    Examples:
        >>> round(days(175e9, 300e9, 1024, 140e12))
        34
    """
    return 8 * tokens * parameters / (devices * flops) / 3600 / _HOURS


def hours_like(known_hours: float, known: tuple[float, float], wanted: tuple[float, float]) -> float:
    """Return the device hours of a training, if they are in proportion to parameters x tokens.

    Args:
        known_hours: Device hours of a training that is known.
        known: Its parameters and tokens.
        wanted: Parameters and tokens of the other one.

    The 65B Llama took a million A100 hours for 1.4T tokens; 100B parameters and 1T tokens on 100 devices, in days:

    Examples:
        >>> round(hours_like(1e6, (65e9, 1.4e12), (100e9, 1e12)) / 100 / 24)
        458
    """
    return known_hours * wanted[0] * wanted[1] / (known[0] * known[1])
