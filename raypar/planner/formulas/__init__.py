"""The formulas by which people plan the training of a transformer, by hand or in a notebook.

They are of the sizes alone and take no run: what raypar predicts of a run is in the modules beside this folder. Sizes
are l layers, h hidden, a heads, s tokens of a sequence, V vocabulary, b sequences of a microbatch, t tensor ranks.
"""

from raypar.planner.formulas.activations import ActivationForm as ActivationForm
from raypar.planner.formulas.activations import layer_activation_bytes as layer_activation_bytes
from raypar.planner.formulas.bubbles import bubble as bubble
from raypar.planner.formulas.bubbles import dualpipe_bubble as dualpipe_bubble
from raypar.planner.formulas.bubbles import zero_bubble_memory as zero_bubble_memory
from raypar.planner.formulas.checkpoints import daly_interval as daly_interval
from raypar.planner.formulas.checkpoints import goodput as goodput
from raypar.planner.formulas.checkpoints import young_interval as young_interval
from raypar.planner.formulas.flops import forward_flops as forward_flops
from raypar.planner.formulas.flops import training_flops as training_flops
from raypar.planner.formulas.messages import collective_bytes as collective_bytes
from raypar.planner.formulas.messages import tensor_parallel_bytes as tensor_parallel_bytes
from raypar.planner.formulas.messages import zero_bytes as zero_bytes
from raypar.planner.formulas.parameters import embedding_parameters as embedding_parameters
from raypar.planner.formulas.parameters import layer_parameters as layer_parameters
from raypar.planner.formulas.parameters import parameters as parameters
from raypar.planner.formulas.states import bytes_per_parameter as bytes_per_parameter
from raypar.planner.formulas.states import gpus_for as gpus_for
from raypar.planner.formulas.utilisation import days as days
from raypar.planner.formulas.utilisation import hfu as hfu
from raypar.planner.formulas.utilisation import hours_like as hours_like
from raypar.planner.formulas.utilisation import mfu as mfu
