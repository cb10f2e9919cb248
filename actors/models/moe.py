"""A block's experts, which replace its MLP.

Shapes: B microbatch, S sequence, D hidden, T tokens (B x S), E experts, K choices of a token.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from raypar.actors.expert_parallel.experts import DROPPED, DividedExperts, run_experts
from raypar.actors.expert_parallel.gates import capacity_of, over_capacity, updated_bias
from raypar.actors.expert_parallel.grouped import pads_rows, run_grouped
from raypar.actors.expert_parallel.joint_loss import JointLoss
from raypar.actors.expert_parallel.losses import Sums, alone, gshard_loss, load_of, switch_loss, z_loss
from raypar.actors.expert_parallel.record import Balanced, attach_loss
from raypar.actors.expert_parallel.router import Router, Routing
from raypar.actors.layers.documents import Documents
from raypar.actors.models.mlp import are_groupable, grouped_mlps
from raypar.actors.specs.model import Transformer

MakeMLP = Callable[[int], nn.Module]  # by its width


class MixtureOfExperts(nn.Module, Balanced):
    """A mixture of experts, (B, S, D) -> (B, S, D).

    Args:
        model: The model.
        num_experts: Number E of experts.
        mlp: Makes an MLP (..., D) -> (..., D).
        documents: Says which tokens of the microbatch are padding: no expert computes them, and no loss counts them.
        joint: The joint loss, which all layers share.
        block: The index of the block.

    Attributes:
        router: Chooses experts for tokens.
        experts: The experts. Expert parallelism replaces the list by this actor's experts.
        shared: The MLP of all tokens beside the experts; None if there is none.
        residual: The MLP of a PR-MoE; None in other models.
        mix: The two coefficients of a PR-MoE, (D) -> (2); None in other models.
        num_experts: Number of experts of all actors.
        sums: Sums a tensor over the actors that have tokens of the same sequences; see losses.py.
        over: Says which choices (B, S, K) are over the capacity of their expert, from those of this actor's tokens.
        attaches: Whether this actor gives auxiliary losses their gradients: of actors that compute the same routing
            and add up its gradients, one does.
    """

    def __init__(
        self, model: Transformer, num_experts: int, mlp: MakeMLP, documents: Documents, joint: JointLoss, block: int
    ) -> None:
        super().__init__()
        assert model.moe is not None
        self.spec = model.moe
        self.num_experts = num_experts
        self.attaches = True
        self.documents = documents
        self._joint, self._is_first = joint, block == model.moe.blocks(model.layers)[0]
        self.sums: Sums = alone
        self.over: Callable[[Tensor], Tensor] = self._over
        self.router = Router(self.spec, model.hidden, num_experts)
        self.is_balanced = self.router.bias is not None
        self.adds_losses = bool((self.spec.alpha and self.spec.loss != "none") or self.spec.z_loss)
        self.experts = nn.ModuleList(mlp(model.expert_width) for _ in range(num_experts))
        self.shared = mlp(model.expert_width * self.spec.shared) if self.spec.shared else None
        self.residual = mlp(model.mlp_width) if self.spec.residual else None
        self.mix = nn.Linear(model.hidden, 2) if self.spec.residual else None

    def forward(self, x_BSD: Tensor) -> Tensor:
        """Route the tokens. A token that all its experts drop gets zeros here."""
        routing = self.router(x_BSD)
        real_T = self.documents.real(self.router.noise.sharding, x_BSD.shape[:2])
        if real_T is not None:
            routing = routing._replace(chosen=routing.chosen.masked_fill(~real_T.unsqueeze(1), DROPPED))
        chosen_TK = self._kept_choices(routing, sequences=len(x_BSD))
        y_BSD = self._of_experts(x_BSD, chosen_TK, routing, has_padding=real_T is not None).view_as(x_BSD)
        if self.residual is not None and self.mix is not None:
            parts_BS2 = self.mix(x_BSD).float().softmax(-1).to(y_BSD.dtype)
            y_BSD = y_BSD * parts_BS2[..., :1] + self.residual(x_BSD) * parts_BS2[..., 1:]
        if self.shared is not None:
            y_BSD = y_BSD + self.shared(x_BSD)
        return self._with_losses(y_BSD, routing, real_T) if self.training else y_BSD

    def _of_experts(self, x_BSD: Tensor, chosen_TK: Tensor, routing: Routing, *, has_padding: bool) -> Tensor:
        """Return the outputs of the experts for their tokens, weighted and added up: (T, D)."""
        experts, gates_TK, x_TD = self.experts, routing.gates, x_BSD.flatten(0, 1)
        if not isinstance(experts, DividedExperts) and are_groupable(mlps := [*experts], x_TD):
            may_drop = has_padding or self.spec.capacity is not None or routing.skipped is not None
            compute = partial(grouped_mlps, mlps)
            return run_grouped(x_TD, chosen_TK, gates_TK, self.num_experts, compute, may_drop=may_drop)
        if isinstance(experts, DividedExperts):
            experts.most_rows = self._most_rows(len(x_BSD), chosen_TK) if pads_rows(x_TD) and not has_padding else None
        return run_experts(x_TD, experts, chosen_TK, gates_TK)

    def _most_rows(self, sequences: int, chosen_TK: Tensor) -> int | None:
        """Return the most tokens that one expert computes; None without a capacity, or one for parts of sequences."""
        if self.spec.capacity is None or self.over != self._over:
            return None
        tokens, choices = chosen_TK.shape
        each = capacity_of(self.spec.capacity, tokens // sequences, choices, self.num_experts)
        return min(sequences * each, tokens)

    @torch.no_grad()
    def balance(self, asked_E: Tensor) -> None:
        """Move the router's bias, if it has one, towards an even load."""
        if (bias_E := self.router.bias) is not None:
            bias_E.copy_(updated_bias(bias_E, asked_E, self.spec.bias_rate))

    def _kept_choices(self, routing: Routing, sequences: int) -> Tensor:
        """Return the choices (T, K), DROPPED where they are over the capacity or the router skips them at random.

        Args:
            routing: The router's choices.
            sequences: Number B of sequences; an expert's capacity is of tokens of one sequence.
        """
        chosen_TK, spec, num_experts = routing.chosen, self.spec, self.num_experts
        made_TK = chosen_TK
        if spec.capacity is not None:
            over_BSK = self.over(chosen_TK.unflatten(0, (sequences, -1)))
            made_TK = chosen_TK.masked_fill(over_BSK.flatten(0, 1), DROPPED)
        if routing.skipped is not None:
            made_TK = made_TK.masked_fill(routing.skipped, DROPPED)
        if self.record is not None:
            asked_E, made_E = load_of(chosen_TK, num_experts), load_of(made_TK, num_experts)
            self.record.tokens(self.name, asked_E, asked_E - made_E)
            self.record.scores(self.name, routing.logits)
        return made_TK

    def _over(self, chosen_BSK: Tensor) -> Tensor:
        """Return which choices (B, S, K) of whole sequences are over the capacity of their expert."""
        factor, choices = self.spec.capacity, chosen_BSK.shape[2]
        assert factor is not None
        real_B = [chosen_BSK.shape[1]] * len(chosen_BSK)
        if self.documents.lengths is not None:
            real_B = (chosen_BSK[:, :, 0] != DROPPED).sum(1).tolist()
        capacities = [capacity_of(factor, tokens, choices, self.num_experts) for tokens in real_B]
        return over_capacity(chosen_BSK.flatten(0, 1), self.num_experts, capacities).view_as(chosen_BSK)

    def _with_losses(self, y_BSD: Tensor, routing: Routing, real_T: Tensor | None) -> Tensor:
        """Return the output with the auxiliary losses attached, whose gradients its backward adds."""
        spec, losses = self.spec, dict[str, Tensor]()
        if spec.loss == "switch" and spec.alpha:
            losses["switch"] = spec.alpha * switch_loss(routing.probs, routing.chosen, self.sums, real_T)
        elif spec.loss == "gshard" and spec.alpha:
            first_T, groups = routing.chosen[:, 0], len(y_BSD)
            losses["gshard"] = spec.alpha * gshard_loss(routing.probs, first_T, groups, self.sums, real_T)
        elif spec.loss == "joint" and spec.alpha:
            again = self.record is not None and self.record.microbatch is None
            at = self.documents.microbatch, self.sums, real_T
            more = self._joint.of_layer(routing.probs, routing.chosen, *at, is_first=self._is_first, again=again)
            losses["joint"] = spec.alpha * more
        if spec.z_loss:
            losses["z"] = spec.z_loss * z_loss(routing.logits, self.sums, real_T)
        for kind, loss in losses.items():
            if self.record is not None:
                self.record.loss(self.name, kind, loss)
            if self.attaches:
                y_BSD = attach_loss(y_BSD, loss, self.record)
        return y_BSD
