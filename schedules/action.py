"""One action of a pipeline rank: an op on a stage, for a microbatch.

The spelling is that of ``torch.distributed.pipelining``: ``1F0`` is stage 1's forward of microbatch 0, ``0SEND_F3`` is
stage 0 sending its output of microbatch 3, ``2REDUCE_GRAD`` is an action of a whole stage. raypar adds one op,
``STEP``: the optimizer update of everything that the rank holds. It has neither stage nor microbatch. An asynchronous
schedule updates each stage by itself: ``1STEP3`` is stage 1's update by step 3 of the schedule. ``1USE2`` lets the
next forwards of stage 1 compute with version 2 of its weights, the one after two updates.
``1VALIDATE3`` checks whether the update by step 3 was right, once the gradients of all stages are known.

``1OFFLOAD3`` moves what stage 1 saved for the backward of microbatch 3 to host memory, and ``1RELOAD3`` moves it back.

A skip connection, from a stage to a later one than the next, has separate messages, which name the other stage:
``0SEND_F3@2`` is stage 0 sending to stage 2, ``2SEND_B3@0`` is stage 2 sending the gradient back.
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import NamedTuple


class Op(StrEnum):
    """The op of an action. Its pseudocode is that of the actor that holds the stage.

    Attributes:
        F: ``outbox[mb] = saved[mb] = stage(inbox[mb])``
        B: the full backward: ``I``, then ``W``
        I: ``outbox[mb] = inputs.grad`` from ``saved[mb]``: the previous stage waits for it
        W: ``weights.grad += ...`` from ``saved.pop(mb)``: only the optimizer waits for it
        SEND_F: ``group.send(outbox.pop(mb), to=the rank of stage + 1)``, the activation; a skip's to its target
        RECV_F: ``inbox[mb] = group.recv(the rank of stage - 1)``; a skip's from its source
        SEND_B: ``group.send(outbox.pop(mb), to=the rank of stage - 1)``, the gradient; a skip's to its source
        RECV_B: ``inbox[mb] = group.recv(the rank of stage + 1)``; a skip's from its target
        UNSHARD: ``weights = all_gather(shard)``
        RESHARD: ``weights = None``, the shard stays
        REDUCE_GRAD: ``weights.grad = all_reduce(weights.grad)`` over the replicas of the stage
        STEP: ``optimizer.step()`` for everything the rank holds, or for one stage
        USE: ``weights = versions[...]`` for the next forwards of the stage
        VALIDATE: ``if not vote.wait(): weights, states = copies; optimizer.step()``, and the forwards since again
        OFFLOAD: ``saved[mb] = saved[mb].to("cpu")``, after F
        RELOAD: ``saved[mb] = saved[mb].to(device)``, before B or I
    """

    F = "F"
    B = "B"
    I = "I"  # noqa: E741  (the field's letter)
    W = "W"
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"
    UNSHARD = "UNSHARD"
    RESHARD = "RESHARD"
    REDUCE_GRAD = "REDUCE_GRAD"
    STEP = "STEP"
    USE = "USE"
    VALIDATE = "VALIDATE"
    OFFLOAD = "OFFLOAD"
    RELOAD = "RELOAD"


COMPUTE = frozenset({Op.F, Op.B, Op.I, Op.W})
BACKWARDS = frozenset({Op.B, Op.I, Op.W})
SENDS = frozenset({Op.SEND_F, Op.SEND_B})
RECVS = frozenset({Op.RECV_F, Op.RECV_B})
MOVES = frozenset({Op.OFFLOAD, Op.RELOAD})
WHOLE_STAGE = frozenset({Op.UNSHARD, Op.RESHARD, Op.REDUCE_GRAD})

_SPELLING = re.compile(r"([0-9]{0,18})([A-Z_]+?)([0-9]{0,18})(?:@([0-9]{1,18}))?")
_MOST_QUOTED = 40  # characters of a wrong text that an error message quotes


class Action(NamedTuple):
    """One action. ``Action(1, Op.F, 0)`` prints as ``1F0``, and ``Action.parse("1F0")`` reads it back.

    Attributes:
        stage: The stage, or None for a STEP of all stages of a rank.
        op: The op.
        microbatch: The microbatch, or None for a STEP of all stages and for the ops of a whole stage. For the STEP of
            one stage and for VALIDATE it is the step, and for USE the version.
        peer: Of a SEND or RECV of a skip connection, the stage at its other end; else None.
    """

    stage: int | None
    op: Op
    microbatch: int | None
    peer: int | None = None

    def __str__(self) -> str:
        stage = "" if self.stage is None else self.stage
        microbatch = "" if self.microbatch is None else self.microbatch
        peer = "" if self.peer is None else f"@{self.peer}"
        return f"{stage}{self.op.value}{microbatch}{peer}"

    def __repr__(self) -> str:
        return str(self)

    @classmethod
    def parse(cls, text: str) -> Action:
        """Read one action from a text like ``1F0``.

        Args:
            text: The text; blanks around it are ignored.

        Returns:
            The action.

        Raises:
            ValueError: If the text is not an action; the message says why.
        """
        match = _SPELLING.fullmatch(text.strip())
        text = text if len(text) <= _MOST_QUOTED else f"{text[:_MOST_QUOTED]}..."
        if match is None or match[2] not in Op.__members__:
            raise ValueError(f"{text!r} is not an action: expected something like 1F0, 0SEND_F3, 2REDUCE_GRAD or STEP")
        op = Op[match[2]]
        stage = int(match[1]) if match[1] else None
        microbatch = int(match[3]) if match[3] else None
        peer = int(match[4]) if match[4] else None
        wants_stage = op is not Op.STEP or microbatch is not None
        wants_microbatch = op not in WHOLE_STAGE and (op is not Op.STEP or stage is not None)
        if (stage is not None) != wants_stage:
            wants = "needs a" if wants_stage else "takes no"
            raise ValueError(f"{text!r}: {op.value} {wants} stage number in front")
        if (microbatch is not None) != wants_microbatch:
            wants = "needs a" if wants_microbatch else "takes no"
            what = {Op.STEP: "step", Op.VALIDATE: "step", Op.USE: "version"}.get(op, "microbatch")
            raise ValueError(f"{text!r}: {op.value} {wants} {what} number after it")
        if peer is not None and op not in SENDS and op not in RECVS:
            raise ValueError(f"{text!r}: {op.value} takes no stage after @, which SENDs and RECVs of skips have")
        return cls(stage, op, microbatch, peer)


STEP = Action(None, Op.STEP, None)
