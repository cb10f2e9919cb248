"""Apply the mesh axes' parallel styles to the layers of a model: first those of cp, then those of tp and ep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import Tensor, nn

from raypar.actors.collective.group import Group, Groups
from raypar.actors.context_parallel.cores import context_styles
from raypar.actors.context_parallel.experts import ExpertsOfTokens
from raypar.actors.mesh.mesh import Mesh
from raypar.actors.models.base import Model
from raypar.actors.models.expert_lists import ExpertParallel
from raypar.actors.models.module_tree import modules_named, replace_modules
from raypar.actors.models.parallel_style import AxisStyles
from raypar.actors.sharding import Pieces, Shard, Sharding
from raypar.actors.specs.moe import orders_of
from raypar.actors.specs.run import Run
from raypar.actors.tensor_parallel.grid.cube import cube_styles
from raypar.actors.tensor_parallel.grid.summa import summa_styles
from raypar.actors.tensor_parallel.megatron import megatron_styles


def axis_styles(run: Run, groups: Mapping[str, Group]) -> list[AxisStyles]:
    """Return the styles of the mesh axes of a run, in the order of application.

    Args:
        run: The run.
        groups: This rank's groups by key.
    """
    axes = []
    if "cp" in groups:
        axes.append(context_styles(run.context, groups["cp"]))
    if "tp" in groups:
        axes.append(tensor_styles(run.mesh, groups, sequence=run.sequence_parallel))
    if "ep" in groups:
        tokens = groups.get("tp") if run.mesh.folds_experts and not run.sequence_parallel else None
        group, last = groups["ep"], run.mesh.expert_actors
        orders = orders_of(run.expert_order)
        holders = range(group.size - last if last else 0, group.size)
        style = ExpertParallel(group, holders, tokens, run.expert_shadows, orders, run.expert_rounds)
        axes.append(AxisStyles({"expert": style}))
    return axes


def tensor_styles(mesh: Mesh, groups: Mapping[str, Group], *, sequence: bool) -> AxisStyles:
    """Return the styles of the tp axis of a mesh, in 1D or on a grid.

    Args:
        mesh: The mesh.
        groups: This rank's groups by key.
        sequence: Whether 1D tensor parallelism shards the sequence too.
    """
    if mesh.grid is None:
        axis = megatron_styles(group := groups["tp"], sequence=sequence)
        if not mesh.folds_experts:
            return axis
        # Tensor ranks have whole experts. They route all tokens alike, or each those of its part of the sequence.
        styles = {**axis.styles}
        del styles["moe"]
        if sequence:
            parts = [Pieces.at(rank, group.size) for rank in range(group.size)]
            styles["moe"] = ExpertsOfTokens(parts, group, is_tensor=True)
        return replace(axis, styles=styles, divides_experts=True)
    return cube_styles(groups) if mesh.grid.kind == "3d" else summa_styles(groups)


class Parallelizer:
    """Applies styles to the layers of a model, axis by axis, and records the sharding of their tensors.

    Args:
        model: The model. If a style shards its logits, its cross-entropy is replaced.
        axes: The styles of each mesh axis, in the order of application.

    Attributes:
        shards: This actor's part of each sharded parameter, by logical name; other parameters are whole.
        partial: Groups over which the gradient of a parameter is to be summed, because all their members hold the same
            part of the parameter but only a part of the sum; by logical name.
    """

    def __init__(self, model: Model, axes: Sequence[AxisStyles]) -> None:
        self._model, self._axes = model, tuple(axes)
        self._outputs: list[dict[str, Sharding]] = [{} for _ in self._axes]
        self.shards: dict[str, Shard] = {}
        self.partial: dict[str, Groups] = {}

    def parallelize(self, name: str, layer: nn.Module) -> dict[str, Shard]:
        """Apply the styles to the modules of a layer, in place, before the layer has weights.

        Args:
            name: Logical name of the layer.
            layer: The layer, or a container of layers.

        Returns:
            This actor's part of each sharded parameter, by the name inside the layer.
        """
        found: dict[str, Shard] = {}
        for axis, outputs in zip(self._axes, self._outputs, strict=True):
            found |= self._apply(axis, outputs, name, layer)
        return found

    def check_loss(self, loss: Tensor) -> None:
        """Raise ValueError if a loss is computed from only a part of the last layer's outputs."""
        for axis in self._axes:
            axis.check_loss(loss)

    @property
    def outputs(self) -> dict[str, Sharding]:
        """The sharding of the outputs of layers and of some modules in them, by logical name."""
        found: dict[str, Sharding] = dict.fromkeys((name for outputs in self._outputs for name in outputs), Sharding())
        for axis, outputs in zip(self._axes, self._outputs, strict=True):
            # without an entry of an axis, an output is sharded as between layers
            found = {name: before.then(outputs.get(name, axis.flow)) for name, before in found.items()}
        return found

    def _apply(self, axis: AxisStyles, outputs: dict[str, Sharding], name: str, layer: nn.Module) -> dict[str, Shard]:
        outputs[name] = axis.flow
        found: dict[str, Shard] = {}
        for pattern, kind in self._model.tensor_plan:
            if (style := axis.style(kind)) is None:
                continue
            replacements: dict[nn.Module, nn.Module] = {}
            for inner, module in modules_named(layer, name, pattern):
                path = f"{name}.{inner}".rstrip(".")
                applied = style.apply(path, module)
                if applied.module is not module:
                    replacements[module] = applied.module
                found |= {f"{inner}.{parameter}": shard for parameter, shard in applied.shards.items()}
                self.partial |= {f"{path}.{parameter}": groups for parameter, groups in applied.partial.items()}
                outputs |= {f"{path}.{own}".rstrip("."): sharding for own, sharding in applied.outputs.items()}
                if applied.cross_entropy is not None:
                    self._model.cross_entropy = applied.cross_entropy
                    if self._model.labels is not None:
                        self._model.labels.vocabulary = applied.vocabulary
                    outputs[name] = applied.outputs[""]  # the layer ends in the logits
            replace_modules(layer, replacements)
        self.shards |= {f"{name}.{inner}": shard for inner, shard in found.items()}
        if axis.partial:
            whole = [f"{name}.{inner}" for inner, _ in layer.named_parameters() if inner not in found]
            apart = self._model.experts.keys() if axis.divides_experts else ()
            self.partial |= dict.fromkeys((one for one in whole if one not in apart), axis.partial)
        axis.guard(name, layer)
        return found
