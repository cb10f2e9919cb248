"""Text generation on one actor: the prompts are read once, then every step adds one token to each sequence.

Shapes: B sequences, S positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from raypar.actors.collective.autograd import joined_parts
from raypar.actors.collective.group import Group, Handle
from raypar.actors.data_parallel.stage_weights import WeightWindows
from raypar.actors.layers.attention.kv_cache import KVCache, going_on, incremental
from raypar.actors.pipeline.p2p import Courier
from raypar.actors.pipeline.stage import Stage
from raypar.actors.rng import derive
from raypar.actors.specs.model import Layers
from raypar.actors.specs.results import Span
from raypar.actors.specs.sampling import Prompts, Sampling
from raypar.actors.tensors import Values
from raypar.actors.worker.build.boundaries import peers_of
from raypar.actors.worker.build.flow import numbers_of, stage_of
from raypar.actors.worker.build.model_part import ModelPart
from raypar.actors.worker.build.rank_context import RankContext
from raypar.actors.worker.build.step import StepState
from raypar.actors.worker.probe import Probe
from raypar.schedules.action import Action, Op
from raypar.schedules.rules import needs

Order = Prompts | Literal["next", "end"]
Drawn = list[list[int]]  # by group, a token for each of its prompts
Scores = list[list[list[tuple[float, bool]]]]  # by group and prompt, of each token but the first; see Generation._score
_TOKENS = 1 << 30  # tag of the first group's tokens; below it are those of the messages between stages


def choose(logits_BV: Tensor, sampling: Sampling, prompts: Sequence[int], positions: Sequence[int]) -> Tensor:
    """Choose the next token of each sequence.

    The choice depends on the seed, the prompt and the position alone, and not on the other sequences.

    Args:
        logits_BV: Logits, of any floating dtype.
        sampling: How to choose.
        prompts: Number of each sequence's prompt.
        positions: Position of each sequence's next token.

    Returns:
        Token ids, (B,) int64.
    """
    logits_BV = logits_BV.float()
    if not sampling.temperature:
        return logits_BV.argmax(dim=-1)
    p_BV = (logits_BV / sampling.temperature).softmax(dim=-1).double()
    p_BV = p_BV.masked_fill(~_allowed(p_BV, sampling), 0.0)
    # By id and not by likelihood: of tokens that are nearly equally likely, rounding would change the order.
    below_BV = p_BV.cumsum(dim=-1)
    drawn = [_uniform(derive(sampling.seed, "token", *at)) for at in zip(prompts, positions, strict=True)]
    wanted_B1 = torch.tensor(drawn, dtype=torch.float64, device=p_BV.device)[:, None] * below_BV[:, -1:]
    return torch.searchsorted(below_BV, wanted_B1, right=True).squeeze(1).clamp(max=p_BV.shape[1] - 1)


def _allowed(p_BV: Tensor, sampling: Sampling) -> Tensor:
    """Return which tokens may be chosen, (B, V) bool."""
    allowed_BV = torch.ones_like(p_BV, dtype=torch.bool)
    if sampling.top_k is not None and sampling.top_k < p_BV.shape[1]:
        best = p_BV.topk(sampling.top_k, dim=-1).indices
        allowed_BV = torch.zeros_like(allowed_BV).scatter_(1, best, value=True)
    if sampling.top_p < 1:
        kept_BV = p_BV.masked_fill(~allowed_BV, 0.0)
        sorted_BV, order_BV = (kept_BV / kept_BV.sum(-1, keepdim=True)).sort(dim=-1, descending=True, stable=True)
        before_BV = sorted_BV.cumsum(dim=-1) - sorted_BV
        allowed_BV = allowed_BV & torch.zeros_like(allowed_BV).scatter_(1, order_BV, before_BV < sampling.top_p)
    return allowed_BV


def _uniform(seed: int) -> float:
    """Return a number in [0, 1) that a seed of 63 bits determines."""
    return (seed >> 10) / 2.0**53


class Generator:
    """Generates text on one actor, one generation at a time.

    Args:
        context: The actor's rank, device and groups.
        part: Its part of the model.
        probe: Its inspection.
    """

    def __init__(self, context: RankContext, part: ModelPart, probe: Probe) -> None:
        self._context, self._part, self._probe = context, part, probe
        self._under_way: ActorGeneration | None = None

    def perform(self, order: Order) -> Drawn | Scores:
        """Begin a generation by reading prompts, add a token to each sequence, or end the generation.

        Returns:
            The tokens by group, or the scores of scored prompts, on the actor that reports for its replica; else an
            empty list.

        Raises:
            ActionError: An action failed. All groups of this actor are aborted.
        """
        self._context.device.enter()
        drawn: Drawn | Scores
        if isinstance(order, Prompts) and order.scored:
            scoring = ActorGeneration(self._context, self._part, order)
            scoring.run(self._begun(order), is_prompt=True)
            drawn = scoring.scores if self._context.leads else []
        elif isinstance(order, Prompts):
            self._under_way = ActorGeneration(self._context, self._part, order)
            drawn = self._under_way.run(self._begun(order), is_prompt=True)
        elif order == "next":
            assert self._under_way is not None
            drawn = self._under_way.run(self._begun(self._under_way.prompts), is_prompt=False)
        else:
            assert self._under_way is not None
            self._under_way.end()
            self._under_way, drawn = None, []
        self._probe.cache_bytes = 0 if self._under_way is None else self._under_way.num_bytes
        self._probe.sequences = () if self._under_way is None else self._under_way.sizes
        self._probe.step.now = None
        return drawn

    def _begun(self, prompts: Prompts) -> StepState:
        """Begin a step of the generation, which saves nothing for a backward."""
        number = 0 if self._under_way is None else self._under_way.steps
        step = self._probe.step = StepState("evaluate", number, len(prompts.groups))
        self._part.begin(number, train=False)
        self._context.device.begin()
        return step


class ActorGeneration:
    """A generation under way on one actor.

    Args:
        context: The actor's rank, device and groups.
        part: Its part of the model.
        prompts: The prompts of its replica.

    Attributes:
        prompts: The same.
        steps: Number of tokens that were added to each sequence.
        scores: By group, the scores, on the actor of the last stage.
    """

    def __init__(self, context: RankContext, part: ModelPart, prompts: Prompts) -> None:
        self._context, self._stages, self.prompts = context, part.stages, prompts
        self._incremental = {number: incremental(stage.modules) for number, stage in part.stages.items()}
        model = context.plan.run.model
        self._vocab, self._again = model.vocab, isinstance(model, Layers) and not prompts.scored
        self._alone = isinstance(model, Layers) and model.goes_by_length
        self._texts = [
            [[*prompt.tokens] for prompt in one] for one in prompts.groups
        ]  # for models without caches, which compute whole texts again
        schedule, group = prompts.schedule, context.groups.get("pp")
        self._row = schedule.rows[context.row]
        self._windows = WeightWindows(part.weights, self._row, context.plan.run.recompute)
        self._first, self._last = schedule.placement[0], schedule.placement[-1]
        sizes = partial(peers_of, context.world, context.plan.rank, schedule=schedule), schedule.num_microbatches
        self._couriers = {is_prompt: Courier(group, *sizes, varies=True) for is_prompt in (True, False)}
        self._courier, self._is_prompt, self.steps = self._couriers[True], True, 0
        self._lengths = [torch.tensor([len(prompt.tokens) for prompt in one]) for one in prompts.groups]
        self._sequences = [KVCache(slots) for slots in prompts.slots]
        self._values: dict[Action, Values] = {}
        self._next: dict[int, Tensor] = {}  # on the actor of the first stage: by group, the next tokens
        self._sending: list[Handle] = []  # of the tokens that this step has chosen
        self._sent: list[Handle] = []  # of those of the step before
        self._drawn: Drawn = []
        self.scores: Scores = []
        self._methods: dict[Op, Callable[[Action], object]] = {
            Op.F: self._forward,
            Op.SEND_F: lambda action: self._courier.send(action, self._take(action)),
            Op.RECV_F: lambda action: self._values.update({action: self._courier.receive(action)}),
            Op.UNSHARD: lambda action: self._windows.open(stage_of(action)),
            Op.RESHARD: lambda action: self._windows.close(stage_of(action)),
        }

    @property
    def num_bytes(self) -> int:
        """Bytes of the caches."""
        return sum(one.num_bytes for one in self._sequences)

    @property
    def sizes(self) -> tuple[tuple[int, int], ...]:
        """Of each group, the number of sequences and the positions of their caches."""
        return tuple(zip(map(len, self.prompts.groups), self.prompts.slots, strict=True))

    def run(self, step: StepState, *, is_prompt: bool) -> Drawn:
        """Perform the row: read the prompts up to their last tokens, or add a token to each sequence.

        Args:
            step: The step, to which the actions are added.
            is_prompt: Whether to read the prompts.

        Raises:
            ActionError: An action failed.
        """
        self._courier, self._is_prompt, self._drawn = self._couriers[is_prompt], is_prompt, []
        self._sent, self._sending = self._sending, []
        if self._again and is_prompt:
            return []  # there is no cache to fill
        if self._again:
            self._courier.begin()  # texts have grown
        self._windows.begin()
        for action in self._row:
            step.now, start = action, self._context.device.mark()
            try:
                self._methods[action.op](action)
            except Exception as error:
                raise self._context.failed(str(action), None, error) from None
            step.events.append(Span(action, start, self._context.device.mark()))
        self._settle("end of step")
        self.steps += not is_prompt
        return self._drawn if self._context.leads else []

    def end(self) -> None:
        """Receive the tokens that are still under way. Raises ActionError."""
        with self._context.reports("end of generation"):
            if self.steps and self._context.row == self._first != self._last:
                for group in range(len(self.prompts.groups)):
                    self._tokens(group)
        self._sent = self._sending
        self._settle("end of generation")

    def _settle(self, what: str) -> None:
        """Wait until all messages are received, except this step's tokens. Raises ActionError."""
        with self._context.reports(what):
            self._courier.drain()
            for handle in self._sent:
                handle.wait()
            self._context.synchronize()

    def _forward(self, action: Action) -> None:
        """Compute a stage for a group of sequences; the last one chooses their tokens."""
        number, group = numbers_of(action)
        stage, sequences = self._stages[number], self._sequences[group]
        if not self._is_prompt and not self._again:
            sequences.go_to(self._lengths[group] - 1 + self.steps, self._context.device.device)
        inputs = self._inputs(group) if number == 0 else self._take(action)
        scored = self.prompts.scored
        head = scored or not self._is_prompt
        with nullcontext() if scored or self._again else going_on(self._incremental[number], sequences):
            outputs = self._infer_alone(stage, inputs, group) if self._alone else stage.infer(inputs, head=head)
        if not stage.is_last:
            self._values[action] = outputs
        elif scored:
            self._score(group, outputs[0])
        elif not self._is_prompt:
            self._choose(group, outputs[0])

    def _infer_alone(self, stage: Stage, inputs: Values, group: int) -> Values:
        """Compute a stage for each text of a group without its padding, on which its numbers would depend."""
        (padded_BS,), ends = inputs, (self._lengths[group] + (-1 if self.prompts.scored else self.steps)).tolist()
        rows = [stage.infer((one[None, :end],))[0] for one, end in zip(padded_BS, ends, strict=True)]
        outputs = rows[0].new_zeros(len(rows), padded_BS.shape[1], rows[0].shape[-1])
        for output, row in zip(outputs, rows, strict=True):
            output[: row.shape[1]] = row[0]
        return (outputs,)

    def _inputs(self, group: int) -> Values:
        """Return the next token ids, (B, S) int64: all but the last one of the prompts, padded, then one at a time.

        Sequence parallelism divides dim 1, so it is padded to a multiple of the ranks; one token is repeated.
        """
        if self._again:
            return self._whole_texts(group)
        run, prompts = self._context.plan.run, [prompt.tokens for prompt in self.prompts.groups[group]]
        multiple = run.mesh.tensor_ranks if run.sequence_parallel else 1
        if not self._is_prompt:
            next_B = self._tokens(group) if self.steps else torch.tensor([tokens[-1] for tokens in prompts])
            return self._context.device.to((next_B[:, None].expand(-1, multiple).contiguous(),))
        longest = max(1, max(map(len, prompts)) - 1)
        width = -(-longest // multiple) * multiple
        padded = [(*tokens[:width], *[0] * (width - len(tokens[:width]))) for tokens in prompts]
        return self._context.device.to((torch.tensor(padded),))

    def _whole_texts(self, group: int) -> Values:
        """Return all token ids of the texts of a group, (B, S) int64, padded at the end."""
        texts = self._texts[group]
        if self.steps:
            for text, token in zip(texts, self._tokens(group).tolist(), strict=True):
                text.append(token)
        width = max(map(len, texts))
        return self._context.device.to((torch.tensor([[*text, *[0] * (width - len(text))] for text in texts]),))

    def _choose(self, group: int, logits_BSV: Tensor) -> None:
        """Choose the next tokens of a group, report them, and pass them to the first stage."""
        logits_BV = logits_BSV[:, 0]
        if self._again:
            ends_B = (self._lengths[group] - 1 + self.steps).to(logits_BSV.device)
            logits_BV = logits_BSV[torch.arange(len(ends_B), device=logits_BSV.device), ends_B]
        if logits_BV.shape[-1] < self._vocab:
            logits_BV = joined_parts(self._context.groups["tp"], 1, self._vocab, logits_BV)
        prompts, steps = self.prompts.groups[group], self.steps
        positions = [len(prompt.tokens) + steps for prompt in prompts]
        tokens_B = choose(logits_BV, self.prompts.sampling, [prompt.number for prompt in prompts], positions).cpu()
        self._drawn.append(tokens_B.tolist())
        if self._first == self._last:
            self._next[group] = tokens_B
        else:
            self._sending.append(self._link.send(tokens_B, self._first, _TOKENS + group, count_as="send tokens"))

    def _score(self, group: int, logits_BSV: Tensor) -> None:
        """Keep the log-probability of each token given those before it, and whether it is the likeliest."""
        if logits_BSV.shape[-1] < self._vocab:
            logits_BSV = joined_parts(self._context.groups["tp"], 2, self._vocab, logits_BSV)
        scores = []
        for logits_SV, prompt in zip(logits_BSV.float(), self.prompts.groups[group], strict=True):
            ids_T = torch.tensor(prompt.tokens[1:], device=logits_SV.device)
            logs_TV = logits_SV[: len(ids_T)].log_softmax(-1)
            found_T = logs_TV.gather(1, ids_T[:, None])[:, 0]
            scores.append([*zip(found_T.tolist(), (logs_TV.argmax(-1) == ids_T).tolist(), strict=True)])
        self.scores.append(scores)

    def _tokens(self, group: int) -> Tensor:
        """Return the tokens (B,) int64 of a group that the last stage chose in the step before."""
        if self._first == self._last:
            return self._next.pop(group)
        tokens_B = torch.empty(len(self._lengths[group]), dtype=torch.int64)
        self._link.recv(tokens_B, self._last, _TOKENS + group, count_as="recv tokens").wait()
        return tokens_B

    @property
    def _link(self) -> Group:
        """The group of the pipeline, for tensors on the host."""
        return self._context.groups["pp"].host

    def _take(self, action: Action) -> Values:
        """Remove and return the values that an action needs from another one."""
        (source,) = (need for need in needs(action, self.prompts.schedule) if need in self._values)
        return self._values.pop(source)
