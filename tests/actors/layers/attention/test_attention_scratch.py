"""Scratch memory of attention in blocks: kept softmaxes change no bit and stay within the budget."""

from __future__ import annotations

import copy
import gc
import pickle
import threading

import pytest
import torch

from raypar.actors.layers.attention import attention_blocks as causal
from raypar.actors.layers.attention.attention_scratch import ScratchAllocator, Size, SoftmaxMemory
from raypar.actors.models.build import build_model
from raypar.config.recipes import recipe
from tests.support.causal import B, N, S, attend, d, one_thread, trained, values  # noqa: F401

SIZE = Size(N, S, 1, d)
PLACE = 4 * sum(SIZE.scores)  # bytes of a sample's scores


def free_heads(scratch):
    """How many samples' scores the budget still allows, by allocating them."""
    like, found = torch.empty(0), []
    while (kept := scratch.softmax(like, SIZE)) is not None:
        found.append(kept)
    for kept in found:
        scratch.free(kept)
    return len(found)


@pytest.mark.sampled
@pytest.mark.parametrize("room", [PLACE - 1, PLACE, 2 * PLACE, 3 * PLACE])
@pytest.mark.parametrize(("kv_heads", "seq"), [(N, S), (4, S), (N, 300), (2, 321)])
def test_kept_or_made_again_it_is_the_same_bits(room, kv_heads, seq):
    inputs = values(3, N, kv_heads, seq)
    scratch = ScratchAllocator(room)
    for _ in range(2):  # the second time with memory of the first
        made = trained(lambda *leaves: causal.attend(*leaves, scratch), inputs)
        assert all(map(torch.equal, made, trained(attend, inputs)))


def test_no_more_waits_than_there_is_room_for_and_a_backward_gives_it_back():
    scratch = ScratchAllocator(5 * PLACE + 3)
    outs = []
    for left in (3, 1, 0, 0):  # two samples each time
        outs.append(causal.attend(*values(), scratch))
        assert free_heads(scratch) == left
    for out, left in zip(outs, (2, 4, 5, 5), strict=True):
        out.sum().backward()
        assert free_heads(scratch) == left


def test_what_nobody_differentiates_does_not_wait():
    scratch, inputs = ScratchAllocator(PLACE), values()
    causal.attend(*(x.detach() for x in inputs), scratch)
    with torch.no_grad():
        causal.attend(*inputs, scratch)
    assert free_heads(scratch) == 1


def test_a_graph_that_is_dropped_leaves_its_room():
    scratch = ScratchAllocator(2 * PLACE)
    out = causal.attend(*values(), scratch)
    assert free_heads(scratch) == 0
    del out
    gc.collect()
    assert free_heads(scratch) == 2


def test_a_second_backward_of_one_graph_makes_them_again():
    scratch, inputs = ScratchAllocator(2 * PLACE), values()
    total = causal.attend(*inputs, scratch).square().sum()
    first = torch.autograd.grad(total, inputs, retain_graph=True)
    causal.attend(*values(seq=320), scratch).sum().backward()  # somebody else works there meanwhile
    again = torch.autograd.grad(total, inputs)
    assert all(map(torch.equal, first, again))


def test_backwards_in_any_order_and_of_several_sizes_find_their_own_scores():
    scratch = ScratchAllocator(7 * PLACE)
    cases = [values(seq=seq) for seq in (256, 320, 256, 300)]
    totals = [causal.attend(*inputs, scratch).square().sum() for inputs in cases]
    for i in (2, 0, 3, 1):
        plain = torch.autograd.grad(attend(*cases[i]).square().sum(), cases[i])
        assert all(map(torch.equal, torch.autograd.grad(totals[i], cases[i]), plain))


def test_scratch_stays_and_is_never_two_threads():
    scratch, like = ScratchAllocator(), torch.empty(0)
    with scratch.working(like, SIZE) as first:
        pass
    with scratch.working(like, SIZE) as again, scratch.working(like, SIZE) as other:
        assert again is first
        assert other is not first
    inputs = [x.detach() for x in values()]
    wanted, wrong = attend(*inputs), []

    def look():
        torch.set_num_threads(1)
        wrong.extend(not torch.equal(causal.attend(*inputs, scratch), wanted) for _ in range(20))

    threads = [threading.Thread(target=look) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert wrong == [False] * 80


def test_a_copy_of_a_desk_has_memory_of_its_own():
    scratch = ScratchAllocator(PLACE)
    kept = scratch.softmax(torch.empty(0), SIZE)
    assert isinstance(kept, SoftmaxMemory)
    for copied in (copy.copy(scratch), copy.deepcopy(scratch), pickle.loads(pickle.dumps(scratch))):
        assert (free_heads(scratch), free_heads(copied)) == (0, 1)


def test_blocks_of_an_actor_share_a_desk_and_actors_do_not():
    models = [build_model(recipe("gpt-small").model, 0) for _ in range(2)]
    mine, others = ({block.attn.core.scratch for block in model.materialize([1, 2, 5], 0)} for model in models)
    assert (len(mine), len(mine | others)) == (1, 2)
