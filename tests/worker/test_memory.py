"""Host memory: used again, but never while somebody still has it."""

import gc
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from worker.tuning.memory import HostMemory


def test_what_nobody_has_any_more_serves_the_next_of_its_size() -> None:
    memory = HostMemory()
    first = memory.empty((1000,))
    at = first.data_ptr()
    del first
    assert memory.empty((999,)).data_ptr() != at
    assert memory.empty((10, 100)).data_ptr() == at
    assert memory.empty((500,), torch.float64).data_ptr() == at


def test_a_view_or_an_array_of_it_is_enough_to_have_it() -> None:
    memory = HostMemory()
    for kept in (lambda whole: whole[10:20], lambda whole: whole.numpy(), lambda whole: memoryview(whole.numpy())):
        whole = memory.empty((1000,)).fill_(1)
        part = kept(whole)
        del whole
        gc.collect()
        other = memory.empty((1000,)).fill_(2)
        assert float(part[0]) == 1
        del part, other


def test_a_copy_is_of_any_kind_and_does_not_change_with_the_original() -> None:
    memory = HostMemory()
    for original in (
        torch.tensor(3.5),
        torch.arange(6).reshape(2, 3).t(),
        torch.randn(4, 4, dtype=torch.bfloat16),
        torch.empty(0, 3),
        torch.tensor([True, False]),
    ):
        expected = original.clone()
        copy = memory.copy(original)
        assert (copy.dtype, copy.shape) == (original.dtype, original.shape)
        original.zero_()
        assert torch.equal(copy, expected)
        assert copy.is_contiguous()


def test_threads_do_not_share_it() -> None:
    memory = HostMemory()

    def differ(number: int) -> bool:
        mine: list[Tensor] = [memory.empty((64,)).fill_(number) for _ in range(50)]
        return all(bool((each == number).all()) for each in mine)

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(differ, range(200)))
