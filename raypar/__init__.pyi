"""The public names, and where each is defined: the table from which raypar/__init__.py imports them."""

from raypar.actors.collective.replicas import replicas as replicas
from raypar.actors.errors import CheckpointError as CheckpointError
from raypar.actors.errors import NonFiniteError as NonFiniteError
from raypar.actors.expert_parallel.auxiliary_loss import AuxiliaryLoss as AuxiliaryLoss
from raypar.actors.expert_parallel.experts import run_experts as run_experts
from raypar.actors.expert_parallel.router_load import RouterLoad as RouterLoad
from raypar.actors.layers import masks as masks
from raypar.actors.layers.attention.chunked_attention import chunked_attention as chunked_attention
from raypar.actors.layers.attention.flex_attention import flex_attention as flex_attention
from raypar.actors.layers.attention.linear_attention import LinearAttention as LinearAttention
from raypar.actors.layers.attention.relative_attention import RelativeAttention as RelativeAttention
from raypar.actors.layers.attention.time_mixing import TimeMixing as TimeMixing
from raypar.actors.mesh.mesh import Mesh as Mesh
from raypar.actors.specs.data import Batches as Batches
from raypar.actors.specs.data import Examples as Examples
from raypar.actors.specs.data import Text as Text
from raypar.actors.specs.lora import Lora as Lora
from raypar.actors.specs.model import GPT as GPT
from raypar.actors.specs.model import Layers as Layers
from raypar.actors.specs.model import Llama as Llama
from raypar.actors.specs.model import RopeScaling as RopeScaling
from raypar.actors.specs.moe import MoE as MoE
from raypar.actors.specs.optim import SGD as SGD
from raypar.actors.specs.optim import AdamW as AdamW
from raypar.actors.specs.optim import Muon as Muon
from raypar.actors.specs.precision import LossScale as LossScale
from raypar.actors.specs.precision import Precision as Precision
from raypar.actors.specs.resources import Resources as Resources
from raypar.actors.specs.run import Run as Run
from raypar.cli.repl import tab_completion as tab_completion
from raypar.config.automatic import Planned as Planned
from raypar.config.automatic import plan as plan
from raypar.config.expert_layout_names import layout as layout
from raypar.config.hugging_face.config_reader import HF as HF
from raypar.config.recipes import depth as depth
from raypar.config.recipes import recipe as recipe
from raypar.errors import (
    ActorDiedError as ActorDiedError,
)
from raypar.errors import (
    CallError as CallError,
)
from raypar.errors import (
    ConfigError as ConfigError,
)
from raypar.errors import (
    JobError as JobError,
)
from raypar.errors import (
    RelayoutLostError as RelayoutLostError,
)
from raypar.errors import (
    StalledError as StalledError,
)
from raypar.errors import (
    StepLostError as StepLostError,
)
from raypar.job.job import Job as Job
from raypar.job.launch import launch as launch
from raypar.job.lm_eval import lm_eval_model as lm_eval_model
from raypar.job.microbatch import fit_microbatch as fit_microbatch
from raypar.job.recover import chaos as chaos
from raypar.job.recover.failures import Failure as Failure
from raypar.job.recover.relayout import Relayout as Relayout
from raypar.job.start.before_launch import faults as faults
from raypar.job.stepping.replay import Replayed as Replayed
from raypar.job.stepping.replay import replay as replay
from raypar.job.stepping.stepper import Stepper as Stepper
from raypar.job.text.growing_text import Continuation as Continuation
from raypar.job.text.scoring import Scored as Scored
from raypar.parity.verify import Verdict as Verdict
from raypar.parity.verify import verify as verify
from raypar.planner import formulas as formulas
from raypar.reporting.evaluation import Evaluation as Evaluation
from raypar.reporting.report import Report as Report
from raypar.reporting.tables.expert_table import expert_table as expert_table
from raypar.schedules.catalog import register_schedule as register_schedule
