"""The formulas by which people plan the training of a transformer, by hand or in a notebook.

They are of the sizes alone and take no run: what raypar predicts of a run is in the modules beside this folder. Sizes
are l layers, h hidden, a heads, s tokens of a sequence, V vocabulary, b sequences of a microbatch, t tensor ranks.
"""

from raypar.planner.formulas.activations import ActivationForm, layer_activation_bytes
from raypar.planner.formulas.bubbles import bubble, dualpipe_bubble, zero_bubble_memory
from raypar.planner.formulas.checkpoints import daly_interval, goodput, young_interval
from raypar.planner.formulas.flops import forward_flops, training_flops
from raypar.planner.formulas.messages import collective_bytes, tensor_parallel_bytes, zero_bytes
from raypar.planner.formulas.parameters import embedding_parameters, layer_parameters, parameters
from raypar.planner.formulas.states import bytes_per_parameter, gpus_for
from raypar.planner.formulas.utilisation import days, hfu, hours_like, mfu

__all__ = [
    "ActivationForm",
    "bubble",
    "bytes_per_parameter",
    "collective_bytes",
    "daly_interval",
    "days",
    "dualpipe_bubble",
    "embedding_parameters",
    "forward_flops",
    "goodput",
    "gpus_for",
    "hfu",
    "hours_like",
    "layer_activation_bytes",
    "layer_parameters",
    "mfu",
    "parameters",
    "tensor_parallel_bytes",
    "training_flops",
    "young_interval",
    "zero_bubble_memory",
    "zero_bytes",
]
