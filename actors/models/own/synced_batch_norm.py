"""BatchNorm with the statistics of all replicas, in place of torch's, which needs torch.distributed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from raypar.actors.collective.replicas import replicas
from raypar.actors.models.module_tree import replace_modules
from raypar.actors.models.own.module_source_lines import note_copy


class SyncedBatchNorm(nn.SyncBatchNorm):
    """Normalizes by the mean and variance of each channel over the microbatches of all replicas.

    With one replica, and in evaluations by running statistics, it is a BatchNorm.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Return the normalized values.

        Args:
            input: Values (N, C, ...), of any floating dtype; statistics are computed in fp32 at least.
        """
        is_by_batch = self.training or self.running_mean is None or self.running_var is None
        if replicas.count == 1 or not is_by_batch:
            return super().forward(input)
        self._check_input_dim(input)
        x = input.float() if input.element_size() < 4 else input
        mean, variance, count = self._statistics(x)
        if self.training and self.running_mean is not None and self.running_var is not None:
            self._track(mean.detach(), variance.detach() * (count / (count - 1).clamp(min=1)))
        shape = (1, -1, *[1] * (x.dim() - 2))
        scale = (variance + self.eps).rsqrt()
        if self.affine:
            scale = scale * self.weight
        y = (x - mean.view(shape)) * scale.view(shape)
        return (y + self.bias.view(shape) if self.affine else y).to(input.dtype)

    def _statistics(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the mean (C,) and the variance (C,) over all replicas, and the number of values of a channel.

        Source: Chan et al. 1979, "Updating Formulae and a Pairwise Algorithm for Computing Sample Variances".
        """
        dims, channels = [dim for dim in range(x.dim()) if dim != 1], x.size(1)
        variance, mean = torch.var_mean(x, dims, correction=0)
        every = replicas.all_gather(torch.cat([mean, variance, mean.new_tensor([x.numel() / channels])])[None])
        means, variances, counts = every.split([channels, channels, 1], 1)
        count = counts.sum()
        mean = (counts * means).sum(0) / count
        return mean, (counts * (variances + (means - mean).square())).sum(0) / count, count.detach()

    @torch.no_grad()
    def _track(self, mean: Tensor, variance: Tensor) -> None:
        """Update the running statistics by the mean and the unbiased variance of a batch."""
        assert self.running_mean is not None and self.running_var is not None
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        weight = 1.0 / self.num_batches_tracked if self.momentum is None else self.momentum
        for running, found in ((self.running_mean, mean), (self.running_var, variance)):
            running.add_((found.to(running.dtype) - running) * weight)


def with_synced_norms(modules: Sequence[nn.Module]) -> list[nn.Module]:
    """Replace each ``nn.SyncBatchNorm`` in some layers by a SyncedBatchNorm with the same tensors.

    Args:
        modules: The layers. Subclasses of the user's own stay as they are.

    Returns:
        The layers; one that is an ``nn.SyncBatchNorm`` itself is another module.
    """
    layers = nn.ModuleList(modules)
    replace_modules(layers, {one: _synced(one) for one in layers.modules() if type(one) is nn.SyncBatchNorm})
    return list(layers)


def _synced(norm: nn.SyncBatchNorm) -> SyncedBatchNorm:
    made = SyncedBatchNorm(norm.num_features, norm.eps, norm.momentum, affine=False, track_running_stats=False)
    made.affine, made.track_running_stats = norm.affine, norm.track_running_stats
    made._parameters.update(norm._parameters)
    made._buffers.clear()  # those of the other module take their place
    note_copy(norm, made)
    return made
