"""What a process says of its GPU."""

from __future__ import annotations

import torch

from raypar.actors.collective.connect import backend_for, capability


def test_members_on_one_gpu_go_through_the_host():
    own = capability(torch.device("cuda:0"))
    assert own.gpu
    assert backend_for("x", [own, own]) == "staged"


def test_every_gpu_has_an_id_of_its_own():
    count = torch.cuda.device_count()
    assert len({capability(torch.device("cuda", index)).gpu for index in range(count)}) == count
